"""A bare streaming server and a bare client, to measure what stands between them."""

import asyncio
import random
import sys
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import uvicorn

__all__ = ["Load", "fast_run", "run_load", "serve_streams"]

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1048576"} 1.0\n'
T = TypeVar("T")

_BODY = b'{"model": "m", "stream": true, "max_tokens": 64, "messages": []}'


def fast_run(main: Coroutine[object, object, T]) -> T:
    """Run *main* on uvloop where it is installed, as the gateway itself does."""
    factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class _Server(asyncio.Protocol):
    """
    Answers every POST with *chunks* events, *gap_s* apart.

    An event says when it was sent, and the first one how long the request was here before that.
    """

    def __init__(self, chunks: int, gap_s: float) -> None:
        self._chunks = chunks
        self._gap_s = gap_s
        self._buffer = b""
        self._left = 0
        self._came = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to listen."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, found, rest = head.partition(b"content-length:")
            whole = end + 4 + (int(rest.partition(b"\r\n")[0]) if found else 0)
            if len(self._buffer) < whole:
                return
            self._buffer = self._buffer[whole:]
            if head.startswith(b"post"):
                self._transport.write(_HEAD)
                self._left, self._came = self._chunks, time.monotonic()
                self._due = self._loop.time() + self._gap_s
                self._timer = self._loop.call_at(self._due, self._event)
            else:
                body = _METRICS if b" /metrics" in head else b"ok"
                answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                self._transport.write(answer)

    def _event(self) -> None:
        now = time.monotonic()
        here = now - self._came if self._left == self._chunks else 0.0
        event = b'data: {"t": %.6f, "here": %.6f}\n\n' % (now, here)
        self._left -= 1
        last = b"" if self._left else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, last))
        if self._left:
            self._due += self._gap_s
            self._timer = self._loop.call_at(self._due, self._event)


async def serve_streams(port: int, *, chunks: int, gap_s: float) -> None:
    """Serve streams on *port* (0: any, printed) until cancelled."""
    server = await asyncio.get_running_loop().create_server(
        lambda: _Server(chunks, gap_s), "127.0.0.1", port
    )
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


@dataclass(slots=True)
class Load:
    """What a client saw; seconds."""

    first: list[float] = field(default_factory=list)
    """Sending of a request to its first event, less the time that the server kept it."""
    late: list[float] = field(default_factory=list)
    """Sending of an event by the server to its arrival."""
    events: int = 0
    """Events that arrived in the time."""
    failed: int = 0


class _Client(asyncio.Protocol):
    """Asks for one stream after the other on one connection, until *end*."""

    def __init__(self, index: int, load: Load, end: float) -> None:
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            b"content-type: application/json\r\nx-session-id: s%d\r\n"
            b"content-length: %d\r\n\r\n%s" % (index, len(_BODY), _BODY)
        )
        self._load = load
        self._end = end
        self._buffer = b""
        self._in_head = True
        self._first = True
        self._began = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first stream."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._ask()

    def _ask(self) -> None:
        self._in_head = self._first = True
        self._began = time.monotonic()
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a stream that was cut."""
        if not self.done.done():
            self._load.failed += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Note when what arrived."""
        now = time.monotonic()
        buffer = self._buffer + data if self._buffer else data
        if self._in_head:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = buffer
                return
            if b" 200 " not in buffer[:20]:
                self._transport.close()
                return
            self._in_head = False
            buffer = buffer[end + 4 :]
        at = 0
        while (line := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line], 16)
            if len(buffer) < line + size + 4:
                break
            if size == 0:
                self._buffer = b""
                self._ended(now)
                return
            self._events(buffer[line + 2 : line + 2 + size].split(b"\n\n"), now)
            at = line + size + 4
        self._buffer = buffer[at:]

    def _events(self, events: Iterable[bytes], now: float) -> None:
        in_time = now <= self._end
        for event in events:
            if not event.startswith(b'data: {"t": '):
                continue
            self._load.events += in_time
            sent, _, here = event[12:-1].partition(b', "here": ')
            self._load.late.append(now - float(sent))
            if self._first:
                self._load.first.append(now - self._began - float(here))
                self._first = False

    def _ended(self, now: float) -> None:
        if now <= self._end:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()


async def run_load(
    port: int, *, streams: int, seconds: float, seed: int, in_step: bool = False
) -> Load:
    """
    Keep *streams* streams open for *seconds*, each its own session; return what was seen.

    They begin at independent times within a second, or, *in_step*, all at once: then their events
    come in bursts, as from one engine whose whole batch makes a step.
    """
    load = Load()
    loop = asyncio.get_running_loop()
    end = time.monotonic() + seconds
    dice = random.Random(seed)

    async def one(index: int, begin_s: float) -> None:
        await asyncio.sleep(begin_s)
        try:
            _, client = await loop.create_connection(
                lambda: _Client(index, load, end), "127.0.0.1", port
            )
        except OSError:
            load.failed += 1
            return
        await client.done

    begins = [0.0 if in_step else dice.uniform(0.0, min(1.0, seconds / 4)) for _ in range(streams)]
    await asyncio.gather(*(one(i, begin) for i, begin in enumerate(begins)))
    return load


if __name__ == "__main__":
    fast_run(serve_streams(int(sys.argv[1]), chunks=int(sys.argv[2]), gap_s=float(sys.argv[3])))

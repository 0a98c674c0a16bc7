"""A bare streaming server and a bare client, to measure what stands between them."""

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field

__all__ = ["Load", "run_load", "serve_streams"]

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1048576"} 1.0\n'


async def serve_streams(port: int, *, chunks: int, gap_s: float) -> None:
    """Answer every POST with *chunks* events, *gap_s* apart, each with its time of sending."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                await reader.readexactly(length)
                if not head.startswith(b"POST"):
                    body = _METRICS if b" /metrics" in head else b"ok"
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                    )
                    continue
                writer.write(_HEAD)
                for _ in range(chunks):
                    await asyncio.sleep(gap_s)
                    event = b'data: {"t": %.6f}\n\n' % time.monotonic()
                    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


@dataclass(slots=True)
class Load:
    """What a client saw; seconds."""

    first: list[float] = field(default_factory=list)
    """Sending of a request to its first event."""
    late: list[float] = field(default_factory=list)
    """Sending of an event by the server to its arrival."""
    streams: int = 0
    """Streams that ended in the time."""
    failed: int = 0


async def run_load(port: int, *, streams: int, seconds: float) -> Load:
    """Keep *streams* streams open for *seconds*, each its own session; return what was seen."""
    load = Load()
    end = time.monotonic() + seconds

    async def one(index: int) -> None:
        # Spread the starts, so that streams are in different phases, as real ones are.
        await asyncio.sleep(index / streams * min(1.0, seconds / 4))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"model": "m", "stream": true, "max_tokens": 64, "messages": []}'
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            b"content-type: application/json\r\nx-session-id: s%d\r\n"
            b"content-length: %d\r\n\r\n%s" % (index, len(body), body)
        )
        try:
            while time.monotonic() < end:
                began = time.monotonic()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " not in head[:20]:
                    load.failed += 1
                    return
                await _stream(reader, began, load)
                if time.monotonic() <= end:
                    load.streams += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            load.failed += 1
        finally:
            writer.close()

    await asyncio.gather(*(one(i) for i in range(streams)))
    return load


async def _stream(reader: asyncio.StreamReader, began: float, load: Load) -> None:
    first = True
    while True:
        size = int(await reader.readline(), 16)
        payload = await reader.readexactly(size + 2)
        if size == 0:
            return
        now = time.monotonic()
        if first:
            load.first.append(now - began)
            first = False
        for event in payload.split(b"\n\n"):
            if event.startswith(b"data: "):
                load.late.append(now - float(event[12:-1]))


if __name__ == "__main__":
    asyncio.run(serve_streams(int(sys.argv[1]), chunks=int(sys.argv[2]), gap_s=float(sys.argv[3])))

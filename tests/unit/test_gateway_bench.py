"""The bare ends that `scout bench gateway` measures between."""

import asyncio

from scout_server.bench.streams import Load, _Client, _Server, run_load


class _Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


async def test_every_event_of_every_stream_is_counted() -> None:
    """Client and server agree: each stream has all its events and one first one."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Server(4, 0.001), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        load = await run_load(port, streams=3, seconds=0.2, seed=0)
    assert load.failed == 0
    assert len(load.first) >= 3
    assert len(load.late) == 4 * len(load.first)
    assert load.events <= len(load.late)


async def test_pieces_mean_what_the_whole_means() -> None:
    """However the network cuts an answer, the same events are seen, and the next one is asked."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"t": 1.000000, "here": 0.500000}\n\n'
    answer = head + 2 * (b"%x\r\n%s\r\n" % (len(event), event)) + b"0\r\n\r\n"
    for size in (1, 7, len(answer)):
        load, wire = Load(), _Wire()
        client = _Client(0, load, end=1e12)
        client.connection_made(wire)
        for at in range(0, len(answer), size):
            client.data_received(answer[at : at + size])
        assert (len(load.first), len(load.late), load.events) == (1, 2, 2)
        assert len(wire.written) == 2


async def test_an_answer_that_is_no_stream_failed() -> None:
    """A refusal, or a cut connection, counts as failed once."""
    load, wire = Load(), _Wire()
    client = _Client(0, load, end=1e12)
    client.connection_made(wire)
    client.data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
    assert wire.closed
    client.connection_lost(None)
    assert (load.failed, client.done.done()) == (1, True)

"""The gateway in front of servers that misbehave, and under an operator who changes things."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from scout_sdk import ConfigError, Hints
from scout_sdk._wire import encode
from scout_server.gateway.app import Gateway
from scout_server.gateway.cli import reread
from scout_server.gateway.settings import GatewaySettings
from scout_server.policy.books import LedgerSettings
from scout_server.policy.engine import TaoSettings
from scout_server.tenancy import TenancySettings

USAGE = b'{"usage": {"prompt_tokens": 100, "completion_tokens": 10}}'
EVENTS = "/v1/scout/events"
CHAT = "/v1/chat/completions"


def answered(body: bytes = USAGE, status: bytes = b"200 OK") -> bytes:
    """Return a whole answer."""
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@dataclass
class Asked:
    """A request as it came off the wire."""

    method: str
    path: str
    headers: dict[str, bytes]
    body: bytes
    connection: int


@dataclass
class RawNode:
    """A server that writes what a test tells it, byte for byte."""

    answer: Callable[[Asked], bytes] = lambda asked: answered()
    gate: asyncio.Event | None = None
    """When set: answers wait for it."""
    cut: bool = False
    """Close the connection after an answer, and tell nobody before."""
    tells_size: bool = True
    seen: list[Asked] = field(default_factory=list)
    looked: int = 0
    connections: int = 0
    url: str = ""
    server: asyncio.Server | None = None

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()

    def paths(self) -> list[str]:
        return [asked.path for asked in self.seen]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._exchange(reader, writer, number):
                await writer.drain()
        writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        method, path, _ = head[0].decode().split(" ")
        lines = (line.partition(b":") for line in head[1:] if line)
        headers = {name.decode().lower(): value.strip() for name, _, value in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/health":
            self.looked += 1
            writer.write(answered(b""))
        elif path == "/metrics":
            text = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0\n'
            writer.write(answered(text) if self.tells_size else answered(b"", b"404 Not Found"))
        elif path == "/v1/scout/state":
            writer.write(answered(b"", b"404 Not Found"))
        else:
            asked = Asked(method, path, headers, body, number)
            self.seen.append(asked)
            if self.gate is not None:
                await self.gate.wait()
            writer.write(self.answer(asked))
            return not self.cut
        return True


@dataclass
class Setting:
    """A running gateway and its nodes."""

    gateway: Gateway
    nodes: list[RawNode]
    port: int

    async def ask(
        self,
        session: str | None = "s",
        *,
        method: str = "POST",
        path: str = CHAT,
        body: bytes = b"{}",
        headers: dict[str, bytes] | None = None,
    ) -> bytes:
        """Return the whole answer, as it comes off the wire."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = {"host": b"gateway", "connection": b"close"} | (headers or {})
        if session is not None:
            lines["x-session-id"] = session.encode()
        if method == "POST":
            lines["content-length"] = str(len(body)).encode()
        head = b"".join(b"%s: %s\r\n" % (n.encode(), v) for n, v in lines.items())
        payload = body if method == "POST" else b""
        writer.write(f"{method} {path} HTTP/1.1\r\n".encode() + head + b"\r\n" + payload)
        try:
            return await reader.read()
        finally:
            writer.close()

    def ended(self) -> dict[str, float]:
        """Return how many requests ended how."""
        (metric,) = self.gateway.pool.meters.requests.collect()
        return {s.labels["outcome"]: s.value for s in metric.samples if s.name.endswith("_total")}

    async def tell(self, headers: dict[str, bytes] | None = None, /, **event: object) -> None:
        """Send one event on the side channel."""
        body = json.dumps({"version": 1, "events": [event]}).encode()
        await self.ask(None, path=EVENTS, body=body, headers=headers)


Start = Callable[..., Awaitable[Setting]]


@pytest.fixture
async def start(
    serve_gateway: Callable[[Gateway], contextlib.AbstractAsyncContextManager[str]],
) -> AsyncIterator[Start]:
    """Start a gateway: await start(nodes=2, **settings)."""
    stack = contextlib.AsyncExitStack()

    async def begin(
        nodes: int | list[RawNode] = 1, *, options: str = "", **settings: object
    ) -> Setting:
        servers = [RawNode() for _ in range(nodes)] if isinstance(nodes, int) else nodes
        for node in servers:
            await node.start()
            stack.push_async_callback(node.stop)
        settings = {"poll_s": 3600.0, "poll_timeout_s": 20.0, **settings}
        settings["nodes"] = tuple(n.url + options for n in servers)
        gateway = Gateway(GatewaySettings(port=0, **settings))  # type: ignore[arg-type]
        url = await stack.enter_async_context(serve_gateway(gateway))
        return Setting(gateway, servers, int(url.rpartition(":")[2]))

    async with stack:
        yield begin


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until *condition* holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# ---- what an operator changes --------------------------------------------------------------


async def test_a_wrong_configuration_changes_nothing(start: Start) -> None:
    """A node that is none, a drain of no node and an empty list are refused before anything."""
    s = await start(1)
    before, tao = s.gateway.settings, s.gateway.pool.engine.settings
    for wrong in (
        {"drain": ("ftp://x",)},
        {"drain": ("http://127.0.0.1:1",)},
        {"nodes": ()},
        {"nodes": ("http://127.0.0.1:1", "no url")},
    ):
        given = replace(before, hold_timeout_s=7.0, tao=TaoSettings(joint_s=9.0), **wrong)
        with pytest.raises(ConfigError):
            await s.gateway.reconfigure(given)
        with pytest.raises(ConfigError):
            Gateway(given)
        assert s.gateway.settings is before
        assert s.gateway.pool.engine.settings is tao
    assert list(s.gateway.nodes.known) == [s.nodes[0].url]


async def test_a_new_configured_size_counts_at_once(start: Start) -> None:
    """Slots and the room of nodes that do not tell theirs follow the configuration."""
    silent, telling = RawNode(tells_size=False), RawNode()
    s = await start([silent, telling])
    given = replace(s.gateway.settings, capacity_tokens=1000, slots=3)
    await s.gateway.reconfigure(given)
    sizes = {n: (k.capacity, k.slots) for n, k in s.gateway.pool.engine.ledger.nodes.items()}
    assert sizes == {silent.url: (1000, 3), telling.url: (65536, 3)}


async def test_a_server_that_drains_drains_with_all_its_ranks(start: Start) -> None:
    """Without #ranks=N, a server stands for all of them."""
    s = await start(1, options="#ranks=2")
    (node,) = s.nodes
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(node.url,)))
    assert all(n.draining for n in s.gateway.pool.engine.ledger.nodes.values())
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(f"{node.url}#ranks=1",)))
    assert [n.draining for n in s.gateway.pool.engine.ledger.by_name()] == [True, False]


async def test_a_draining_node_gets_nothing_new_while_another_is_up(start: Start) -> None:
    """Neither turns nor what needs no room; when no other is up, it serves what needs none."""
    s = await start(2)
    drained, other = s.nodes
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(drained.url,)))
    for _ in range(3):
        await s.ask()
        await s.ask(path="/v1/embeddings")
        await s.ask(method="GET", path="/v1/models")
    assert (len(drained.seen), len(other.seen)) == (0, 9)
    await s.gateway.reconfigure(replace(s.gateway.settings, nodes=(drained.url,)))
    assert (await s.ask(method="GET", path="/v1/models")).startswith(b"HTTP/1.1 200")


async def test_tenants_are_told_as_the_new_configuration_says(start: Start) -> None:
    """The header that names the tenant can be changed without a restart."""
    s = await start(1)
    await s.gateway.reconfigure(s.gateway.settings, TenancySettings(tenant_header="x-team"))
    await s.ask(headers={"x-team": b"one"})
    await s.ask(headers={"x-team": b"two"})
    assert len(s.gateway.pool.engine.ledger.sessions) == 2


async def test_a_configuration_that_cannot_be_read_is_not_taken(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong in reading it again is said, and the gateway goes on."""
    s = await start(1)
    before = s.gateway.settings
    answers: list[GatewaySettings | Exception] = [OSError("no such file"), ConfigError("no node")]

    def reload() -> tuple[GatewaySettings, TenancySettings]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, TenancySettings()

    for words in ("could not be read", "is not taken: no node"):
        await reread(s.gateway, reload)
        assert words in caplog.text
    assert s.gateway.settings is before
    answers.append(replace(before, host="localhost", retries=7))
    await reread(s.gateway, reload)
    assert "gateway.host changes with the next start" in caplog.text
    assert s.gateway.settings.retries == 7


# ---- what nodes are told -------------------------------------------------------------------


async def test_the_end_of_a_session_is_told_to_every_node_that_holds_of_it(start: Start) -> None:
    """A session that moved left its cache behind; a tool concerns only where it goes on."""
    s = await start(2)
    await s.ask("s")
    old, new = sorted(s.nodes, key=lambda n: -len(n.seen))
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(old.url,)))
    await s.ask("s")
    assert (len(old.seen), len(new.seen)) == (1, 1)
    await s.tell(session="s", tool={"name": "bash", "state": "started"})
    await until(lambda: EVENTS in new.paths())
    await s.tell(session="s", final=True)
    await until(lambda: EVENTS in old.paths() and new.paths().count(EVENTS) == 2)
    (told,) = (json.loads(a.body)["events"] for a in old.seen if a.path == EVENTS)
    assert [event["final"] for event in told] == [True]


async def test_a_last_request_ends_its_session_on_the_nodes_before_its_last(start: Start) -> None:
    """Its own node reads the hint; the others are told on the side channel."""
    s = await start(2)
    await s.ask("s")
    old, new = sorted(s.nodes, key=lambda n: -len(n.seen))
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(old.url,)))
    last = {name: value.encode() for name, value in encode(Hints(session="s", final=True)).items()}
    await s.ask(None, headers=last)
    await until(lambda: EVENTS in old.paths())
    assert new.paths() == [CHAT]
    assert not s.gateway.pool.engine.ledger.sessions


async def test_what_waits_when_a_decision_fails_goes_to_no_draining_node(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours holds nobody, and sends nobody to a node that is on its way out."""
    s = await start([RawNode(), RawNode(gate=asyncio.Event())], slots=1)
    drained, node = s.nodes
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(drained.url,)))
    first = asyncio.create_task(s.ask("a"))
    await until(lambda: len(node.seen) == 1)

    def broken(**_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(s.gateway.pool.engine, "snapshot", broken)
    second = asyncio.create_task(s.ask("b"))
    await until(lambda: len(node.seen) == 2)
    assert node.gate is not None
    node.gate.set()
    assert all(a.startswith(b"HTTP/1.1 200") for a in await asyncio.gather(first, second))
    assert not drained.seen


async def test_events_of_a_session_that_the_gateway_does_not_know_reach_all_nodes(
    start: Start,
) -> None:
    """A gateway that was started anew does not keep from nodes what it does not understand."""
    s = await start(2)
    await s.tell(session="from before", final=True)
    await until(lambda: all(EVENTS in n.paths() for n in s.nodes))
    assert not s.gateway.pool.engine.ledger.sessions


async def test_events_reach_a_node_in_their_order_and_few_messages(start: Start) -> None:
    """What comes while a message is on its way waits for its end; each speaker's go together."""
    node = RawNode()
    s = await start([node], options="#ranks=2")
    node.gate = asyncio.Event()
    for i in range(6):
        await s.tell(session=str(i), tool={"name": "bash", "state": "started"})
        await until(lambda: len(node.seen) == 1)
    await s.tell({"authorization": b"Bearer k"}, session="mine", final=True)
    await s.tell(session="5", tool={"name": "bash", "state": "ended"})
    node.gate.set()
    await until(lambda: len(node.seen) == 3)
    told = [json.loads(asked.body)["events"] for asked in node.seen]
    assert [[e["session"] for e in events] for events in told] == [
        ["0"],
        ["1", "2", "3", "4", "5", "5"],
        ["mine"],
    ]
    assert [e["tool"]["state"] for e in told[1][-2:]] == ["started", "ended"]
    assert told[1][0]["age_s"] > 0
    assert [asked.headers.get("authorization") for asked in node.seen] == [None, None, b"Bearer k"]


async def test_capabilities_name_what_the_gateway_takes(start: Start) -> None:
    """In the words of the engines; what is switched off is not named."""
    s = await start(1, admin_key="k", max_body_bytes=1000)
    path = "/v1/scout/capabilities"
    said = json.loads((await s.ask(None, method="GET", path=path)).split(b"\r\n\r\n")[1])
    every = "admission events foreign-hints hints outcome sessions state tool-calls"
    assert (said["features"], said["limits"]["body_bytes"]) == (every.split(), 1000)
    await s.gateway.reconfigure(replace(s.gateway.settings, admin_key="", tool_calls=False))
    said = json.loads((await s.ask(None, method="GET", path=path)).split(b"\r\n\r\n")[1])
    assert {*every.split()} - {*said["features"]} == {"sessions", "tool-calls"}


async def test_header_values_pass_byte_for_byte(start: Start) -> None:
    """Whether a client writes them in UTF-8 or not."""
    s = await start(1)
    await s.ask("séance", headers={"x-note": "schön".encode()})
    (asked,) = s.nodes[0].seen
    assert (asked.headers["x-session-id"], asked.headers["x-note"]) == (
        "séance".encode(),
        "schön".encode(),
    )


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/%2e%2e/sleep", "/v1/./models", "/v1"])
async def test_no_path_leads_out_of_the_api(start: Start, path: str) -> None:
    """A server, or a proxy before it, may resolve dots; the gateway does not pass them."""
    s = await start(1)
    assert (await s.ask(None, method="GET", path=path)).startswith(b"HTTP/1.1 404")
    assert not s.nodes[0].seen


# ---- what ends, and how --------------------------------------------------------------------


async def test_leases_that_ran_out_are_counted(start: Start) -> None:
    """A turn that shows no life loses its room, and the metric says so."""
    node = RawNode(gate=asyncio.Event())
    ledger = LedgerSettings(lease_s=0.01)
    s = await start([node], poll_s=0.05, tao=TaoSettings(ledger=ledger))
    asking = asyncio.create_task(s.ask())
    pool = s.gateway.pool
    await until(lambda: bool(node.seen) and not pool.engine.ledger.bookings)
    assert b"scout_gateway_leases_expired_total 1.0" in pool.meters.text()
    assert node.gate is not None
    node.gate.set()
    await asking


async def test_requests_that_fail_leave_no_session_of_no_name(start: Start) -> None:
    """Nobody can go on with one; a named session that never ran is forgotten as well."""
    node = RawNode(answer=lambda asked: answered(b"{}", b"400 Bad Request"))
    s = await start([node], hold_timeout_s=0.05)
    sessions = s.gateway.pool.engine.ledger.sessions
    for body in (b"{}", b'{"messages": [{"role": "user", "content": "hello"}]}'):
        await s.ask(None, body=body)
    assert not sessions
    await s.gateway.reconfigure(replace(s.gateway.settings, drain=(node.url,)))
    assert (await s.ask("held")).startswith(b"HTTP/1.1 429")
    assert not sessions


async def test_an_answer_that_is_cut_is_said_in_a_line_and_its_node_looked_at(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sees the connection close; no traceback for each of a dead node's streams."""
    node = RawNode(
        answer=lambda asked: b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegin", cut=True
    )
    s = await start([node])
    looked = node.looked
    assert (await s.ask()).endswith(b"\r\n\r\nbegin")
    await until(lambda: node.looked > looked)
    assert s.ended() == {"cut": 1.0}
    assert "broke an answer off" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
    assert not s.gateway.pool.engine.ledger.bookings


async def test_a_kept_connection_that_its_node_closed_says_nothing_of_the_node(
    start: Start,
) -> None:
    """The turn runs on the same node, over a new connection: its cache is there."""
    node, other = RawNode(), RawNode()
    s = await start([node, other])
    await s.ask("s")
    home = node if node.seen else other

    def closing(asked: Asked) -> bytes:
        return b"" if asked.connection == home.seen[0].connection else answered()

    home.answer, home.cut = closing, True
    assert (await s.ask("s")).startswith(b"HTTP/1.1 200")
    assert s.gateway.pool.meters.retries.collect()[0].samples[0].value == 0
    assert [len(n.seen) for n in (node, other) if n is not home] == [0]


async def test_a_retry_keeps_its_place_in_the_queue(start: Start) -> None:
    """Who was sent to a node that failed does not wait behind those that came later."""
    failing = RawNode(gate=asyncio.Event(), answer=lambda a: answered(b"", b"503 Unavailable"))
    busy = RawNode(gate=asyncio.Event())
    s = await start([failing, busy], slots=1)
    engine = s.gateway.pool.engine
    tasks = [asyncio.create_task(s.ask("a")), asyncio.create_task(s.ask("b"))]
    await until(lambda: bool(failing.seen) and bool(busy.seen))
    tasks.append(asyncio.create_task(s.ask("c")))
    await until(lambda: len(engine.waiting) == 1)
    first = s.nodes[0].seen[0].headers["x-session-id"].decode()
    assert failing.gate is not None
    assert busy.gate is not None
    failing.gate.set()
    await until(lambda: len(engine.waiting) == 2 or len(busy.seen) > 1)
    order = sorted(engine.waiting.values(), key=lambda held: held.arrived)
    assert [held.turn.session for held in order] in ([first, "c"], [first])
    busy.gate.set()
    failing.answer = lambda asked: answered()
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*tasks))


async def test_a_client_that_leaves_the_side_channel_is_no_fault(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a message is as if none were sent."""
    s = await start(1)
    _, writer = await asyncio.open_connection("127.0.0.1", s.port)
    writer.write(f"POST {EVENTS} HTTP/1.1\r\nhost: g\r\ncontent-length: 99\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await s.tell(session="s", final=True)
    await until(lambda: EVENTS in s.nodes[0].paths())
    assert not [record for record in caplog.records if record.exc_info]

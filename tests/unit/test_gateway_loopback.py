"""The gateway in front of fake nodes on loopback."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from aiohttp import web

from scout_server.gateway.app import Gateway
from scout_server.gateway.settings import GatewaySettings
from scout_server.policy.admission import AdmissionSettings
from scout_server.policy.engine import TaoSettings


@dataclass
class FakeNode:
    """An OpenAI-compatible server that does what a test tells it."""

    capacity_tokens: int | None = 65536
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    cached: int = 0
    gate: asyncio.Event | None = None
    """When set: answers wait for it."""
    status: int = 200
    break_before_first_byte: bool = False
    break_in_stream: bool = False
    running: int = 0
    aborted: int = 0
    healthy: bool = True
    waiting: int = 0
    engines: int = 1
    looked: int = 0
    """Times that its health was asked for."""
    url: str = ""
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=10**8)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/health":
            self.looked += 1
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/v1/scout/state":
            return web.Response(status=404)
        if request.path == "/metrics":
            if self.capacity_tokens is None:
                return web.Response(status=404)
            text = "".join(
                f'vllm:cache_config_info{{block_size="16",engine="{engine}",'
                f'num_gpu_blocks="{self.capacity_tokens // 16}"}} 1.0\n'
                f'vllm:num_requests_waiting{{engine="{engine}"}} {self.waiting}.0\n'
                for engine in range(self.engines)
            )
            return web.Response(text=text)
        lines = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.path_qs, lines, body))
        self.running += 1
        try:
            return await self.reply(request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def reply(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if self.break_before_first_byte:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(3600)
        if self.gate is not None:
            await self.gate.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if request.method != "POST":
            return web.Response(body=b"plain", headers={"x-node": "fake"})
        if b'"stream": true' in body:
            response = web.StreamResponse(
                headers={
                    "content-type": "text/event-stream",
                    "x-scout-outcome": "session=clipped",
                    "connection": "x-private, keep-alive",
                    "x-private": "1",
                }
            )
            await response.prepare(request)
            for i in range(5):
                await response.write(f'data: {{"i": {i}}}\n\n'.encode())
                if self.break_in_stream:
                    assert request.transport is not None
                    request.transport.abort()
                if self.gate is not None and i == 0:
                    self.gate.clear()
                    await self.gate.wait()
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        return web.json_response({"usage": usage}, headers={"x-node": self.url})


@dataclass
class Setting:
    """A running gateway, its nodes and a client."""

    gateway: Gateway
    nodes: list[FakeNode]
    client: aiohttp.ClientSession
    url: str

    async def ask(
        self,
        session: str | None = "s",
        *,
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
        **body: object,
    ) -> tuple[int, dict[str, str], bytes]:
        lines = {"x-session-id": session} if session else {}
        lines |= headers or {}
        async with self.client.post(self.url + path, json=body, headers=lines) as response:
            lower = {name.lower(): value for name, value in response.headers.items()}
            return response.status, lower, await response.read()


Start = Callable[..., Awaitable[Setting]]
Serve = Callable[[Gateway], contextlib.AbstractAsyncContextManager[str]]


@pytest.fixture
async def start(serve_gateway: Serve) -> AsyncIterator[Start]:
    """Start a gateway: await start(nodes=2, **settings)."""
    stack = contextlib.AsyncExitStack()

    async def begin(nodes: int | list[FakeNode] = 1, **settings: object) -> Setting:
        fakes = [FakeNode() for _ in range(nodes)] if isinstance(nodes, int) else nodes
        for node in fakes:
            if node.runner is None:
                await node.start()
            stack.push_async_callback(node.stop)
        settings = {"poll_s": 0.05, "poll_timeout_s": 1.0, "connect_timeout_s": 1.0, **settings}
        gateway = Gateway(
            GatewaySettings(nodes=tuple(n.url for n in fakes), port=0, **settings)  # type: ignore[arg-type]
        )
        url = await stack.enter_async_context(serve_gateway(gateway))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        return Setting(gateway, fakes, client, url)

    async with stack:
        yield begin


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until *condition* holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_stream_passes_byte_for_byte(start: Start) -> None:
    """What a node streams arrives unchanged; its hop-by-hop headers do not."""
    s = await start()
    status, headers, body = await s.ask(stream=True)
    expected = b"".join(f'data: {{"i": {i}}}\n\n'.encode() for i in range(5)) + b"data: [DONE]\n\n"
    assert (status, body) == (200, expected)
    assert "x-private" not in headers
    assert headers["content-type"] == "text/event-stream"


async def test_a_body_and_the_query_pass_unchanged(start: Start) -> None:
    """The node gets the client's bytes, path and query as they were sent."""
    s = await start()
    raw = b'{ "messages" : [],\n "x":"\xc3\xa9" }'
    async with s.client.post(s.url + "/v1/completions?a=b%20c&d", data=raw) as response:
        assert response.status == 200
    path, _, body = s.nodes[0].seen[-1]
    assert (path, body) == ("/v1/completions?a=b%20c&d", raw)


async def test_every_other_route_passes_without_a_plan(start: Start) -> None:
    """GET /v1/models and unknown routes go to a node with their method."""
    s = await start()
    async with s.client.get(s.url + "/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"plain")
    async with s.client.delete(s.url + "/v1/files/f-1") as response:
        assert response.status == 200
    assert [path for path, _, _ in s.nodes[0].seen] == ["/v1/models", "/v1/files/f-1"]


async def test_client_errors_pass_unchanged(start: Start) -> None:
    """A 400 of a node is the client's 400, and is not tried elsewhere."""
    s = await start(2)
    for node in s.nodes:
        node.status = 400
    status, _, body = await s.ask()
    assert (status, json.loads(body)) == (400, {"error": {"message": "no"}})
    assert sum(len(n.seen) for n in s.nodes) == 1


async def test_hints_tenant_and_outcome(start: Start) -> None:
    """Hints go on, the tenant is named by us only, and outcomes of both are merged."""
    s = await start()
    _, headers, _ = await s.ask(
        stream=True,
        headers={
            "x-scout-version": "1",
            "x-scout-session": '"s"',
            "x-scout-agent": '"coder"',
            "x-scout-tenant": "forged",
            "authorization": "Bearer key",
        },
    )
    got = s.nodes[0].seen[-1][1]
    assert got["x-scout-agent"] == '"coder"'
    assert got["authorization"] == "Bearer key"
    assert got["x-scout-tenant"] not in ("forged", "")
    outcome = dict(m.strip().split("=") for m in headers["x-scout-outcome"].split(","))
    assert (outcome["session"], outcome["agent"]) == ("clipped", "accepted")
    assert outcome["admission"] == "accepted"


async def test_a_body_over_the_limit_is_refused(start: Start) -> None:
    """413, announced or chunked, before anything reaches a node."""
    s = await start(max_body_bytes=1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    for data in (b"x" * 2000, chunks()):
        async with s.client.post(s.url + "/v1/completions", data=data) as response:
            assert response.status == 413
    assert s.nodes[0].seen == []


async def test_a_session_returns_to_its_origin(start: Start) -> None:
    """While a node's cache holds a session, its turns go there."""
    s = await start(3)
    for node in s.nodes:
        node.cached = 90
    for turn in range(5):
        for session in ("a", "b", "c"):
            status, _, _ = await s.ask(session, turn=turn)
            assert status == 200
    per_node = [{h["x-session-id"] for _, h, _ in n.seen} for n in s.nodes]
    assert sorted(map(sorted, per_node)) == [["a"], ["b"], ["c"]]


async def test_sessions_over_capacity_wait_and_then_run(start: Start) -> None:
    """A turn without room is held, not refused, and runs when room is given back."""
    node = FakeNode(capacity_tokens=1024, gate=asyncio.Event())
    s = await start([node], output_tokens=600)
    first = asyncio.create_task(s.ask("a"))
    await until(lambda: node.running == 1)
    second = asyncio.create_task(s.ask("b"))
    await until(lambda: len(s.gateway.pool.engine.waiting) == 1)
    assert node.running == 1
    assert node.gate is not None
    node.gate.set()
    assert [r[0] for r in await asyncio.gather(first, second)] == [200, 200]


async def test_a_held_client_that_leaves_is_dropped(start: Start) -> None:
    """A client that gives up while held never reaches a node, and its place is free."""
    node = FakeNode(capacity_tokens=1024, gate=asyncio.Event())
    s = await start([node], output_tokens=600)
    first = asyncio.create_task(s.ask("a"))
    await until(lambda: node.running == 1)
    second = asyncio.create_task(s.ask("b"))
    await until(lambda: len(s.gateway.pool.engine.waiting) == 1)
    second.cancel()
    await until(lambda: not s.gateway.pool.engine.waiting)
    assert node.gate is not None
    node.gate.set()
    assert (await first)[0] == 200
    assert len(node.seen) == 1


async def test_a_client_that_leaves_a_stream_stops_the_node(start: Start) -> None:
    """When a client leaves mid-stream or before the first byte, the node's request ends too."""
    node = FakeNode(gate=asyncio.Event())
    s = await start([node])
    waiting = asyncio.create_task(s.ask("a", stream=True))
    await until(lambda: node.running == 1)
    waiting.cancel()
    await until(lambda: node.aborted == 1)
    assert node.gate is not None
    node.gate.set()
    response = await s.client.post(
        s.url + "/v1/chat/completions", json={"stream": True}, headers={"x-session-id": "a"}
    )
    await response.content.readany()
    response.close()
    await until(lambda: node.aborted == 2 and not s.gateway.pool.engine.ledger.bookings)


async def test_a_full_queue_and_a_deadline_are_429(start: Start) -> None:
    """More held requests than allowed, or a hold longer than the client waits: 429, retry later."""
    node = FakeNode(capacity_tokens=1024, gate=asyncio.Event())
    s = await start([node], output_tokens=600, tao=TaoSettings(max_waiting=1), retry_after_s=7)
    first = asyncio.create_task(s.ask("a"))
    await until(lambda: node.running == 1)
    status, headers, _ = await s.ask("b", headers={"x-request-timeout": "0.05"})
    assert (status, headers["retry-after"]) == (429, "7")
    second = asyncio.create_task(s.ask("c"))
    await until(lambda: len(s.gateway.pool.engine.waiting) == 1)
    status, headers, _ = await s.ask("d")
    assert (status, headers["retry-after"]) == (429, "7")
    assert node.gate is not None
    node.gate.set()
    assert [r[0] for r in await asyncio.gather(first, second)] == [200, 200]


async def test_a_request_that_failed_before_its_first_byte_runs_elsewhere(start: Start) -> None:
    """A node that breaks the connection, or says 503, loses the request to another."""
    bad, good = FakeNode(), FakeNode()
    s = await start([bad, good])
    bad.break_before_first_byte = True
    for session in "abcdef":
        assert (await s.ask(session))[0] == 200
    bad.break_before_first_byte, bad.status = False, 503
    for session in "abcdef":
        assert (await s.ask(session))[0] == 200
    assert bad.seen
    assert len(good.seen) == 12


async def test_a_request_on_a_node_that_hangs_and_dies_runs_elsewhere(start: Start) -> None:
    """What waits for the first byte of a node that goes down is sent to another one."""
    hung, good = FakeNode(gate=asyncio.Event()), FakeNode()
    s = await start([hung, good])
    asks = [asyncio.create_task(s.ask(session)) for session in "abcd"]
    await until(lambda: hung.running > 0)
    hung.healthy = False
    assert [status for status, _, _ in await asyncio.gather(*asks)] == [200] * 4
    assert len(good.seen) == 4
    await until(lambda: hung.aborted > 0 and hung.running == 0)
    assert not s.gateway.pool.engine.ledger.bookings


async def test_only_v1_passes(start: Start) -> None:
    """Other routes of a server, such as those of its operators, do not pass the gateway."""
    s = await start()
    for path in ("/reset_prefix_cache", "/v2/x", "/", "/v1"):
        async with s.client.post(s.url + path) as response:
            assert response.status == 404
    assert s.nodes[0].seen == []


async def test_a_stream_that_was_begun_is_not_repeated(start: Start) -> None:
    """After the first byte a failure is the client's to see, and nothing stays booked."""
    s = await start(2)
    for node in s.nodes:
        node.break_in_stream = True
    with pytest.raises(aiohttp.ClientError):
        await s.ask(stream=True)
    assert sum(len(n.seen) for n in s.nodes) == 1
    await until(lambda: not s.gateway.pool.engine.ledger.bookings)


async def test_a_node_dies_and_comes_back(start: Start) -> None:
    """Sessions of a dead node go on elsewhere, and it is used again when it answers."""
    s = await start(2)
    for session in "abcd":
        await s.ask(session)
    dead = s.nodes[0]
    port = int(dead.url.rsplit(":", 1)[1])
    await dead.stop()
    for session in "abcd":
        assert (await s.ask(session))[0] == 200
    await until(lambda: not s.gateway.pool.engine.ledger.nodes[dead.url].up)
    await dead.start(port)
    await until(lambda: s.gateway.pool.engine.ledger.nodes[dead.url].up)
    before = len(dead.seen)
    for session in "efgh":
        assert (await s.ask(session))[0] == 200
    assert len(dead.seen) > before


async def test_without_any_node_the_answer_is_503(start: Start) -> None:
    """When no node answers, a request fails soon and says so."""
    s = await start(1, hold_timeout_s=0.5)
    await s.nodes[0].stop()
    status, headers, _ = await s.ask()
    assert status in (429, 503)
    assert "retry-after" in headers
    await until(lambda: not s.gateway.nodes.any_up())
    async with s.client.get(s.url + "/health") as response:
        assert response.status == 503


async def test_a_draining_node_keeps_its_stream_and_gets_nothing_new(start: Start) -> None:
    """Taking a node out of the configuration lets its stream end and moves its sessions."""
    old, new = FakeNode(gate=asyncio.Event()), FakeNode()
    s = await start([old])
    assert old.gate is not None
    old.gate.set()
    stream = asyncio.create_task(s.ask("a", stream=True))
    await until(lambda: old.running == 1)
    await new.start()
    try:
        settings = s.gateway.settings
        await s.gateway.reconfigure(
            GatewaySettings(nodes=(new.url,), poll_s=settings.poll_s, port=settings.port)
        )
        assert (await s.ask("a"))[0] == 200
        assert len(new.seen) == 1
        old.gate.set()
        status, _, body = await stream
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        ledger = s.gateway.pool.engine.ledger
        await until(lambda: old.url not in ledger.nodes and old.url not in s.gateway.nodes.known)
        looked = new.looked
        await until(lambda: new.looked > looked + 2)
        assert set(ledger.nodes) == {new.url}
    finally:
        await new.stop()


async def test_a_node_whose_own_queue_grows_gets_no_more(start: Start) -> None:
    """While the engine itself makes requests wait, turns are held in the gateway."""
    node = FakeNode(gate=asyncio.Event(), waiting=3)
    s = await start([node])
    first = asyncio.create_task(s.ask("a"))
    await until(lambda: node.running == 1)
    await until(lambda: s.gateway.pool.engine.ledger.nodes[node.url].pressed)
    second = asyncio.create_task(s.ask("b"))
    await until(lambda: len(s.gateway.pool.engine.waiting) == 1)
    assert node.gate is not None
    node.gate.set()
    node.waiting = 0
    assert [r[0] for r in await asyncio.gather(first, second)] == [200, 200]


async def test_what_waits_for_the_end_of_a_step_is_no_queue(start: Start) -> None:
    """One look that finds requests waiting in the engine changes nothing; the next one decides."""
    node = FakeNode(gate=asyncio.Event())
    s = await start([node], poll_s=60.0)
    first = asyncio.create_task(s.ask("a"))
    await until(lambda: node.running == 1)
    nodes, ledger = s.gateway.nodes, s.gateway.pool.engine.ledger
    node.waiting = 1
    nodes._look[node.url].set()
    await until(lambda: node.url in nodes._queued)
    assert not ledger.nodes[node.url].pressed
    nodes._look[node.url].set()
    await until(lambda: ledger.nodes[node.url].pressed)
    assert node.gate is not None
    node.gate.set()
    assert (await first)[0] == 200


async def test_a_plain_server_works(start: Start) -> None:
    """A server without metrics, state or cached tokens is served all the same."""
    s = await start([FakeNode(capacity_tokens=None)], capacity_tokens=5000)
    assert (await s.ask())[0] == 200
    (node,) = s.gateway.pool.engine.ledger.nodes.values()
    assert node.capacity == 5000


async def test_ranks_are_nodes_with_a_header(start: Start) -> None:
    """A server with ranks is as many nodes, told apart by X-data-parallel-rank."""
    fake = FakeNode(engines=2)
    await fake.start()
    fake.url += "#ranks=2"
    s = await start([fake])
    for session in "abcdefgh":
        assert (await s.ask(session, headers={"x-data-parallel-rank": "7"}))[0] == 200
    ranks = {h["x-data-parallel-rank"] for _, h, _ in fake.seen}
    assert ranks == {"0", "1"}


async def test_admin_view_needs_its_key(start: Start) -> None:
    """GET /v1/scout/sessions shows sessions to who has the key, and is off without one."""
    s = await start(admin_key="secret")
    await s.ask("mine")
    url = s.url + "/v1/scout/sessions"
    async with s.client.get(url) as response:
        assert response.status == 401
    async with s.client.get(url, headers={"authorization": "Bearer secret"}) as response:
        (entry,) = (await response.json())["sessions"]
        assert (entry["session"], entry["state"], entry["turns"]) == ("mine", "tool", 1)
    off = await start()
    async with off.client.get(off.url + "/v1/scout/sessions") as response:
        assert response.status == 404


async def test_events_reach_the_session_and_its_node(start: Start) -> None:
    """A side-channel event changes the session's readiness and is told to its origin."""
    s = await start(2)
    await s.ask("a")
    event = {"session": "a", "final": True}
    async with s.client.post(
        s.url + "/v1/scout/events", json={"version": 1, "events": [event]}
    ) as response:
        assert (response.status, await response.json()) == (202, {"accepted": 1, "rejected": 0})
    assert not s.gateway.pool.engine.ledger.sessions
    await until(lambda: any(p == "/v1/scout/events" for n in s.nodes for p, _, _ in n.seen))


async def test_metrics_name_what_happened(start: Start) -> None:
    """Requests, decisions, tokens and nodes are in the metrics."""
    s = await start()
    await s.ask()
    async with s.client.get(s.url + "/metrics") as response:
        text = await response.text()
    assert 'scout_gateway_requests_total{outcome="served"} 1.0' in text
    assert "scout_gateway_prompt_tokens_total 100.0" in text
    assert f'scout_gateway_node_up{{node="{s.nodes[0].url}"}} 1.0' in text
    assert 'scout_gateway_plans_total{exact="true",method="at-once"} 1.0' in text


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_large_decisions_are_made_in_a_worker(start: Start, worker: str) -> None:
    """A burst over capacity is planned off the loop, loses nobody, and leaves nothing booked."""
    node = [FakeNode(capacity_tokens=4096), FakeNode(capacity_tokens=4096)]
    tao = TaoSettings(admission=AdmissionSettings(quantum_tokens=256))
    s = await start(node, worker=worker, inline_cells=0, tao=tao)
    answers = await asyncio.gather(*(s.ask(f"s{i % 20}", stream=i % 2 == 0) for i in range(120)))
    assert {status for status, _, _ in answers} == {200}
    assert sum(len(n.seen) for n in node) == 120
    assert not s.gateway.pool.engine.ledger.bookings


async def test_a_planner_process_that_dies_is_replaced(start: Start) -> None:
    """When the planner's process is killed, requests are admitted all the same."""
    node = FakeNode(capacity_tokens=1024)
    s = await start([node], worker="process", inline_cells=0)
    pool = s.gateway.pool
    for _ in range(2):
        executor = pool._executor
        assert isinstance(executor, ProcessPoolExecutor)
        for process in list(executor._processes.values()):
            process.kill()
        node.gate = gate = asyncio.Event()
        asked = [asyncio.create_task(s.ask(f"s{i}")) for i in range(6)]
        await until(lambda: len(pool.engine.waiting) > 1)  # only a plan can let these in
        gate.set()
        answers = await asyncio.gather(*asked)
        assert {status for status, _, _ in answers} == {200}
        assert pool._executor is not executor


async def test_anonymous_requests_leave_no_session(start: Start) -> None:
    """A request without any identity is served and forgotten."""
    s = await start()
    assert (await s.ask(None))[0] == 200
    assert not s.gateway.pool.engine.ledger.sessions


async def test_a_history_that_grows_returns_to_its_origin(start: Start) -> None:
    """Without any name, a request that begins with an earlier one goes where that one ran."""
    s = await start(3)
    history: list[dict[str, str]] = [{"role": "user", "content": "a"}]
    nodes = []
    for number in range(5):
        status, headers, _ = await s.ask(None, messages=history)
        assert status == 200
        nodes.append(headers["x-node"])
        history += [{"role": "assistant", "content": "b"}, {"role": "tool", "content": str(number)}]
        assert len(s.gateway.pool.engine.ledger.sessions) == (1 if number else 0)
    assert len(set(nodes[1:])) == 1


async def test_a_held_stream_is_kept_alive_and_then_passes_byte_for_byte(start: Start) -> None:
    """Comments come while a stream is held; what follows is what the node sends."""
    setting = await start(1, slots=1, keep_alive_s=0.01)
    node = setting.nodes[0]
    node.gate = asyncio.Event()
    first = asyncio.create_task(setting.ask("a"))
    await until(lambda: bool(node.running))
    held = setting.client.post(
        setting.url + "/v1/chat/completions", json={"stream": True}, headers={"x-session-id": "b"}
    )
    async with held as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert await response.content.readexactly(16) == b": held\n\n: held\n\n"
        node.gate.set()
        assert (await first)[0] == 200
        body = await response.content.readuntil(b'data: {"i": 0}\n\n')
        node.gate.set()
        body += await response.read()
    comments, _, rest = body.rpartition(b": held\n\n")
    assert comments.replace(b": held\n\n", b"") == b""
    assert rest == b"".join(b'data: {"i": %d}\n\n' % i for i in range(5)) + b"data: [DONE]\n\n"


async def test_what_is_no_stream_gets_no_comments(start: Start) -> None:
    """A held request without `stream: true` waits in silence and is answered as ever."""
    setting = await start(1, slots=1, keep_alive_s=0.001)
    node = setting.nodes[0]
    node.gate = asyncio.Event()
    first = asyncio.create_task(setting.ask("a"))
    await until(lambda: bool(node.running))
    second = asyncio.create_task(setting.ask("b"))
    await until(lambda: bool(setting.gateway.pool.engine.waiting))
    await asyncio.sleep(0.02)
    node.gate.set()
    assert (await first)[0] == 200
    assert json.loads((await second)[2])["usage"]["prompt_tokens"] == 100


async def test_a_refusal_after_comments_is_an_event(start: Start) -> None:
    """When a stream was kept alive, 429 and a node's own error come as its last event."""
    setting = await start(1, slots=1, keep_alive_s=0.01, hold_timeout_s=0.1)
    node = setting.nodes[0]
    node.gate = asyncio.Event()
    first = asyncio.create_task(setting.ask("a"))
    await until(lambda: bool(node.running))
    status, _, body = await setting.ask("b", stream=True)
    assert status == 200
    assert body.startswith(b": held\n\n")
    assert json.loads(body.split(b"data: ")[1])["error"]["code"] == 429
    await setting.gateway.reconfigure(
        replace(setting.gateway.settings, hold_timeout_s=60.0, retries=0)
    )
    second = asyncio.create_task(setting.ask("c", stream=True))
    await until(lambda: bool(setting.gateway.pool.engine.waiting))
    await asyncio.sleep(0.05)
    node.status = 400
    node.gate.set()
    await first
    status, _, body = await second
    assert status == 200
    assert json.loads(body.split(b"data: ")[1])["error"]["message"] == "no"

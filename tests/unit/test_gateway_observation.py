"""What the gateway reads off responses: the calls of tools, and how long they say they take."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import SessionEvent, ToolEvent
from scout_sdk._hints import Evidence, ToolState
from scout_server.gateway.app import Gateway
from scout_server.gateway.settings import GatewaySettings
from scout_server.policy.readiness import Forecast, Source
from scout_server.tao import observation
from scout_server.tao.observation import Observation

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"Content-Type", b"application/json")]
CALLS = [("bash", '{"command": "sleep 40 && make"}'), ("read", '{"path": "a.py"}')]
READ = [("bash", 40.0), ("read", None)]


def event(**delta: object) -> bytes:
    """A piece of a streamed chat completion."""
    return b"data: " + json.dumps({"choices": [{"index": 0, **delta}]}).encode() + b"\n\n"


def stream(calls: Sequence[tuple[str, str]] = CALLS, *, text: int = 0, finish: str = "") -> bytes:
    """A streamed answer of *text* words and calls, arguments in two pieces."""
    parts = [event(delta={"content": "word "}, finish_reason=None) for _ in range(text)]
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        for function in (
            {"name": name, "arguments": ""},
            {"arguments": arguments[:half]},
            {"arguments": arguments[half:]},
        ):
            call = {"index": index, "function": function}
            parts.append(event(delta={"tool_calls": [call]}, finish_reason=None))
    finish = finish or ("tool_calls" if calls else "stop")
    return b"".join([*parts, event(delta={}, finish_reason=finish), b"data: [DONE]\n\n"])


def whole(calls: Sequence[tuple[str, str]] = CALLS, **more: object) -> bytes:
    """The same in one JSON body."""
    given = [{"function": {"name": name, "arguments": args}} for name, args in calls]
    choice = {"index": 0, "message": {"tool_calls": given}, "finish_reason": "tool_calls"}
    return json.dumps({"choices": [choice], **more}).encode()


def observed(
    chunks: Sequence[bytes], headers: Sequence[tuple[bytes, bytes]] = STREAM, status: int = 200
) -> Observation:
    seen = Observation()
    seen.start(status, headers)
    for chunk in chunks:
        seen.feed(chunk)
    return seen


def test_calls_and_their_seconds_are_read() -> None:
    """Streams and JSON bodies tell the tools that are called, and the sleeps in their arguments."""
    assert observed([stream()]).calls() == READ
    assert observed([stream(text=500)]).calls() == READ
    assert observed([stream(finish="stop")]).calls() == READ
    assert observed([whole()], JSON).calls() == READ
    assert observed([stream([])]).calls() == []
    assert observed([b"{}"], JSON).calls() == []


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 40_000), max_size=30), text=st.sampled_from([0, 3, 300]))
def test_it_does_not_matter_where_the_pieces_end(cuts: list[int], text: int) -> None:
    """A stream tells the same however it is cut."""
    body = stream(text=text) + b": the end\n"
    places = sorted({0, *(cut % len(body) for cut in cuts), len(body)})
    chunks = [body[a:b] for a, b in itertools.pairwise(places)]
    assert observed(chunks).calls() == READ


@settings(max_examples=60, deadline=None)
@given(
    body=st.binary(max_size=200) | st.just(whole()[:-9]) | st.just(b"data: {_call\n\n" * 20),
    kind=st.sampled_from([b"application/json", b"text/event-stream", b"text/html", b""]),
    status=st.sampled_from([200, 500]),
)
def test_a_broken_response_is_no_fault(body: bytes, kind: bytes, status: int) -> None:
    """Whatever comes, nothing is raised."""
    seen = observed([body, body], [(b"content-type", kind)], status)
    assert [seconds for _, seconds in seen.calls() if seconds is not None] == []


def test_without_a_head_only_names_are_read() -> None:
    """What is not to be parsed, or is compressed, tells the names that stand in it, no seconds."""
    seen = Observation()
    seen.feed(whole())
    assert seen.calls() == [("bash", None), ("read", None)]
    packed = [*JSON, (b"content-encoding", b"gzip")]
    assert observed([whole()], packed).calls() == [("bash", None), ("read", None)]


def test_what_is_held_is_bounded() -> None:
    """A body or a line of more than 256 KiB is not held, and the names in it still count."""
    filler = b'{"filler": "' + b"x" * 1000 + b'", '
    seen = observed([filler] + [b"x" * 1000] * 2000, JSON)
    assert sum(map(len, seen._pending)) == 0
    assert observed([whole(filler="x" * 300_000)], JSON).calls() == [("bash", None), ("read", None)]
    cut = observed([b"data: " + b"x" * 300_000], STREAM)
    assert sum(map(len, cut._pending)) == 0
    assert cut.calls() == []
    long = observed([event(delta={"content": "word "})] * 9000, STREAM)
    assert sum(map(len, long._pending)) < 2 * observation._BATCH


def test_text_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without a call is not read line by line."""

    class Reader(observation.ResponseObserver):
        def feed(self, data: bytes) -> None:
            raise AssertionError

    monkeypatch.setattr(observation, "ResponseObserver", Reader)
    assert observed([stream([], text=900)]).calls() == []


# ---- through the gateway ---------------------------------------------------------------------


@dataclass
class Node:
    """A server whose answers a test gives."""

    body: bytes = b""
    kind: str = "text/event-stream"
    url: str = ""
    asked: list[bytes] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """When set: answers wait for it."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            return web.Response(status=200 if request.path == "/health" else 404)
        self.asked.append(await request.read())
        if self.gate is not None:
            await self.gate.wait()
        response = web.StreamResponse(headers={"content-type": self.kind})
        await response.prepare(request)
        for start in range(0, len(self.body), 1000):
            await response.write(self.body[start : start + 1000])
        await response.write_eof()
        return response


@dataclass
class Setting:
    """A gateway in front of one node, and a client."""

    node: Node
    gateway: Gateway
    client: aiohttp.ClientSession
    url: str

    async def ask(self, content: str = "a", **headers: str) -> bytes:
        """Return the bytes of an answer."""
        body = {"messages": [{"role": "user", "content": content}]}
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        address = self.url + "/v1/chat/completions"
        async with self.client.post(address, json=body, headers=lines) as response:
            assert response.status == 200
            return await response.read()

    def forecast(self) -> Forecast | None:
        """Return what is known of the one session's return."""
        pool = self.gateway.pool
        ((tenant, session),) = pool.engine.ledger.sessions
        return pool.engine.readiness.forecast(session, tenant=tenant, now=pool.clock())

    def tell(self, event: SessionEvent) -> None:
        """Send an event of the side channel."""
        ((tenant, _),) = self.gateway.pool.engine.ledger.sessions
        self.gateway.pool.event(event, tenant=tenant)


Serve = Callable[[Gateway], contextlib.AbstractAsyncContextManager[str]]


@pytest.fixture
async def begin(serve_gateway: Serve) -> AsyncIterator[Callable[..., object]]:
    """Start a gateway: await begin(body, **settings)."""
    stack = contextlib.AsyncExitStack()

    async def start(body: bytes, kind: str = "text/event-stream", **more: object) -> Setting:
        node = Node(body, kind)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", node.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        node.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        gateway = Gateway(GatewaySettings(nodes=(node.url,), port=0, **more))  # type: ignore[arg-type]
        url = await stack.enter_async_context(serve_gateway(gateway))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        return Setting(node, gateway, client, url)

    async with stack:
        yield start


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def answered(setting: Setting) -> None:
    """Return when the gateway has done with the answer that the client has."""
    await until(lambda: bool(setting.gateway.pool.engine.readiness))


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_a_sleep_in_a_call_tells_when_a_client_without_hints_comes_back(
    begin: Callable[..., object], kind: str
) -> None:
    """The answer passes byte for byte, and its session is expected when its tools have slept."""
    body = stream(text=200) if "event" in kind else whole()
    setting = await begin(body, kind)  # type: ignore[misc]
    assert await setting.ask() == body
    await answered(setting)
    forecast = setting.forecast()
    assert forecast is not None
    assert forecast.source is Source.SLEEP
    assert 30 < forecast.remaining_s <= 40


async def test_it_can_be_switched_off(begin: Callable[..., object]) -> None:
    """With `gateway.tool_calls` off, only the tool's name is known."""
    setting = await begin(stream(), tool_calls=False)  # type: ignore[misc]
    await setting.ask()
    await answered(setting)
    forecast = setting.forecast()
    assert forecast is not None
    assert forecast.source is Source.DEFAULT


async def test_a_fault_in_reading_fails_no_answer(
    begin: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that is broken off inside a call passes as it is."""
    body = stream()[:-60] + b"\n\ndata: {"
    setting = await begin(body)  # type: ignore[misc]
    assert await setting.ask(x_session_id="s") == body
    await answered(setting)
    assert setting.forecast() is not None


@pytest.mark.parametrize("early", [False, True])
async def test_who_hints_counts_more(begin: Callable[..., object], early: bool) -> None:
    """A deadline of the client's own counts, whether it is told after the answer or before."""
    setting = await begin(stream(CALLS[:1]))  # type: ignore[misc]
    hint = SessionEvent(
        session="s",
        tool=ToolEvent(
            name="bash", state=ToolState.STARTED, remaining_s=3.0, evidence=Evidence.DEADLINE
        ),
    )
    if early:
        setting.node.body = stream([])
        await setting.ask(x_session_id="s")
        setting.node.body, setting.node.gate = stream(CALLS[:1]), asyncio.Event()
        asked = asyncio.ensure_future(setting.ask(x_session_id="s"))
        await until(lambda: len(setting.node.asked) == 2)
        setting.tell(hint)
        setting.node.gate.set()
        await asked
        await until(lambda: setting.gateway.pool.engine.ledger.used(setting.node.url)[1] == 0)
    else:
        await setting.ask(x_session_id="s")
        await answered(setting)
        setting.tell(hint)
    forecast = setting.forecast()
    assert forecast is not None
    assert forecast.source is Source.DEADLINE
    assert forecast.remaining_s <= 3

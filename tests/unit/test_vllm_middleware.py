"""The middleware between a client and vLLM, over a recording app; vLLM is not needed."""

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from scout_sdk import Evidence, HintOutcome, Hints, ToolEvent, ToolState, _wire
from scout_server.vllm import ScoutMiddleware
from scout_server.vllm.bodies import parsed_body, with_xargs
from scout_server.vllm.link import EngineLink
from scout_server.vllm.middleware import PATHS

HINTS = Hints(
    session="s 1",
    agent="plänner",
    turn=3,
    tools=(
        ToolEvent(name="shell", state=ToolState.STARTED, remaining_s=5.0, evidence=Evidence.SLEEP),
    ),
    next_agents=("coder",),
)
STATE = SimpleNamespace(args=SimpleNamespace(additional_config={}))
"""Kept over many calls, as a server keeps it."""
BODY = b'{"model": "m",  "n": 1.0, "messages": []}'


class App:
    """Reads a request as vLLM would and answers with two chunks."""

    def __init__(self) -> None:
        self.body = b""
        self.scope: Any = None
        self.messages: list[Any] = []
        self.state = SimpleNamespace(args=SimpleNamespace(additional_config={}))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        more = scope["type"] == "http"
        while more:
            message = await receive()
            self.messages.append(message)
            if message["type"] != "http.request":
                break
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"x-app", b"there")]}
        )
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False})


async def call(
    app: App,
    *,
    headers: Mapping[str, str] | list[tuple[bytes, bytes]] = (),  # type: ignore[assignment]
    body: bytes = BODY,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    chunk: int = 7,
    extra: list[Any] | None = None,
) -> list[Any]:
    pairs = (
        [(k.encode(), v.encode()) for k, v in dict(headers).items()]
        if not isinstance(headers, list)
        else headers
    )
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [*pairs, (b"content-length", str(len(body)).encode())],
        "app": app,
    }
    parts = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
    incoming = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ] + (extra or [])
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await ScoutMiddleware(app)(scope, receive, send)
    return sent


def outcome_of(sent: list[Any]) -> dict[str, HintOutcome]:
    headers = dict(sent[0]["headers"])
    return _wire.decode_outcome(headers.get(b"x-scout-outcome", b"").decode())


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_hints_become_xargs(path: str) -> None:
    """Headers of a hinted request arrive as xargs that decode to the same hints."""
    app = App()
    sent = await call(app, headers=_wire.encode(HINTS), path=path)
    parsed = json.loads(app.body)

    assert _wire.from_xargs(parsed.pop("vllm_xargs")) == HINTS
    assert parsed == json.loads(BODY)
    assert int(dict(app.scope["headers"])[b"content-length"]) == len(app.body)
    assert outcome_of(sent)["agent"] is HintOutcome.ACCEPTED


async def test_requests_that_say_nothing_pass_unchanged() -> None:
    """Without hints and credentials the app gets the messages as they came."""
    app = App()
    sent = await call(app)

    assert app.body == BODY
    assert len(app.messages) == -(-len(BODY) // 7)
    assert b"x-scout-outcome" not in dict(sent[0]["headers"])


@pytest.mark.parametrize("off", [{"policy": {"hints": False, "fingerprints": False}}, None])
async def test_where_nobody_is_recognised_nothing_is_read(off: Any) -> None:
    """With identity off, or an engine without Scout, the first chunk reaches vLLM at once."""

    async def answer(operation: str, argument: str) -> list[str]:
        return ['{"mode": "stock"}']

    app = App()
    app.state.args.additional_config = {"scout": off or {}}
    if off is None:
        app.state.scout = EngineLink(answer, timeout_s=1.0)
        await app.state.scout.refresh()
    sent = await call(app, headers=_wire.encode(HINTS))

    assert len(app.messages) == -(-len(BODY) // 7)
    assert set(outcome_of(sent).values()) == {HintOutcome.IGNORED}


async def test_streams_pass_untouched() -> None:
    """Response chunks arrive one by one as the app sent them, with its headers kept."""
    sent = await call(App(), headers=_wire.encode(HINTS))

    assert [message.get("body") for message in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert (b"x-app", b"there") in sent[0]["headers"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"text"',
        b"{",
        b'{"a": 1} trailing',
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"vllm_xargs": "no mapping"}',
        b'{"a": "\xff"}',
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_what_is_no_json_object_passes_unchanged(body: bytes) -> None:
    """A body that cannot take xargs reaches vLLM byte for byte, and its hints are ignored."""
    app = App()
    sent = await call(app, headers=_wire.encode(HINTS), body=body, chunk=4096)

    assert app.body == body
    assert set(outcome_of(sent).values()) == {HintOutcome.IGNORED}


async def test_bodies_over_the_bound_pass_unchanged() -> None:
    """A body above max_body_bytes streams through, byte for byte."""
    app = App()
    app.state.args.additional_config = {"scout": {"vllm": {"max_body_bytes": 20}}}
    sent = await call(app, headers=_wire.encode(HINTS))

    assert app.body == BODY
    assert outcome_of(sent)["session"] is HintOutcome.IGNORED


async def test_the_users_xargs_win() -> None:
    """What the body says in vllm_xargs stays; ours fill the gaps."""
    app = App()
    body = b'{"vllm_xargs": {"scout_agent": "mine", "other": [1, 2]}, "n": 2}'
    await call(app, headers=_wire.encode(HINTS), body=body)
    xargs = json.loads(app.body)["vllm_xargs"]

    assert xargs["scout_agent"] == "mine"
    assert xargs["other"] == [1, 2]
    assert xargs["scout_session"] == HINTS.session


async def test_null_xargs_are_absent_ones() -> None:
    """`"vllm_xargs": null` counts as not said."""
    app = App()
    await call(app, headers=_wire.encode(HINTS), body=b'{"vllm_xargs": null}')

    assert _wire.from_xargs(json.loads(app.body)["vllm_xargs"]) == HINTS


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer secret"}])
async def test_the_tenant_cannot_be_forged(headers: dict[str, str]) -> None:
    """What only servers say is ours, or is taken out of the body; the key itself never goes on."""
    app = App()
    forged = {"scout_tenant": "else", "scout_call": "c", "scout_seal": "s", "other": 1}
    body = json.dumps({"vllm_xargs": forged}).encode()
    await call(app, headers=headers, body=body)
    xargs = json.loads(app.body)["vllm_xargs"]

    assert xargs["other"] == 1
    assert xargs.get("scout_tenant") != "else"
    assert ("scout_tenant" in xargs) == ("scout_seal" in xargs) == bool(headers)
    assert "secret" not in app.body.decode()


async def test_foreign_hints_become_xargs_like_ours() -> None:
    """A session that another client names in its own way reaches the engine, and is reported."""
    app = App()
    body = b'{"nvext": {"agent_hints": {"prefix_id": "s", "priority": 7}}}'
    sent = await call(app, headers={"x-dynamo-parent-session-id": "p"}, body=body)
    parsed = json.loads(app.body)

    assert _wire.from_xargs(parsed["vllm_xargs"]) == Hints(session="s", parent="p")
    assert "priority" not in parsed
    assert outcome_of(sent)["session"] is HintOutcome.ACCEPTED
    assert outcome_of(sent)["priority"] is HintOutcome.IGNORED


async def test_priorities_are_given_on_where_the_engine_has_them() -> None:
    """Dynamo's high priority is vLLM's low number; the body's own priority stays."""
    app = App()
    app.state.args.scheduling_policy = "priority"
    body = b'{"nvext": {"agent_hints": {"priority": 7}}}'
    await call(app, body=body)
    assert json.loads(app.body)["priority"] == -7
    app = App()
    app.state.args.scheduling_policy = "priority"
    await call(app, body=b'{"priority": 3, ' + body[1:])
    assert json.loads(app.body)["priority"] == 3


class Answering(App):
    """Answers with one chat completion that calls a tool, in three pieces."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.body = (await receive())["body"]
        arguments = json.dumps({"command": "sleep 4"})
        called = {"function": {"name": "bash", "arguments": arguments}}
        message = {"tool_calls": [called]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        answer = json.dumps({"choices": [choice]}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (answer[:20], answer[20:]):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


async def test_tool_calls_of_a_response_are_told_to_the_engine() -> None:
    """The engine hears the tools and their seconds under the name that the request carried."""
    heard: list[Any] = []

    async def answer(operation: str, argument: str) -> list[str]:
        heard.append((operation, json.loads(argument)))
        return ["{}"]

    app = Answering()
    app.state.scout = EngineLink(answer, timeout_s=1.0)
    sent = await call(app, chunk=4096)
    await app.state.scout._telling
    name = json.loads(app.body)["vllm_xargs"]["scout_call"]

    assert heard == [
        ("endings", [{"call": name, "finish": "tool_calls", "tools": [["bash", 4.0]]}])
    ]
    assert json.loads(b"".join(message.get("body", b"") for message in sent[1:]))["choices"]


async def test_endings_gather_while_the_engine_is_busy() -> None:
    """What comes meanwhile goes in one message; over the bound the oldest are dropped."""
    gate = asyncio.Event()
    heard: list[Any] = []

    async def answer(operation: str, argument: str) -> list[str]:
        await gate.wait()
        heard.append(json.loads(argument))
        return ["{}"]

    link = EngineLink(answer, timeout_s=5.0)
    link.tell({"call": "first"})
    await asyncio.sleep(0)
    for index in range(1100):
        link.tell({"call": index})
    gate.set()
    assert link._telling is not None
    await link._telling

    assert heard[0] == [{"call": "first"}]
    assert heard[-1][-1] == {"call": 1099}
    assert max(len(batch) for batch in heard) == 128
    assert (link.untold, sum(map(len, heard))) == (1100 - 1024, 1025)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/v1/models")])
async def test_other_requests_are_left_alone(method: str, path: str) -> None:
    """Only generation requests are touched."""
    app = App()
    await call(app, headers=_wire.encode(HINTS), method=method, path=path)

    assert app.body == BODY


async def test_a_client_that_hangs_up_is_reported_to_the_app() -> None:
    """A disconnect in mid-body reaches the app, after what was read before it."""
    app = App()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(k.encode(), v.encode()) for k, v in _wire.encode(HINTS).items()],
        "app": app,
    }
    incoming = [
        {"type": "http.request", "body": b'{"a"', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        pass

    await ScoutMiddleware(app)(scope, receive, send)
    assert [message["type"] for message in app.messages] == ["http.request", "http.disconnect"]
    assert app.body == b'{"a"'


async def test_other_connections_pass() -> None:
    """Lifespan and websocket scopes go straight to the app."""
    app = App()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing to read")

    await ScoutMiddleware(app)({"type": "websocket"}, receive, send)
    assert app.scope == {"type": "websocket"}


async def test_an_engine_without_scout_ignores_hints() -> None:
    """Once the engines said that they run without Scout, outcomes say `ignored`."""

    async def answer(operation: str, argument: str) -> list[str]:
        return ['{"mode": "stock"}']

    app = App()
    app.state.scout = EngineLink(answer, timeout_s=1.0)
    await call(app, path="/metrics", method="GET")
    sent = await call(app, headers=_wire.encode(HINTS))

    assert set(outcome_of(sent).values()) == {HintOutcome.IGNORED}


async def test_a_scrape_does_not_wait_for_a_silent_engine() -> None:
    """/metrics is answered though the engine never answers; only one question is in flight."""
    asked = 0

    async def answer(operation: str, argument: str) -> list[str]:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        return []

    app = App()
    app.state.scout = EngineLink(answer, timeout_s=0.01)
    for _ in range(3):
        sent = await call(app, path="/metrics", method="GET")
        assert sent[0]["status"] == 200
    assert asked == 1
    assert app.state.scout.failures == 3
    app.state.scout._flight.cancel()


async def test_metrics_of_several_processes_get_ours_appended() -> None:
    """Where /metrics shows files of several processes, our collectors stand at its end."""
    registry = CollectorRegistry()
    Gauge("scout_there", "A figure of ours", registry=registry).set(3)

    class Metrics(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/plain; version=0.0.4"), (b"content-length", b"7")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"a_b 1.0"})

    async def answer(operation: str, argument: str) -> list[str]:
        return ["{}"]

    app = Metrics()
    app.state.scout = EngineLink(answer, timeout_s=1.0)
    app.state.scout_registry = registry
    sent = await call(app, path="/metrics", method="GET")

    lines = sent[1]["body"].decode().splitlines()
    assert lines[0] == "a_b 1.0"
    assert "scout_there 3.0" in lines
    assert b"content-length" not in dict(sent[0]["headers"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.dictionaries(st.text(), JSON, max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_rest_of_a_body_keeps_its_value(
    body: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    """Adding xargs changes nothing else in any JSON object, however it is written."""
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
    raw = text.encode("utf-8", "surrogatepass")
    understood = parsed_body(raw)
    if understood is None:
        return  # lone surrogates that are not valid UTF-8, or vllm_xargs that are no mapping
    parsed = json.loads(with_xargs(raw, understood, {"scout_agent": "a"}))
    assert parsed.pop("vllm_xargs")["scout_agent"] == "a"
    body.pop("vllm_xargs", None)
    assert parsed == body


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    b"X-Scout-Version",
                    b"x-scout-session",
                    b"x-scout-agent",
                    b"x-scout-tools",
                    b"x-scout-next",
                    b"x-scout-turn",
                    b"x-session-id",
                    b"authorization",
                ]
            ),
            st.binary(max_size=200),
        ),
        max_size=12,
    ),
    body=st.binary(max_size=60) | st.just(BODY),
)
@settings(max_examples=200, deadline=None)
def test_hostile_headers_and_bodies_never_fail_a_request(
    headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """Whatever is sent, the app is called once, with a body that is the same or a JSON object."""
    app = App()
    app.state = STATE
    sent = asyncio.run(call(app, headers=headers, body=body, chunk=4096))

    assert sent[0]["status"] == 200
    if app.body != body:
        parsed = json.loads(app.body)
        parsed.pop("vllm_xargs")
        assert parsed == json.loads(body)

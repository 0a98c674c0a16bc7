"""Damaged headers, bodies, messages and responses: no exception, nothing that grows."""

import json
import random
import resource
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scout_sdk import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_server.ingress import (
    Arrival,
    Ending,
    EventDesk,
    IngressSettings,
    RequestReader,
    ResponseObserver,
)
from scout_server.tenancy import TenancySettings
from scout_server.vllm.middleware import ScoutMiddleware

MILLION = 1_000_000
TOOL = ToolEvent(
    name="bash", state=ToolState.STARTED, call_id="c", remaining_s=5.0, evidence=Evidence.SLEEP
)
HINTS = Hints(session="s%1", agent="研究", path="a/b", turn=3, tools=(TOOL,), next_agents=("x",))
OURS = [(name.encode(), value.encode()) for name, value in _wire.encode(HINTS).items()]
THEIRS = [
    (b"authorization", b"Bearer k"),
    (b"x-tenant", b"t"),
    (b"thread-id", b"th"),
    (b"x-dynamo-session-id", b"d"),
    (b"x-dynamo-session-final", b"true"),
    (b"x-claude-code-session-id", b"c"),
    (b"x-claude-code-agent-id", b"sub"),
    (b"x-vllm-priority", b"3"),
    (b"x-nat-interarrival-ms", b"1500"),
    (b"x-agent-hint", b"eyJzZXNzaW9uX2lkIjogInMifQ"),
    (b"baggage", b"gen_ai.agent.name=a%20b;p=1,session.id=s"),
]
BODIES = [
    json.dumps(body).encode()
    for body in (
        {"messages": [{"role": "user", "content": "hi"}], "prompt_cache_key": "k"},
        {"prompt": "x", "session_id": "s", "vllm_xargs": {"scout_tenant": "t", "session_id": "y"}},
        {"input": "x", "nvext": {"agent_hints": {"priority": 5, "osl": 9, "iat": 10}}},
        {"kv_hints": {"actions": [{"action_type": "retain", "payload": {"ttl_s": 9}}]}},
        {"vllm_xargs": None, "priority": 1},
    )
]
MESSAGE = _wire.encode_events(
    [SessionEvent(session="s", agent="a", tool=TOOL), SessionEvent(session="t", final=True)]
)
ARGUMENTS = json.dumps({"command": "sleep 5"})
CALLED = {"tool_calls": [{"index": 0, "function": {"name": "bash", "arguments": ARGUMENTS}}]}
STREAM = b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"choices": [{"index": 0, "delta": CALLED}]},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use"}},
        {"type": "response.output_item.done", "output_index": 2, "item": {"type": "function_call"}},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    )
)
WHOLE = json.dumps({"choices": [{"index": 0, "message": CALLED, "finish_reason": "stop"}]}).encode()
SCRAPS = [b'"', b"%", b"\\", b"(", b";", b"=", b",", b"?", b":", b"\x00", b"\xff", b"9" * 20]
SCRAPS += [b"{", b"}", b"[", b"]", b"null", b"true", b"-1e999", b"\xe7\xa0", b'"\\ud800"', b"\n"]


def mutated(source: bytes, chance: random.Random) -> bytes:
    octets = bytearray(source)
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(octets) + 1)
        match chance.randrange(4):
            case 0:
                octets[at:at] = chance.choice(SCRAPS)
            case 1:
                del octets[at : at + chance.randint(1, 8)]
            case 2:
                octets[at : at + 1] = chance.randbytes(1)
            case _:
                other = chance.randrange(len(octets) + 1)
                octets[at:at] = octets[other : other + chance.randint(1, 12)]
    return bytes(octets)


def some_headers(chance: random.Random) -> list[tuple[bytes, bytes]]:
    pairs = [*OURS, *chance.sample(THEIRS, 3)]
    for _ in range(2):
        at = chance.randrange(len(pairs))
        name, value = pairs[at]
        pairs[at] = (name, mutated(value, chance))
    if chance.random() < 0.2:  # ever new identities
        pairs.append((b"x-scout-session", f'"{chance.getrandbits(64):x}"'.encode()))
        pairs.append((b"authorization", f"{chance.getrandbits(16)}".encode()))
    return pairs


def requests() -> Callable[[random.Random], None]:
    tenancy = TenancySettings(tenant_header="X-Tenant")
    reader = RequestReader(IngressSettings(), tenancy, max_agents=16, max_sessions=64)

    def one(chance: random.Random) -> None:
        try:
            body = json.loads(mutated(chance.choice(BODIES), chance))
        except ValueError:
            body = None
        given = body if isinstance(body, dict) else None
        arrival = reader.read(some_headers(chance), given)
        assert isinstance(arrival, Arrival)
        assert len(arrival.tenant) in (0, 16)
        assert all(isinstance(outcome, HintOutcome) for outcome in arrival.outcomes.values())
        if arrival.hints is not None:
            assert isinstance(arrival.hints, Hints)
            _wire.to_xargs(arrival.hints)
        assert len(_wire.encode_outcome(arrival.outcomes)) < 4096

    return one


def messages() -> Callable[[random.Random], None]:
    desk = EventDesk(IngressSettings(events_per_s=5))
    now = 0.0

    def one(chance: random.Random) -> None:
        nonlocal now
        now += chance.random() / 100
        taken = desk.take(mutated(MESSAGE, chance), str(chance.randrange(5000)), now=now)
        assert taken.status in (202, 400)
        assert all(isinstance(event, SessionEvent) for event in taken.events)
        assert len(taken.events) + taken.clipped <= 256
        assert len(desk._budget._buckets) <= 1024

    return one


def responses() -> Callable[[random.Random], None]:
    def one(chance: random.Random) -> None:
        found: list[Ending] = []
        observer = ResponseObserver(found.append)
        kind = chance.choice([b"text/event-stream", b"application/json"])
        observer.start(200, [(mutated(b"content-type", chance), mutated(kind, chance))])
        observer.start(200, [(b"content-type", kind)])
        data = mutated(STREAM if kind == b"text/event-stream" else WHOLE, chance)
        cut = chance.randrange(len(data) + 1)
        observer.feed(data[:cut])
        observer.feed(data[cut:])
        observer.end()
        assert len(found) <= 1
        for ending in found:
            assert len(ending.tools) <= 16

    return one


def middleware() -> Callable[[random.Random], None]:
    """Drive the coroutine by hand: nothing in it waits for anything but these functions."""
    state = SimpleNamespace(args=SimpleNamespace(additional_config={}))
    heard: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive()).get("body", b""))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": WHOLE, "more_body": False})

    app.state = state  # type: ignore[attr-defined]
    served = ScoutMiddleware(app)

    def one(chance: random.Random) -> None:
        body = mutated(chance.choice(BODIES), chance)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": some_headers(chance),
            "app": app,
        }
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        heard.clear()
        call = served(scope, receive, send)
        with pytest.raises(StopIteration):
            call.send(None)
        assert [message["type"] for message in sent] == [
            "http.response.start",
            "http.response.body",
        ]
        assert sent[1]["body"] == WHOLE
        if heard != [body]:
            parsed, given = json.loads(heard[0]), json.loads(body)
            parsed.pop("vllm_xargs", None)
            given.pop("vllm_xargs", None)
            assert json.dumps(parsed) == json.dumps(given)

    return one


KINDS = [requests, messages, responses, middleware]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damaged_inputs(kind: Callable[[], Callable[[random.Random], None]]) -> None:
    """Nothing raises, and after the first hundreds nothing grows."""
    chance = random.Random(7)
    one = kind()
    for _ in range(800):
        one(chance)
    tracemalloc.start()
    for _ in range(200):
        one(chance)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown < 300_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_damaged_inputs(kind: Callable[[], Callable[[random.Random], None]]) -> None:
    """Nothing raises, and the process does not grow after the first tenth."""
    chance = random.Random(8)
    one = kind()
    for _ in range(MILLION // 10):
        one(chance)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MILLION - MILLION // 10):
        one(chance)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert grown_kib < 32 * 1024

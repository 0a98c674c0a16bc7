"""The parts of the Ray Serve application that need no Ray: routing, notes, pool, engines."""

import ast
import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scout_sdk import ConfigError, Hints, SessionEvent, UnsupportedError
from scout_server.cli import app
from scout_server.config import load
from scout_server.gateway.settings import GatewaySettings
from scout_server.policy.engine import TaoEngine
from scout_server.ray import notes, versions
from scout_server.ray.calls import Call, Head, NodeFacts, Placed, PoolGoneError, Refusal, Ticket
from scout_server.ray.engines import AsgiEngine, EngineDiedError, ServerEngine, load_factory
from scout_server.ray.pool import PoolActor
from scout_server.ray.replica import LlmReplica, engine_kind, engine_of, vllm_command
from scout_server.ray.routing import Routing
from scout_server.ray.settings import RaySettings, document_of
from scout_server.tao.asked import Asked
from scout_server.tao.trace import TracedEngine, drive, placements, replay


def asked(key: str, session: str | None = None, *, tokens: int = 100, final: bool = False) -> Asked:
    return Asked(
        key=key,
        session=session or key,
        tenant="",
        hints=Hints(session=session or key),
        outcomes={},
        final=final,
        body_bytes=4 * tokens,
        output_tokens=0,
        timeout_s=None,
    )


def facts(*names: str, capacity: int = 10_000) -> tuple[NodeFacts, ...]:
    return tuple(NodeFacts(name=n, capacity_tokens=capacity) for n in names)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def pool(**ray: object) -> AsyncIterator[PoolActor]:
    actor = PoolActor({"ray": {"slots": 1, "trace_events": 10_000, **ray}})
    try:
        yield actor
    finally:
        await actor.stop()


class Link:
    """A pool that a test speaks for."""

    def __init__(self, *answers: Placed | Refusal | Exception) -> None:
        self.answers = list(answers)
        self.avoided: list[frozenset[str]] = []
        self.told: list[tuple[object, ...]] = []
        self.number = 1
        self.gone = False

    async def found(self) -> int:
        if self.gone:
            raise PoolGoneError
        return self.number

    async def place(
        self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
    ) -> Placed | Refusal:
        self.avoided.append(avoid)
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, method: str, *args: object) -> None:
        self.told.append((method, *args))


def on(node: str) -> Placed:
    return Placed(node=node, held_s=0.0)


# ---- importing and settings ----------------------------------------------------------------


def test_without_ray_the_package_imports_and_the_application_says_what_to_install() -> None:
    """
    Importing scout_server.ray needs no Ray; asking for `app` without it names the extra.
    """
    code = (
        "import importlib.metadata as m, sys\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "import scout_server.ray as r\n"
        "assert 'ray' not in sys.modules\n"
        "try: r.app\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "UnsupportedError Ray is not installed: pip install 'scout-sdk[ray]'\n"


def test_one_module_imports_ray() -> None:
    """
    All that is alpha stands in `_compat`.
    """
    folder = Path(versions.__file__).parent
    importing = {
        path.stem
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(n.name.split(".")[0] == "ray" for n in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray")
    }
    assert importing == {"_compat"}


def test_a_ray_outside_the_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Every extension point is alpha: a Ray that the tests did not run on is refused by name.
    """
    monkeypatch.setattr(versions.metadata, "version", lambda name: "2.61.0")
    with pytest.raises(UnsupportedError, match=r"Ray 2\.61\.0 is not supported; supported: .*60"):
        versions.require_ray()


def test_arguments_are_a_configuration_document_or_flat_words() -> None:
    """
    A Serve YAML gives nested `args`, `serve run` flat words; both are the same document.
    """
    flat = document_of(
        {"ray.replicas": "3", "embedded.model": "m", "ray.tao.use_readiness": "false"}
    )
    assert flat == {
        "ray": {"replicas": 3, "tao": {"use_readiness": False}},
        "embedded": {"model": "m"},
    }
    assert document_of(flat) == flat
    with pytest.raises(ConfigError, match=r"'replicas': the form is section\.name=value"):
        document_of({"replicas": "3"})


def test_the_engine_is_vllm_only_where_it_is_wanted_and_named() -> None:
    """
    `auto` is the embedded engine without a model; `vllm` without a model is a clear error.
    """
    assert engine_kind(RaySettings()) == "embedded"
    with pytest.raises(ConfigError, match=r"ray\.model is empty"):
        engine_kind(RaySettings(engine="vllm"))
    with pytest.raises(ConfigError, match="the form is module:function"):
        load_factory("nonsense")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_factory("scout_server.nothing:app")
    assert isinstance(engine_of({"ray": {"engine": "vllm", "model": "m"}}), ServerEngine)


def test_vllm_is_started_by_a_command_that_scout_serve_understands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Settings that differ from the defaults reach the extension; vLLM gets its own arguments.
    """
    document = {
        "ray": {"engine": "vllm", "model": "m", "vllm_args": ["--config", "x.yaml"]},
        "policy": {"hints": False},
        "tenancy": {"tenant_header": "x-scout-tenant"},
    }
    command = vllm_command(document)
    assert command[:4] == [sys.executable, "-m", "scout_server.cli", "serve"]
    got: list[object] = []

    def serve_vllm(model: str, args: Sequence[str], values: Sequence[str], **_: object) -> None:
        got.extend((model, list(args), list(values)))

    monkeypatch.setattr("scout_server.serve.serve_vllm", serve_vllm)
    assert CliRunner().invoke(app, command[3:]).exit_code == 0
    assert got == [
        "m",
        ["--host", "127.0.0.1", "--port", "{port}", "--config", "x.yaml"],
        ["policy.hints=false", 'tenancy.tenant_header="x-scout-tenant"'],
    ]


# ---- routing -------------------------------------------------------------------------------


async def test_a_placed_turn_goes_to_that_replica_alone() -> None:
    """
    One rank of one replica: Serve cannot send it elsewhere.
    """
    link = Link(on("b"))
    assert await Routing(link).choose(Ticket(asked=asked("k")), ["a", "b"]) == [["b"]]


async def test_a_call_without_a_turn_goes_anywhere_or_first_where_it_should() -> None:
    """
    Only turns need room.
    """
    routing = Routing(Link())
    assert await routing.choose(Ticket(), ["a", "b"]) == [["a", "b"]]
    assert await routing.choose(Ticket(node="b"), ["a", "b", "c"]) == [["b"], ["a", "c"]]
    assert await routing.choose(Ticket(node="x"), ["a", "b"]) == [["a", "b"]]
    assert await routing.choose(None, ["a", "b"]) == [["a", "b"]]


@pytest.mark.parametrize("fault", [PoolGoneError(), RuntimeError("a fault of ours")])
async def test_no_fault_leaves_a_router(fault: Exception) -> None:
    """
    An exception in a router would leave the request waiting for ever (pitfall 1): it goes anywhere.
    """
    assert await Routing(Link(fault)).choose(Ticket(asked=asked("k")), ["a", "b"]) == [["a", "b"]]


async def test_without_a_pool_turns_go_anywhere() -> None:
    """
    While the pool is being replaced requests are served, not planned.
    """
    link = Link()
    link.gone = True
    assert await Routing(link).choose(Ticket(asked=asked("k")), ["a"]) == [["a"]]


async def test_a_pool_that_hangs_holds_nobody_for_ever() -> None:
    """
    The router waits a little longer than the request may be held, then goes on without the pool.
    """
    routing = Routing(Link(), grace_s=0.01)
    assert await routing.choose(Ticket(asked=asked("k"), timeout_s=0.01), ["a"]) == [["a"]]


async def test_a_replica_that_the_router_does_not_know_is_avoided() -> None:
    """
    Views differ for a moment when membership changes: the pool is asked for another replica.
    """
    link = Link(on("dead"), on("a"))
    assert await Routing(link).choose(Ticket(asked=asked("k")), ["a", "b"]) == [["a"]]
    assert link.avoided == [frozenset(), frozenset({"dead"})]


async def test_asked_again_for_a_request_the_replica_before_is_avoided() -> None:
    """
    Serve asks again when a replica was full (pitfall 3); a taken call is not asked for again.
    """
    link = Link(on("a"), on("b"), on("a"))
    routing = Routing(link)
    ticket = Ticket(asked=asked("k"))
    await routing.choose(ticket, ["a", "b"])
    assert await routing.choose(ticket, ["a", "b"]) == [["b"]]
    routing.routed(ticket)
    await routing.choose(ticket, ["a", "b"])
    assert link.avoided == [frozenset(), frozenset({"a"}), frozenset()]


async def test_a_new_pool_is_told_the_replicas_before_it_is_asked() -> None:
    """
    A pool that was replaced knows nothing: the first request introduces the replicas.
    """
    link = Link(on("a"), on("a"))
    routing = Routing(link)
    routing.update({"a": NodeFacts(name="a")})
    link.told.clear()
    await routing.choose(Ticket(asked=asked("1")), ["a"])
    link.number = 2
    await routing.choose(Ticket(asked=asked("2")), ["a"])
    assert link.told == [("set_nodes", (NodeFacts(name="a"),))] * 2


async def test_a_refusal_reaches_the_ingress_through_its_note() -> None:
    """
    Serve gives a router no way to answer: the ingress is told, and cancels the call.
    """
    note = notes.open_note("k")
    call = asyncio.create_task(Routing(Link(Refusal.FULL)).choose(Ticket(asked=asked("k")), ["a"]))
    assert await note.refusal is Refusal.FULL
    assert not call.done()
    call.cancel()
    notes.close("k")
    assert not notes.refused("k", Refusal.FULL)


async def test_notes_cross_threads() -> None:
    """
    Router and ingress have an event loop each, in threads of one process.
    """
    note = notes.open_note("k")
    thread = threading.Thread(target=notes.refused, args=("k", Refusal.LATE))
    thread.start()
    assert await note.refusal is Refusal.LATE
    thread.join()
    notes.close("k")


# ---- the pool ------------------------------------------------------------------------------


async def test_turns_wait_for_room_and_get_it_when_another_ends() -> None:
    """
    One slot a replica: the third turn waits until one finishes, and goes there.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a", "b"))
        first = await actor.place(asked("1"), 0, frozenset(), 5)
        second = await actor.place(asked("2"), 0, frozenset(), 5)
        assert isinstance(first, Placed)
        assert isinstance(second, Placed)
        assert {first.node, second.node} == {"a", "b"}
        third = asyncio.create_task(actor.place(asked("3"), 0, frozenset(), 5))
        await until(lambda: "3" in actor.engine.waiting)
        await actor.finish("2", 0, 100, 10, 0, ())
        assert (await third) == Placed(node=second.node, held_s=(await third).held_s)
        await actor.finish("1", 0, 100, 10, 0, ())
        await actor.finish("3", 0, 100, 10, 0, ())
        assert not actor.engine.ledger.bookings


async def test_placing_is_idempotent() -> None:
    """
    Asked twice for a waiting turn both get the one placement; asked for a placed one it moves.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a"))
        await actor.place(asked("1"), 0, frozenset(), 5)
        twice = [asyncio.create_task(actor.place(asked("2"), 0, frozenset(), 5)) for _ in "ab"]
        await until(lambda: "2" in actor.engine.waiting)
        await actor.set_nodes(facts("a", "b"))
        placements = await asyncio.gather(*twice)
        assert [p.node for p in placements if isinstance(p, Placed)] == ["b", "b"]
        assert len(actor.engine.ledger.bookings) == 2
        await actor.set_nodes(facts("a", "b", "c"))
        again = await actor.place(asked("2"), 0, frozenset({"b"}), 5)
        assert isinstance(again, Placed)
        assert again.node == "c"
        assert len(actor.engine.ledger.bookings) == 2


async def test_a_held_client_that_leaves_gets_no_room() -> None:
    """
    Its place is gone at once, and a message that comes after that changes nothing.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a"))
        await actor.place(asked("1"), 0, frozenset(), 5)
        held = asyncio.create_task(actor.place(asked("2"), 0, frozenset(), 5))
        await until(lambda: "2" in actor.engine.waiting)
        await actor.cancel("2", 0, "client-left")
        assert await held is Refusal.GONE
        assert not actor.engine.waiting
        assert await actor.place(asked("2"), 0, frozenset(), 5) is Refusal.GONE
        await actor.finish("1", 0, None, None, None, ())
        retried = await actor.place(asked("2"), 1, frozenset(), 5)
        assert isinstance(retried, Placed)
        await actor.cancel("2", 0, "")  # a word about the first attempt does not end the second
        assert "2" in actor.engine.ledger.bookings


async def test_too_many_and_too_long_are_refused() -> None:
    """
    The queue and the hold time are bounded.
    """
    async with pool(tao={"max_waiting": 1}) as actor:
        held = asyncio.create_task(actor.place(asked("1"), 0, frozenset(), 0.05))
        await until(lambda: "1" in actor.engine.waiting)
        assert await actor.place(asked("2"), 0, frozenset(), 5) is Refusal.FULL
        assert await held is Refusal.LATE
        assert not actor.engine.waiting


async def test_a_replica_that_left_drains_and_is_forgotten() -> None:
    """
    Serve takes a replica out of the list while its last requests run: they end in peace.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a"))
        await actor.place(asked("1"), 0, frozenset(), 5)
        await actor.set_nodes(facts("b"))
        assert actor.engine.ledger.nodes["a"].draining
        assert "1" in actor.engine.ledger.bookings
        await actor.finish("1", 0, 100, 10, 0, ())
        await actor.set_nodes(facts("b"))
        assert list(actor.engine.ledger.nodes) == ["b"]


async def test_a_dead_replica_takes_its_bookings_and_credit_along() -> None:
    """
    Membership changes the ledger at once: nothing is booked on what is not there.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a"))
        await actor.place(asked("1", "s"), 0, frozenset(), 5)
        await actor.finish("1", 0, 100, 10, 90, ())
        await actor.place(asked("2", "s"), 0, frozenset(), 5)
        await actor.lose_node("a")
        assert not actor.engine.ledger.bookings
        assert not actor.engine.ledger.nodes
        await actor.set_nodes(facts("a"))  # another router, which did not hear of it yet
        assert not actor.engine.ledger.nodes
        (session,) = await actor.sessions()
        assert (session["credit"], session["origin"]) == ({}, None)
        await actor.finish("2", 0, 100, 10, 0, ())  # its end comes after it: nothing to give back


async def test_a_new_pool_learns_what_runs() -> None:
    """
    Ingresses say every few seconds what runs; a younger pool books it, an ended turn it does not.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a", "b"))
        await actor.cancel("2", 0, "")
        await actor.renew([(asked("1"), 0, "a"), (asked("2"), 0, "b"), (asked("3"), 0, "x")])
        assert {k: b.node for k, b in actor.engine.ledger.bookings.items()} == {"1": "a"}
        assert not actor.engine.waiting
        placed = await actor.place(asked("4"), 0, frozenset(), 5)
        assert isinstance(placed, Placed)
        assert placed.node == "b"


async def test_an_ingress_that_died_leaks_nothing() -> None:
    """
    A turn of which nobody speaks any more loses its room when its lease ends.
    """
    short = {"ledger": {"lease_s": 0.05}}
    async with pool(tao=short, stats_period_s=0.02) as actor:
        await actor.set_nodes(facts("a"))
        await actor.place(asked("1"), 0, frozenset(), 5)
        assert "1" in actor.engine.ledger.bookings
        await until(lambda: not actor.engine.ledger.bookings)


async def test_events_are_learnt_and_named_after_the_replica_of_their_session() -> None:
    """
    The ingress passes an event on to where its session last ran; an unknown one's to every replica.
    """
    async with pool() as actor:
        await actor.set_nodes(facts("a", "b"))
        placed = await actor.place(asked("1", "s"), 0, frozenset(), 5)
        (home,), other = {placed.node}, ({"a", "b"} - {placed.node}).pop()
        events = [SessionEvent(session="other"), SessionEvent(session="s", final=True)]
        assert await actor.events(events, "") == {home: [0, 1], other: [0]}
        await actor.finish("1", 0, 100, 10, 0, ())
        assert await actor.sessions() == []


async def test_load_and_cache_counters_reach_the_ledger() -> None:
    """
    A waiting engine is pressed; counters turn into the share of tokens found cached since before.
    """
    async with pool() as actor:
        said = NodeFacts(
            name="a", capacity_tokens=100, waiting=2, queried_tokens=100, hit_tokens=50
        )
        await actor.set_nodes((said,))
        assert actor.engine.ledger.nodes["a"].pressed
        assert actor.engine.ledger.nodes["a"].rate.value == 0.5
        await actor.set_nodes((replace(said, waiting=0),))
        assert not actor.engine.ledger.nodes["a"].pressed
        assert (await actor.state())["nodes"]["a"]["capacity_tokens"] == 100
        assert b'scout_gateway_node_capacity_tokens{node="a"} 100.0' in await actor.metrics()


async def test_decisions_are_made_off_the_pools_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    However small a decision is, no caller waits for it (pitfall 6).
    """
    import scout_server.tao.pool as driver

    threads: list[str] = []
    real = driver.make_plan

    def spy(snapshot: object) -> object:
        threads.append(threading.current_thread().name)
        return real(snapshot)  # type: ignore[arg-type]

    monkeypatch.setattr(driver, "make_plan", spy)
    async with pool() as actor:
        await actor.set_nodes(facts("a"))
        await actor.place(asked("1"), 0, frozenset(), 5)
        assert threads
        assert all(name.startswith("scout-plan") for name in threads)


async def _busy(actor: PoolActor) -> None:
    """Thirty turns of ten sessions, with retries, departures and a replica that dies."""
    await actor.set_nodes(facts("a", "b", "c"))

    async def session(i: int) -> None:
        for turn in range(3):
            key = f"{i}/{turn}"
            placed = await actor.place(asked(key, f"s{i}", tokens=300 + 10 * i), 0, frozenset(), 20)
            if not isinstance(placed, Placed):
                continue
            await actor.renew([(asked(key, f"s{i}"), 0, placed.node)])
            if i == 3 and turn == 1:
                await actor.lose_node(placed.node)
                await actor.cancel(key, 0, "")
                await actor.place(asked(key, f"s{i}"), 1, frozenset({placed.node}), 20)
            await asyncio.sleep(0)
            if i == 4:
                await actor.cancel(key, 0, "client-left")
            else:
                await actor.finish(key, 1, 300 + 10 * i, 20, 200 * turn, (("bash", None),))
            await actor.events([SessionEvent(session=f"s{i}")], "")

    await asyncio.gather(*(session(i) for i in range(10)))


def test_the_trace_misses_no_call_of_the_engine() -> None:
    """
    Whatever changes the engine is written down; what only shows it, or is made of the rest, not.
    """
    public = {name for name in vars(TaoEngine) if not name.startswith("_")}
    assert public - {"concerned", "step", "view"} <= {*vars(TracedEngine)}


async def test_the_trace_replays_to_the_same_decisions() -> None:
    """
    Facts that the pool was told, told again to a fresh engine, give every plan bit for bit.
    """
    async with pool() as actor:
        await _busy(actor)
        assert not actor.engine.ledger.bookings
        lost, log = await actor.trace()
        assert lost == 0
        assert sum(e.method == "apply" for e in log) > 5
        assert replay(log, TracedEngine(actor.settings.tao)) == []
        wrong = [e for e in log if e.method != "finish"]
        assert replay(wrong, TracedEngine(actor.settings.tao)) != []


async def test_the_gateways_pool_decides_the_same_on_the_same_trace() -> None:
    """
    The gateway's driver, told the same facts at the same times, places the same turns alike.
    """
    async with pool() as actor:
        await _busy(actor)
        _, log = await actor.trace()
        ours = list(placements(log))
        assert len(ours) == 31
        assert await drive(log, GatewaySettings(tao=actor.settings.tao)) == ours


# ---- engines -------------------------------------------------------------------------------


def chat(text: str, *, stream: bool = False) -> Call:
    flag = "true" if stream else "false"
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}], "stream": {flag}}}'
    return Call(
        method="POST",
        path="/v1/chat/completions",
        headers=((b"content-type", b"application/json"),),
        body=body.encode(),
    )


def embedded(**section: object) -> AsgiEngine:
    engine = engine_of({"ray": {"engine": "embedded"}, "embedded": section})
    assert isinstance(engine, AsgiEngine)
    return engine


async def whole(engine: AsgiEngine | ServerEngine, call: Call) -> tuple[int, bytes]:
    head, *body = [part async for part in engine.serve(call)]
    assert isinstance(head, Head)
    return head.status, b"".join(part for part in body if isinstance(part, bytes))


async def test_an_engine_inside_the_replica_answers_and_streams() -> None:
    """
    The head comes first, then the body as the application sends it.
    """
    engine = embedded()
    await engine.start()
    status, body = await whole(engine, chat("[[reply hello]]"))
    assert (status, b"hello" in body) == (200, True)
    parts = [part async for part in engine.serve(chat("[[tokens 5]]", stream=True))]
    assert isinstance(parts[0], Head)
    assert len(parts) > 3
    assert bytes(parts[-1]).endswith(b"data: [DONE]\n\n")  # type: ignore[arg-type]
    assert (await whole(engine, Call(method="GET", path="/v1/models")))[0] == 200
    await engine.stop()


async def test_closing_an_answer_aborts_the_request_in_the_engine() -> None:
    """
    The application sees its client leave: what the request held is free.
    """
    engine = embedded(reply_tokens=4000)
    await engine.start()
    answer = engine.serve(chat("long", stream=True))
    assert isinstance(await anext(answer), Head)
    await answer.aclose()
    _, state = await whole(engine, Call(method="GET", path="/v1/scout/state"))
    assert b'"running":0' in state
    await engine.stop()


async def test_an_answer_without_an_end_is_an_error() -> None:
    """
    A fault in the middle of an answer is no short answer.
    """

    async def app(scope: dict[str, object], receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        raise RuntimeError

    with pytest.raises(EngineDiedError):
        await whole(AsgiEngine(app), Call(method="GET", path="/"))  # type: ignore[arg-type]


async def test_a_replica_tells_its_size_and_load() -> None:
    """
    Capacity is told once, waiting requests and cache counters again and again.
    """
    replica = LlmReplica(
        {"ray": {"engine": "embedded"}, "embedded": {"kv_blocks": 100, "block_tokens": 16}}
    )
    await replica.start()
    await replica.check_health()
    assert await replica.record_replica_metadata() == {"capacity_tokens": 1600}
    before = await replica.record_routing_stats()
    assert before["waiting"] == 0
    _ = [part async for part in replica.serve(chat("x" * 400), Ticket())]
    after = await replica.record_routing_stats()
    assert after["queried_tokens"] > before["queried_tokens"]


async def test_a_turn_that_is_tried_again_keeps_its_place() -> None:
    """
    Whose replica failed before the first byte does not wait behind those that came later.
    """
    async with pool(slots=1) as actor:
        await actor.set_nodes(facts("a"))
        assert isinstance(await actor.place(asked("1"), 0, frozenset(), 5), Placed)
        later = asyncio.create_task(actor.place(asked("2"), 0, frozenset(), 5))
        await until(lambda: "2" in actor.engine.waiting)
        await actor.failed("1", 0)
        assert await actor.place(asked("1"), 0, frozenset(), 5) is Refusal.GONE
        again = asyncio.create_task(actor.place(asked("1"), 1, frozenset(), 5))
        assert isinstance(await again, Placed)
        assert not later.done()
        await actor.finish("1", 1, 100, 10, 0, ())
        assert isinstance(await later, Placed)
        await actor.failed("2", 0)
        await actor.cancel("2", 1, "client-left")
        assert not actor.engine.ledger.bookings


async def test_what_waits_for_the_end_of_a_step_is_no_queue_of_a_replica() -> None:
    """
    A queue that is gone at the second look is not told: it would close the replica for seconds.
    """
    replica = LlmReplica({"ray": {"engine": "embedded", "stats_period_s": 0.01}})
    waiting: list[int] = []

    async def app(scope: dict[str, object], receive: object, send: Callable[..., object]) -> None:
        body = b"vllm:num_requests_waiting 1.0\n" if waiting and waiting.pop(0) else b""
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        body = body or b"vllm:num_requests_waiting 0.0\n"
        await send({"type": "http.response.body", "body": body})  # type: ignore[misc]

    replica._engine = AsgiEngine(app)  # type: ignore[arg-type]
    for looks, told in (([0], 0), ([1, 0], 0), ([1, 1], 1)):
        waiting[:] = looks
        assert (await replica.record_routing_stats())["waiting"] == told
        assert not waiting


async def test_an_ill_engine_fails_its_health_check() -> None:
    """
    Serve replaces a replica whose engine answers 5xx to /health, as vLLM's does when it is dead.
    """
    replica = LlmReplica({"ray": {"engine": "embedded"}})

    async def ill(scope: dict[str, object], receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[misc]

    await replica.start()
    await replica.check_health()
    replica._engine = AsgiEngine(ill)  # type: ignore[arg-type]
    with pytest.raises(EngineDiedError, match="answers 503"):
        await replica.check_health()
    assert await replica.record_replica_metadata() == {"capacity_tokens": None}


async def test_an_engine_beside_the_replica_dies_with_it() -> None:
    """
    The server runs as a process of its own, and ends when the replica's pipe closes.
    """
    engine = ServerEngine(
        [sys.executable, "-m", "scout_server.cli", "serve", "--embedded", "--port", "{port}"],
        start_timeout_s=60,
    )
    await engine.start()
    status, body = await whole(engine, chat("[[reply hello]]"))
    assert (status, b"hello" in body, engine.alive()) == (200, True, True)
    await engine.stop()
    assert not engine.alive()
    with pytest.raises(EngineDiedError):
        await whole(engine, chat("gone"))


async def test_an_engine_beside_a_killed_replica_ends() -> None:
    """
    Ray kills a worker's children when it ends: the server ends all the same.
    """
    engine = ServerEngine(
        [sys.executable, "-m", "scout_server.cli", "serve", "--embedded", "--port", "{port}"],
        start_timeout_s=60,
    )
    await engine.start()
    process = engine._process
    assert process is not None
    assert process.stdin is not None
    process.kill()
    await process.wait()
    assert not engine.alive()
    assert await engine._well()  # the server has not noticed
    process.stdin.close()
    async with asyncio.timeout(20):
        while await engine._well():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await engine.stop()


async def test_a_server_that_does_not_start_says_so() -> None:
    """
    The replica fails with the command's status instead of waiting for its time-out.
    """
    engine = ServerEngine([sys.executable, "-c", "raise SystemExit(3)"], start_timeout_s=60)
    with pytest.raises(EngineDiedError, match="ended with status 3"):
        await engine.start()


def test_the_settings_of_ray_are_a_section_of_the_one_schema() -> None:
    """
    One file configures everything; leases are short, since ingresses speak of their turns.
    """
    settings = load({"ray": {"slots": 3}}).of(RaySettings)
    assert (settings.slots, settings.tao.ledger.lease_s) == (3, 60.0)
    assert settings.renew_s * 3 < settings.tao.ledger.lease_s

"""Ingress, router, pool and embedded replicas together, with a stand-in for Ray Serve itself."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from scout_sdk import HintOutcome, _wire
from scout_server.config import load
from scout_server.policy.readiness import Source
from scout_server.ray.calls import Call, Head, NodeFacts, Placed, PoolGoneError, Refusal, Ticket
from scout_server.ray.engines import AsgiEngine
from scout_server.ray.ingress import Front, UnreachableError
from scout_server.ray.pool import PoolActor
from scout_server.ray.replica import engine_of
from scout_server.ray.routes import create_app
from scout_server.ray.routing import Routing
from scout_server.ray.settings import RaySettings
from scout_server.tao.asked import Asked
from scout_server.tao.trace import TracedEngine, replay
from scout_server.tenancy import TenancySettings


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Answer:
    """One call as Serve would run it: routed when it is first asked for, then streamed."""

    def __init__(self, serve: "Serve", call: Call, ticket: Ticket) -> None:
        self._serve, self._call, self._ticket = serve, call, ticket
        self._parts: asyncio.Queue[Head | bytes | Exception] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while not self._serve.replicas:  # noqa: ASYNC110  # so does Serve, without end
                await asyncio.sleep(0.01)
            ranks = await self._serve.routing.choose(self._ticket, sorted(self._serve.replicas))
            name = next(n for rank in ranks for n in rank)
            self._serve.routing.routed(self._ticket)
            self._serve.ran.append((self._ticket, name))
            async for part in self._serve.run(name, self._call):
                self._parts.put_nowait(part)
            self._parts.put_nowait(StopAsyncIteration())
        except UnreachableError as error:
            self._parts.put_nowait(error)

    async def __anext__(self) -> Head | bytes:
        part = await self._parts.get()
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        self._task.cancel()


class Serve:
    """What Ray Serve is to this application: it routes, runs, and tells of deaths."""

    def __init__(self, pool: PoolActor, document: dict[str, Any]) -> None:
        self.pool = pool
        self.pool_gone = False
        self.pools = 1
        self.routing = Routing(self, grace_s=1.0)
        self.replicas: dict[str, AsgiEngine] = {}
        self.dead: dict[str, asyncio.Event] = {}
        self.ran: list[tuple[Ticket, str]] = []
        self._document = document
        self._told: set[asyncio.Task[None]] = set()

    # as a cluster

    async def scale(self, *names: str) -> None:
        for name in names:
            engine = engine_of(self._document)
            assert isinstance(engine, AsgiEngine)
            await engine.start()
            self.replicas[name], self.dead[name] = engine, asyncio.Event()
        self.routing.update({n: NodeFacts(name=n, capacity_tokens=20_000) for n in self.replicas})
        await until(lambda: set(self.pool.engine.ledger.nodes) >= set(self.replicas))

    def kill(self, name: str) -> None:
        """Kill a replica; as in Serve, the router learns it with the first failed request."""
        self.dead[name].set()

    async def run(self, name: str, call: Call) -> AsyncGenerator[Head | bytes, None]:
        if self.dead[name].is_set():
            self._mourn(name)
            raise UnreachableError
        answer = self.replicas[name].serve(call)
        death = asyncio.create_task(self.dead[name].wait())
        part: asyncio.Future[Head | bytes] | None = None
        try:
            while True:
                part = asyncio.ensure_future(anext(answer))
                await asyncio.wait({part, death}, return_when=asyncio.FIRST_COMPLETED)
                if death.done():
                    part.cancel()
                    await asyncio.wait({part})
                    self._mourn(name)
                    raise UnreachableError
                try:
                    yield part.result()
                except StopAsyncIteration:
                    return
        finally:
            death.cancel()
            if part is not None and not part.done():
                part.cancel()
                await asyncio.wait({part})
            await answer.aclose()

    def _mourn(self, name: str) -> None:
        if self.replicas.pop(name, None) is not None:
            self.routing.died(name)

    def send(self, call: Call, ticket: Ticket) -> Answer:
        return Answer(self, call, ticket)

    # as the way to the pool

    async def found(self) -> int:
        if self.pool_gone:
            raise PoolGoneError
        return self.pools

    async def ask(self, method: str, *args: object) -> Any:
        if self.pool_gone:
            raise PoolGoneError
        return await getattr(self.pool, method)(*args)

    async def place(
        self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
    ) -> Placed | Refusal:
        answer: Placed | Refusal = await self.ask("place", asked, attempt, avoid, timeout_s)
        return answer

    def tell(self, method: str, *args: object) -> None:
        if not self.pool_gone:
            task = asyncio.create_task(getattr(self.pool, method)(*args))
            self._told.add(task)
            task.add_done_callback(self._told.discard)


@dataclass
class Reply:
    """What a client has got so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    broken: bool = False


@dataclass
class Application:
    """The application, and a client that speaks ASGI to it."""

    serve: Serve
    app: Any

    async def ask(
        self,
        session: str | None,
        text: str = "[[tokens 8]]",
        *,
        stream: bool = False,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        leave: asyncio.Event | None = None,
        prefix: str = "",
    ) -> Reply:
        lines = {"content-type": "application/json", **(headers or {})}
        if session is not None:
            lines["x-session-id"] = session
        document = {"messages": [{"role": "user", "content": text}], "stream": stream}
        content = json.dumps(document).encode() if body is None else body
        asking = iter([{"type": "http.request", "body": content, "more_body": False}])
        reply = Reply()

        async def receive() -> dict[str, Any]:
            if (message := next(asking, None)) is not None:
                return message
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {n.decode(): v.decode() for n, v in message["headers"]}
            else:
                reply.body += message.get("body", b"")
                reply.whole = not message.get("more_body", False)

        scope = {
            "type": "http",
            "method": method,
            "path": prefix + path,
            "raw_path": (prefix + path).encode(),
            "query_string": b"",
            "root_path": prefix,
            "headers": [(n.encode(), v.encode()) for n, v in lines.items()],
        }
        try:
            await self.app(scope, receive, send)
        except UnreachableError:
            reply.broken = True
        return reply

    @property
    def engine(self) -> TracedEngine:
        return self.serve.pool.engine

    async def settle(self) -> None:
        """Wait until the pool has heard of everything."""
        await until(lambda: not self.engine.ledger.bookings and not self.engine.waiting)


@asynccontextmanager
async def application(replicas: int = 3, **ray: object) -> AsyncIterator[Application]:
    document: dict[str, Any] = {
        "ray": {"engine": "embedded", "slots": 2, "trace_events": 100_000, **ray},
        "embedded": {"step_s": 0.001},
    }
    pool = PoolActor(document)
    serve = Serve(pool, document)
    await serve.scale(*[f"r{i}" for i in range(replicas)])
    front = Front(load(document).of(RaySettings), TenancySettings(), serve, serve)
    try:
        yield Application(serve, create_app(front, serve, serve))
    finally:
        await pool.stop()
        for engine in serve.replicas.values():
            await engine.stop()


async def test_sessions_stay_where_their_plan_puts_them() -> None:
    """
    Every turn runs on the replica of its placement; sessions spread, and come back to their origin.
    """
    async with application() as a:
        for _ in range(3):
            replies = await asyncio.gather(
                *(a.ask(f"s{i}", "x" * 4000 + "[[tokens 3]]", stream=i % 2 == 1) for i in range(6))
            )
            assert {r.status for r in replies} == {200}
            assert all(r.whole for r in replies)
            await a.settle()
        planned = {}
        for entry in a.engine.log:
            if entry.method == "apply":
                planned |= {p.key: p.node for p in entry.result.placements}
            elif entry.method == "resume" and entry.result is not None:
                planned[entry.args[0]] = entry.result.node
        ran = {t.asked.key: name for t, name in a.serve.ran if t.asked is not None}
        assert ran == planned
        assert Counter(s.origin for s in a.engine.ledger.sessions.values()) == {
            "r0": 2,
            "r1": 2,
            "r2": 2,
        }
        assert all(s.moves == 0 and s.turns == 3 for s in a.engine.ledger.sessions.values())
        assert replay(a.engine.log, TracedEngine(a.engine.settings)) == []


async def test_the_answer_is_the_replicas_own_with_the_outcome_of_its_admission() -> None:
    """
    Bodies pass unchanged, and the response header says that the turn was admitted.
    """
    async with application(1) as a:
        reply = await a.ask("s", "[[reply hello]]")
        document = json.loads(reply.body)
        assert document["choices"][0]["message"]["content"] == "hello"
        outcomes = _wire.decode_outcome(reply.headers["x-scout-outcome"])
        assert outcomes["admission"] is HintOutcome.ACCEPTED
        stream = await a.ask("s", "[[reply hello]]", stream=True)
        assert stream.body.endswith(b"data: [DONE]\n\n")
        await a.settle()
        (session,) = a.engine.ledger.sessions.values()
        assert (session.turns, session.id) == (2, ("", "s"))
        assert session.footprint > 0


async def test_everything_but_turns_passes_without_being_held() -> None:
    """
    A full pool holds no other request, and a client's error comes back as the replica gave it.
    """
    async with application(1, slots=1) as a:
        long = asyncio.create_task(a.ask("s", "[[tokens 300]]"))
        await until(lambda: a.engine.ledger.bookings)
        models = await a.ask(None, path="/v1/models", method="GET", body=b"")
        assert (models.status, b"scout-embedded" in models.body) == (200, True)
        assert (await a.ask(None, path="/v1/nothing", method="GET", body=b"")).status == 404
        ran = len(a.serve.ran)
        assert (await a.ask(None, path="/sleep", body=b"")).status == 404
        assert len(a.serve.ran) == ran  # an engine's own doors are not opened to clients
        assert (await long).status == 200
        wrong = await a.ask("s", body=b"{")
        assert wrong.status == 400
        await a.settle()


async def test_a_killed_replica_loses_no_session() -> None:
    """
    Unary turns are sent again elsewhere before their first byte; a cut stream is seen to be cut,
    and the session's next try goes on elsewhere. At the end nothing is booked.
    """
    async with application() as a:

        async def session(i: int) -> int:
            cut = 0
            for _ in range(3):
                reply = await a.ask(f"s{i}", "[[tokens 40]]", stream=i % 2 == 1)
                while reply.broken:
                    assert not reply.whole
                    cut += 1
                    reply = await a.ask(f"s{i}", "[[tokens 40]]", stream=True)
                assert (reply.status, reply.whole) == (200, True)
            return cut

        sessions = [asyncio.create_task(session(i)) for i in range(12)]
        await until(lambda: a.engine.ledger.used("r1")[1] == 2)
        a.serve.kill("r1")
        cuts = await asyncio.gather(*sessions)
        assert sum(cuts) <= 2
        await a.settle()
        assert sorted(a.engine.ledger.nodes) == ["r0", "r2"]
        assert all(s.turns == 3 for s in a.engine.ledger.sessions.values())
        assert replay(a.engine.log, TracedEngine(a.engine.settings)) == []


async def test_without_any_replica_the_client_is_told_in_time() -> None:
    """
    Serve would wait for a replica without end: the ingress answers, with a time to come back.
    """
    async with application(1, hold_timeout_s=0.05) as a:
        a.serve.kill("r0")
        reply = await a.ask("s")
        assert (reply.status, reply.headers["retry-after"]) == (429, "5")
        models = await a.ask(None, path="/v1/models", method="GET", body=b"")
        assert (models.status, models.headers["retry-after"]) == (503, "5")
        await a.settle()


async def test_held_clients_that_leave_are_dropped() -> None:
    """
    Their turns leave the pool at once, none ever reaches a replica, and others get the room.
    """
    async with application(1, slots=1) as a:
        running = asyncio.create_task(a.ask("s", "[[tokens 300]]"))
        await until(lambda: a.engine.ledger.bookings)
        leave = asyncio.Event()
        held = [asyncio.create_task(a.ask(f"h{i}", leave=leave)) for i in range(10)]
        stays = asyncio.create_task(a.ask("stays"))
        await until(lambda: len(a.engine.waiting) == 11)
        leave.set()
        await asyncio.gather(*held)
        await until(lambda: len(a.engine.waiting) == 1)
        assert (await running).status == 200
        assert (await stays).status == 200
        await a.settle()
        sessions = [t.asked.session for t, _ in a.serve.ran if t.asked is not None]
        assert sessions == ["s", "stays"]
        assert b'requests_total{outcome="client-left"} 10.0' in await a.serve.pool.metrics()


async def test_a_client_that_leaves_its_stream_frees_engine_and_room() -> None:
    """
    The replica aborts the request and the room is given back.
    """
    async with application(1) as a:
        leave = asyncio.Event()
        streaming = asyncio.create_task(a.ask("s", "[[tokens 3000]]", stream=True, leave=leave))
        await until(lambda: a.serve.ran)
        leave.set()
        await streaming
        await a.settle()

        async def running() -> int:
            call = Call(method="GET", path="/v1/scout/state")
            parts = [p async for p in a.serve.replicas["r0"].serve(call)]
            return int(json.loads(b"".join(p for p in parts if isinstance(p, bytes)))["running"])

        async with asyncio.timeout(10):
            while await running():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_refused_turn_is_answered_429() -> None:
    """
    Queue and hold time are bounded, the client's own time-out counts, and it is told when to retry.
    """
    async with application(1, slots=1, tao={"max_waiting": 1}) as a:
        running = asyncio.create_task(a.ask("s", "[[tokens 400]]"))
        await until(lambda: a.engine.ledger.bookings)
        late = asyncio.create_task(a.ask("t", headers={"x-request-timeout": "0.1"}))
        await until(lambda: a.engine.waiting)
        full = await a.ask("u")
        assert (full.status, full.headers["retry-after"]) == (429, "5")
        assert b"too many requests wait" in full.body
        refused = await late
        assert (refused.status, b"no room in time" in refused.body) == (429, True)
        assert (await running).status == 200
        await a.settle()


async def test_while_the_pool_is_gone_requests_are_served() -> None:
    """
    They go anywhere, and the outcome says that admission was ignored; the new pool learns of all.
    """
    async with application() as a:
        a.serve.pool_gone = True
        reply = await a.ask("s")
        assert reply.status == 200
        outcomes = _wire.decode_outcome(reply.headers["x-scout-outcome"])
        assert outcomes["admission"] is HintOutcome.IGNORED
        health = await a.ask(None, path="/health", method="GET", body=b"")
        assert json.loads(health.body) == {"status": "ok", "pool": "gone"}
        state = await a.ask(None, path="/v1/scout/state", method="GET", body=b"")
        assert state.status == 503
        await a.serve.pool.stop()
        a.serve.pool = PoolActor({"ray": {"slots": 2}})
        a.serve.pool_gone, a.serve.pools = False, 2
        assert (await a.ask("s")).status == 200
        await until(lambda: len(a.engine.ledger.nodes) == 3)
        assert list(a.engine.ledger.sessions) == [("", "s")]


async def test_the_pool_may_die_while_turns_are_held() -> None:
    """
    Who was held goes anywhere at once.
    """

    class Dying(Serve):
        async def place(
            self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
        ) -> Placed | Refusal:
            try:
                return await super().place(asked, attempt, avoid, timeout_s)
            finally:
                if self.pool_gone:
                    raise PoolGoneError

    async with application(1, slots=1) as a:
        dying = Dying(a.serve.pool, {"ray": {"engine": "embedded"}})
        await dying.scale("r0")
        settings = load({"ray": {"slots": 1}}).of(RaySettings)
        b = Application(
            dying, create_app(Front(settings, TenancySettings(), dying, dying), dying, dying)
        )
        running = asyncio.create_task(b.ask("s", "[[tokens 100]]"))
        await until(lambda: a.engine.ledger.bookings)
        held = [asyncio.create_task(b.ask(f"h{i}")) for i in range(5)]
        await until(lambda: len(a.engine.waiting) == 5)
        dying.pool_gone = True
        await a.serve.pool.stop()
        assert {r.status for r in await asyncio.gather(running, *held)} == {200}


async def test_hints_and_identity_of_the_wire_reach_the_ledger() -> None:
    """
    Hints come as headers, the tenant from the credentials; a client's own tenant header is void.
    """
    async with application(1) as a:
        lines = {
            "x-scout-version": "1",
            "x-scout-session": '"t-1"',
            "x-scout-final": "?1",
            "authorization": "Bearer k",
            "x-scout-tenant": "forged",
        }
        assert (await a.ask(None, headers={**lines, "x-scout-final": "?0"})).status == 200
        await a.settle()
        ((tenant, session),) = a.engine.ledger.sessions
        assert (session, len(tenant)) == ("t-1", 16)
        reply = await a.ask(None, headers=lines)
        outcomes = _wire.decode_outcome(reply.headers["x-scout-outcome"])
        assert outcomes["session"] is HintOutcome.ACCEPTED
        await until(lambda: not a.engine.ledger.sessions)


async def test_the_side_channel_ends_sessions_and_reaches_their_replica() -> None:
    """
    Events teach the pool, and go on to the replica where their session ran.
    """
    async with application() as a:
        await a.ask("s")
        await a.settle()
        body = b'{"version": 1, "events": [{"session": "s", "final": true}]}'
        reply = await a.ask(None, path=_wire.EVENTS_PATH, body=body)
        assert (reply.status, json.loads(reply.body)) == (202, {"accepted": 1, "rejected": 0})
        assert not a.engine.ledger.sessions


async def test_the_admin_view_needs_its_key() -> None:
    """
    Names of sessions are shown to nobody else.
    """
    async with application(1, admin_key="secret") as a:
        await a.ask("s")

        async def view(key: str) -> Reply:
            lines = {"authorization": f"Bearer {key}"}
            return await a.ask(
                None, path="/v1/scout/sessions", method="GET", body=b"", headers=lines
            )

        assert (await view("wrong")).status == 401
        shown = json.loads((await view("secret")).body)
        assert [s["session"] for s in shown["sessions"]] == ["s"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_bodies_are_bounded(path: str) -> None:
    """
    A larger one is refused before it is kept.
    """
    async with application(1, max_body_bytes=100) as a:
        assert (await a.ask("s", path=path, body=b"x" * 101)).status == 413


async def test_signs_of_life_name_what_runs_and_where() -> None:
    """
    A pool that lost its memory gets it back from the ingresses.
    """
    async with application(1) as a:
        front = a.app._front
        running = asyncio.create_task(a.ask("s", "[[tokens 300]]"))
        await until(lambda: a.serve.ran)
        (key,) = a.engine.ledger.bookings
        a.engine.ledger.release(key)
        front.renew()
        await until(lambda: key in a.engine.ledger.bookings)
        assert (await running).status == 200
        await a.settle()
        front.renew()  # nothing runs: nothing is said
        await asyncio.sleep(0)
        assert not a.engine.ledger.bookings


async def test_an_ingress_asks_a_replica_when_it_starts() -> None:
    """
    Serve makes a router at the first call, and without one the pool would know no replica.
    """
    async with application(1) as a:
        said: asyncio.Queue[str] = asyncio.Queue()
        done = asyncio.Event()
        asking = iter([{"type": "lifespan.startup"}])

        async def receive() -> dict[str, str]:
            if (message := next(asking, None)) is not None:
                return message
            await done.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: dict[str, str]) -> None:
            said.put_nowait(message["type"])

        life = asyncio.create_task(a.app({"type": "lifespan"}, receive, send))
        assert await said.get() == "lifespan.startup.complete"
        await until(lambda: a.serve.ran)
        assert a.serve.ran == [(Ticket(), "r0")]
        done.set()
        await life


async def test_a_route_prefix_of_serve_changes_nothing() -> None:
    """
    Turns are turns under `/llm/v1` too, and engines see the paths that they know.
    """
    async with application(1) as a:
        assert (await a.ask("s", prefix="/llm")).status == 200
        await a.settle()
        assert list(a.engine.ledger.sessions) == [("", "s")]
        health = await a.ask(None, path="/health", method="GET", body=b"", prefix="/llm")
        assert health.status == 200


SLEEPER = '[[tool bash {"command": "sleep 40"}]]'
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def turn(*texts: str, stream: bool = False) -> bytes:
    """Return the body of a turn that names no session, in which the model may call `bash`."""
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"messages": messages, "tools": TOOLS, "stream": stream}).encode()


async def test_a_growing_history_is_one_session_whatever_ingress_it_comes_to() -> None:
    """
    Who names no session goes on with the one whose history his begins with, on its replica.
    """
    async with application() as a:
        settings = a.serve.pool.settings
        other = create_app(Front(settings, TenancySettings(), a.serve, a.serve), a.serve, a.serve)
        apps = [a.app, other]
        history: list[str] = []
        for number in range(4):
            history.append(f"{number} {SLEEPER}")
            a.app = apps[number % 2]
            assert (await a.ask(None, body=turn(*history))).status == 200
            await a.settle()
            assert len(a.engine.ledger.sessions) == 1
        (session,) = a.engine.ledger.sessions.values()
        assert (session.turns, session.moves) == (4, 0)
        assert len({name for ticket, name in a.serve.ran if ticket.asked is not None}) == 1


async def test_without_a_tool_call_a_session_that_named_itself_not_is_over() -> None:
    """
    A first answer that calls nothing leaves no session; switched off, none is ever found.
    """
    async with application(1) as a:
        assert (await a.ask(None, "[[reply done]]")).status == 200
        await a.settle()
        assert not a.engine.ledger.sessions
    async with application(1, growing_prompts=False) as a:
        for texts in ([SLEEPER], [SLEEPER, SLEEPER]):
            assert (await a.ask(None, body=turn(*texts))).status == 200
        await a.settle()
        assert not a.engine.ledger.sessions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read", [False, True])
async def test_a_sleep_in_a_call_tells_when_its_session_comes_back(
    stream: bool, read: bool
) -> None:
    """
    The arguments of a call are read off the answer, unless `ray.tool_calls` is off.
    """
    async with application(1, tool_calls=read) as a:
        reply = await a.ask(None, body=turn(SLEEPER, stream=stream))
        assert (reply.status, reply.whole) == (200, True)
        await a.settle()
        ((tenant, session),) = a.engine.ledger.sessions
        now = a.serve.pool.pool.clock()
        forecast = a.engine.readiness.forecast(session, tenant=tenant, now=now)
        assert forecast is not None
        assert forecast.source is (Source.SLEEP if read else Source.DEFAULT)
        assert (forecast.remaining_s > 30) == read


async def test_a_retried_turn_keeps_the_session_of_its_history() -> None:
    """
    A turn whose replica died is the same session when it is sent again.
    """
    async with application(2) as a:
        assert (await a.ask(None, body=turn(SLEEPER))).status == 200
        await a.settle()
        (before,) = a.engine.ledger.sessions
        origin = a.engine.ledger.sessions[before].origin
        a.serve.dead[origin].set()
        assert (await a.ask(None, body=turn(SLEEPER, SLEEPER))).status == 200
        await a.settle()
        assert list(a.engine.ledger.sessions) == [before]

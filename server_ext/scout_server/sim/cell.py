"""The event loop: programs, tools, router and replicas on one simulated clock."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from annotated_types import Ge

from scout_sdk._errors import ScoutError
from scout_sdk._hints import HUMAN, SessionEvent, ToolEvent, ToolState
from scout_server.policy import Finish
from scout_server.replica import Replica, Request, RequestTooLargeError
from scout_server.sim.chains import chain_name
from scout_server.sim.clients import Clients, HintSettings
from scout_server.sim.foresight import blocks_again, foresee
from scout_server.sim.gate import Gate
from scout_server.sim.hardware.fitted import FrontLatency
from scout_server.sim.oracle import Future
from scout_server.sim.programs import ProgramRun
from scout_server.sim.prompts import PromptHasher, next_of_session
from scout_server.sim.record import CellStats, Span
from scout_server.sim.routing import Route, Router
from scout_server.sim.sending import Seen, Sent
from scout_server.sim.tiers import Tiers
from scout_server.sim.tools import ToolSource
from scout_server.sim.traces.records import Program
from scout_server.sim.views import TurnView

__all__ = ["ArrivalSettings", "Cell", "StuckError"]


class StuckError(ScoutError, RuntimeError):
    """Programs are left that no event can help: a bug, or a hook that refuses for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSettings:
    """When programs arrive."""

    concurrency: Annotated[int, Ge(0)] = 0
    """Programs under way at once (closed loop); 0: as the trace or workload says."""
    speedup: Annotated[float, Ge(0.001)] = 1.0
    """Arrival times are divided by it; gaps are not."""


# Kinds of events, in the order in which they happen at one instant.
_REPLY, _RELEASE, _ENTER, _ARRIVAL, _ASK, _SAMPLE = range(6)


_ASK_EVERY_S = 1.0
_STUCK_S = 86_400.0
"""So long the gate may hold turns while nothing else happens."""


class Cell:
    """
    Runs programs over replicas until all are done.

    Event key: (time, kind, sequence); at one instant steps end first, then replies reach clients,
    then turns are released and enter replicas, then programs arrive. One instance runs once.
    """

    def __init__(
        self,
        programs: Iterable[Program],
        replicas: Sequence[Replica],
        *,
        hasher: PromptHasher,
        router: Router,
        tools: ToolSource,
        arrivals: ArrivalSettings | None = None,
        hints: HintSettings | None = None,
        tiers: Tiers | None = None,
        future: Future | None = None,
        gate: Gate | None = None,
        front: FrontLatency | None = None,
        start_s: float = 0.0,
        first_number: int = 0,
        timeline: int = 0,
        sample_s: float = 0.0,
        on_finish: Callable[[Sent, Request, float], None] | None = None,
    ) -> None:
        self._programs: Iterator[Program] = iter(programs)
        self._replicas = replicas
        self._views = [Seen(index, replica) for index, replica in enumerate(replicas)]
        self._hasher = hasher
        self._router = router
        self._tools = tools
        self._arrivals = arrivals or ArrivalSettings()
        self._clients = Clients(hints or HintSettings())
        self._tiers = tiers
        self._future = future
        self._gate = gate
        self._front = front or FrontLatency()
        self._held: dict[str, tuple[ProgramRun, int, Sequence[int], TurnView, float]] = {}
        self._asked = math.inf
        """When the gate is asked again."""
        self._on_finish = on_finish
        self._sample_s = sample_s
        self.stats = CellStats(timeline)
        self.now = start_s
        self.live = 0
        """Programs under way."""
        self.most_live = 0
        self.rejected = 0
        """Programs given up because one turn can never fit into a replica."""
        self.start_s = start_s
        """The replicas' time when it begins: they may have run before."""
        self._heap: list[tuple[float, int, int, object]] = []
        self._sequence = 0
        self.number = first_number
        """Number of the next program: those of one replica's life never meet."""
        self._exhausted = False

    def run(self) -> None:
        """Simulate until every program has ended; StuckError if some cannot."""
        replicas, heap = self._replicas, self._heap
        first = max(self._arrivals.concurrency, 1)
        for _ in range(first):
            self._next_arrival()
        if self._sample_s:
            self._push(self.now, _SAMPLE, None)
        single = replicas[0] if len(replicas) == 1 else None
        worked = self.now
        while True:
            due = heap[0][0] if heap else math.inf
            if single is not None:
                chosen, at = single, single.next_event_time()
            else:
                chosen, at = replicas[0], replicas[0].next_event_time()
                for replica in replicas[1:]:
                    other = replica.next_event_time()
                    if other < at:
                        chosen, at = replica, other
            if at <= due and at < math.inf:
                worked = at
                result = chosen.step(at)
                self.stats.events += 1
                if result.finished:
                    self.now = result.time
                    for request in list(result.finished):
                        self._finished(request, result.time)
                continue
            if not heap:
                break
            if not self.live and self._only_samples():
                break
            time, kind, _, what = heapq.heappop(heap)
            self.now = time
            self.stats.events += 1
            if kind not in (_ASK, _SAMPLE):
                worked = time
            if kind == _RELEASE:
                run, index = cast(tuple[ProgramRun, int], what)
                run.end_gap()
                if not run.stopped:
                    self._release(run, index, time)
            elif kind == _REPLY:
                sent, request = cast(tuple[Sent, Request], what)
                self._replied(sent, request, time)
            elif kind == _ENTER:
                sent, request = cast(tuple[Sent, Request], what)
                self._enter(request, sent, time)
            elif kind == _ARRIVAL:
                self._arrive(cast(Program, what), time)
            elif kind == _ASK:
                self._asked = math.inf
                self._let_in(time)
                if time - worked > _STUCK_S and all(replica.idle for replica in replicas):
                    break
            else:
                self._sample(time)
        if self.live:
            waiting = sum(replica.unfinished for replica in replicas)
            msg = f"{self.live} programs are stuck at {self.now:.3f} s; {waiting} requests wait"
            raise StuckError(msg)

    def _only_samples(self) -> bool:
        return self._exhausted and all(entry[1] == _SAMPLE for entry in self._heap)

    def _push(self, time: float, kind: int, what: object) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time, kind, self._sequence, what))

    def _next_arrival(self) -> None:
        program = next(self._programs, None)
        if program is None:
            self._exhausted = True
            return
        closed = self._arrivals.concurrency > 0
        at = self.now if closed else max(program.arrival_s / self._arrivals.speedup, self.now)
        self._push(at, _ARRIVAL, program)

    def _arrive(self, program: Program, now: float) -> None:
        run = ProgramRun(program, self.number, now)
        self.number += 1
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        if not self._arrivals.concurrency:
            self._next_arrival()
        for index in list(run.roots()):
            self._begin_gap(run, index, now)

    def _begin_gap(self, run: ProgramRun, index: int, now: float) -> None:
        gap = self._tools.gap_s(run.program, index)
        run.begin_gap()
        turn = run.program.turns[index]
        self.stats.tool_s += gap
        if gap > 0.0 and run.number < self.stats.timeline:
            self.stats.spans.append(Span(run.program.program, turn.session, "tool", now, now + gap))
        if (
            self._clients.settings.tools
            and turn.tool is not None
            and self._clients.says(run)
            and gap > 0.0
        ):
            self._tell(run, index, ToolState.STARTED, turn.tool_expected_s, now)
        if self._future is not None:
            turn_s = self.stats.turn.mean
            foresee(self._future, run, index, now + gap, turn_s=turn_s, tools=self._tools)
        self._push(now + gap, _RELEASE, (run, index))

    def _tell(
        self, run: ProgramRun, index: int, state: ToolState, left: float | None, now: float
    ) -> None:
        turn = run.program.turns[index]
        session = run.session(turn.parents[0] if turn.parents else index)
        home = run.home.get(session)
        if home is None:
            return
        event = SessionEvent(
            session=session,
            # Who called it: whose turn comes next is not known yet.
            agent=run.program.turns[turn.parents[0]].agent if turn.parents else turn.agent,
            tool=ToolEvent(name=turn.tool or HUMAN, state=state, remaining_s=left),
        )
        self._replicas[home].event(event, now, tenant=run.program.tenant)
        if self._gate is not None:
            self._gate.event(event, run.program.tenant, now)

    def _release(self, run: ProgramRun, index: int, now: float) -> None:
        program = run.program
        turn = program.turns[index]
        session = run.session(index)
        hashes = self._hasher.hashes(run.number, turn, next_of_session(program, index), index)
        bt = self._replicas[0].settings.block_tokens
        view = TurnView(
            program=program.program,
            session=session,
            agent=turn.agent,
            turn=run.count_turn(index),
            prompt_tokens=turn.input_tokens,
            prompt_hashes=hashes[: turn.input_tokens // bt],
            program_arrival=run.arrived_at,
            attained_tokens=run.attained_tokens,
            tool=turn.tool,
            tenant=program.tenant,
        )
        if self._gate is not None:
            key = f"{program.program}.{index}"
            run.paused += 1
            self._held[key] = (run, index, hashes, view, now)
            self._gate.submit(key, view, self._clients.hints(run, index, view), now)
            self._let_in(now)
            return
        home = run.home.get(session)
        self._place(run, index, hashes, view, self._router.route(view, home, self._views), now, now)

    def _let_in(self, now: float) -> None:
        """Ask the gate who may run; ask again in a second while turns are held."""
        assert self._gate is not None
        for placed in self._gate.decide(now):
            run, index, hashes, view, released = self._held.pop(placed.key)
            run.paused -= 1
            self._place(run, index, hashes, view, Route(replica=placed.replica), released, now)
        if self._held and self._asked > now + _ASK_EVERY_S:
            self._asked = now + _ASK_EVERY_S
            self._push(self._asked, _ASK, None)

    def _place(
        self,
        run: ProgramRun,
        index: int,
        hashes: Sequence[int],
        view: TurnView,
        route: Route,
        released: float,
        now: float,
    ) -> None:
        """Send a turn to its replica."""
        program = run.program
        session = view.session
        home = run.home.get(session)
        bt = self._replicas[0].settings.block_tokens
        if home is not None and home != route.replica:
            self.stats.moves += 1
        run.home[session] = route.replica
        if self._future is not None:
            again = blocks_again(self._hasher, run, index, hashes, bt)
            self._future.tell_again(f"{program.program}.{index}", again)
        sent = Sent(run, index, route.replica, view, released)
        request = self._request(run, index, hashes, sent)
        if self._tiers is not None:
            if route.migrate_from is not None:
                moving = self._tiers.migrate(route.migrate_from, route.replica, hashes, now)
                self.stats.migrated_tokens += len(moving.hashes) * bt if moving else 0
            else:
                moving = self._tiers.fetch(route.replica, view.prompt_hashes, now)
            if moving is not None:
                self._tiers.expect(request.request_id, moving)
        sent.run.send(sent.index, request)
        busy = not self._replicas[sent.replica].idle
        delay = self._front.request_s(request.prompt_tokens, busy=busy)
        if delay > 0.0:
            self._push(now + delay, _ENTER, (sent, request))
        else:
            self._enter(request, sent, now)

    def _request(self, run: ProgramRun, index: int, hashes: Sequence[int], sent: Sent) -> Request:
        program = run.program
        turn = program.turns[index]
        tools: tuple[tuple[str, float | None], ...] = ()
        for child in run.children(index):
            name = program.turns[child].tool
            if name is not None and name != HUMAN:
                tools += ((name, program.turns[child].tool_expected_s),)
        calls = turn.calls_tool if turn.calls_tool is not None else bool(tools)
        hints = self._clients.hints(run, index, sent.view)
        return Request(
            f"{program.program}.{index}",
            prompt_tokens=turn.input_tokens,
            output_tokens=max(turn.output_tokens, 1),
            hashes=hashes,
            hints=hints,
            tenant=program.tenant,
            finish=Finish.TOOL_CALLS if calls else Finish.STOP,
            tools=tools,
            program=program.program,
            agent=turn.agent,
            payload=sent,
        )

    def _enter(self, request: Request, sent: Sent, now: float) -> None:
        """Let a turn arrive at its replica's engine."""
        try:
            self._replicas[sent.replica].submit(request, now)
        except RequestTooLargeError:
            del sent.run.active[sent.index]
            if self._tiers is not None:
                self._tiers.forget(request.request_id)
            self._give_up(sent.run, request.request_id, now)
            return
        sent.outstanding = request.prompt_tokens
        self._views[sent.replica].outstanding_tokens += sent.outstanding

    def _give_up(self, run: ProgramRun, key: str, now: float) -> None:
        """End a program whose turn *key* can never fit: the context is too long for the pool."""
        if self._gate is not None:
            held = [k for k, (who, *_) in self._held.items() if who is run]
            for name in held:
                del self._held[name]
                run.paused -= 1
            self._gate.cancel([key, *held], now)
        if not run.stopped:
            run.stopped = True
            self.rejected += 1
            self.live -= 1
            if self._arrivals.concurrency:
                self._next_arrival()

    def _finished(self, request: Request, now: float) -> None:
        """Take in that a replica is done with a turn."""
        sent = request.payload
        assert isinstance(sent, Sent)
        self._views[sent.replica].outstanding_tokens -= sent.outstanding
        if self._gate is not None:
            self._gate.finish(request, now)
            if self._held:
                self._let_in(now)
        if self._on_finish is not None:
            self._on_finish(sent, request, now)
        if self._front.reply_s > 0.0:
            self._push(now + self._front.reply_s, _REPLY, (sent, request))
        else:
            self._replied(sent, request, now)

    def _replied(self, sent: Sent, request: Request, now: float) -> None:
        """Let the client have the reply: what waits for it begins."""
        run = sent.run
        self._count(request, sent, now)
        due = run.finish(sent.index, now)
        if self._future is not None and not due:
            self._future.tell(
                chain_name(sent.view.session, sent.view.agent), sent.view.agent, math.inf
            )
        if run.stopped:
            return
        for index in due:
            self._begin_gap(run, index, now)
        if not run.left:
            self._end(run, now)

    def _count(self, request: Request, sent: Sent, now: float) -> None:
        stats = self.stats
        released = sent.released_at
        scheduled, first = request.first_scheduled_at, request.first_token_at
        assert scheduled is not None
        assert first is not None
        first += self._front.reply_s
        stats.turns += 1
        stats.ttft.add(first - released)
        stats.turn.add(now - released)
        stats.queue.add(scheduled - released)
        if request.output_tokens > 1:
            stats.tpot.add((now - first) / (request.output_tokens - 1))
        if sent.run.number < stats.timeline:
            name, lane = sent.view.program, sent.run.program.turns[sent.index].session
            if request.arrival > released:
                stats.spans.append(Span(name, lane, "paused", released, request.arrival))
            stats.spans.append(Span(name, lane, "queued", request.arrival, scheduled))
            stats.spans.append(Span(name, lane, "prefill", scheduled, first))
            stats.spans.append(Span(name, lane, "decode", first, now))

    def _end(self, run: ProgramRun, now: float) -> None:
        self.live -= 1
        stats = self.stats
        stats.programs += 1
        if run.program.aborted:
            stats.aborted += 1
        else:
            stats.jct.add(now - run.arrived_at)
        if self._clients.settings.final and self._clients.says(run) and not run.program.aborted:
            for session, home in run.home.items():
                event = SessionEvent(session=session, final=True)
                self._replicas[home].event(event, now, tenant=run.program.tenant)
                if self._gate is not None:
                    self._gate.event(event, run.program.tenant, now)
        if self._arrivals.concurrency:
            self._next_arrival()

    def _sample(self, now: float) -> None:
        used = sum(replica.pool.usage for replica in self._replicas) / len(self._replicas)
        tier = self._tiers.filled() if self._tiers is not None else 0.0
        self.stats.sample(now, used, tier)
        self._push(now + self._sample_s, _SAMPLE, None)

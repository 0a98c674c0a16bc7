"""
The programs of `scout bench engine` on vLLM's scheduler and block pool, in virtual time.

What is scheduled, cached, evicted and warmed up is vLLM's and Scout's real code; there is no model,
and a step takes what the cost says. So hit rates are those of an engine of that speed, and times
are only as good as the cost.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scout_sdk import Evidence, Hints, ScoutError, SessionEvent, ToolEvent, ToolState, _wire
from scout_server.bench.enginerun import WARM_UPS, Run
from scout_server.bench.programs import Turn
from scout_server.bench.ttl import keep_by_time
from scout_server.demo.measure import Counters

__all__ = ["Cost", "Rehearsal"]

_SETTINGS: Mapping[str, dict[str, object] | None] = {
    "stock": None,
    "ttl": {},
    "scout": {},
    "prefetch": {"prefetch": {"enabled": True, "chunk_tokens": 192}},
}
"""What Scout is set to in each arm; None: it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an engine step takes, in seconds: about what SmolLM2 needs on two CPUs."""

    step_s: float = 0.05
    token_s: float = 0.0011


@dataclass(slots=True)
class _Asked:
    session: str
    turns: Sequence[Turn]
    number: int
    sent: float
    first: float | None = None


class Rehearsal:
    """One arm's engine, and clients that ask it as those of the real benchmark do."""

    def __init__(
        self, arm: str, model: Path, *, blocks: int, block_tokens: int, cost: Cost | None = None
    ) -> None:
        from scout_server.vllm import _compat

        self._compat = _compat
        self._cost = cost or Cost()
        self._now = 0.0
        self._block_tokens = block_tokens
        self._scheduler = _compat.bare_scheduler(
            model,
            blocks=blocks,
            block_tokens=block_tokens,
            max_model_len=min(2560, block_tokens * (blocks - 2)),
            additional=_SETTINGS[arm],
        )
        self._bridge: Any = getattr(self._scheduler, "scout", None)
        if (self._bridge is None) != (arm == "stock"):
            problems = "; ".join(self._scheduler.scout_problems)
            raise ScoutError(f"the arm {arm!r} cannot be rehearsed: {problems}")
        if self._bridge is not None:
            self._bridge.clock = lambda: self._now
        if arm == "ttl":
            keep_by_time(self._scheduler.scout.core)
        self._warms = arm == "prefetch"
        self._due: list[tuple[float, int, str, Sequence[Turn], int]] = []
        self._serial = itertools.count()
        self._running: dict[str, _Asked] = {}
        self._waiting: list[tuple[str, Sequence[Turn]]] = []
        self._poke_at = 0.0

    def run(self, sessions: Sequence[Sequence[Turn]], *, concurrency: int, name: str) -> Run:
        """Run *sessions*, *concurrency* at a time, to their end; times are virtual."""
        run = Run(counters=Counters(0.0, 0.0))
        started, warmed = self._now, self._warm_ups()
        self._waiting = [(f"{name}-{at}", turns) for at, turns in enumerate(sessions)][::-1]
        for _ in range(concurrency):
            self._begin()
        while self._due or self._running:
            while self._due and self._due[0][0] <= self._now:
                _, _, session, turns, number = heapq.heappop(self._due)
                self._ask(session, turns, number, run)
            if self._scheduler.has_requests():
                self._step(run)
            else:
                self._rest()
        run.wall_s = self._now - started
        run.warm_ups = {key: n - warmed.get(key, 0) for key, n in self._warm_ups().items()}
        if self._bridge is not None and self._bridge.breaker.open:
            raise ScoutError(f"our code failed: {self._bridge.breaker.reason}")
        return run

    def _begin(self) -> None:
        if self._waiting:
            session, turns = self._waiting.pop()
            heapq.heappush(self._due, (self._now, next(self._serial), session, turns, 0))

    def _ask(self, session: str, turns: Sequence[Turn], number: int, run: Run) -> None:
        turn = turns[number]
        nth = sum(each.agent == turn.agent for each in turns[: number + 1])
        hints = Hints(session=session, agent=turn.agent, turn=nth, final=turn.final)
        request_id = f"{session}/{number}"
        request = self._compat.bare_request(
            request_id,
            list(turn.prompt),
            self._block_tokens,
            dict(_wire.to_xargs(hints)),
            max_tokens=turn.output,
        )
        self._scheduler.add_request(request)
        self._running[request_id] = _Asked(session, turns, number, self._now)
        run.counters += Counters(float(len(turn.prompt)), 0.0)

    def _step(self, run: Run) -> None:
        plan = self._scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        requests = self._scheduler.requests
        tokens = [[] if requests[each].is_prefill_chunk else [1] for each in ids]
        if ids:
            computed = sum(plan.num_scheduled_tokens.values())
            self._now += self._cost.step_s + self._cost.token_s * computed
        self._scheduler.update_from_output(plan, self._compat.model_output(ids, tokens))
        for new in plan.scheduled_new_reqs:
            if new.req_id in self._running:
                run.counters += Counters(0.0, float(new.num_computed_tokens))
        for request_id, asked in list(self._running.items()):
            there = self._scheduler.requests.get(request_id)
            if asked.first is None and (there is None or there.num_output_tokens):
                asked.first = self._now
                run.ttft_s.append(self._now - asked.sent)
            if there is None:
                del self._running[request_id]
                run.turn_s.append(self._now - asked.sent)
                self._answered(asked, run)

    def _answered(self, asked: _Asked, run: Run) -> None:
        turn = asked.turns[asked.number]
        if turn.final:
            self._begin()
            return
        if turn.expected_s is not None and self._bridge is not None:
            tool = ToolEvent(
                name=turn.tool,
                state=ToolState.STARTED,
                remaining_s=turn.expected_s,
                evidence=Evidence.DECLARED,
            )
            event = SessionEvent(session=asked.session, agent=turn.agent, tool=tool)
            self._bridge.event(event)
        run.gaps_s += turn.gap_s
        back = (self._now + turn.gap_s, next(self._serial))
        heapq.heappush(self._due, (*back, asked.session, asked.turns, asked.number + 1))

    def _rest(self) -> None:
        """Let time pass until a client comes, or until the engine wants to be asked."""
        if not self._due:
            return
        if not self._warms:
            self._now = self._due[0][0]
            return
        self._now = min(self._due[0][0], max(self._now, self._poke_at))
        if self._now >= self._poke_at:
            self._poke_at = self._now + self._bridge.prefetch.poke()

    def _warm_ups(self) -> dict[str, int]:
        if self._bridge is None or self._bridge.prefetch is None:
            return {}
        state = self._bridge.prefetch.state()
        return {key: int(state[key]) for key in WARM_UPS}

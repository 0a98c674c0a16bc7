"""What retention gains on vLLM's real scheduler and pool, in virtual time and without a model."""

import heapq
import random
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

AGENTS, SESSIONS, LIVE = 12, 40, 8
STEP_S, TOKEN_S = 0.04, 0.001
"""How long an engine step takes: about what SmolLM2 needs on two cores."""


class Program:
    """One session that walks over the agents, each with a fixed prompt and a growing history."""

    def __init__(self, serial: int) -> None:
        shared = random.Random(5)
        self.anchors = [
            [shared.randrange(5, 1000) for _ in range(shared.randint(400, 700))]
            for _ in range(AGENTS)
        ]
        self.follow = [
            shared.sample([j for j in range(AGENTS) if j != i], 3) for i in range(AGENTS)
        ]
        self.rng = random.Random(1000 + serial)
        self.serial = serial
        self.agent = self.rng.randrange(2)
        self.turns = self.rng.randint(4, 8)
        self.turn = 0
        self.history: dict[int, list[int]] = {i: [] for i in range(AGENTS)}

    def prompt(self) -> tuple[str, list[int], dict[str, object]]:
        from scout_sdk import Hints, _wire

        self.turn += 1
        self.history[self.agent] += [self.rng.randrange(5, 1000) for _ in range(50)]
        hints = Hints(
            session=f"s{self.serial}",
            agent=f"a{self.agent}",
            turn=self.turn,
            final=self.turn == self.turns,
        )
        tokens = self.anchors[self.agent] + self.history[self.agent]
        return f"{self.serial}/{self.turn}", tokens, dict(_wire.to_xargs(hints))

    def gap(self) -> float | None:
        """Return the seconds until the next turn, or None after the last."""
        if self.turn == self.turns:
            return None
        self.agent = self.rng.choices(self.follow[self.agent], [0.8, 0.14, 0.06])[0]
        return self.rng.lognormvariate(0.0, 0.8)


def hit_rate(lab: Any, runner: Any, scheduler: Any) -> float:
    """Run all programs to their end; return cached prompt tokens per prompt token."""
    now = 0.0
    bridge = getattr(scheduler, "scout", None)
    if bridge is not None:
        bridge.clock = lambda: now
    driver = runner(scheduler)
    waiting = [(0.0, serial) for serial in range(LIVE)]
    programs = {serial: Program(serial) for serial in range(LIVE)}
    running: dict[str, int] = {}
    cached = asked = 0
    while waiting or scheduler.requests:
        while waiting and (waiting[0][0] <= now or not scheduler.requests):
            when, serial = heapq.heappop(waiting)
            now = max(now, when)
            name, tokens, xargs = programs[serial].prompt()
            scheduler.add_request(lab.request(scheduler, name, tokens, max_tokens=1, xargs=xargs))
            running[name] = serial
            asked += len(tokens)
        plan = driver.step()
        now += STEP_S + TOKEN_S * sum(plan["tokens"].values())
        cached += sum(computed for _, computed, _ in plan["new"])
        for name in [name for name in running if name not in scheduler.requests]:
            serial = running.pop(name)
            gap = programs[serial].gap()
            if gap is not None:
                heapq.heappush(waiting, (now + gap, serial))
            elif len(programs) < SESSIONS:
                programs[len(programs)] = Program(len(programs))
                heapq.heappush(waiting, (now, len(programs) - 1))
    return cached / asked


def test_hints_raise_the_hit_rate_and_without_identity_it_is_lru(lab: Any, runner: Any) -> None:
    """
    Where the pool holds two thirds of the anchors, hints gain at least 8 points of hit rate over
    stock vLLM; with identity off, Scout's hit rate is exactly stock vLLM's.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from scout_server.vllm import ScoutScheduler

    options = {"blocks": 280, "block_size": 16}
    off = {"policy": {"hints": False, "fingerprints": False}}
    stock = hit_rate(lab, runner, lab.scheduler(Scheduler, **options))
    lru = hit_rate(lab, runner, lab.scheduler(ScoutScheduler, additional=off, **options))
    scout = lab.scheduler(ScoutScheduler, additional={}, **options)
    gained = hit_rate(lab, runner, scout)

    assert lru == stock
    assert 0.4 < stock < 0.85
    assert gained >= stock + 0.08
    assert scout.scout.breaker.open is False
    assert scout.scout.mode == "scout"

"""The programs of `scout bench engine` on vLLM's real scheduler and pool, in virtual time."""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from scout_sdk import Evidence, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_server.bench.enginefigures import BENCHMARKS
from scout_server.bench.programs import SHAPES, Shape, Turn, make_sessions

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

STEP_S, TOKEN_S = 0.05, 0.0015
"""How long an engine step takes: about what SmolLM2 needs on two cores."""


@pytest.fixture(scope="module")
def wide(lab: Any) -> Any:
    """An engine that takes as much at once as the servers of the benchmark."""
    from vllm.engine.arg_utils import EngineArgs

    return type(lab)(
        EngineArgs(
            model=lab.config.model_config.model,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=2560,
            block_size=32,
            max_num_seqs=8,
            max_num_batched_tokens=2560,
            enforce_eager=True,
        ).create_engine_config()
    )


@dataclass
class Asked:
    """One request on its way."""

    session: str
    turns: list[Turn]
    turn: int
    sent: float
    first: float | None = None


@dataclass
class World:
    """The clients of one shape, and the engine that they ask."""

    lab: Any
    driver: Any
    shape: Shape
    now: float = 0.0
    cached: int = 0
    asked: int = 0
    ttft: list[float] = field(default_factory=list)

    def run(self, series: int, sessions: int) -> None:
        """Run one repetition to its end."""
        name = f"{self.shape.name}-{series}"
        queue = list(enumerate(make_sessions(self.shape, sessions, seed=0, series=series)))[::-1]
        serial = itertools.count()
        due: list[tuple[float, int, str, list[Turn], int]] = []
        running: dict[str, Asked] = {}

        def begin() -> None:
            if queue:
                number, turns = queue.pop()
                heapq.heappush(due, (self.now, next(serial), f"{name}-{number}", turns, 0))

        for _ in range(self.shape.concurrency):
            begin()
        scheduler = self.driver.scheduler
        while due or running:
            while due and (due[0][0] <= self.now or not scheduler.requests):
                at, _, session, turns, turn = heapq.heappop(due)
                self.now = max(self.now, at)
                running[f"{session}/{turn}"] = self._ask(session, turns, turn)
            plan = self.driver.step()
            self.now += STEP_S + TOKEN_S * sum(plan["tokens"].values())
            self.cached += sum(tokens for _, tokens, _ in plan["new"])
            for request_id, each in list(running.items()):
                there = scheduler.requests.get(request_id)
                if each.first is None and (there is None or there.num_output_tokens):
                    each.first = self.now
                    self.ttft.append(self.now - each.sent)
                if there is None:
                    del running[request_id]
                    turn = each.turns[each.turn]
                    if turn.final:
                        begin()
                        continue
                    self._tell(each.session, turn)
                    back = (self.now + turn.gap_s, next(serial))
                    heapq.heappush(due, (*back, each.session, each.turns, each.turn + 1))

    def _ask(self, session: str, turns: list[Turn], number: int) -> Asked:
        turn = turns[number]
        nth = sum(each.agent == turn.agent for each in turns[: number + 1])
        hints = Hints(session=session, agent=turn.agent, turn=nth, final=turn.final)
        request = self.lab.request(
            self.driver.scheduler,
            f"{session}/{number}",
            list(turn.prompt),
            max_tokens=turn.output,
            xargs=dict(_wire.to_xargs(hints)),
        )
        self.driver.scheduler.add_request(request)
        self.asked += len(turn.prompt)
        return Asked(session, turns, number, self.now)

    def _tell(self, session: str, turn: Turn) -> None:
        bridge = getattr(self.driver.scheduler, "scout", None)
        if bridge is not None and turn.expected_s is not None:
            tool = ToolEvent(
                name=turn.tool,
                state=ToolState.STARTED,
                remaining_s=turn.expected_s,
                evidence=Evidence.DECLARED,
            )
            bridge.event(SessionEvent(session=session, agent=turn.agent, tool=tool))


def measured(wide: Any, runner: Any, cls: Any, shape: Shape) -> tuple[float, float]:
    """Return hit rate and mean TTFT over two repetitions, after one to learn from."""
    scheduler = wide.scheduler(cls, blocks=shape.blocks, block_size=32)
    world = World(wide, runner(scheduler), shape)
    if getattr(scheduler, "scout", None) is not None:
        scheduler.scout.clock = lambda: world.now
    world.run(0, max(1, shape.sessions // 2))
    world.cached = world.asked = 0
    world.ttft.clear()
    for series in (1, 2):
        world.run(series, shape.sessions)
    return world.cached / world.asked, sum(world.ttft) / len(world.ttft)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_s_shape_gains(wide: Any, runner: Any, name: str) -> None:
    """
    Where stock vLLM hits less than 0.85, Scout hits at least 8 points more, and the mean time to
    the first token is at least a sixth shorter.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from scout_server.vllm import ScoutScheduler

    stock, stock_ttft = measured(wide, runner, Scheduler, SHAPES[name])
    scout, scout_ttft = measured(wide, runner, ScoutScheduler, SHAPES[name])

    assert 0.4 < stock < 0.85
    assert scout >= stock + 0.08
    assert scout_ttft <= stock_ttft * 5 / 6

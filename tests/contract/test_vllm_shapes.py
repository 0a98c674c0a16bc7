"""The programs of `scout bench engine` on vLLM's real scheduler and pool, in virtual time."""

from pathlib import Path
from typing import Any

import pytest

from scout_server.bench.enginefigures import BENCHMARKS
from scout_server.bench.enginerun import Run
from scout_server.bench.programs import SHAPES, make_sessions
from scout_server.bench.rehearsal import Rehearsal

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def measured(lab: Any, arm: str, name: str, *, repetitions: int = 2) -> list[Run]:
    """Return the repetitions of a shape on one arm, after one to learn from."""
    shape = SHAPES[name]
    folder = Path(lab.config.model_config.model)
    engine = Rehearsal(arm, folder, blocks=shape.blocks, block_tokens=32)
    return [
        engine.run(
            make_sessions(shape, shape.sessions, seed=0, series=series),
            concurrency=shape.concurrency,
            name=f"{name}-{series}",
        )
        for series in range(repetitions + 1)
    ][1:]


def hit_rate(runs: list[Run]) -> float:
    return sum(run.counters.hit for run in runs) / sum(run.counters.queried for run in runs)


def ttft(runs: list[Run]) -> float:
    return sum(run.ttft for run in runs) / len(runs)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_s_shape_gains(lab: Any, name: str) -> None:
    """
    Where stock vLLM hits less than 0.85, Scout hits at least 10 points more, and the mean time to
    the first token is at least 18 % shorter.
    """
    stock, scout = (measured(lab, arm, name) for arm in ("stock", "scout"))

    assert 0.4 < hit_rate(stock) < 0.85
    assert hit_rate(scout) >= hit_rate(stock) + 0.10
    assert ttft(scout) <= 0.82 * ttft(stock)


def test_prefetch_turns_idle_time_into_a_shorter_wait(lab: Any) -> None:
    """
    Where agents follow each other with tools in between, most warm-ups are used, none shares a step
    with a user's request, and the mean time to the first token is at least a quarter shorter.
    """
    scout, prefetch = (measured(lab, arm, "idle-gaps") for arm in ("scout", "prefetch"))
    warm = {key: sum(run.warm_ups[key] for run in prefetch) for key in prefetch[0].warm_ups}

    assert ttft(prefetch) <= 0.75 * ttft(scout)
    assert warm["used"] >= 0.6 * warm["started"] > 0
    assert warm["contended"] == 0


def test_nothing_is_warmed_up_at_random(lab: Any) -> None:
    """
    Where any agent may follow any other, prefetching does nothing at all, and costs nothing.
    """
    scout, prefetch = (measured(lab, arm, "random") for arm in ("scout", "prefetch"))

    assert [run.warm_ups["started"] for run in prefetch] == [0, 0]
    assert [run.ttft_s for run in prefetch] == [run.ttft_s for run in scout]


def test_a_rehearsal_is_the_same_every_time(lab: Any) -> None:
    """
    Two rehearsals of one arm are equal, request by request.
    """
    assert measured(lab, "ttl", "gsm8k", repetitions=1) == measured(
        lab, "ttl", "gsm8k", repetitions=1
    )

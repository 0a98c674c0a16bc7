"""Decisions logged inside vLLM come out again in the simulator's core."""

import random
from typing import Any

import pytest

from scout_server.sim.decisions import load_log, record, replay

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_victims_logged_in_vllm_are_the_replay_s_victims(lab: Any, runner: Any, tmp_path) -> None:
    """Block sizes, hashes and times of a run under pressure replay with 100 % equal victims."""
    from scout_server.vllm import ScoutScheduler

    scheduler = lab.scheduler(ScoutScheduler, blocks=60)
    log = record(scheduler.scout.core)
    steps = runner(scheduler)
    rng = random.Random(7)
    anchors = [[rng.randrange(5, 1000) for _ in range(rng.randint(40, 120))] for _ in range(5)]
    histories: dict[int, list[int]] = {}
    for serial in range(160):
        session = rng.randrange(12)
        agent = rng.randrange(5)
        history = histories.setdefault(session, [])
        history.extend(rng.randrange(5, 1000) for _ in range(rng.randint(5, 30)))
        del history[400:]
        tokens = anchors[agent] + history
        scheduler.add_request(
            lab.request(scheduler, f"r{serial}", tokens, max_tokens=rng.randint(1, 12))
        )
        for _ in range(rng.randint(1, 4)):
            steps.step()
    steps.drain()
    path = tmp_path / "log.jsonl"
    log.write(path)

    found = replay(load_log(path))

    assert found.victims > 500
    assert found.share == 1.0, found.first_difference

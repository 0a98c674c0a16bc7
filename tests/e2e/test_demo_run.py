from dataclasses import replace

import pytest

from scout_server.demo.comparison import PLANS, compare
from scout_server.demo.workload import Mix
from scout_server.report import progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_small_demo():
    """
    The demo runs all three examples on both servers, its figures are those of the measured rounds,
    and with identity off the server counts exactly as LRU does.
    """
    mix = Mix(travel=2, coding=1, desk=3, concurrency=3)
    plan = replace(PLANS["embedded"], kv_blocks=300, mix=mix, repetitions=1)
    with progress() as bar:
        results, targets = await compare(plan, seed=3, bar=bar)

    rows = results["side by side"]
    assert isinstance(rows, dict)
    sessions = mix.travel + mix.coding + mix.desk
    requests = 9 * mix.travel + 8 * mix.coding + 3 * mix.desk
    for name in ("LRU", "Scout"):
        assert (sessions, requests) == (rows[name]["sessions"], rows[name]["requests"])
        assert 0.0 < rows[name]["hit rate"] < 1.0
        assert rows[name]["TTFT p50 (s)"] > 0.0
    off = next(target for target in targets if "identity off" in target.name)
    assert 0.0 == off.value
    assert off.met

"""The replicas under a virtual clock that `scout bench tao` measures with."""

from pathlib import Path

import pytest

from scout_server.bench.taoarms import BASELINES, CELLS, PROFILES, CacheAware, Sticky, run_arm
from scout_server.bench.taogain import OTHERS, PlannerGain, merged
from scout_server.bench.taoruns import Run, load, perform
from scout_server.bench.taosim import Cell, programs, simulate
from scout_server.policy.engine import TaoSettings
from scout_server.policy.evaluators import EvaluatorSettings

SMALL = Cell(profile=PROFILES[0], nodes=1, concurrency=30)
"""About twice what one node holds."""


def test_twelve_cells_on_four_two_and_one_nodes() -> None:
    """There are twelve cells: three profiles, four concurrencies each, on 4, 2 and 1 nodes."""
    assert [c.nodes for c in CELLS] == [4] * 4 + [2] * 4 + [1] * 4
    assert len({(c.profile.name, c.concurrency) for c in CELLS}) == 12


def test_programs_are_the_same_for_the_same_seed() -> None:
    """Programs depend on the seed and nothing else, and their prompts only grow."""
    first, second = programs(8, seed=3), programs(8, seed=3)
    assert first == second
    assert first != programs(8, seed=4)
    head, longer = first[0].hashes(9000), first[0].hashes(20_000)
    assert longer[: len(head)] == head


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_arm_ends_and_repeats(name: str) -> None:
    """Every baseline runs all programs to their end, twice with the same result."""
    cell = Cell(profile=PROFILES[1], nodes=2, concurrency=8)
    outcomes = []
    for _ in range(2):
        arm = BASELINES[name]()
        if isinstance(arm, TaoSettings):
            outcome = simulate(cell, 5, tao=arm)
        else:
            outcome = simulate(cell, 5, route=arm)
        outcome.planning_share = 0.0
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].decode_tokens_per_s > 0


def test_tao_keeps_the_cache_where_placement_alone_loses_it() -> None:
    """At twice over-subscription sticky routing loses its hits, and TAO keeps half at least."""
    sticky = simulate(SMALL, 1, route=Sticky())
    aware = simulate(SMALL, 1, route=CacheAware())
    ours = simulate(SMALL, 1, tao=TaoSettings())
    assert max(sticky.hit_rate, aware.hit_rate) < 0.3
    assert ours.hit_rate > 0.5
    assert ours.decode_tokens_per_s > 1.6 * sticky.decode_tokens_per_s


def test_runs_are_kept_and_not_repeated(tmp_path: Path) -> None:
    """A finished run is read from the file again, unless it came from other code."""
    file = tmp_path / "runs.jsonl"
    runs = [Run(len(CELLS) + 2, arm, 3) for arm in ("sticky", "TAO")]
    first = perform(runs, jobs=1, file=file)
    assert perform(runs, jobs=1, file=file) == first
    assert len(file.read_text().splitlines()) == 2
    file.write_text(file.read_text().replace(first[runs[0]]["code"], "other"))
    assert set(load(file)) == {runs[1]}
    assert perform(runs, jobs=1, file=file)[runs[0]]["outcome"] == first[runs[0]]["outcome"]
    assert len(file.read_text().splitlines()) == 3


def test_the_programme_is_compared_decision_by_decision() -> None:
    """Every decision of a run is planned again by the others; rounding alone may favour them."""
    gain = PlannerGain()
    outcome = run_arm("TAO", SMALL, 1, watch=gain)
    assert gain.decisions == outcome.decisions > 0
    rows = merged([gain.row(), gain.row()], EvaluatorSettings().objective)
    assert {row["against"] for row in rows} == set(OTHERS)
    for row in rows:
        assert row["decisions"] == 2 * gain.decisions
        equal, better, worse = (float(str(row[f"{k} %"])) for k in ("equal", "better", "worse"))
        assert equal + better + worse == pytest.approx(100, abs=0.1)
        assert better > worse
        assert row["proved optimal %"] == 100

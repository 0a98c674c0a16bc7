"""How `scout bench tao` sums up its runs."""

import ctypes
from dataclasses import replace

import pytest

from scout_server.bench.planner import stdout_to_stderr
from scout_server.bench.taoarms import BASELINES
from scout_server.bench.taoreport import Found, ablation_rows, cell_row, double_targets, targets
from scout_server.bench.taosim import Outcome

PLAIN = Outcome(
    latency_s=100.0,
    ttft_s=10.0,
    ttft_p99_s=50.0,
    decode_tokens_per_s=100.0,
    hit_rate=0.3,
    planning_share=0.0005,
)


def cell(*latencies: float, share: float = 0.0005) -> dict[str, list[Outcome]]:
    """Every baseline takes 100 s in every seed, TAO what is said."""
    ours = [
        replace(PLAIN, latency_s=s, ttft_s=s / 20, planning_share=share, hit_rate=0.6)
        for s in latencies
    ]
    return {**{name: [PLAIN] * len(latencies) for name in BASELINES}, "TAO": ours}


def test_cells_are_won_on_the_mean_over_seeds() -> None:
    """A cell is won when the mean over seeds is lower; the worst seed is counted by itself."""
    found: Found = {0: cell(80.0, 110.0), 1: cell(120.0, 90.0)}
    by_name = {t.name: t for t in targets(found)}
    assert by_name["cells of 2 with lower mean latency"].value == 1
    assert by_name["the same, in the seed that won fewest"].value == 1
    assert by_name["largest gain in mean latency, %"].value == 5
    assert by_name["largest gain in mean TTFT, %"].met
    assert not by_name["largest gain in decode throughput, %"].met


def test_the_share_of_run_time_is_that_of_the_worst_run() -> None:
    """One run above the bound is enough to miss it."""
    found: Found = {0: cell(80.0), 1: cell(80.0, share=0.0013)}
    worst = next(t for t in targets(found) if "bookkeeping" in t.name)
    assert worst.value == 0.13
    assert not worst.met


def test_gains_are_over_the_best_baseline_of_each_figure() -> None:
    """Latency and throughput are each held against the baseline that is best in it."""
    arms = cell(80.0)
    arms["sticky"] = [replace(PLAIN, latency_s=90.0)]
    arms["round robin"] = [replace(PLAIN, decode_tokens_per_s=200.0)]
    row = cell_row(0, arms)
    assert row["best baseline"] == "sticky"
    assert row["latency %"] == 11.1
    assert row["decode throughput %"] == -50


def test_over_subscription_is_judged_by_its_worst_seed() -> None:
    """Throughput over sticky, hit rate and TTFT p99 are those of the seed that is worst."""
    arms = cell(80.0, 80.0)
    arms["TAO"][1] = replace(arms["TAO"][1], decode_tokens_per_s=170.0, ttft_p99_s=310.0)
    ratio, hits, late = double_targets(arms, "here")
    assert (ratio.value, ratio.met) == (1.0, False)
    assert (hits.value, hits.met) == (0.6, True)
    assert (late.value, late.met) == (310.0, False)


def test_an_ablation_is_compared_where_it_ran() -> None:
    """Changes are means over the cells that have the ablation; others do not count."""
    arms = cell(80.0)
    arms["TAO, no credit"] = [replace(arms["TAO"][0], latency_s=120.0)]
    (row,) = ablation_rows({0: arms, 1: cell(50.0)})
    assert (row["ablation"], row["cells"], row["latency %"]) == ("TAO, no credit", 1, 50.0)
    assert row["slower cells"] == 1


def test_what_c_code_prints_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """Within the block, what a library prints goes to stderr; after it, to stdout again."""
    libc = ctypes.CDLL(None)
    with stdout_to_stderr():
        libc.puts(b"from the solver")
    libc.puts(b"after")
    libc.fflush(None)
    out, err = capfd.readouterr()
    assert (out, err) == ("after\n", "from the solver\n")

"""What `scout bench engine` makes of its runs: figures, ratios with their spread, targets."""

import math
import statistics
from collections.abc import Mapping, Sequence

from scout_server.bench.enginerun import WARM_UPS, Run
from scout_server.report import Target

__all__ = ["BENCHMARKS", "figures", "ratios", "targets_of"]

BENCHMARKS = ("gsm8k", "mt-bench", "gaia", "swe-bench")
"""Workloads that are judged against the stock server."""
_SMALL = 0.85  # stock hit rate up to which a gain is required


def figures(runs: Sequence[Run]) -> dict[str, object]:
    """Return the means of one arm's repetitions of one workload."""
    return {
        "hit rate": statistics.fmean(run.counters.hit_rate for run in runs),
        "ttft s": statistics.fmean(run.ttft for run in runs),
        "turn s": statistics.fmean(run.turn for run in runs),
        "turns/s": statistics.fmean(run.throughput for run in runs),
        "prompt tokens": sum(run.counters.queried for run in runs),
        **{f"warm-ups {key}": sum(run.warm_ups.get(key, 0) for run in runs) for key in WARM_UPS},
    }


def _pairs(runs: Mapping[str, list[Run]], arm: str, against: str) -> list[tuple[Run, Run]]:
    return list(zip(runs.get(arm, []), runs.get(against, []), strict=False))


def ratios(runs: Mapping[str, Mapping[str, list[Run]]]) -> list[dict[str, object]]:
    """Return a row for each workload and arm: means and ranges over the repetitions."""
    rows: list[dict[str, object]] = []
    for name, arms in runs.items():
        against = "stock" if "stock" in arms else "scout"
        for arm in arms:
            pairs = _pairs(dict(arms), arm, against)
            if arm == against or not pairs:
                continue
            row: dict[str, object] = {"workload": name, "arm": arm, "against": against}
            for what, values in (
                (
                    "hit points",
                    [100 * (a.counters.hit_rate - b.counters.hit_rate) for a, b in pairs],
                ),
                ("ttft", [a.ttft / b.ttft for a, b in pairs]),
                ("turn", [a.turn / b.turn for a, b in pairs]),
                ("throughput", [a.throughput / b.throughput for a, b in pairs]),
            ):
                row[what] = statistics.fmean(values)
                row[f"{what} range"] = f"{min(values):.3g}..{max(values):.3g}"
            row["helps"] = "yes" if isinstance(row["ttft"], float) and row["ttft"] < 1.0 else "no"
            rows.append(row)
    return rows


def targets_of(runs: Mapping[str, Mapping[str, list[Run]]]) -> list[Target]:
    """Return what issue 3 asks, judged by what was run; each of our arms for itself."""
    targets: list[Target] = []
    for arm in ("scout", "prefetch"):
        targets += _arm_targets(runs, arm)
    return targets + _prefetch_targets(runs)


def _arm_targets(runs: Mapping[str, Mapping[str, list[Run]]], arm: str) -> list[Target]:
    targets: list[Target] = []
    points: list[float] = []
    ttfts: list[float] = []
    turns: list[float] = []
    throughputs: list[float] = []
    for name in BENCHMARKS:
        pairs = _pairs(dict(runs.get(name, {})), arm, "stock")
        if not pairs:
            continue
        turns.append(statistics.fmean(a.turn / b.turn for a, b in pairs))
        throughput = statistics.fmean(a.throughput / b.throughput for a, b in pairs)
        throughputs.append(throughput if turns[-1] <= 1.0 else 0.0)
        if statistics.fmean(b.counters.hit_rate for _, b in pairs) >= _SMALL:
            continue
        points.append(
            statistics.fmean(100 * (a.counters.hit_rate - b.counters.hit_rate) for a, b in pairs)
        )
        ttfts.append(statistics.fmean(a.ttft / b.ttft for a, b in pairs))
        targets += [
            Target.at_least(f"{name}: hit points, {arm} over stock", points[-1], 10.0),
            Target.at_most(f"{name}: mean TTFT, {arm} by stock", ttfts[-1], 0.82),
        ]
    if points:
        targets += [
            Target.at_least(f"best of all: hit points, {arm} over stock", max(points), 18.0),
            Target.at_most(f"best of all: mean TTFT, {arm} by stock", min(ttfts), 0.55),
        ]
    if turns:
        second = sorted(turns)[1] if len(turns) > 1 else None
        # closed loop: more turns a second at a latency that is not higher, so a lower bound
        targets += [
            Target.at_most(f"second best: turn latency, {arm} by stock", second, 0.71),
            Target.at_least(
                f"best of all: throughput, {arm} by stock (lower bound)", max(throughputs), 1.2
            ),
        ]
    return targets


def _prefetch_targets(runs: Mapping[str, Mapping[str, list[Run]]]) -> list[Target]:
    targets: list[Target] = []
    pairs = _pairs(dict(runs.get("idle-gaps", {})), "prefetch", "scout")
    if pairs:
        warm = [a.warm_ups for a, _ in pairs]
        started = sum(each.get("started", 0) for each in warm)
        used = sum(each.get("used", 0) for each in warm) / started if started else math.nan
        ttft = statistics.fmean(a.ttft / b.ttft for a, b in pairs)
        targets += [
            Target.at_most("idle-gaps: mean TTFT, prefetch by scout", ttft, 0.75),
            Target.at_least("idle-gaps: share of warm-ups used", used, 0.6),
        ]
    ours = [run for arms in runs.values() for run in arms.get("prefetch", [])]
    if ours:
        contended = sum(run.warm_ups.get("contended", 0) for run in ours)
        targets.append(
            Target.equal("steps that a warm-up shared with a user's request", contended, 0)
        )
    chance = runs.get("random", {}).get("prefetch", [])
    if chance:
        started = sum(run.warm_ups.get("started", 0) for run in chance)
        targets.append(Target.equal("random: warm-ups", started, 0))
    return targets

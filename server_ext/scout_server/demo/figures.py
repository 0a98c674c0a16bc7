"""What the demo's measurements amount to."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scout_server.demo.measure import Counters
from scout_server.report import Target

__all__ = ["VOID_ABOVE", "Arm", "Bounds", "judge", "percentile", "summarise"]

VOID_ABOVE = 0.85
"""A baseline that hits more than this leaves nothing to win: the run is void."""


@dataclass(slots=True)
class Arm:
    """What one server did, over all repetitions."""

    counters: list[Counters] = field(default_factory=list)
    """Counter differences, one a repetition."""
    ttft_s: list[float] = field(default_factory=list)
    """Seconds to the first byte, of every request."""
    job_s: list[float] = field(default_factory=list)
    """Seconds of every session."""

    @property
    def total(self) -> Counters:
        """The sum of the differences."""
        return sum(self.counters, Counters(0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is required of one engine."""

    hit_points: float
    """Percentage points of hit rate over LRU, at least."""
    ttft_ratio: float
    """Median TTFT over LRU's, at most."""


def percentile(values: Sequence[float], q: float) -> float:
    """Return the *q*-quantile (0..1) of *values*, by nearest rank; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def summarise(arm: Arm) -> dict[str, float]:
    """Return the row of one server."""
    total = arm.total
    return {
        "hit rate": total.hit_rate,
        "recomputed tokens": total.recomputed,
        "TTFT p50 (s)": percentile(arm.ttft_s, 0.5),
        "TTFT p95 (s)": percentile(arm.ttft_s, 0.95),
        "job mean (s)": statistics.fmean(arm.job_s) if arm.job_s else math.nan,
        "job p95 (s)": percentile(arm.job_s, 0.95),
        "requests": len(arm.ttft_s),
        "sessions": len(arm.job_s),
    }


def judge(
    lru: Arm, scout: Arm, off: Mapping[str, Counters], bounds: Bounds
) -> tuple[dict[str, object], list[Target]]:
    """
    Return the results and the targets of a run.

    *off* holds the counters of one replay against `lru` and `identity off`.
    """
    base, ours = summarise(lru), summarise(scout)
    void = base["hit rate"] > VOID_ABOVE
    points = 100 * (ours["hit rate"] - base["hit rate"])
    ratio = ours["TTFT p50 (s)"] / base["TTFT p50 (s)"]
    per_repetition = [
        {"repetition": index + 1, "LRU hit rate": a.hit_rate, "Scout hit rate": b.hit_rate}
        for index, (a, b) in enumerate(zip(lru.counters, scout.counters, strict=True))
    ]
    results: dict[str, object] = {
        "side by side": {"LRU": base, "Scout": ours},
        "repetitions": per_repetition,
        "replay, one request at a time": {
            name: {"hit rate": counted.hit_rate, "recomputed tokens": counted.recomputed}
            for name, counted in off.items()
        },
        "hit rate gained (points)": points,
        "recomputed tokens, Scout / LRU": ours["recomputed tokens"] / base["recomputed tokens"],
        "median TTFT, Scout / LRU": ratio,
        "p95 TTFT, Scout / LRU": ours["TTFT p95 (s)"] / base["TTFT p95 (s)"],
        "mean job time, Scout / LRU": ours["job mean (s)"] / base["job mean (s)"],
        "void": void,
    }
    if void:
        results["why void"] = (
            f"LRU's hit rate is above {VOID_ABOVE}: the cache is not under pressure"
        )
    difference = 100 * (off["identity off"].hit_rate - off["LRU"].hit_rate) if off else None
    targets = [
        Target.at_least("hit rate over LRU, points", None if void else points, bounds.hit_points),
        Target.at_most("median TTFT over LRU's", None if void else ratio, bounds.ttft_ratio),
        Target.equal("hit rate, identity off minus LRU, points", difference, 0.0),
    ]
    return results, targets

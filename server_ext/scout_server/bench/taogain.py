"""What the dynamic programme gains over simpler planners, decision by decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scout_server.policy.admission import Plan
from scout_server.policy.engine import Snapshot, make_plan

__all__ = ["OTHERS", "PlannerGain", "merged"]

OTHERS = ("best-fit-decreasing", "value-best-fit", "greedy")
"""Planners that plan every snapshot again."""


@dataclass(slots=True)
class PlannerGain:
    """
    Plans the snapshots of a run again with other planners, and compares what the plans are worth.

    Whole decisions are compared (planned, spread, topped up), so that the shared steps count.
    """

    decisions: int = 0
    exact: int = 0
    ours: list[int] = field(default_factory=list)
    better: dict[str, int] = field(default_factory=dict)
    worse: dict[str, int] = field(default_factory=dict)
    lost: dict[str, list[int]] = field(default_factory=dict)
    """Per planner and component: what its plans are worth less, summed over all decisions."""
    better_in: dict[str, list[int]] = field(default_factory=dict)
    """Per planner: decisions in which this component was the first that differed, ours more."""

    def __call__(self, snapshot: Snapshot, plan: Plan) -> None:
        """Compare one decision."""
        self.decisions += 1
        self.exact += plan.exact
        parts = len(snapshot.settings.objective.objective)
        best = plan.objective or (0,) * parts
        self.ours = [a + b for a, b in zip(self.ours or [0] * parts, best, strict=True)]
        for name in OTHERS:
            other = make_plan(replace(snapshot, settings=replace(snapshot.settings, planner=name)))
            found = other.objective or (0,) * parts
            lost = self.lost.setdefault(name, [0] * parts)
            first = self.better_in.setdefault(name, [0] * parts)
            for c, (a, b) in enumerate(zip(best, found, strict=True)):
                lost[c] += a - b
            self.better[name] = self.better.get(name, 0) + (best > found)
            self.worse[name] = self.worse.get(name, 0) + (best < found)
            if best > found:
                first[
                    next(c for c, (a, b) in enumerate(zip(best, found, strict=True)) if a != b)
                ] += 1

    def row(self) -> dict[str, object]:
        """Return the counts as plain values, for a file."""
        return {
            "decisions": self.decisions,
            "exact": self.exact,
            "ours": self.ours,
            "better": self.better,
            "worse": self.worse,
            "lost": self.lost,
            "better_in": self.better_in,
        }


def merged(rows: list[Mapping[str, object]], objective: tuple[str, ...]) -> list[dict[str, object]]:
    """Return one row per other planner over several runs' counts."""
    table: list[dict[str, object]] = []
    decisions = sum(_int(r["decisions"]) for r in rows)
    if not decisions:
        return table
    exact = sum(_int(r["exact"]) for r in rows)
    for name in OTHERS:
        better = sum(_int(_of(r["better"], name)) for r in rows)
        worse = sum(_int(_of(r["worse"], name)) for r in rows)
        row: dict[str, object] = {
            "against": name,
            "decisions": decisions,
            "proved optimal %": round(100 * exact / decisions, 2),
            "equal %": round(100 * (decisions - better - worse) / decisions, 2),
            "better %": round(100 * better / decisions, 2),
            "worse %": round(100 * worse / decisions, 2),
        }
        for c, part in enumerate(objective):
            ours = sum(_ints(r["ours"])[c] for r in rows if r["ours"])
            lost = sum(_ints(_of(r["lost"], name))[c] for r in rows if r["ours"])
            first = sum(_ints(_of(r["better_in"], name))[c] for r in rows if r["ours"])
            row[f"better first in {part} %"] = round(100 * first / decisions, 2)
            row[f"{part} gained a decision"] = round(lost / decisions, 3)
            row[f"{part} gained %"] = round(100 * lost / (ours - lost), 3) if ours > lost else None
        table.append(row)
    return table


def _of(value: object, name: str) -> object:
    assert isinstance(value, Mapping)
    return value.get(name, 0)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _ints(value: object) -> list[int]:
    assert isinstance(value, list)
    return value

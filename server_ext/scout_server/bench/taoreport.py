"""What the runs of `scout bench tao` come to: gains, ablations and targets."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from scout_server.bench.taoarms import ABLATIONS, BASELINES, CALM, CELLS, cell_name
from scout_server.bench.taogain import merged
from scout_server.bench.taoruns import Run
from scout_server.bench.taosim import Outcome
from scout_server.policy.evaluators import EvaluatorSettings
from scout_server.report import Target

__all__ = [
    "Found",
    "ablation_rows",
    "cell_row",
    "double_targets",
    "full_name",
    "planner_rows",
    "run_row",
    "targets",
]

Found = dict[int, dict[str, list[Outcome]]]
"""Cell -> arm -> one outcome per seed."""
_LOWER = {"latency": "latency_s", "TTFT": "ttft_s"}
_HIGHER = {"decode throughput": "decode_tokens_per_s"}


def full_name(cell: int) -> str:
    """Return the name of a cell by its index into CELLS and then CALM."""
    return cell_name((*CELLS, *CALM)[cell])


def _mean(outcomes: Sequence[Outcome], figure: str) -> float:
    return statistics.fmean(getattr(o, figure) for o in outcomes)


def _gain(arms: Mapping[str, Sequence[Outcome]]) -> dict[str, float]:
    """Return TAO's gain in per cent over the best baseline of each figure."""
    gain = {
        f"{name} %": 100
        * (1 - _mean(arms["TAO"], figure) / min(_mean(arms[b], figure) for b in BASELINES))
        for name, figure in _LOWER.items()
    }
    for name, figure in _HIGHER.items():
        best = max(_mean(arms[b], figure) for b in BASELINES)
        gain[f"{name} %"] = 100 * (_mean(arms["TAO"], figure) / best - 1)
    return gain


def _by_seed(arms: Mapping[str, Sequence[Outcome]]) -> list[dict[str, float]]:
    return [
        _gain({a: [o] for a, o in zip(arms, one, strict=True)})
        for one in zip(*arms.values(), strict=True)
    ]


def cell_row(cell: int, arms: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """Return a cell's line of the table."""
    gain = _gain(arms)
    single = [g["latency %"] for g in _by_seed(arms)]
    return {
        "cell": full_name(cell),
        "load": round(_mean(arms["TAO"], "load"), 2),
        "best baseline": min(BASELINES, key=lambda b: _mean(arms[b], "latency_s")),
        **{k: round(v, 1) for k, v in gain.items()},
        "latency % by seed": " ".join(f"{g:.1f}" for g in single),
        "hit rate": round(_mean(arms["TAO"], "hit_rate"), 3),
        "CPU share %": round(100 * _mean(arms["TAO"], "planning_share"), 3),
    }


def run_row(cell: int, arm: str, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return an arm's figures in a cell, means over the seeds."""
    means = {f.name: round(_mean(outcomes, f.name), 4) for f in fields(Outcome)}
    return {"cell": full_name(cell), "arm": arm, **means}


def ablation_rows(found: Found) -> list[dict[str, object]]:
    """Return what TAO loses without each part: mean change of a figure over the cells run."""
    table: list[dict[str, object]] = []
    for name in ABLATIONS:
        cells = [arms for arms in found.values() if name in arms]
        if not cells:
            continue
        row: dict[str, object] = {"ablation": name, "cells": len(cells)}
        for label, figure in {**_LOWER, **_HIGHER, "TTFT p99": "ttft_p99_s"}.items():
            changes = [
                100 * (_mean(arms[name], figure) / _mean(arms["TAO"], figure) - 1) for arms in cells
            ]
            row[f"{label} %"] = round(statistics.fmean(changes), 1)
        row["hit rate"] = round(
            statistics.fmean(
                _mean(arms[name], "hit_rate") - _mean(arms["TAO"], "hit_rate") for arms in cells
            ),
            3,
        )
        row["slower cells"] = sum(
            _mean(arms[name], "latency_s") > _mean(arms["TAO"], "latency_s") for arms in cells
        )
        table.append(row)
    return table


def planner_rows(
    rows: Mapping[Run, dict[str, Any]], runs: Sequence[Run], chosen: Sequence[int]
) -> list[dict[str, object]]:
    """Return what the programme gained over other planners on the snapshots of TAO's runs."""
    objective = EvaluatorSettings().objective
    table: list[dict[str, object]] = []
    for nodes in sorted({CELLS[c].nodes for c in chosen}, reverse=True):
        counts = [
            rows[r]["gain"]
            for r in runs
            if r.arm == "TAO" and r.cell in chosen and CELLS[r.cell].nodes == nodes
        ]
        table += [{"nodes": nodes, **row} for row in merged(counts, objective)]
    return table


def targets(found: Found) -> list[Target]:
    """Return the targets on all cells."""
    gains = [_gain(arms) for arms in found.values()]
    won = sum(g["latency %"] > 0 for g in gains)
    needed = 11 if len(gains) == 12 else math.ceil(11 / 12 * len(gains))
    fewest = min(
        sum(_by_seed(arms)[i]["latency %"] > 0 for arms in found.values())
        for i in range(len(next(iter(found.values()))["TAO"]))
    )
    shares = [o.planning_share for arms in found.values() for o in arms["TAO"]]
    return [
        Target.at_least(f"cells of {len(gains)} with lower mean latency", won, needed),
        Target.at_least("the same, in the seed that won fewest", fewest, needed),
        Target.at_least("largest gain in mean latency, %", _most(gains, "latency %"), 26.8),
        Target.at_least("largest gain in mean TTFT, %", _most(gains, "TTFT %"), 36.3),
        Target.at_least(
            "largest gain in decode throughput, %", _most(gains, "decode throughput %"), 29.5
        ),
        Target.at_most(
            "planner and bookkeeping, CPU as a share of run time, worst run, %",
            round(100 * max(shares), 3),
            0.12,
        ),
    ]


def _most(gains: Sequence[dict[str, float]], name: str) -> float:
    return round(max(g[name] for g in gains), 2)


def double_targets(arms: Mapping[str, Sequence[Outcome]], name: str) -> list[Target]:
    """Return the targets at about twice over-subscription; each in its worst seed."""
    pairs = list(zip(arms["TAO"], arms["sticky"], strict=True))
    ratio = min(o.decode_tokens_per_s / s.decode_tokens_per_s for o, s in pairs)
    place = f"{name}, load {_mean(arms['TAO'], 'load'):.2f}, worst seed"
    return [
        Target.at_least(f"throughput over sticky routing ({place})", round(ratio, 3), 1.6),
        Target.at_least(
            f"pool hit rate ({place})", round(min(o.hit_rate for o, _ in pairs), 3), 0.50
        ),
        Target.at_most(
            f"TTFT p99, s ({place})", round(max(o.ttft_p99_s for o, _ in pairs), 1), 300
        ),
    ]

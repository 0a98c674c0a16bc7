"""`scout bench tao`: joint admission and placement against routers (issue 5, section 4)."""

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from scout_server.bench.taoarms import ABLATIONS, BASELINES, CALM, CELLS, cell_name
from scout_server.bench.taogain import merged
from scout_server.bench.taoruns import Run, perform
from scout_server.bench.taosim import Outcome
from scout_server.policy.evaluators import EvaluatorSettings
from scout_server.report import Target, command_line, emit, progress

__all__ = ["tao"]

Found = dict[int, dict[str, list[Outcome]]]
"""Cell -> arm -> one outcome per seed."""
_LOWER = {"latency": "latency_s", "TTFT": "ttft_s"}
_HIGHER = {"decode throughput": "decode_tokens_per_s"}


class Ablated(enum.Enum):
    """Where ablations run."""

    ONE = "one"
    """The cell at about twice over-subscription on 4 nodes."""
    HALF = "half"
    """Every second cell: the second and the fourth concurrency of each profile."""
    ALL = "all"


def tao(
    ablations: Annotated[
        Ablated, typer.Option(help="Cells in which the ablations run, too.")
    ] = Ablated.ONE,
    calm: Annotated[bool, typer.Option(help="Add the three cells below capacity.")] = False,
    cells: Annotated[int, typer.Option(min=1, max=len(CELLS), help="Cells to run.")] = len(CELLS),
    seed: Annotated[int, typer.Option(help="First seed of the programs.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds to run, from the first on.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at the same time.")] = 1,
    file: Annotated[
        Path | None,
        typer.Option(help="Keep finished runs here (JSON lines) and go on from them."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Compare TAO with routers on replicas under a virtual clock, cell by cell.

    Example: scout bench tao --seed 11 --seeds 3 --jobs 2 --file runs.jsonl
    """
    chosen = list(range(cells))
    double = min(chosen, key=lambda c: (CELLS[c].nodes != 4, abs(CELLS[c].concurrency - 128)))
    arms = [*BASELINES, "TAO"]
    ablated = {
        Ablated.ONE: {double},
        Ablated.HALF: {c for c in chosen if c % 2},
        Ablated.ALL: set(chosen),
    }[ablations]
    runs = [
        Run(cell, arm, number)
        for number in range(seed, seed + seeds)
        for cell in [*chosen, *(len(CELLS) + i for i in range(len(CALM) if calm else 0))]
        for arm in [*arms, *(ABLATIONS if cell in ablated else ())]
    ]
    with progress() as bar:
        task = bar.add_task("simulating", total=len(runs))
        rows = perform(runs, jobs=jobs, file=file, done=lambda: bar.advance(task))
    found: Found = {}
    for run in runs:
        outcome = Outcome(**rows[run]["outcome"])
        found.setdefault(run.cell, {}).setdefault(run.arm, []).append(outcome)
    main = {cell: found[cell] for cell in chosen}
    targets = [*_judge(main), *_double(found[double], _name(double))]
    emit(
        Console(),
        command_line(),
        seed,
        {
            "rule": "three times as many programs as are alive; figures are means over"
            f" {seeds} seeds; best baseline of a cell and figure among {', '.join(BASELINES)};"
            " latency is a program's, from its first request to its last answer; profiles are"
            " chosen, not measured",
            "cells": [_gains(cell, found[cell]) for cell in found],
            "ablations": _ablations(main),
            "planners on the snapshots of TAO's runs": _planners(rows, runs, chosen),
            "runs": [_row(cell, arm, found[cell][arm]) for cell in found for arm in found[cell]],
        },
        targets,
        json_output,
    )


def _name(cell: int) -> str:
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


def _gains(cell: int, arms: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """Return a cell's line of the table."""
    gain = _gain(arms)
    single = [g["latency %"] for g in _by_seed(arms)]
    return {
        "cell": _name(cell),
        "load": round(_mean(arms["TAO"], "load"), 2),
        "best baseline": min(BASELINES, key=lambda b: _mean(arms[b], "latency_s")),
        **{k: round(v, 1) for k, v in gain.items()},
        "latency % by seed": " ".join(f"{g:.1f}" for g in single),
        "hit rate": round(_mean(arms["TAO"], "hit_rate"), 3),
        "CPU share %": round(100 * _mean(arms["TAO"], "planning_share"), 3),
    }


def _row(cell: int, arm: str, outcomes: Sequence[Outcome]) -> dict[str, object]:
    means = {f.name: round(_mean(outcomes, f.name), 4) for f in fields(Outcome)}
    return {"cell": _name(cell), "arm": arm, **means}


def _ablations(found: Found) -> list[dict[str, object]]:
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


def _planners(
    rows: Mapping[Run, dict[str, Any]], runs: Sequence[Run], chosen: Sequence[int]
) -> list[dict[str, object]]:
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


def _judge(found: Found) -> list[Target]:
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


def _double(arms: Mapping[str, Sequence[Outcome]], name: str) -> list[Target]:
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

"""`scout bench tao`: joint admission and placement against routers (issue 5, section 4)."""

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scout_server.bench.taoarms import ABLATIONS, BASELINES, CALM, CELLS
from scout_server.bench.taoreport import (
    Found,
    ablation_rows,
    cell_row,
    double_targets,
    full_name,
    planner_rows,
    run_row,
    targets,
)
from scout_server.bench.taoruns import Run, perform
from scout_server.bench.taosim import Outcome
from scout_server.report import command_line, emit, progress

__all__ = ["tao"]


class Ablated(enum.Enum):
    """Where ablations run."""

    ONE = "one"
    """The cell at about twice over-subscription on 4 nodes."""
    LOADED = "loaded"
    """The most loaded cell of each profile."""
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
        Ablated.LOADED: {c for c in chosen if c % 4 == 3} | {double},
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
    judged = [*targets(main), *double_targets(found[double], full_name(double))]
    emit(
        Console(),
        command_line(),
        seed,
        {
            "rule": "three times as many programs as are alive; figures are means over"
            f" {seeds} seeds; best baseline of a cell and figure among {', '.join(BASELINES)};"
            " latency is a program's, from its first request to its last answer; profiles are"
            " chosen, not measured",
            "cells": [cell_row(cell, found[cell]) for cell in found],
            "ablations": ablation_rows(main),
            "planners on the snapshots of TAO's runs": planner_rows(rows, runs, chosen),
            "runs": [run_row(cell, arm, found[cell][arm]) for cell in found for arm in found[cell]],
        },
        judged,
        json_output,
    )

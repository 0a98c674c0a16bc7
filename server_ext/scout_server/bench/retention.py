"""`scout bench retention`: every policy on every workload, against the clairvoyant optimum."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import typer
from rich.console import Console

from scout_server.bench.baselines import BASELINES
from scout_server.bench.oracles import Belady
from scout_server.bench.ours import Ours
from scout_server.bench.replay import Policy, Result, replay
from scout_server.bench.workloads import (
    Workload,
    coding_sessions,
    markov,
    random_draw,
    short_skewed,
)
from scout_server.report import Target, command_line, emit, progress

__all__ = ["Cell", "retention"]

Make = Callable[[Workload, int, int], Policy]

_LEVELS = (0.5, 1.0, 2.0)
_WARM = 500

_OURS: dict[str, Make] = {
    "scout": Ours,
    "scout+time": lambda w, c, k: Ours(w, c, k, hints="time"),
    "informed": lambda w, c, k: Ours(w, c, k, informed=True),
    "informed+time": lambda w, c, k: Ours(w, c, k, informed=True, hints="time"),
}
_HOSTILE: dict[str, Make] = {
    "off": lambda w, c, k: Ours(w, c, k, hints="off"),
    "wrong": lambda w, c, k: Ours(w, c, k, hints="wrong"),
    "lying": lambda w, c, k: Ours(w, c, k, hints="lying"),
}
_POLICIES: dict[str, Make] = {**BASELINES, **_OURS, "belady": Belady}
_BOUNDS = {"scout": -0.1, "off": -0.1, "wrong": -1.0, "lying": -1.0}
"""Least points over LRU where there is nothing to win."""


def _only(*names: str) -> dict[str, Make]:
    every = {**_POLICIES, **_HOSTILE}
    return {name: every[name] for name in names}


@dataclass(slots=True)
class Cell:
    """One workload at one cache size."""

    name: str
    level: float
    results: dict[str, Result] = field(default_factory=dict)

    def share(self, policy: str, *, after: int = 0) -> float:
        """Return how much of the gap from LRU to the optimum *policy* closes."""
        low = self.results["lru"].rate_after(after)
        high = self.results["belady"].rate_after(after)
        return (self.results[policy].rate_after(after) - low) / max(high - low, 1e-9)

    def points(self, policy: str, other: str = "lru") -> float:
        """Return the hit rate of *policy* less that of *other* in percentage points."""
        return 100.0 * (self.results[policy].rate - self.results[other].rate)

    def row(self) -> dict[str, object]:
        """Return the cell for a table."""
        row: dict[str, object] = {"workload": self.name, "cache": self.level}
        row.update({name: result.rate for name, result in self.results.items()})
        return row


def run_cell(
    workload: Workload, level: float, capacity: int, policies: dict[str, Make], *, retained: bool
) -> Cell:
    """Replay *workload* under every policy."""
    working = workload.largest if retained else 0
    cell = Cell(workload.name, level)
    for name, make in policies.items():
        cell.results[name] = replay(
            workload.requests, capacity, make(workload, capacity, working), working=working
        )
    return cell


Job = tuple[str, tuple[Any, ...], bool]
"""Kind of workload, its parameters, whether running requests' blocks are extra."""

_PLAIN = ("lru", "scout")
_COMPARED = ("lru", "scout", "belady")


def _grid(sessions: int, seed: int) -> list[tuple[Any, ...]]:
    return [
        (sessions, seed, determinism, concurrency, level)
        for concurrency in (30, 12, 4)
        for determinism in (0.6, 0.8, 0.95)
        for level in _LEVELS
    ]


def _run(job: Job) -> Cell | None:
    """Run one cell; None for a cache that cannot hold a request. In a process of its own."""
    kind, given, retained = job
    cell: Cell | None = None
    match kind:
        case "grid":
            sessions, seed, determinism, concurrency, level = given
            workload = markov(
                seed=seed, sessions=sessions, concurrency=concurrency, determinism=determinism
            )
            capacity = int(sum(workload.anchors) * level)
            cell = run_cell(workload, level, capacity, _POLICIES, retained=retained)
        case "safety":
            cell = _safe(*given, retained=retained)
        case "short":
            seed, concurrency, blocks = given
            workload = short_skewed(seed=seed, concurrency=concurrency)
            level = blocks / sum(workload.anchors)
            policies: dict[str, Make] = {**BASELINES, "scout": Ours, "belady": Belady}
            cell = run_cell(workload, level, blocks, policies, retained=retained)
        case "draw":
            workload, level = random_draw(*given)
            capacity = int(sum(workload.anchors) * level)
            if capacity >= workload.largest:
                cell = run_cell(workload, level, capacity, _only(*_COMPARED), retained=retained)
        case _:
            path, rate, blocks = given
            workload = coding_sessions(path, per_minute=rate)
            fits = [r for r in workload.requests if len(r.prompt) + len(r.output) <= blocks]
            part = Workload(f"{workload.name}, {blocks} blocks", fits, workload.anchors)
            policies = _only("lru", "ttl-learnt", "scout", "scout+time", "belady")
            cell = run_cell(part, float(blocks), blocks, policies, retained=retained)
    return cell


def _safe(name: str, seed: int, level: float, *, retained: bool) -> Cell:
    """Run a workload on which there is nothing to win, or whose hints are false."""
    if name == "uniform transitions":
        workload, policies = markov(seed=seed, sessions=100, uniform=True), _only(*_PLAIN)
    elif name == "one agent":
        workload, policies = markov(seed=seed, agents=1, sessions=100), _only(*_PLAIN)
    else:
        workload = markov(seed=seed, sessions=100)
        policies = _only("lru", *(("off",) if name == "identity off" else ("wrong", "lying")))
    unit = sum(workload.anchors)
    if name in ("uniform transitions", "one agent"):
        # one anchor alone is smaller than a request; the cache then has to hold some sessions
        unit = max(unit, workload.largest)
    cell = run_cell(workload, level, int(unit * level), policies, retained=retained)
    cell.name = name
    return cell


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _grid_targets(cells: list[Cell]) -> Iterator[Target]:
    bounds = {
        "scout": {0.5: (0.80, 0.88), 1.0: (0.75, 0.84), 2.0: (0.45, 0.58)},
        "scout+time": {0.5: (0.85, 0.92), 1.0: (0.80, 0.88), 2.0: (0.65, 0.74)},
    }
    for policy, levels in bounds.items():
        for level, (least, mean) in levels.items():
            shares = [cell.share(policy) for cell in cells if cell.level == level]
            name = f"{policy} at {level:g}x: share of the gap"
            yield Target.at_least(f"{name}, worst cell", min(shares), least)
            yield Target.at_least(f"{name}, mean", _mean(shares), mean)
    worst = min(cell.points("scout", "static-rate") for cell in cells)
    yield Target.at_least("scout less static-rate, worst cell (points)", worst, -0.5)
    behind = [
        1.0 - cell.results["scout"].rate_after(_WARM) / cell.results["informed"].rate_after(_WARM)
        for cell in cells
        if len(cell.results["informed"].queried) > _WARM
    ]
    name = "scout behind informed after 500 requests, worst cell"
    yield Target.at_most(name, max(behind, default=None), 0.03)
    worst = min(cell.points("scout+time", "scout") for cell in cells)
    yield Target.at_least("return hints against none, worst cell (points)", worst, 0.0)


def _speed(seed: int) -> dict[str, float]:
    """Return requests a second of CPU time at 10^4 blocks, whatever else the machine does."""
    workload = markov(seed=seed, agents=64, sessions=600, concurrency=120, history=1, anchor=(2, 6))
    found = {}
    for name, make in (("lru", BASELINES["lru"]), ("scout", Ours)):
        policy = make(workload, 10_000, 0)
        start = process_time()
        replay(workload.requests, 10_000, policy)
        found[f"{name} (requests/s)"] = len(workload.requests) / (process_time() - start)
    return found


def retention(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="40 sessions and 20 draws: the cold start weighs more, minutes less."
        ),
    ] = False,
    sessions: Annotated[
        int | None, typer.Option(min=20, help="Sessions per workload of the grid; 200 if not said.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=0, help="Random workloads, 0: none; 200 if not said.")
    ] = None,
    coding: Annotated[
        Path | None, typer.Option(help="Gzipped JSON lines of recorded coding sessions.")
    ] = None,
    pool: Annotated[
        str,
        typer.Option(help="retained: running requests' blocks are extra; engine: they are not."),
    ] = "retained",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as there are CPUs if not said.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write NAME.html, and NAME.png where matplotlib is.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workloads.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Replay workloads through every retention policy and compare them with the optimum.

    Example: scout bench retention --quick --plot retention
    """
    if pool not in ("retained", "engine"):
        raise typer.BadParameter(f"pool is 'retained' or 'engine', not {pool!r}")
    if coding is not None and not coding.is_file():
        raise typer.BadParameter(f"there is no file {coding}", param_hint="--coding")
    sessions = sessions or (40 if quick else 200)
    draws = (20 if quick else 200) if draws is None else draws
    kinds: dict[str, list[tuple[Any, ...]]] = {
        "coding": []
        if coding is None
        else [(coding, rate, blocks) for rate in (1.0, 6.0) for blocks in (3_000, 1_000, 300)],
        "grid": _grid(sessions, seed),
        "safety": [
            (name, seed, level)
            for name in ("uniform transitions", "one agent", "identity off", "hostile hints")
            for level in _LEVELS
        ],
        "short": [(s, c, blocks) for s, c in ((2, 3), (3, 6)) for blocks in (110, 150, 200)],
        "draw": [(number,) for number in range((seed - 1) * draws, seed * draws)],
    }
    console = Console()
    speed = _speed(seed)
    found: dict[str, list[Cell | None]] = {}
    # fresh processes: the progress bar's thread must not be copied in the middle of something
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers, progress() as bar:
        running = {
            kind: [workers.submit(_run, (kind, given, pool == "retained")) for given in every]
            for kind, every in kinds.items()
        }
        for kind, futures in running.items():
            task = bar.add_task(kind, total=len(futures))
            found[kind] = []
            for future in futures:
                found[kind].append(future.result())
                bar.advance(task)
    results: dict[str, Any] = {}
    targets: list[Target] = []
    cells = [cell for cell in found["grid"] if cell is not None]
    results["grid"] = [cell.row() for cell in cells]
    results["share of the gap, mean"] = [
        {
            "policy": name,
            **{
                f"{level:g}x": _mean([c.share(name) for c in cells if c.level == level])
                for level in _LEVELS
            },
        }
        for name in _POLICIES
    ]
    targets += _grid_targets(cells)
    results["safety"] = []
    results["cold and short"] = []
    results["coding sessions"] = []
    for cell in found["safety"]:
        assert cell is not None
        targets += _safety_targets(cell, results["safety"])
    for cell, (_, _, blocks) in zip(found["short"], kinds["short"], strict=True):
        assert cell is not None
        targets += _short_targets(cell, blocks, results["cold and short"])
    for cell in found["coding"]:
        assert cell is not None
        results["coding sessions"].append(cell.row())
        for policy, bound in (("scout", 0.3), ("scout+time", 0.9)):
            name = f"{cell.name}: {policy}, share of the gap"
            targets.append(Target.at_least(name, cell.share(policy), bound))
    if draws:
        targets += _draw_targets(found["draw"], results)
    results["speed at 10^4 blocks"] = [speed]
    for name, value in speed.items():
        targets.append(Target.at_least(f"speed at 10^4 blocks, {name}", value, 20_000))
    if plot is not None:
        from scout_server.bench.plot import draw

        results["plots"] = ", ".join(draw(plot, cells, list(_POLICIES)))
    emit(console, command_line(), seed, results, targets, json_output)


def _safety_targets(cell: Cell, rows: list[dict[str, object]]) -> Iterator[Target]:
    for policy in cell.results:
        if policy == "lru":
            continue
        points = cell.points(policy)
        rows.append(
            {
                "workload": cell.name,
                "cache": cell.level,
                "policy": policy,
                "lru": cell.results["lru"].rate,
                "points over lru": points,
            }
        )
        name = f"{policy} less lru, {cell.name}, {cell.level:g}x (points)"
        yield Target.at_least(name, points, _BOUNDS[policy])


def _short_targets(cell: Cell, blocks: int, rows: list[dict[str, object]]) -> Iterator[Target]:
    rows.append({"blocks": blocks, **cell.row()})
    if not cell.name.endswith("2"):
        return
    name = f"cold and short, {blocks} blocks: scout less lru (points)"
    yield Target.at_least(name, cell.points("scout"), 0.0)
    if blocks == 110:
        share = cell.share("scout")
        yield Target.at_least("cold and short, 110 blocks: share of the gap", share, 0.5)


def _draw_targets(cells: list[Cell | None], results: dict[str, object]) -> list[Target]:
    shares: list[float] = []
    below: list[str] = []
    total = 0
    for cell in cells:
        if cell is None:
            continue
        total += 1
        if cell.points("scout") < -1.0:
            below.append(f"{cell.name}, {cell.level:g}x")
        if cell.points("belady") > 2.0:
            shares.append(cell.share("scout"))
    shares.sort()
    results["random draws"] = [
        {"draws": total, "below lru by a point": len(below), "median share": _middle(shares)}
    ]
    if below:
        results["draws below lru by a point"] = "; ".join(below)
    return [
        Target.at_most("random draws below lru by a point", len(below) / max(1, total), 0.01),
        Target.at_least("random draws, median share of the gap", _middle(shares), 0.65),
    ]


def _middle(values: list[float]) -> float:
    return values[len(values) // 2] if values else 0.0

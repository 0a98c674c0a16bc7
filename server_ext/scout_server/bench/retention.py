"""`scout bench retention`: every policy on every workload, against the clairvoyant optimum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated

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


def _grid(sessions: int, seed: int) -> Iterator[Workload]:
    for determinism in (0.6, 0.8, 0.95):
        for concurrency in (4, 12, 30):
            yield markov(
                seed=seed, sessions=sessions, concurrency=concurrency, determinism=determinism
            )


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
    ]
    yield Target.at_most("scout behind informed after 500 requests, worst cell", max(behind), 0.03)
    worst = min(cell.points("scout+time", "scout") for cell in cells)
    yield Target.at_least("return hints against none, worst cell (points)", worst, 0.0)


def _safety(seed: int, retained: bool) -> Iterator[tuple[Cell, str, float]]:
    """Yield (cell, policy, least points over LRU) where there is nothing to win."""
    plain: dict[str, Make] = {"lru": BASELINES["lru"], "scout": Ours}
    off: Make = lambda w, c, k: Ours(w, c, k, hints="off")  # noqa: E731
    hostile: dict[str, Make] = {
        "lru": BASELINES["lru"],
        "wrong": lambda w, c, k: Ours(w, c, k, hints="wrong"),
        "lying": lambda w, c, k: Ours(w, c, k, hints="lying"),
    }
    uniform = markov(seed=seed, sessions=100, uniform=True)
    one = markov(seed=seed, agents=1, sessions=100)
    known = markov(seed=seed, sessions=100)
    for level in _LEVELS:
        for workload in (uniform, one):
            # one anchor alone is smaller than a request; the cache then has to hold some sessions
            unit = max(sum(workload.anchors), workload.largest)
            cell = run_cell(workload, level, int(unit * level), plain, retained=retained)
            yield cell, "scout", -0.1
        capacity = int(sum(known.anchors) * level)
        cell = run_cell(
            known, level, capacity, {"lru": BASELINES["lru"], "off": off}, retained=retained
        )
        cell.name = "identity off"
        yield cell, "off", -0.1
        cell = run_cell(known, level, capacity, hostile, retained=retained)
        cell.name = "hostile hints"
        yield cell, "wrong", -1.0
        yield cell, "lying", -1.0


def _short(retained: bool) -> Iterator[tuple[Cell, int]]:
    policies: dict[str, Make] = {**BASELINES, "scout": Ours, "belady": Belady}
    for seed, concurrency in ((2, 3), (3, 6)):
        workload = short_skewed(seed=seed, concurrency=concurrency)
        for blocks in (110, 150, 200):
            level = blocks / sum(workload.anchors)
            yield run_cell(workload, level, blocks, policies, retained=retained), blocks


def _draws(count: int, retained: bool) -> Iterator[Cell | None]:
    """Yield one cell a draw, None for a cache that cannot hold a request."""
    policies: dict[str, Make] = {"lru": BASELINES["lru"], "scout": Ours, "belady": Belady}
    for seed in range(count):
        workload, level = random_draw(seed)
        capacity = int(sum(workload.anchors) * level)
        if capacity < workload.largest:
            yield None
            continue
        yield run_cell(workload, level, capacity, policies, retained=retained)


def _coding(path: Path, retained: bool) -> Iterator[Cell]:
    policies: dict[str, Make] = {
        "lru": BASELINES["lru"],
        "ttl-learnt": BASELINES["ttl-learnt"],
        "scout": Ours,
        "scout+time": _OURS["scout+time"],
        "belady": Belady,
    }
    for rate in (1.0, 6.0):
        workload = coding_sessions(path, per_minute=rate)
        for blocks in (300, 1_000, 3_000):
            fits = [r for r in workload.requests if len(r.prompt) + len(r.output) <= blocks]
            part = Workload(f"{workload.name}, {blocks} blocks", fits, workload.anchors)
            yield run_cell(part, float(blocks), blocks, policies, retained=retained)


def _speed(seed: int) -> dict[str, float]:
    """Return requests a second at 10^4 blocks."""
    workload = markov(seed=seed, agents=64, sessions=600, concurrency=120, history=1, anchor=(2, 6))
    found = {}
    for name, make in (("lru", BASELINES["lru"]), ("scout", Ours)):
        policy = make(workload, 10_000, 0)
        start = perf_counter()
        replay(workload.requests, 10_000, policy)
        found[f"{name} (requests/s)"] = len(workload.requests) / (perf_counter() - start)
    return found


def retention(
    sessions: Annotated[int, typer.Option(min=20, help="Sessions per workload of the grid.")] = 200,
    draws: Annotated[int, typer.Option(min=0, help="Random workloads; 0: none.")] = 200,
    coding: Annotated[
        Path | None, typer.Option(help="Gzipped JSON lines of recorded coding sessions.")
    ] = None,
    pool: Annotated[
        str,
        typer.Option(help="retained: running requests' blocks are extra; engine: they are not."),
    ] = "retained",
    plot: Annotated[
        Path | None, typer.Option(help="Write NAME.html, and NAME.png where matplotlib is.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workloads.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Replay workloads through every retention policy and compare them with the optimum.

    Example: scout bench retention --draws 50 --plot retention
    """
    if pool not in ("retained", "engine"):
        raise typer.BadParameter(f"pool is 'retained' or 'engine', not {pool!r}")
    retained = pool == "retained"
    console = Console()
    results: dict[str, object] = {}
    targets: list[Target] = []
    policies: dict[str, Make] = {**BASELINES, **_OURS, "belady": Belady}
    with progress() as bar:
        task = bar.add_task("grid", total=27)
        cells: list[Cell] = []
        for workload in _grid(sessions, seed):
            for level in _LEVELS:
                capacity = int(sum(workload.anchors) * level)
                cells.append(run_cell(workload, level, capacity, policies, retained=retained))
                bar.advance(task)
        results["grid"] = [cell.row() for cell in cells]
        results["share of the gap, mean"] = [
            {
                "policy": name,
                **{
                    f"{level:g}x": _mean([c.share(name) for c in cells if c.level == level])
                    for level in _LEVELS
                },
            }
            for name in policies
        ]
        targets += _grid_targets(cells)
        task = bar.add_task("safety", total=15)
        rows = []
        for cell, policy, bound in _safety(seed, retained):
            rows.append({**cell.row(), "policy": policy, "points over lru": cell.points(policy)})
            name = f"{policy} less lru, {cell.name}, {cell.level:g}x (points)"
            targets.append(Target.at_least(name, cell.points(policy), bound))
            bar.advance(task)
        results["safety"] = [
            {k: row[k] for k in ("workload", "cache", "policy", "lru", "points over lru")}
            for row in rows
        ]
        task = bar.add_task("cold and short", total=6)
        short: list[dict[str, object]] = []
        for cell, blocks in _short(retained):
            short.append({"blocks": blocks, **cell.row()})
            if cell.name.endswith("2"):
                name = f"cold and short, {blocks} blocks: scout less lru (points)"
                targets.append(Target.at_least(name, cell.points("scout"), 0.0))
                if blocks == 110:
                    share = cell.share("scout")
                    targets.append(
                        Target.at_least("cold and short, 110 blocks: share of the gap", share, 0.5)
                    )
            bar.advance(task)
        results["cold and short"] = short
        if draws:
            task = bar.add_task("random draws", total=draws)
            found: list[Cell | None] = []
            for drawn in _draws(draws, retained):
                found.append(drawn)
                bar.advance(task)
            targets += _draw_targets(found, results)
        if coding is not None:
            task = bar.add_task("coding sessions", total=6)
            rows = []
            for cell in _coding(coding, retained):
                rows.append(cell.row())
                for policy, bound in (("scout", 0.3), ("scout+time", 0.9)):
                    share = cell.share(policy)
                    name = f"{cell.name}: {policy}, share of the gap"
                    targets.append(Target.at_least(name, share, bound))
                bar.advance(task)
            results["coding sessions"] = rows
    speed = _speed(seed)
    results["speed at 10^4 blocks"] = [speed]
    for name, value in speed.items():
        targets.append(Target.at_least(f"speed at 10^4 blocks, {name}", value, 20_000))
    if plot is not None:
        from scout_server.bench.plot import draw

        results["plots"] = ", ".join(draw(plot, cells, list(policies)))
    emit(console, command_line(), seed, results, targets, json_output)


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

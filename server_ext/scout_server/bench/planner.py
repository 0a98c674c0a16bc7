"""`scout bench planner`: how long a decision takes and how good it is (issue 5, section 1)."""

import contextlib
import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from scout_server.bench.oracle import Optimum, lexicographic_optimum
from scout_server.bench.workers import measure_workers
from scout_server.policy.admission import AdmissionSettings, decide
from scout_server.policy.discretise import discretise
from scout_server.policy.engine import Snapshot, TaoSettings
from scout_server.policy.evaluators import TaoValue
from scout_server.policy.placement import Candidate, Problem, Room
from scout_server.policy.planners import planner as planner_named
from scout_server.policy.planners import planners
from scout_server.report import Target, command_line, emit, progress

__all__ = ["component_values", "instance", "planner", "stdout_to_stderr"]

SIZES = ((16, 2, 2.0, True), (64, 4, 20.0, False), (256, 16, 100.0, False))
"""(sessions, nodes, median ms that is required, must be exact)."""
CAPACITY = 49_152
QUANTUM = 1024


def instance(
    sessions: int, nodes: int, seed: int, *, load: float = 2.0, prefixes: int = 0
) -> tuple[list[Candidate], list[Room]]:
    """
    Return a random pool at *load* times what the nodes hold.

    Sizes are lognormal; seven sessions in ten have decayed credit on one node or two; eight in ten
    are ready; nodes are 60 to 100 % free.
    """
    rng = random.Random(seed)
    names = [f"n{i:02}" for i in range(nodes)]
    mean = CAPACITY * nodes * load / sessions
    pool: list[Candidate] = []
    for s in range(sessions):
        footprint = min(CAPACITY, max(512, int(rng.lognormvariate(0, 0.8) * mean * 0.73)))
        credits: dict[str, int] = {}
        if rng.random() < 0.7:
            held = footprint * rng.uniform(0.3, 1)
            credits[rng.choice(names)] = int(held * 2 ** -rng.expovariate(1.0))
            if rng.random() < 0.3:
                held = footprint * rng.uniform(0.1, 0.6)
                credits[rng.choice(names)] = int(held * 2 ** -rng.expovariate(0.5))
        shared = prefixes and rng.random() < 0.6
        pool.append(
            Candidate(
                key=f"r{s:03}",
                session=f"s{s:03}",
                footprint=footprint,
                prefix=f"p{rng.randrange(prefixes)}" if shared else None,
                prefix_tokens=2048 if shared else 0,
                ready=rng.random() < 0.8,
                arrived=rng.uniform(0, 30),
                credits=credits,
            )
        )
    rooms = [
        Room(
            node=name,
            tokens=int(CAPACITY * rng.uniform(0.6, 1)),
            slots=64,
            capacity=CAPACITY,
            running=1,
        )
        for name in names
    ]
    return pool, rooms


def component_values(
    pool: Sequence[Candidate], rooms: Sequence[Room], judge: TaoValue
) -> npt.NDArray[np.int64]:
    """Return the evaluator's integers as an array [session, node, component]."""
    return np.array([[judge.values(c, r.node) for r in rooms] for c in pool], dtype=np.int64)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what C code prints to stderr: HiGHS prints at times, and stdout is for one object."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        libc.fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


@dataclass(frozen=True, slots=True)
class _Case:
    """One instance, its optimum, and what rounding cost."""

    pool: list[Candidate]
    rooms: list[Room]
    problem: Problem
    parts: npt.NDArray[np.int64]
    optimum: Optimum
    unrounded: Optimum | None


def _case(sessions: int, nodes: int, seed: int, limit_s: float, *, unrounded: bool) -> _Case:
    judge = TaoValue()
    pool, rooms = instance(sessions, nodes, seed)
    problem, _ = discretise(pool, rooms, judge, quantum=QUANTUM)
    parts = component_values(pool, rooms, judge)
    fine = None
    with stdout_to_stderr():
        optimum = lexicographic_optimum(problem, parts, time_limit_s=limit_s)
        if unrounded:
            exact, _ = discretise(pool, rooms, judge, quantum=1)
            fine = lexicographic_optimum(exact, parts, time_limit_s=limit_s)
    return _Case(pool, rooms, problem, parts, optimum, fine)


def _sums(nodes: Sequence[int], parts: npt.NDArray[np.int64]) -> list[int]:
    return [
        sum(int(parts[s, i, c]) for s, i in enumerate(nodes) if i >= 0)
        for c in range(parts.shape[2])
    ]


def _share(ours: Sequence[int], best: Sequence[int]) -> list[float]:
    return [a / b if b else 1.0 for a, b in zip(ours, best, strict=True)]


def planner(
    instances: Annotated[int, typer.Option(min=1, help="Instances of every size.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Timed decisions per instance.")] = 15,
    limit: Annotated[float, typer.Option(help="Seconds of the oracle per stage.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the instances.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Measure decisions against the time that is required and the oracle's optimum.

    Example: scout bench planner --instances 5
    """
    settings = AdmissionSettings(quantum_tokens=QUANTUM, max_hold_s=1e9)
    judge = TaoValue()
    dp = planner_named("dp")
    sizes: list[dict[str, object]] = []
    others: list[dict[str, object]] = []
    targets: list[Target] = []
    with progress() as bar:
        task = bar.add_task("planning", total=len(SIZES) * instances)
        for sessions, nodes, required_ms, must_be_exact in SIZES:
            times, shares, exact, rounding, real = [], [], [], [], []
            beaten: dict[str, list[list[float]]] = {name: [] for name in planners()}
            proved = 0
            for index in range(instances):
                case = _case(sessions, nodes, seed + index, limit, unrounded=sessions <= 64)
                proved += case.optimum.proved
                own = []
                for _ in range(repeats):
                    began = time.perf_counter()
                    decide(
                        case.pool,
                        case.rooms,
                        evaluator=judge,
                        planner=dp,
                        settings=settings,
                        now=30.0,
                    )
                    own.append(1e3 * (time.perf_counter() - began))
                times.append(statistics.median(own))
                solution = dp.solve(case.problem)
                exact.append(solution.exact)
                shares.append(_share(_sums(solution.nodes, case.parts), case.optimum.sums))
                for name, other in planners().items():
                    sums = _sums(other.solve(case.problem).nodes, case.parts)
                    beaten[name].append(_share(sums, case.optimum.sums))
                if case.unrounded is not None:
                    plan = decide(
                        case.pool,
                        case.rooms,
                        evaluator=judge,
                        planner=dp,
                        settings=settings,
                        now=30.0,
                    )
                    real.append(_share(plan.objective, case.unrounded.sums))
                    rounding.append(_share(case.optimum.sums, case.unrounded.sums))
                bar.advance(task)
            label = f"{sessions} x {nodes}"
            median = statistics.median(times)
            worst = [min(s[c] for s in shares) for c in range(3)]
            sizes.append(
                {
                    "sessions x nodes": label,
                    "decision ms, median": round(median, 3),
                    "exact": f"{sum(exact)}/{instances}",
                    "oracle proved": f"{proved}/{instances}",
                    "credit, worst share": round(worst[0], 5),
                    "readiness, worst share": round(worst[1], 5),
                    "footprint, worst share": round(worst[2], 5),
                    "credit lost after topping up %": round(
                        100 * (1 - statistics.fmean(r[0] for r in real)), 2
                    )
                    if real
                    else None,
                    "credit lost to rounding %": round(
                        100 * (1 - statistics.fmean(r[0] for r in rounding)), 2
                    )
                    if rounding
                    else None,
                }
            )
            for name, found in beaten.items():
                others.append(
                    {
                        "sessions x nodes": label,
                        "planner": name,
                        **{
                            part: round(statistics.fmean(f[c] for f in found), 4)
                            for c, part in enumerate(judge.objective)
                        },
                    }
                )
            targets.append(Target.at_most(f"{label}: median decision, ms", median, required_ms))
            if must_be_exact:
                share = sum(exact) / instances
                targets.append(Target.at_least(f"{label}: share of exact plans", share, 1.0))
            for part, value in zip(judge.objective, worst, strict=True):
                name = f"{label}: worst {part} as a share of the oracle's"
                targets.append(Target.at_least(name, round(value, 5), 0.99))
    results = {
        "rule": f"nodes of {CAPACITY} tokens, quantum {QUANTUM}, twice over-subscribed; oracle:"
        " HiGHS, lexicographic in stages, on the same discretised problem; a decision is"
        " evaluation, discretisation, planning, spreading and topping up together",
        "sizes": sizes,
        "planners, mean share of the oracle": others,
        "preprocessing": _linear(seed),
        "workers, 256 x 16": measure_workers(_snapshot(seed)),
    }
    emit(Console(), command_line(), seed, results, targets, json_output)


def _snapshot(seed: int) -> Snapshot:
    pool, rooms = instance(256, 16, seed)
    return Snapshot(
        now=30.0,
        candidates=tuple(pool),
        rooms=tuple(rooms),
        reserved=(),
        settings=TaoSettings(),
    )


def _linear(seed: int) -> list[dict[str, object]]:
    """Return the cost of evaluation and discretisation per session and node, by size."""
    rows: list[dict[str, object]] = []
    for sessions, nodes in ((64, 4), (256, 4), (1024, 4), (256, 16), (1024, 16)):
        pool, rooms = instance(sessions, nodes, seed)
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            discretise(pool, rooms, TaoValue(), quantum=QUANTUM)
            best = min(best, time.perf_counter() - began)
        rows.append(
            {
                "sessions": sessions,
                "nodes": nodes,
                "ms": round(1e3 * best, 3),
                "us per session and node": round(1e6 * best / sessions / nodes, 3),
            }
        )
    return rows

"""`scout bench tao`: joint admission and placement against routers (issue 5, section 4)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from scout_server.bench.taosim import Cell, Outcome, Profile, Program, Route, simulate
from scout_server.policy.credit import CreditSettings
from scout_server.policy.engine import TaoSettings
from scout_server.policy.evaluators import EvaluatorSettings
from scout_server.replica.latency import LinearLatency
from scout_server.replica.replica import Replica
from scout_server.replica.request import Request
from scout_server.report import Target, command_line, emit, progress

__all__ = ["ABLATIONS", "BASELINES", "CELLS", "tao"]

PROFILES = (
    Profile(
        name="30B MoE, large GPU",
        latency=LinearLatency(
            step_s_fixed=0.007,
            prefill_s_per_token=1 / 9000,
            decode_s_per_sequence=5e-5,
            decode_s_per_kv_token=2e-8,
        ),
        kv_tokens=524_288,
    ),
    Profile(
        name="8B, medium GPU",
        latency=LinearLatency(
            step_s_fixed=0.010,
            prefill_s_per_token=1 / 12_000,
            decode_s_per_sequence=8e-5,
            decode_s_per_kv_token=5e-8,
        ),
        kv_tokens=393_216,
    ),
    Profile(
        name="70B, four GPUs",
        latency=LinearLatency(
            step_s_fixed=0.022,
            prefill_s_per_token=1 / 5000,
            decode_s_per_sequence=1e-4,
            decode_s_per_kv_token=3e-8,
        ),
        kv_tokens=524_288,
    ),
)
CELLS = tuple(
    Cell(profile=profile, nodes=nodes, concurrency=per_node * nodes)
    for profile, nodes in zip(PROFILES, (4, 2, 1), strict=True)
    for per_node in (14, 20, 26, 32)
)
"""
Three profiles, on 4, 2 and 1 nodes, with four concurrencies each: about 1 to 2 times the KV room.

With 10 programs a node (load 0.6 to 0.8) all good arms are equal: there is nothing to gain.
"""


class RoundRobin:
    """Every turn on the next node."""

    queue = None

    def __init__(self) -> None:
        self._next = -1

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the next index."""
        self._next += 1
        return self._next % len(replicas)


class Sticky:
    """A session stays where it began: on the node with fewest requests then."""

    queue = None

    def __init__(self) -> None:
        self._home: dict[int, int] = {}

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the session's node."""
        if program.index not in self._home:
            self._home[program.index] = _least(replicas)
        return self._home[program.index]


class CacheAware:
    """The node that holds most of the prompt, unless the load is unbalanced."""

    queue = None

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the node with the longest match, else the least loaded one."""
        load = [r.unfinished for r in replicas]
        if max(load) - min(load) > 32 and max(load) > 1.5 * min(load):
            return _least(replicas)
        found = [len(r.pool.lookup(request.hashes, len(request.hashes))) for r in replicas]
        best = max(range(len(replicas)), key=lambda n: (found[n], -load[n], -n))
        return best if found[best] > 0.5 * len(request.hashes) else _least(replicas)


class KvAware:
    """Least work to prefill and to hold, with queues that put long programs first."""

    @staticmethod
    def queue(request: Request, now: float) -> float:
        """Return the key of a replica's queue: turns already taken, most first."""
        return -request.priority

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the node with the smallest cost in blocks."""
        need = len(request.hashes)

        def cost(n: int) -> tuple[float, int]:
            replica = replicas[n]
            missing = need - len(replica.pool.lookup(request.hashes, need))
            active = sum(len(r.hashes) for r in replica.requests)
            return missing + active, n

        return min(range(len(replicas)), key=cost)


def _least(replicas: Sequence[Replica]) -> int:
    return min(range(len(replicas)), key=lambda n: (replicas[n].unfinished, n))


BASELINES: dict[str, Callable[[], Route | TaoSettings]] = {
    "round robin": RoundRobin,
    "cache-aware": CacheAware,
    "sticky": Sticky,
    "ThunderAgent-like": lambda: TaoSettings(
        evaluator="thunderagent", planner="value-best-fit", origin_share=1.0
    ),
    "Dynamo-like": KvAware,
}
ABLATIONS: dict[str, Callable[[], Route | TaoSettings]] = {
    "TAO, no credit": lambda: TaoSettings(
        objective=EvaluatorSettings(objective=("readiness", "footprint")), origin_share=1.0
    ),
    "TAO, no decay": lambda: TaoSettings(credit=CreditSettings(half_life_s=1e9)),
    "TAO, no readiness": lambda: TaoSettings(use_readiness=False),
    "TAO, ThunderAgent order": lambda: TaoSettings(evaluator="thunderagent"),
    "TAO, best-fit decreasing": lambda: TaoSettings(planner="best-fit-decreasing"),
    "TAO, only reported credit": lambda: TaoSettings(credit=CreditSettings(trust_computed=False)),
    "TAO, every event decided": lambda: TaoSettings(joint_s=0.0),
}


def _run(arm: Route | TaoSettings, cell: Cell, seed: int) -> Outcome:
    if isinstance(arm, TaoSettings):
        return simulate(cell, seed, tao=arm)
    return simulate(cell, seed, route=arm)


def _name(cell: Cell) -> str:
    return f"{cell.profile.name}: {cell.nodes} nodes, {cell.concurrency} programs"


def tao(
    ablations: Annotated[
        bool, typer.Option(help="Run the ablations in every cell, not in one only.")
    ] = False,
    cells: Annotated[int, typer.Option(min=1, max=len(CELLS), help="Cells to run.")] = len(CELLS),
    seed: Annotated[int, typer.Option(help="Seed of the programs.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Compare TAO with routers on replicas under a virtual clock, cell by cell.

    Example: scout bench tao --cells 4
    """
    rows: list[dict[str, object]] = []
    found: dict[str, dict[str, Outcome]] = {}
    chosen = CELLS[:cells]
    double = min(chosen, key=lambda c: (c.nodes != 4, abs(c.concurrency - 128)))
    arms = {**BASELINES, "TAO": TaoSettings}
    with progress() as bar:
        task = bar.add_task("simulating", total=len(chosen) * len(arms))
        for cell in chosen:
            here = arms | (ABLATIONS if ablations or cell is double else {})
            for arm, make in here.items():
                outcome = _run(make(), cell, seed)
                found.setdefault(_name(cell), {})[arm] = outcome
                figures = {k: round(v, 4) for k, v in asdict(outcome).items()}
                rows.append({"cell": _name(cell), "arm": arm, **figures})
                if arm in arms:
                    bar.advance(task)
    summary, targets = _judge(found)
    targets += _double(found[_name(double)], _name(double))
    emit(
        Console(),
        command_line(),
        seed,
        {
            "rule": "three times as many programs as are alive; best baseline of a cell and figure"
            " among " + ", ".join(BASELINES) + "; latency is a program's, from its first request"
            " to its last answer; profiles are chosen, not measured",
            "cells": summary,
            "runs": rows,
        },
        targets,
        json_output,
    )


def _judge(
    found: dict[str, dict[str, Outcome]],
) -> tuple[list[dict[str, object]], list[Target]]:
    """Return TAO's gain over the best baseline per cell, and the targets on them."""
    gains: list[dict[str, float]] = []
    summary: list[dict[str, object]] = []
    for name, arms in found.items():
        ours = arms["TAO"]
        rest = [arms[b] for b in BASELINES]
        gain = {
            "latency %": 100 * (1 - ours.latency_s / min(o.latency_s for o in rest)),
            "TTFT %": 100 * (1 - ours.ttft_s / min(o.ttft_s for o in rest)),
            "decode throughput %": 100
            * (ours.decode_tokens_per_s / max(o.decode_tokens_per_s for o in rest) - 1),
        }
        gains.append(gain)
        best = min(BASELINES, key=lambda b: arms[b].latency_s)
        shown = {k: round(v, 2) for k, v in gain.items()}
        summary.append({"cell": name, "load": round(ours.load, 2), "best baseline": best, **shown})
    won = sum(g["latency %"] > 0 for g in gains)
    needed = 11 if len(gains) == 12 else math.ceil(11 / 12 * len(gains))
    planning = max(arms["TAO"].planning_share for arms in found.values())
    targets = [
        Target.at_least(f"cells of {len(gains)} with lower mean latency", won, needed),
        Target.at_least("largest gain in mean latency, %", _most(gains, "latency %"), 26.8),
        Target.at_least("largest gain in mean TTFT, %", _most(gains, "TTFT %"), 36.3),
        Target.at_least(
            "largest gain in decode throughput, %", _most(gains, "decode throughput %"), 29.5
        ),
        Target.at_most("planner and bookkeeping, worst share of run time, %", 100 * planning, 0.12),
    ]
    return summary, targets


def _most(gains: Sequence[dict[str, float]], name: str) -> float:
    return round(max(g[name] for g in gains), 2)


def _double(arms: dict[str, Outcome], name: str) -> list[Target]:
    """Return the targets at about twice over-subscription."""
    ours, sticky = arms["TAO"], arms["sticky"]
    ratio = ours.decode_tokens_per_s / sticky.decode_tokens_per_s
    place = f"{name}, load {ours.load:.2f}"
    return [
        Target.at_least(f"throughput over sticky routing ({place})", round(ratio, 3), 1.6),
        Target.at_least(f"pool hit rate ({place})", round(ours.hit_rate, 3), 0.50),
        Target.at_most(f"TTFT p99, s ({place})", round(ours.ttft_p99_s, 1), 300),
    ]

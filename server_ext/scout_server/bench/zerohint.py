"""`scout bench zero-hint`: the gain that is left when clients say nothing (issue 3, section 4)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console

from scout_server.bench.recording import Program, Replay, record
from scout_server.demo.comparison import PLANS
from scout_server.demo.workload import make_jobs
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.ingress import IngressSettings
from scout_server.policy.runtime import PolicySettings
from scout_server.report import Target, command_line, emit, progress

__all__ = ["zero_hint"]

_SILENT = IngressSettings(tool_calls=False)


def _rates(
    rounds: Sequence[Sequence[Program]],
    settings: EmbeddedSettings,
    concurrency: int,
    ingress: IngressSettings | None = None,
) -> list[float]:
    """Return the hit rate of every round but the first, which warms the server."""
    replay = Replay(settings, PolicySettings(), ingress)
    queried = hit = 0
    rates: list[float] = []
    for number, programs in enumerate(rounds):
        counters = replay.run(programs, concurrency=concurrency)
        if number:
            rates.append((counters.hit_tokens - hit) / (counters.queried_tokens - queried))
        queried, hit = counters.queried_tokens, counters.hit_tokens
    return rates


def _row(rates: Sequence[float], lru: Sequence[float]) -> Mapping[str, float]:
    gains = [100 * (a - b) for a, b in zip(rates, lru, strict=True)]
    return {
        "hit rate": statistics.fmean(rates),
        "points over LRU": statistics.fmean(gains),
        "least": min(gains),
        "most": max(gains),
    }


def zero_hint(
    repetitions: Annotated[int, typer.Option(min=1, max=20, help="Rounds that count.")] = 3,
    kv_blocks: Annotated[
        int | None, typer.Option(min=64, help="KV blocks; default: the demo's.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at a time; default: the demo's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the users' inputs.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Replay the demo's sessions with and without hints, in virtual time, against the same engine.

    Example: scout bench zero-hint --json
    """
    plan = PLANS["embedded"]
    blocks, at_once = kv_blocks or plan.kv_blocks, concurrency or plan.mix.concurrency
    jobs = [make_jobs(plan.mix, seed + index) for index in range(repetitions + 1)]
    with progress() as bar:
        task = bar.add_task("recording the examples", total=sum(map(len, jobs)))
        hinted = [
            record(each, concurrency=at_once, done=lambda: bar.advance(task)) for each in jobs
        ]
        silent = [[program.stripped() for program in each] for each in hinted]
        scout = EmbeddedSettings(kv_blocks=blocks)
        lru = EmbeddedSettings(kv_blocks=blocks, policy="lru")
        arms = {
            "LRU": (hinted, lru, None),
            "hinted": (hinted, scout, None),
            "zero-hint": (silent, scout, None),
            "zero-hint, tool calls unread": (silent, scout, _SILENT),
        }
        bar.update(task, description="replaying", total=len(arms), completed=0)
        rates: dict[str, list[float]] = {}
        for name, (rounds, settings, ingress) in arms.items():
            rates[name] = _rates(rounds, settings, at_once, ingress)
            bar.advance(task)
    rows = {name: _row(each, rates["LRU"]) for name, each in rates.items()}
    gain = rows["hinted"]["points over LRU"]
    share = rows["zero-hint"]["points over LRU"] / gain if gain > 0 else None
    requests = sum(1 for each in hinted[1:] for p in each for i in p.items if i.body is not None)
    results = {
        "rule": "sessions of the examples, recorded against an engine that takes no time and"
        " replayed closed-loop in virtual time; a first round warms each arm and does not count;"
        " zero-hint: the same requests without our headers and events",
        "KV blocks": blocks,
        "sessions at a time": at_once,
        "requests that count": requests,
        "events": sum(1 for each in hinted[1:] for p in each for i in p.items if i.event),
        "arms": rows,
        "share of the hinted gain": share,
    }
    targets = [Target.at_least("zero-hint, share of the hinted gain", share, 0.7)]
    emit(Console(), command_line(), seed, results, targets, json_output)

"""`scout bench zero-hint`: the gain that is left when clients say nothing (issue 3, section 4)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console

from scout_sdk import _wire
from scout_server.bench.recording import Program, Replay, record
from scout_server.bench.toolsessions import tool_sessions
from scout_server.demo.comparison import PLANS
from scout_server.demo.workload import make_jobs
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.ingress import IngressSettings
from scout_server.policy.runtime import PolicySettings
from scout_server.report import Target, command_line, emit, progress

__all__ = ["zero_hint"]

_SILENT = IngressSettings(tool_calls=False)
_TOOL_SESSIONS, _TOOL_TURNS, _TOOL_BLOCKS, _TOOLS_AT_ONCE = 30, 8, 600, 16


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


def _arms(
    rounds: Sequence[Sequence[Program]], blocks: int, concurrency: int
) -> dict[str, Mapping[str, float]]:
    """Replay *rounds* against each arm; return a row for each."""
    silent = [[program.stripped() for program in each] for each in rounds]
    scout = EmbeddedSettings(kv_blocks=blocks)
    lru = _rates(rounds, EmbeddedSettings(kv_blocks=blocks, policy="lru"), concurrency)
    return {
        "LRU": _row(lru, lru),
        "hinted": _row(_rates(rounds, scout, concurrency), lru),
        "zero-hint": _row(_rates(silent, scout, concurrency), lru),
        "zero-hint, tool calls unread": _row(_rates(silent, scout, concurrency, _SILENT), lru),
    }


def _share(rows: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return what is left of the hinted gain without hints; None where there was none."""
    gain = rows["hinted"]["points over LRU"]
    return rows["zero-hint"]["points over LRU"] / gain if gain > 0 else None


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
        bar.update(task, description="replaying", total=2, completed=0)
        rows = _arms(hinted, blocks, at_once)
        bar.advance(task)
        tools = [
            tool_sessions(_TOOL_SESSIONS, turns=_TOOL_TURNS, seed=1000 * seed + number)
            for number in range(repetitions + 1)
        ]
        tool_rows = _arms(tools, _TOOL_BLOCKS, _TOOLS_AT_ONCE)
        bar.advance(task)
    share = _share(rows)
    requests = sum(1 for each in hinted[1:] for p in each for i in p.items if i.body is not None)
    results = {
        "rule": "sessions of the examples, recorded against an engine that takes no time and"
        " replayed closed-loop in virtual time; a first round warms each arm and does not count;"
        " zero-hint: the same requests without our headers and events. The models of the examples"
        " call no tools themselves, so sessions made up for it show what reading tool calls adds",
        "KV blocks": blocks,
        "sessions at a time": at_once,
        "requests that count": requests,
        "of them with hints": sum(
            1
            for each in hinted[1:]
            for p in each
            for i in p.items
            if i.body is not None and _wire.decode(i.headers).hints is not None
        ),
        "events": sum(1 for each in hinted[1:] for p in each for i in p.items if i.event),
        "arms": rows,
        "share of the hinted gain": share,
        "made-up sessions that call tools": tool_rows,
        "their share of the hinted gain (no target)": _share(tool_rows),
    }
    targets = [Target.at_least("zero-hint, share of the hinted gain", share, 0.7)]
    emit(Console(), command_line(), seed, results, targets, json_output)

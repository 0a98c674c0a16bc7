"""`scout sim`: run, compare and sweep simulations of agent programs."""

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scout_sdk._errors import ConfigError, ScoutError
from scout_server.report import Target, command_line, emit, progress
from scout_server.sim.accuracy_cli import register_accuracy
from scout_server.sim.consoles import to_write, wide_console
from scout_server.sim.html import write_report
from scout_server.sim.paper import EXPERIMENTS, Finding, run_experiment
from scout_server.sim.record import CellRecord
from scout_server.sim.scenario import Scenario, defaults_yaml, load_document, scenario_of
from scout_server.sim.simulate import programs_of
from scout_server.sim.sweep import (
    Axis,
    axes_of,
    combinations,
    combine,
    scalar,
    split_axes,
    validated,
)
from scout_server.sim.sweep import sweep as run_sweep
from scout_server.sim.tools import durations_by_tool, fit_tools, save_tools
from scout_server.sim.traces import TraceReader
from scout_server.sim.traces.inspection import inspect

__all__ = ["sim_app"]

sim_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Simulate agent programs: which policy, on which hardware, and would Scout help.",
)

Config = Annotated[Path | None, typer.Argument(help="Scenario (YAML or JSON); none: the defaults.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override, such as residency.policy=lru; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", callback=to_write, help="Write a self-contained HTML report."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", callback=to_write, help="Write the records as JSON lines."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Processes; 0: one per core.")]


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"scout: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(1)


def _document(config: Path | None, overrides: Sequence[str] | None) -> dict[str, object]:
    document = load_document(config) if config is not None else {}
    for text in overrides or ():
        place, sign, value = text.partition("=")
        if not sign:
            raise typer.BadParameter(f"{text!r} is not of the form section.setting=value")
        document = combine(document, place, scalar(value))
    return document


def _table(records: Sequence[CellRecord]) -> Table:
    table = Table(title="simulated", title_justify="left", padding=(0, 0), pad_edge=False)
    table.add_column("run")
    columns: tuple[tuple[str, Callable[[CellRecord], str]], ...] = (
        ("programs", lambda r: f"{r.programs}"),
        ("JCT s", lambda r: f"{r.jct_s.mean:.2f}"),
        ("p50", lambda r: f"{r.jct_s.p50:.2f}"),
        ("p99", lambda r: f"{r.jct_s.p99:.1f}"),
        ("TTFT s", lambda r: f"{r.ttft_s.mean:.3f}"),
        ("p99", lambda r: f"{r.ttft_s.p99:.2f}"),
        ("hits", lambda r: f"{r.hit_rate:.3f}"),
        ("tok/s", lambda r: f"{r.tokens_per_s:.0f}"),
        ("busy", lambda r: f"{r.busy_fraction:.2f}"),
        ("preempt", lambda r: f"{r.preemptions}"),
    )
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(escape(record.label), *(value(record) for _, value in columns))
    return table


def _report(
    records: Sequence[CellRecord],
    *,
    scenario: Scenario,
    as_json: bool,
    html: Path | None,
    out: Path | None,
) -> None:
    if out is not None:
        out.write_text("".join(record.to_json() + "\n" for record in records), "utf-8")
    if html is not None:
        info, programs = programs_of(scenario)
        curve = inspect(info, programs, curve_blocks=300_000).curve
        write_report(html, records, command_line(), curve)
    seed = scenario.seed
    console = wide_console()
    if as_json:
        emit(
            console, command_line(), seed, {"runs": [json.loads(r.to_json()) for r in records]},
            (), json_output=True,
        )  # fmt: skip
        return
    emit(console, command_line(), seed, {})
    console.print(_table(records))
    if records and records[0].skipped_lines:
        console.print(f"{records[0].skipped_lines} broken lines of the trace were left out:")
        for reason in records[0].skip_reasons:
            console.print(f"  {reason}", markup=False, highlight=False)
    for record in records:
        if record.rejected:
            console.print(
                f"{record.label}: {record.rejected} programs were given up: a turn is larger than"
                f" the pool of {record.kv_blocks} blocks",
                markup=False,
            )
    if html is not None:
        console.print(f"report: {html}", markup=False)


@sim_app.command("config")
def config_command() -> None:
    """Print every setting with its default, as YAML."""
    typer.echo(defaults_yaml(), nl=False)


@sim_app.command("run")
def run_command(
    config: Config = None,
    overrides: Set = None,
    html: Html = None,
    out: Out = None,
    json_output: Json = False,
) -> None:
    """Simulate one scenario, under LRU and under its own policy."""
    try:
        document, left = split_axes(_document(config, overrides))
        chosen = scenario_of(document).residency.policy
        policies = ["lru"] if chosen == "lru" else ["lru", chosen]
        axes = [Axis("residency.policy", tuple(policies))]
        scenario, records = _sweep(document, axes, jobs=1, resume=None)
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    if left:
        names = ", ".join(axis.place for axis in left)
        Console(stderr=True).print(
            f"scout: one scenario was run; for every value of {names} use scout sim sweep",
            markup=False,
        )
    _report(records, scenario=scenario, as_json=json_output, html=html, out=out)


def _sweep(
    document: dict[str, object], axes: Sequence[Axis], *, jobs: int, resume: Path | None
) -> tuple[Scenario, list[CellRecord]]:
    scenario = validated(list(combinations(document, axes)))[0]
    records = run_sweep(document, axes, jobs=jobs, console=Console(stderr=True), resume=resume)
    return scenario, records


@sim_app.command("compare")
def compare_command(
    config: Config = None,
    overrides: Set = None,
    policies: Annotated[
        str, typer.Option(help="Residency policies, comma separated.")
    ] = "lru,static-ttl,adaptive-ttl,min-waste,keep,scout,oracle-next-use",
    html: Html = None,
    out: Out = None,
    jobs: Jobs = 0,
    json_output: Json = False,
) -> None:
    """Simulate one scenario under several residency policies."""
    try:
        document, axes = split_axes(_document(config, overrides))
        axes = [a for a in axes if a.place != "residency.policy"]
        axes.append(Axis("residency.policy", tuple(p.strip() for p in policies.split(","))))
        scenario, records = _sweep(document, axes, jobs=jobs, resume=None)
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    _report(records, scenario=scenario, as_json=json_output, html=html, out=out)


@sim_app.command("sweep")
def sweep_command(
    config: Config = None,
    overrides: Set = None,
    axis: Annotated[
        list[str] | None,
        typer.Option("--axis", "-a", help="Values, such as cell.replicas=1,2,4; repeatable."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            callback=to_write,
            help="File of finished runs: read at the start, extended after each run.",
        ),
    ] = None,
    html: Html = None,
    out: Out = None,
    jobs: Jobs = 0,
    json_output: Json = False,
) -> None:
    """Simulate every combination of the axes (`sweep:` in the file, or --axis)."""
    try:
        document, axes = split_axes(_document(config, overrides))
        axes = [*axes, *axes_of(axis or ())]
        scenario, records = _sweep(document, axes, jobs=jobs, resume=resume)
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    _report(records, scenario=scenario, as_json=json_output, html=html, out=out)


@sim_app.command("fit-tools")
def fit_tools_command(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Scout trace.")],
    out: Annotated[
        Path | None, typer.Argument(callback=to_write, help="File to write; none: print only.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out broken lines, and count them; else fatal.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Fit a distribution per tool: lognormal body, Pareto tail, timeout; check its quantiles."""
    try:
        reader = TraceReader(trace, skip_bad=skip_bad)
        fits = fit_tools(reader)
        durations = durations_by_tool(reader, fits)
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    if not fits:
        raise _fail(ConfigError(f"{trace.name}: no turn follows another, so no gap can be fitted"))
    rows: dict[str, object] = {}
    for name, fit in fits.items():
        values = sorted(durations[name])
        row: dict[str, object] = {
            "calls": fit.samples,
            "cut off": fit.censored,
            "median s": math.exp(fit.log_median),
            "sigma": fit.log_sigma,
            "tail index": fit.tail_index,
            "cap s": fit.cap_s,
        }
        for share in (0.5, 0.9, 0.99):
            measured = values[int(share * (len(values) - 1))]
            row[f"p{share * 100:.0f} s"] = measured
            row[f"fit/p{share * 100:.0f}"] = fit.quantile(share) / max(measured, 1e-6)
        rows[name] = row
    if out is not None:
        save_tools(out, fits)
    results: dict[str, object] = {"tools": rows}
    if reader.skips.skipped:
        results["skipped lines"] = reader.skips.skipped
    emit(wide_console(), command_line(), None, results, (), json_output)


@sim_app.command("paper")
def paper_command(
    only: Annotated[
        str, typer.Option(help=f"Comma separated, of {', '.join(EXPERIMENTS)}; none: all.")
    ] = "",
    scale: Annotated[float, typer.Option(min=0.2, help="Times the number of programs.")] = 1.0,
    jobs: Jobs = 0,
    json_output: Json = False,
) -> None:
    """Run small versions of published findings; print what was found beside what was reported."""
    names = [n.strip() for n in only.split(",") if n.strip()] or list(EXPERIMENTS)
    unknown = [n for n in names if n not in EXPERIMENTS]
    if unknown:
        known = ", ".join(EXPERIMENTS)
        raise _fail(ConfigError(f"unknown experiment {unknown[0]!r}; known: {known}"))
    findings: list[Finding] = []
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("experiments", total=len(names))
        with ProcessPoolExecutor(min(jobs or os.cpu_count() or 1, len(names))) as pool:
            for found in pool.map(run_experiment, names, [scale] * len(names)):
                findings.extend(found)
                bar.advance(task)
    rows = [
        {
            "statement": f.statement,
            "reported": f.reported,
            "found": f.found,
            "shows": f.shows,
            "note": f.note,
        }
        for f in findings
    ]
    shown = sum(f.shows for f in findings)
    targets = [Target.at_least("findings that show here", float(shown), float(len(findings)))]
    emit(wide_console(), command_line(), 1, {"findings": rows}, targets, json_output)


register_accuracy(sim_app)

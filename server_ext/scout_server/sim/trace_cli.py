"""`scout trace`: convert, inspect and judge traces of agent programs."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scout_sdk._errors import ScoutError
from scout_server.report import command_line, emit
from scout_server.sim.advise import advise
from scout_server.sim.consoles import to_write, wide_console
from scout_server.sim.html import inspection_html, write_report
from scout_server.sim.traces import Program, TraceReader, write_trace
from scout_server.sim.traces.convert import CONVERTERS, SourceOptions
from scout_server.sim.traces.convert.source import checked
from scout_server.sim.traces.inspection import Inspection
from scout_server.sim.traces.inspection import inspect as inspect_trace

__all__ = ["trace_app"]

trace_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Convert, inspect and judge traces of agent programs.",
)

SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out broken lines, and count them; else fatal.")
]


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"scout: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(1)


@trace_app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(CONVERTERS))}.")],
    path: Annotated[Path, typer.Argument(exists=True, help="File (may be .gz), folder or tar.")],
    out: Annotated[
        Path, typer.Argument(callback=to_write, help="Trace to write; .gz is compressed.")
    ],
    skip_bad: SkipBad = False,
    starts_per_minute: Annotated[
        float, typer.Option(min=0.001, help="Arrivals where the source has no common clock.")
    ] = 1.0,
    programs: Annotated[int, typer.Option(min=0, help="Most programs; 0: all.")] = 0,
) -> None:
    """Convert a trace of another tool into Scout's format."""
    if source not in CONVERTERS:
        known = ", ".join(sorted(CONVERTERS))
        raise _fail(ValueError(f"unknown source {source!r}; known: {known}"))
    options = SourceOptions(skip_bad=skip_bad, starts_per_minute=starts_per_minute)
    turns = 0

    def limited(found: Iterator[Program]) -> Iterator[Program]:
        nonlocal turns
        for number, program in enumerate(found):
            if programs and number >= programs:
                return
            turns += len(program.turns)
            yield program

    try:
        info, found = CONVERTERS[source](path, options)
        count = write_trace(out, info, limited(checked(info, found, path.name, options)))
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    typer.echo(f"{count} programs, {turns} turns written to {out}")
    if options.skips.skipped:
        typer.echo(f"{options.skips.skipped} entries left out:", err=True)
        for reason in options.skips.reasons:
            typer.echo(f"  {reason}", err=True)


@trace_app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Scout trace.")],
    skip_bad: SkipBad = False,
    curve: Annotated[int, typer.Option(min=0, help="Cache sizes of the reuse curve; 0: none.")] = 7,
    html: Annotated[
        Path | None, typer.Option(callback=to_write, help="Write the plots as an HTML page.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print counts, gap quantiles, reuse, predictability, and working set against cache size."""
    try:
        reader = TraceReader(path, skip_bad=skip_bad)
        found = inspect_trace(reader.info, reader, sizes=curve)
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    if html is not None:
        html.write_text(inspection_html(found, command_line()), "utf-8")
    console = wide_console()
    results = dataclasses.asdict(found) if json_output else _readable(found)
    if reader.skips.skipped:
        results["skipped lines"] = reader.skips.skipped
    emit(console, command_line(), None, results, (), json_output)
    if not json_output:
        for reason in reader.skips.reasons:
            console.print(f"skipped: {reason}", markup=False)


def _bar(share: float, width: int = 30) -> str:
    return "█" * round(share * width)


def _readable(found: Inspection) -> dict[str, object]:
    def row(summary: object) -> dict[str, object]:
        values = dataclasses.asdict(summary)  # type: ignore[call-overload]
        return {k: values[k] for k in ("count", "mean", "p50", "p90", "p99", "most")}

    return {
        "per turn": {
            "turns of a program": row(found.turns_per_program),
            "input tokens": row(found.input_per_turn),
            "output tokens": row(found.output_per_turn),
            "gap s": row(found.gap_s),
        },
        "gaps by tool, s": {name: row(s) for name, s in found.gap_by_tool.items()},
        "gap distribution": [
            {"up to s": value, "share": share, "": _bar(share)}
            for value, share in found.gap_points[:: max(len(found.gap_points) // 10, 1)]
        ],
        "next agent and next tool, learnt online": {
            "agent": dataclasses.asdict(found.agents_next),
            "tool": dataclasses.asdict(found.tools_next),
        },
        "hit rate against cache size": [
            {
                "blocks": p.blocks, "tokens": p.tokens, "LRU": p.lru, "Bélády": p.belady,
                "": _bar(p.lru) + "░" * (round(p.belady * 30) - round(p.lru * 30)),
            }
            for p in found.curve
        ],
        "source": f"{found.info.source} ({found.info.hashes.value} hashes,"
        f" {found.info.block_tokens}-token blocks, scope {found.info.scope.value})",
        "programs": found.programs,
        "turns": found.turns,
        "aborted": found.aborted,
        "agents": ", ".join(f"{n} {c}" for n, c in list(found.agents.items())[:8]),
        "parallel turns": found.parallel_turns,
        "joins": found.joins,
        "gaps that are lower bounds": found.censored,
        "prompt tokens": found.input_tokens,
        "reuse, cache without limit": found.reuse,
        "working set, tokens: mean": found.live_tokens_mean,
        "working set, tokens: p90": found.live_tokens_p90,
        "working set, tokens: peak": found.live_tokens_peak,
        "curve measured on blocks": found.curve_programs_blocks,
    }  # fmt: skip


@trace_app.command("advise")
def advise_command(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Scout trace.")],
    gpu: Annotated[str, typer.Option(help="Accelerator of a replica.")] = "H100",
    model: Annotated[str, typer.Option(help="Model.")] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1)] = 1,
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Programs at once, closed loop; 0: as recorded.")
    ] = 0,
    speedup: Annotated[float, typer.Option(min=0.001, help="Divide arrival times by it.")] = 1.0,
    kv_blocks: Annotated[int, typer.Option(min=0, help="Instead of what fits.")] = 0,
    programs: Annotated[int, typer.Option(min=0, help="First so many; 0: all.")] = 100,
    skip_bad: SkipBad = False,
    html: Annotated[
        Path | None, typer.Option(callback=to_write, help="Write an HTML report.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether Scout would help on this trace, by how much, and if not, why."""
    try:
        found = advise(
            path,
            gpu=gpu,
            model=model,
            tensor_parallel=tensor_parallel,
            replicas=replicas,
            concurrency=concurrency,
            speedup=speedup,
            kv_blocks=kv_blocks,
            programs=programs,
            skip_bad=skip_bad,
        )
    except (ScoutError, OSError) as error:
        raise _fail(error) from error
    if html is not None:
        write_report(html, found.records, command_line())
    results: dict[str, object] = {
        "policies": {
            r.label: {
                "JCT mean s": r.jct_s.mean,
                "JCT p99 s": r.jct_s.p99,
                "TTFT mean s": r.ttft_s.mean,
                "hit rate": r.hit_rate,
                "tokens/s": r.tokens_per_s,
                "preempted": r.preemptions,
            }
            for r in found.records
        },
        "programs": found.programs,
        "turns": found.records[0].turns,
        "KV tokens of a replica": found.pool_tokens,
        "pressure (contexts under way / KV tokens)": found.pressure,
        "reuse, cache without limit": found.inspection.reuse,
        "verdict": found.verdict,
    }
    if found.skips.skipped:
        results["skipped lines"] = found.skips.skipped
    if json_output:
        results["worth it"] = found.worth_it
        results["why"] = list(found.reasons)
    console = wide_console()
    emit(console, command_line(), None, results, (), json_output)
    if not json_output:
        for reason in found.reasons:
            console.print(f" - {reason}", markup=False, highlight=False)
        for skip in found.skips.reasons:
            console.print(f"skipped: {skip}", markup=False)

"""`scout bench gateway`: what the gateway adds to a direct connection (issue 5, section 2)."""

import asyncio
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from scout_server.bench.streams import Load, run_load
from scout_server.report import Target, command_line, emit, progress

__all__ = ["gateway", "gateway_port", "started", "stop"]

_CHUNKS = 64
_GAP_S = 0.02


async def started(*args: str) -> Process:
    """Start this Python with *args*, its output in pipes."""
    return await asyncio.create_subprocess_exec(sys.executable, *args, stdout=PIPE, stderr=PIPE)


async def gateway_port(process: Process) -> int:
    """Return the port that a starting gateway says it listens on."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while line := await process.stderr.readline():
            if b"listening on" in line:
                return int(line.rsplit(b":", 1)[1])
    raise RuntimeError("the gateway did not start")


async def stop(process: Process) -> None:
    """End a process, and wait for it."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _measure(streams: int, seconds: float, rounds: int) -> tuple[list[Load], list[Load]]:
    """Return the loads of direct and of gateway rounds, taken in turn."""
    backend = await started("-m", "scout_server.bench.streams", "0", str(_CHUNKS), str(_GAP_S))
    front: Process | None = None
    try:
        assert backend.stdout is not None
        direct = int(await backend.stdout.readline())
        front = await started(
            "-m",
            "scout_server.cli",
            "gateway",
            "--port",
            "0",
            "--node",
            f"http://127.0.0.1:{direct}",
        )
        through = await gateway_port(front)
        ends: tuple[list[Load], list[Load]] = ([], [])
        with progress() as bar:
            task = bar.add_task("streaming", total=2 * rounds + 1)
            await run_load(through, streams=streams, seconds=min(2.0, seconds))  # warm
            bar.advance(task)
            for turn in range(rounds):
                order = (
                    ((0, direct), (1, through)) if turn % 2 == 0 else ((1, through), (0, direct))
                )
                for which, port in order:
                    ends[which].append(await run_load(port, streams=streams, seconds=seconds))
                    bar.advance(task)
        return ends
    finally:
        if front is not None:
            await stop(front)
        await stop(backend)


def _quantile(values: Sequence[float], q: int) -> float:
    """Return the q-th percentile in milliseconds."""
    return 1e3 * statistics.quantiles(values, n=100, method="inclusive")[q - 1]


def _row(loads: Sequence[Load], seconds: float) -> dict[str, object]:
    first = [v for load in loads for v in load.first]
    late = [v for load in loads for v in load.late]
    return {
        "first event p50 ms": round(_quantile(first, 50), 3),
        "first event p99 ms": round(_quantile(first, 99), 3),
        "event lateness p50 ms": round(_quantile(late, 50), 3),
        "event lateness p99 ms": round(_quantile(late, 99), 3),
        "streams/s": round(sum(load.streams for load in loads) / len(loads) / seconds, 2),
        "events": len(late),
        "failed": sum(load.failed for load in loads),
    }


def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Streams open at the same time.")] = 200,
    seconds: Annotated[float, typer.Option(min=2, help="Length of one round.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind, in turn.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Measure what the gateway adds to streams, against the same server without it.

    Example: scout bench gateway --streams 200
    """
    direct, through = asyncio.run(_measure(streams, seconds, rounds))
    rows = {"direct": _row(direct, seconds), "gateway": _row(through, seconds)}
    added: list[dict[str, float]] = []
    for a, b in zip(direct, through, strict=True):
        added.append(
            {
                "first p50": _quantile(b.first, 50) - _quantile(a.first, 50),
                "first p99": _quantile(b.first, 99) - _quantile(a.first, 99),
                "event p50": _quantile(b.late, 50) - _quantile(a.late, 50),
                "event p99": _quantile(b.late, 99) - _quantile(a.late, 99),
                "loss %": 100 * (1 - b.streams / a.streams),
            }
        )
    middle = {name: round(statistics.median(x[name] for x in added), 3) for name in added[0]}
    bounds = {"first p50": 1.0, "first p99": 5.0, "event p50": 1.0, "event p99": 5.0, "loss %": 5.0}
    names = {
        "first p50": "added to the first event, p50 ms",
        "first p99": "added to the first event, p99 ms",
        "event p50": "added to every event, p50 ms",
        "event p99": "added to every event, p99 ms",
        "loss %": "throughput lost, %",
    }
    targets = [
        Target.at_most(f"{names[n]} ({streams} streams)", v, bounds[n]) for n, v in middle.items()
    ]
    failed = sum(load.failed for load in (*direct, *through))
    targets.append(Target.equal("failed streams", failed, 0))
    results = {
        "rule": f"streams of {_CHUNKS} events, {1e3 * _GAP_S:g} ms apart; server, gateway and"
        " client are a process each; rounds in turn; a figure is the median over rounds of the"
        " difference between neighbouring rounds",
        "rounds": rows,
        "added per round": [{n: round(v, 3) for n, v in x.items()} for x in added],
    }
    emit(Console(), command_line(), None, results, targets, json_output)

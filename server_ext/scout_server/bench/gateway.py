"""`scout bench gateway`: what the gateway adds to a direct connection (issue 5, section 2)."""

import asyncio
import contextlib
import os
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console

from scout_server.bench.streams import Load, fast_run, run_load
from scout_server.report import Target, command_line, emit, progress

__all__ = ["gateway", "gateway_port", "started", "stop"]

_CHUNKS = 64


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


@contextlib.contextmanager
def _apart(pin: bool) -> Iterator[tuple[set[int], set[int]]]:
    """Yield the cores of both ends and those of what stands between them; undo it at the end."""
    if not pin or not hasattr(os, "sched_setaffinity"):
        yield set(), set()
        return
    all_cores = os.sched_getaffinity(0)
    *ends, middle = sorted(all_cores)
    try:
        yield set(ends or [middle]), {middle}
    finally:
        os.sched_setaffinity(0, all_cores)


def _move(cores: set[int]) -> None:
    """Run on *cores* from here on, and what is started from here on too."""
    if cores:
        os.sched_setaffinity(0, cores)


async def _measure(
    streams: int,
    seconds: float,
    rounds: int,
    gap_s: float,
    *,
    pin: bool,
    in_step: bool,
    seed: int,
) -> tuple[list[Load], list[Load]]:
    """Return the loads of direct and of gateway rounds, taken in turn."""

    async def load(port: int, turn: int, seconds: float) -> Load:
        return await run_load(
            port, streams=streams, seconds=seconds, seed=seed + turn, in_step=in_step
        )

    front: Process | None = None
    with _apart(pin) as (ends, middle):
        _move(ends)
        backend = await started("-m", "scout_server.bench.streams", "0", str(_CHUNKS), str(gap_s))
        try:
            assert backend.stdout is not None
            direct = int(await backend.stdout.readline())
            _move(middle)
            front = await started(
                *("-m", "scout_server.cli", "gateway", "--port", "0"),
                *("--node", f"http://127.0.0.1:{direct}"),
            )
            through = await gateway_port(front)
            _move(ends)
            loads: tuple[list[Load], list[Load]] = ([], [])
            with progress() as bar:
                task = bar.add_task("streaming", total=2 * rounds + 1)
                await load(through, 0, min(2.0, seconds))  # warm
                bar.advance(task)
                for turn in range(rounds):
                    pair = ((0, direct), (1, through))
                    for which, port in pair if turn % 2 == 0 else pair[::-1]:
                        loads[which].append(await load(port, turn, seconds))
                        bar.advance(task)
            return loads
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
        "events/s": round(sum(load.events for load in loads) / len(loads) / seconds, 1),
        "streams": len(first),
        "failed": sum(load.failed for load in loads),
    }


def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Streams open at the same time.")] = 200,
    seconds: Annotated[float, typer.Option(min=2, help="Length of one round.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind, in turn.")] = 5,
    gap_ms: Annotated[float, typer.Option(min=1, help="Time between two events.")] = 20.0,
    pin: Annotated[
        bool, typer.Option(help="Client and server on other cores than the gateway, in all rounds.")
    ] = True,
    in_step: Annotated[
        bool, typer.Option(help="All streams send at the same moments, as one engine's batch.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the times at which streams begin.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Measure what the gateway adds to streams, against the same server without it.

    Example: scout bench gateway --streams 200
    """
    direct, through = fast_run(
        _measure(streams, seconds, rounds, gap_ms / 1e3, pin=pin, in_step=in_step, seed=seed)
    )
    rows = {"direct": _row(direct, seconds), "gateway": _row(through, seconds)}
    added: list[dict[str, float]] = []
    for a, b in zip(direct, through, strict=True):
        added.append(
            {
                "first p50": _quantile(b.first, 50) - _quantile(a.first, 50),
                "first p99": _quantile(b.first, 99) - _quantile(a.first, 99),
                "event p50": _quantile(b.late, 50) - _quantile(a.late, 50),
                "event p99": _quantile(b.late, 99) - _quantile(a.late, 99),
                "loss %": 100 * (1 - b.events / a.events),
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
        "rule": f"streams of {_CHUNKS} events, {gap_ms:g} ms apart, "
        + ("all at the same moments" if in_step else "each in its own phase")
        + "; server, gateway and client are a process each, "
        + ("server and client on other cores than the gateway" if pin else "on any core")
        + ", also while it is idle; rounds in turn; a figure is the median over rounds of the"
        " difference between neighbouring rounds; first event: without the time in the server",
        "rounds": rows,
        "added per round": [{n: round(v, 3) for n, v in x.items()} for x in added],
    }
    emit(Console(), command_line(), seed, results, targets, json_output)

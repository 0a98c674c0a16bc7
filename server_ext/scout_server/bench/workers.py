"""What a decision in a thread, or in a process, does to the event loop beside it."""

import asyncio
import statistics
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

from scout_server.policy.engine import Snapshot, make_plan

__all__ = ["measure_workers"]


def measure_workers(snapshot: Snapshot, *, plans: int = 12) -> list[dict[str, object]]:
    """Return, per kind of worker, how late a 1 ms timer of the loop is while *plans* are made."""
    rows: list[dict[str, object]] = []
    for name in ("nothing", "inline", "thread", "process"):
        executor: Executor | None = None
        if name == "thread":
            executor = ThreadPoolExecutor(1)
        elif name == "process":
            executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            late, seconds = asyncio.run(_measure(name, executor, snapshot, plans))
        finally:
            if executor is not None:
                executor.shutdown()
        rows.append(
            {
                "decisions in": name,
                "timer late p50 ms": round(1e3 * statistics.median(late), 3),
                "timer late p99 ms": round(1e3 * statistics.quantiles(late, n=100)[98], 3),
                "timer late max ms": round(1e3 * max(late), 3),
                "ms per decision": round(1e3 * seconds / plans, 2) if name != "nothing" else None,
            }
        )
    return rows


async def _measure(
    name: str, executor: Executor | None, snapshot: Snapshot, plans: int
) -> tuple[list[float], float]:
    loop = asyncio.get_running_loop()
    if executor is not None:
        await loop.run_in_executor(executor, make_plan, snapshot)  # warm
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(max(0.0, time.perf_counter() - due))

    ticker = asyncio.create_task(tick())
    began = time.perf_counter()
    for _ in range(plans):
        if executor is not None:
            await loop.run_in_executor(executor, make_plan, snapshot)
        elif name == "inline":
            make_plan(snapshot)
            await asyncio.sleep(0.002)
        else:
            await asyncio.sleep(0.05)
    seconds = time.perf_counter() - began
    ticker.cancel()
    return late, seconds

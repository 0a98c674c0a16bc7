"""Runs multi-agent programs against one server and measures what a client sees."""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from scout_sdk import Evidence, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_server.bench.programs import Turn
from scout_server.demo.measure import Counters, read_counters

__all__ = ["WARM_UPS", "Run", "run_sessions"]

WARM_UPS = ("started", "used", "wasted", "cancelled", "contended")
"""What is counted of a server's prefetching."""

_STATE_PATH = "/v1/scout/state"


@dataclass(slots=True)
class Run:
    """One repetition of one workload on one server."""

    ttft_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    """Seconds from sending a request to its last byte."""
    wall_s: float = 0.0
    gaps_s: float = 0.0
    """Seconds that sessions spent in gaps, all together."""
    counters: Counters = field(default_factory=lambda: Counters(0.0, 0.0))
    warm_ups: dict[str, int] = field(default_factory=dict)
    """What the server's prefetching did meanwhile: started, used, wasted, cancelled, contended."""

    @property
    def ttft(self) -> float:
        """Mean seconds to the first token."""
        return statistics.fmean(self.ttft_s)

    @property
    def turn(self) -> float:
        """Mean seconds of a turn."""
        return statistics.fmean(self.turn_s)

    @property
    def throughput(self) -> float:
        """Turns a second."""
        return len(self.turn_s) / self.wall_s


async def run_sessions(
    root: str, model: str, sessions: Sequence[Sequence[Turn]], *, concurrency: int, name: str
) -> Run:
    """
    Run *sessions* at the server at *root*, *concurrency* at a time; return what was measured.

    *name* makes session names unique on a server that is used for several runs.
    """
    run = Run()
    queue = list(enumerate(sessions))[::-1]
    async with httpx.AsyncClient(base_url=root, timeout=600.0) as client:
        counted, warmed = await read_counters(root), await _warm_ups(client)
        started = time.perf_counter()

        async def worker(side: asyncio.TaskGroup) -> None:
            while queue:
                number, turns = queue.pop()
                await _session(client, side, model, f"{name}-{number}", turns, run)

        async with asyncio.TaskGroup() as side:
            workers = [asyncio.create_task(worker(side)) for _ in range(concurrency)]
            await asyncio.gather(*workers)
            run.wall_s = time.perf_counter() - started
        run.counters = await read_counters(root) - counted
        run.warm_ups = {key: n - warmed.get(key, 0) for key, n in (await _warm_ups(client)).items()}
    return run


async def _session(
    client: httpx.AsyncClient,
    side: asyncio.TaskGroup,
    model: str,
    name: str,
    turns: Sequence[Turn],
    run: Run,
) -> None:
    numbers: dict[str, int] = {}
    for turn in turns:
        numbers[turn.agent] = numbers.get(turn.agent, 0) + 1
        hints = Hints(session=name, agent=turn.agent, turn=numbers[turn.agent], final=turn.final)
        await _ask(client, model, turn, hints, run)
        if turn.gap_s <= 0.0:
            continue
        if turn.expected_s is not None:
            tool = ToolEvent(
                name=turn.tool,
                state=ToolState.STARTED,
                remaining_s=turn.expected_s,
                evidence=Evidence.DECLARED,
            )
            event = SessionEvent(session=name, agent=turn.agent, tool=tool)
            side.create_task(_tell(client, event))
        run.gaps_s += turn.gap_s
        await asyncio.sleep(turn.gap_s)


async def _tell(client: httpx.AsyncClient, event: SessionEvent) -> None:
    # A stock server has no such route; what it answers does not matter.
    await client.post(_wire.EVENTS_PATH, content=_wire.encode_events([event]))


async def _ask(client: httpx.AsyncClient, model: str, turn: Turn, hints: Hints, run: Run) -> None:
    body = {
        "model": model,
        "prompt": list(turn.prompt),
        "max_tokens": turn.output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    first: float | None = None
    sent = time.perf_counter()
    async with client.stream(
        "POST", "/v1/completions", json=body, headers=_wire.encode(hints)
    ) as answer:
        if answer.status_code != httpx.codes.OK:
            await answer.aread()
            answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data:") and first is None:
                first = time.perf_counter()
    run.turn_s.append(time.perf_counter() - sent)
    run.ttft_s.append((first or time.perf_counter()) - sent)


async def _warm_ups(client: httpx.AsyncClient) -> dict[str, int]:
    answer = await client.get(_STATE_PATH)
    if answer.status_code != httpx.codes.OK:
        return {}
    found: dict[str, int] = {}
    for engine in json.loads(answer.text).get("engines", []):
        for key in WARM_UPS:
            value = engine.get("prefetch", {}).get(key, 0)
            found[key] = found.get(key, 0) + int(value)
    return found

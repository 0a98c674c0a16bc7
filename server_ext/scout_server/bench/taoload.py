"""Programs of two agents with growing histories, and a client that runs them on servers."""

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from scout_sdk import Hints, ScoutError, _wire
from scout_server.bench.vllmrouter import OUTPUT_TOKENS, named
from scout_server.demo.measure import Counters, read_counters
from scout_server.tao.telemetry import read_metrics

__all__ = ["Arm", "Program", "Route", "Step", "make_programs", "mean_size", "run_programs"]

_AGENTS = ("planner", "coder")
Route = Callable[[int, int], str]
"""Session's number and request's number -> root of the server to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request of a program."""

    agent: str
    prompt: tuple[int, ...]
    gap_s: float
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One session: two agents in turn, whose histories grow."""

    steps: tuple[Step, ...]


def mean_size(programs: Sequence[Program]) -> float:
    """Return the tokens that a session holds, both agents together, on average over its steps."""
    sizes = []
    for program in programs:
        held: dict[str, int] = {}
        for step in program.steps:
            held[step.agent] = len(step.prompt)
            sizes.append(sum(held.values()))
    return statistics.fmean(sizes)


@dataclass(slots=True)
class Arm:
    """What one way to spread sessions did, over all repetitions."""

    jct_s: list[float] = field(default_factory=list)
    """Seconds from a session's first request to its last answer, waiting included."""
    ttft_s: list[float] = field(default_factory=list)
    counters: Counters = field(default_factory=lambda: Counters(0.0, 0.0))
    failed: int = 0
    running: list[int] = field(default_factory=list)
    """Requests in one server, running or waiting there, once a second."""

    def row(self) -> dict[str, object]:
        """Return the figures."""
        return {
            "hit rate": round(self.counters.hit_rate, 4),
            "mean JCT s": round(statistics.fmean(self.jct_s), 3) if self.jct_s else None,
            "mean TTFT s": round(statistics.fmean(self.ttft_s), 3) if self.ttft_s else None,
            "requests in a server": round(statistics.fmean(self.running), 2)
            if self.running
            else None,
            "sessions": len(self.jct_s),
            "failed": self.failed,
        }


def make_programs(
    count: int, *, steps: int, tokens: int, vocabulary: int, sizes: int, texts: str
) -> list[Program]:
    """
    Return *count* programs that end at about *tokens* tokens, both agents together.

    *sizes* seeds lengths and gaps, *texts* the tokens: other texts with the same sizes are equal
    work on a cold cache. Anchors are the same in all programs.
    """
    size_dice, text_dice, anchor_dice = (
        random.Random(sizes),
        random.Random(texts),
        random.Random(0),
    )
    low, high = 10, vocabulary - 1
    anchor = tokens // 16
    anchors = {a: [anchor_dice.randint(low, high) for _ in range(anchor)] for a in _AGENTS}
    mean = max(1, (tokens - len(_AGENTS) * anchor) // steps)
    programs = []
    for _ in range(count):
        histories = {agent: list(anchors[agent]) for agent in _AGENTS}
        made = []
        for number in range(steps):
            agent = _AGENTS[number % len(_AGENTS)]
            grown = size_dice.randint(mean // 2, mean + mean // 2)
            histories[agent] += [text_dice.randint(low, high) for _ in range(grown)]
            made.append(
                Step(
                    agent=agent,
                    prompt=tuple(histories[agent]),
                    gap_s=size_dice.uniform(0.05, 0.4),
                    final=number + 1 == steps,
                )
            )
        programs.append(Program(steps=tuple(made)))
    return programs


async def run_programs(
    arm: Arm,
    route: Route,
    roots: Sequence[str],
    model: str,
    programs: Sequence[Program],
    *,
    concurrency: int,
    name: str,
    in_body: bool,
) -> None:
    """
    Run *programs*, *concurrency* at a time, and add what was seen to *arm*.

    *in_body*: bodies name the program, too.
    """
    queue = list(enumerate(programs))[::-1]
    requests = itertools.count()
    before = await _counters(roots)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
    ) as client:

        async def worker() -> None:
            while queue:
                number, program = queue.pop()
                began = time.perf_counter()
                for turn, step in enumerate(program.steps, 1):
                    hints = Hints(
                        session=f"{name}-{number}", agent=step.agent, turn=turn, final=step.final
                    )
                    body = {
                        "model": model,
                        "prompt": list(step.prompt),
                        "max_tokens": OUTPUT_TOKENS,
                        "ignore_eos": True,
                        "temperature": 0.0,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                        **(named(hints) if in_body else {}),
                    }
                    root = route(number, next(requests))
                    headers = dict(_wire.encode(hints))
                    try:
                        arm.ttft_s.append(await _ask(client, root, body, headers))
                    except (aiohttp.ClientError, TimeoutError, ScoutError):
                        arm.failed += 1
                    if not step.final:
                        await asyncio.sleep(step.gap_s)
                arm.jct_s.append(time.perf_counter() - began)

        looks = asyncio.create_task(_look(client, roots, arm.running))
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        looks.cancel()
    arm.counters = arm.counters + (await _counters(roots) - before)


async def _look(client: aiohttp.ClientSession, roots: Sequence[str], seen: list[int]) -> None:
    """Add the requests that each server runs to *seen*, once a second."""
    while True:
        await asyncio.sleep(1.0)
        for root in roots:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with client.get(root + "/metrics") as answer:
                    report = read_metrics(await answer.text(), rank=None)
                seen.append((report.running or 0) + (report.waiting or 0))


async def _ask(
    client: aiohttp.ClientSession,
    root: str,
    body: dict[str, object],
    headers: dict[str, str],
) -> float:
    """Return the seconds to the first event of one streamed answer, read to its end."""
    sent = time.perf_counter()
    first: float | None = None
    async with client.post(root + "/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            msg = f"{root} answered {answer.status}: {(await answer.text())[:200]}"
            raise ScoutError(msg)
        async for _ in answer.content.iter_any():
            first = first or time.perf_counter()
    return (first or time.perf_counter()) - sent


async def _counters(roots: Sequence[str]) -> Counters:
    total = Counters(0.0, 0.0)
    for root in roots:
        total = total + await read_counters(root)
    return total

"""`scout bench tao-engines`: TAO on two vLLM servers, against other ways to spread sessions."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.progress import Progress

from scout_sdk import ConfigError, Hints, ScoutError, _wire
from scout_server.bench.gateway import gateway_port, started, stop
from scout_server.bench.vllmrouter import (
    OUTPUT_TOKENS,
    PEERS,
    PROGRAMS,
    named,
    peer_arguments,
    serve_router,
)
from scout_server.demo.measure import Counters, read_counters
from scout_server.demo.servers import Running, ServerSpec, free_ports, start_all
from scout_server.report import Target, command_line, emit, progress
from scout_server.tao.telemetry import read_metrics

__all__ = [
    "Arm",
    "Program",
    "make_programs",
    "mean_size",
    "tao_engines",
]

_BLOCK = 32  # of which the CPU backend wants a multiple
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


async def _run(
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


def _spec(number: int, model: Path, *, blocks: int, longest: int, events: int | None) -> ServerSpec:
    about = model / "scout-model.json"
    own = json.loads(about.read_text()).get("vllm_arguments", []) if about.is_file() else []
    args = [
        str(model), "--scout-off", "--dtype", "float32", "--enforce-eager",
        "--block-size", str(_BLOCK), "--num-gpu-blocks-override", str(blocks),
        "--max-num-seqs", "16", "--max-model-len", str(longest),
        "--enable-prompt-tokens-details", "--served-model-name", "m",
        # the first token at once, the others together: client and servers share the cores
        "--stream-interval", "1000",
        *own,
    ]  # fmt: skip
    if events is not None:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "topic": "",
        }
        args += ["--kv-events-config", json.dumps(config)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    environ = {
        # Left alone, every CPU server binds itself to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return ServerSpec(name=f"node {number}", args=args, environ=environ, start_s=240.0)


@contextlib.asynccontextmanager
async def _gateway(nodes: Sequence[str]) -> AsyncIterator[str]:
    args = [arg for node in nodes for arg in ("--node", node)]
    process = await started("-m", "scout_server.cli", "gateway", "--port", "0", *args)
    try:
        yield f"http://127.0.0.1:{await gateway_port(process)}"
    finally:
        await stop(process)


async def _state(root: str) -> object:
    async with aiohttp.ClientSession() as client, client.get(root + "/v1/scout/state") as answer:
        return await answer.json()


def _to(root: str) -> Route:
    return lambda session, request: root


async def _measure(
    servers: Sequence[Running],
    events: Sequence[int] | None,
    router: str | None,
    plan: Mapping[str, int],
    bar: Progress,
) -> tuple[dict[str, Arm], dict[str, str], object]:
    """
    Return the arms, those that did not start and why, and the gateway's state at the end.

    Repetitions are whole: one that would not end in time is not begun, but for the first.
    """
    until = time.monotonic() + plan["seconds"]
    roots = [server.root for server in servers]
    nodes = list(roots)
    if events is not None:
        nodes = [
            f"{root}#kv_events=tcp://127.0.0.1:{port}"
            for root, port in zip(roots, events, strict=True)
        ]
    absent: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        front = await stack.enter_async_context(_gateway(nodes))
        routes: dict[str, Route] = {
            "round-robin": lambda session, request: roots[request % len(roots)],
            "sticky": lambda session, request: roots[session % len(roots)],
            "tao": _to(front),
        }
        for name in PEERS:
            if router is None:
                absent[name] = "vllm-router is not installed"
                continue
            try:
                extra = peer_arguments(name, plan["room"])
                routes[name] = _to(
                    await stack.enter_async_context(serve_router(router, roots, extra))
                )
            except (ScoutError, OSError) as error:
                absent[name] = str(error)
        arms = {name: Arm() for name in routes}
        names = list(routes)
        task = bar.add_task("running", total=len(names) * plan["repetitions"] + 1)

        async def one(name: str, repetition: int, arm: Arm, count: int) -> None:
            programs = make_programs(
                count,
                steps=plan["steps"],
                tokens=plan["tokens"],
                vocabulary=plan["vocabulary"],
                sizes=plan["seed"] + repetition,
                texts=f"{plan['seed']} {repetition} {name}",
            )
            label = f"{name}-{repetition}".replace(" ", "-")
            await _run(
                arm,
                routes[name],
                roots,
                servers[0].model,
                programs,
                concurrency=plan["concurrency"],
                name=label,
                in_body=name == PROGRAMS,
            )
            bar.advance(task)

        longest = 0.0
        await one("round-robin", -1, Arm(), 4)  # kernels and anchors are warm from here on
        for repetition in range(plan["repetitions"]):
            began = time.monotonic()
            if repetition and began + longest > until:
                break
            for place in range(len(names)):
                name = names[(place + repetition) % len(names)]
                bar.update(task, description=f"{name} {repetition}")
                await one(name, repetition, arms[name], plan["sessions"])
            longest = max(longest, time.monotonic() - began)
        return arms, absent, await _state(front)


def _targets(arms: Mapping[str, Arm], absent: Mapping[str, str]) -> list[Target]:
    base, ours = arms["round-robin"], arms["tao"]
    sticky = arms["sticky"]
    jct = statistics.fmean(ours.jct_s)
    points = round(100 * (ours.counters.hit_rate - base.counters.hit_rate), 2)
    targets = [
        Target.at_least("hit rate over round robin, points", points, 10.0),
        Target.at_most(
            "mean JCT by round robin's", round(jct / statistics.fmean(base.jct_s), 4), 0.8
        ),
        Target.at_most("mean JCT by sticky's", round(jct / statistics.fmean(sticky.jct_s), 4), 1.0),
    ]
    for name in PEERS:
        ratio = None
        if name not in absent and arms[name].jct_s and not arms[name].failed:
            ratio = round(jct / statistics.fmean(arms[name].jct_s), 4)
        targets.append(Target.at_most(f"mean JCT by that of {name}", ratio, 1.0))
    targets.append(Target.equal("failed requests", ours.failed, 0))
    return targets


def tao_engines(
    model: Annotated[Path, typer.Option(help="Model folder that vLLM can serve.")] = Path(
        "models", "tiny"
    ),
    router: Annotated[
        str, typer.Option(help="The program of PyPI's vllm-router; left out where there is none.")
    ] = "vllm-router",
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a session at its end.")] = 4800,
    steps: Annotated[int, typer.Option(min=2, help="Turns of a session.")] = 12,
    load: Annotated[float, typer.Option(min=0.1, help="Load by the KV room of all nodes.")] = 2.0,
    blocks: Annotated[int, typer.Option(min=64, help="KV blocks of 32 tokens of a node.")] = 600,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of one repetition.")] = 48,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of every arm.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, help="Repetitions that would not end by then are not begun.")
    ] = 12.0,
    kv_events: Annotated[
        bool,
        typer.Option(
            help="Let the nodes publish KV events, and the gateway listen; they count one agent's"
            " history per session."
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One short repetition.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of sizes, gaps and texts.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Compare TAO with round robin, sticky and vllm-router in front of the same two vLLM servers.

    Example: scout bench tao-engines --quick
    """
    config = model / "config.json"
    if not config.is_file():
        msg = f"no model at {model}: give --model DIR"
        raise ConfigError(msg)
    document = json.loads(config.read_text())
    longest = tokens + 512
    vocabulary = int(document.get("vocab_size", 1000))
    size = mean_size(
        make_programs(
            64, steps=steps, tokens=tokens, vocabulary=vocabulary, sizes=seed, texts="size"
        )
    )
    plan = {
        "steps": steps,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "sessions": min(sessions, 32) if quick else sessions,
        "repetitions": 1 if quick else repetitions,
        "room": blocks * _BLOCK,
        "seconds": round(60 * minutes),
        "concurrency": max(2, round(load * 2 * blocks * _BLOCK / size)),
        "seed": seed,
    }
    events = free_ports(2) if kv_events else None

    async def run() -> tuple[dict[str, Arm], dict[str, str], object]:
        specs = [
            _spec(
                i,
                model.resolve(),
                blocks=blocks,
                longest=longest,
                events=events[i] if events else None,
            )
            for i in range(2)
        ]
        with progress() as bar:
            async with start_all(specs) as servers:
                return await _measure(servers, events, shutil.which(router), plan, bar)

    arms, absent, state = asyncio.run(run())
    results = {
        "rule": f"two vLLM servers with {blocks * _BLOCK} tokens of KV room each, stock;"
        f" {plan['concurrency']} sessions at a time, each of {size:.0f} tokens on average over its"
        f" {steps} turns: {load:g} times the room; arms in turn, other texts of the same sizes for"
        " each",
        "arms": {name: arm.row() for name, arm in arms.items()},
        "absent": absent,
        "gateway at the end": state,
    }
    emit(Console(), command_line(), seed, results, _targets(arms, absent), json_output)

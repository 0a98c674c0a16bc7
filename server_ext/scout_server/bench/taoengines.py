"""`scout bench tao-engines`: TAO on two vLLM servers, against other ways to spread sessions."""

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.progress import Progress

from scout_sdk import ConfigError, ScoutError
from scout_server.bench.gateway import gateway_port, started, stop
from scout_server.bench.taoload import Arm, Route, make_programs, mean_size, run_programs
from scout_server.bench.vllmrouter import (
    PEERS,
    PROGRAMS,
    peer_arguments,
    serve_router,
)
from scout_server.demo.servers import Running, ServerSpec, free_ports, start_all
from scout_server.report import Target, command_line, emit, progress

__all__ = ["tao_engines"]

_BLOCK = 32  # of which the CPU backend wants a multiple


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
            await run_programs(
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

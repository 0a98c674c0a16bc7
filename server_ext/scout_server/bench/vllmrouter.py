"""The router of PyPI's vllm-router, a peer to measure against: how it is run and told of turns."""

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence

import aiohttp

from scout_sdk import Hints, ScoutError
from scout_server.bench.gateway import stop
from scout_server.demo.servers import free_ports
from scout_server.sim.hardware.fitted import shipped_profiles

__all__ = ["OUTPUT_TOKENS", "PEERS", "PROGRAMS", "named", "peer_arguments", "serve_router"]

OUTPUT_TOKENS = 8
"""Of every turn of the benchmark."""
_CACHE_AWARE = "vllm-router cache-aware"
PROGRAMS = "vllm-router programs"
PEERS = (_CACHE_AWARE, PROGRAMS)
"""Arms of the router of PyPI's vllm-router, where it is installed."""


def peer_arguments(name: str, room: int) -> list[str]:
    """
    Return how the router is started, for nodes of *room* KV tokens each.

    Its program scheduling gets what it asks for: the nodes' room, the tiny model's step times on a
    CPU as `scout sim calibrate` measured them, and sessions that may resume on another node.
    """
    if name == _CACHE_AWARE:
        return ["--policy", "cache_aware"]
    fit = shipped_profiles()["CPU", "scout-tiny"]
    step = fit.latency
    config = {
        "global_queue": True,
        "token_capacity_per_dp_rank": room,
        "decode_buffer_tokens": OUTPUT_TOKENS,
        "prefill_cost_model": {
            "intercept_seconds": fit.front.request_s_fixed + step.prefill_s_per_request,
            "linear_seconds_per_1k_tokens": 1e3 * (step.dense_s_per_token + step.large_s_per_token),
            "quadratic_seconds_per_1k_tokens_squared": 0.5e6 * step.pair_s,
            "decode_throughput_alpha": 0.15,
        },
        "decode_throughput_model": {
            "fixed_step_seconds": step.step_s_fixed,
            "batch_step_seconds_per_request": step.sequence_s + step.dense_s_per_token,
            "context_step_seconds_per_token": step.kv_token_s,
        },
    }
    return [
        "--policy", "cache_aware", "--enable-program-scheduling",
        "--program-scheduling-config-json", json.dumps(config),
    ]  # fmt: skip


def named(hints: Hints) -> dict[str, object]:
    """Return what tells the router's program scheduling whose turn it is: in the body."""
    context = {
        "program_id": f"{hints.session}:{hints.agent}",
        "task_id": hints.session,
        "session_id": hints.session,
        "agent_id": hints.agent,
        "agent_role": "lead",
        "blocks_parent": False,
        "expected_resume": not hints.final,
        "expected_output_length": OUTPUT_TOKENS,
    }
    return {"vllm_xargs": {"agentic_context": json.dumps(context)}}


@contextlib.asynccontextmanager
async def serve_router(
    program: str, roots: Sequence[str], extra: Sequence[str]
) -> AsyncIterator[str]:
    """Run the router *program* in front of *roots*; yield its root. ScoutError if it ends."""
    port, metrics = free_ports(2)
    process: Process = await asyncio.create_subprocess_exec(
        program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *roots,
        "--prometheus-port", str(metrics), *extra,
        stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
    )  # fmt: skip
    try:
        root = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as client:
            for _ in range(300):
                if process.returncode is not None:
                    msg = f"{program} {' '.join(extra)} ended with status {process.returncode}"
                    raise ScoutError(msg)
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(root + "/v1/models") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)
            else:
                msg = f"{program} {' '.join(extra)} did not answer within 30 s"
                raise ScoutError(msg)
        yield root
    finally:
        await stop(process)

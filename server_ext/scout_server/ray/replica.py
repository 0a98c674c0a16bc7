"""The LLM deployment: one replica is one engine."""

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from scout_sdk import ConfigError
from scout_server.config import load
from scout_server.ray.calls import Call, Head, Ticket
from scout_server.ray.engines import AsgiEngine, Engine, EngineDiedError, ServerEngine, load_factory
from scout_server.ray.settings import RaySettings
from scout_server.tao.telemetry import MAX_BYTES, NodeReport, read_metrics, read_state

__all__ = ["LlmReplica", "engine_kind", "engine_of", "vllm_command"]

_HEALTH_S = 20.0
_SOON = 1 / 8
"""Share of `stats_period_s` until an engine that makes requests wait is looked at again."""


def engine_kind(settings: RaySettings) -> str:
    """Return `vllm` or `embedded`; ConfigError when what is asked for is not there."""
    there = importlib.util.find_spec("vllm") is not None
    if settings.engine == "embedded" or (
        settings.engine == "auto" and not (settings.model and there)
    ):
        return "embedded"
    if not settings.model:
        msg = "ray.model is empty; ray.engine=vllm needs the name or path of a model"
        raise ConfigError(msg)
    return "vllm"


def engine_of(document: Mapping[str, Any]) -> Engine:
    """Return the engine that *document* configures, not started."""
    settings = load(document).of(RaySettings)
    if engine_kind(settings) == "embedded":
        return AsgiEngine(load_factory(settings.engine_app)(document))
    return ServerEngine(vllm_command(document), start_timeout_s=settings.start_timeout_s)


def vllm_command(document: Mapping[str, Any]) -> list[str]:
    """
    Return the `scout serve` command of a vLLM replica; `{port}` stands for its port.

    The extension inside reads the same settings: those that it would not find by itself are given.
    """
    loaded = load(document)
    settings = loaded.of(RaySettings)
    found = load({}).as_dict()
    command = [sys.executable, "-m", "scout_server.cli", "serve", settings.model]
    for name, section in loaded.as_dict().items():
        for key, value in section.items():
            if name != "ray" and value != found[name][key]:
                command += ["--set", f"{name}.{key}={json.dumps(value)}"]
    return [*command, "--", "--host", "127.0.0.1", "--port", "{port}", *settings.vllm_args]


class LlmReplica:
    """
    Serves what the router sends it, and tells how large and how busy its engine is.

    Serve's own admission gate (`max_ongoing_requests`) must stand above the pool's slots, and does
    in `_compat.application`: a replica that refuses what the plan placed would undo the plan.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._engine = engine_of(document)
        self._settings = load(document).of(RaySettings)

    async def start(self) -> None:
        """Return when the engine can serve."""
        await self._engine.start()

    async def serve(self, call: Call, ticket: Ticket) -> AsyncGenerator[Head | bytes, None]:
        """Yield one Head, then the body as it comes. *ticket* is for the router."""
        answer = self._engine.serve(call)
        try:
            async for part in answer:
                yield part
        finally:
            await answer.aclose()

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return what never changes; Serve asks once, and gives it to every router."""
        return {"capacity_tokens": (await self._report()).capacity_tokens}

    async def record_routing_stats(self) -> dict[str, Any]:
        """
        Return how busy it is; Serve asks every `stats_period_s`. Too old to count slots with.

        What came while a step was computed waits for its end: only a queue that stays counts.
        """
        report = await self._report()
        waiting = report.waiting
        if waiting:
            await asyncio.sleep(_SOON * self._settings.stats_period_s)
            waiting = min(waiting, (await self._report()).waiting or 0)
        return {
            "waiting": waiting,
            "queried_tokens": report.queried_tokens,
            "hit_tokens": report.hit_tokens,
        }

    async def check_health(self) -> None:
        """Raise when the engine is gone or says that it is ill: Serve then replaces the replica."""
        if not self._engine.alive():
            msg = "the engine's process is gone"
            raise EngineDiedError(msg)
        async with asyncio.timeout(_HEALTH_S):
            status, _ = await self._get("/health")
        if status >= 500:
            msg = f"the engine answers {status} when asked for its health"
            raise EngineDiedError(msg)

    async def _report(self) -> NodeReport:
        try:
            status, body = await self._get("/metrics")
            if status == 200:
                report = read_metrics(body.decode("utf-8", "replace"), rank=None)
                if report != NodeReport():
                    return report
            status, body = await self._get("/v1/scout/state")
            return read_state(json.loads(body)) if status == 200 else NodeReport()
        except (EngineDiedError, ValueError, RecursionError):
            return NodeReport()  # health is looked at elsewhere

    async def _get(self, path: str) -> tuple[int, bytes]:
        status, body = 0, b""
        answer = self._engine.serve(Call(method="GET", path=path))
        try:
            async for part in answer:
                if isinstance(part, Head):
                    status = part.status
                else:
                    body += part
                if len(body) > MAX_BYTES:
                    break
        finally:
            await answer.aclose()
        return status, body

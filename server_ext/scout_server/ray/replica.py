"""The LLM deployment: one replica is one engine."""

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

__all__ = ["LlmReplica", "engine_kind", "engine_of"]


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
    # The extension inside vLLM reads the same document.
    ours = {name: section for name, section in document.items() if name != "ray"}
    sets = [
        word
        for name, section in ours.items()
        for key, value in section.items()
        for word in ("--set", f"{name}.{key}={json.dumps(value)}")
    ]
    command = [sys.executable, "-m", "scout_server.cli", "serve", settings.model, *sets, "--"]
    command += ["--host", "127.0.0.1", "--port", "{port}", *settings.vllm_args]
    return ServerEngine(command, start_timeout_s=settings.start_timeout_s)


class LlmReplica:
    """
    Serves what the router sends it, and tells how large and how busy its engine is.

    Serve's own admission gate (`max_ongoing_requests`) must stand above the pool's slots, and does
    in `_compat.application`: a replica that refuses what the plan placed would undo the plan.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._engine = engine_of(document)

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
        """Return how busy it is; Serve asks every `stats_period_s`. Too old to count slots with."""
        report = await self._report()
        return {
            "waiting": report.waiting,
            "queried_tokens": report.queried_tokens,
            "hit_tokens": report.hit_tokens,
        }

    async def check_health(self) -> None:
        """Raise when the engine is gone: Serve then starts another replica."""
        if not self._engine.alive():
            msg = "the engine's process is gone"
            raise EngineDiedError(msg)

    async def _report(self) -> NodeReport:
        try:
            report = read_metrics(
                (await self._get("/metrics")).decode("utf-8", "replace"), rank=None
            )
            if report != NodeReport():
                return report
            return read_state(json.loads(await self._get("/v1/scout/state")))
        except (EngineDiedError, ValueError, RecursionError):
            return NodeReport()  # health is looked at elsewhere

    async def _get(self, path: str) -> bytes:
        body = b""
        answer = self._engine.serve(Call(method="GET", path=path))
        try:
            async for part in answer:
                if isinstance(part, bytes):
                    body += part
                elif part.status != 200:
                    return b""
                if len(body) > MAX_BYTES:
                    break
        finally:
            await answer.aclose()
        return body

"""HTTP routes under /v1/scout, which vLLM's API key guards like everything under /v1."""

import asyncio
from argparse import Namespace
from importlib import metadata
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from scout_sdk import _wire
from scout_sdk._limits import MAX_EVENTS_BYTES, STATED
from scout_server.config import load
from scout_server.policy.prefetch import PrefetchSettings
from scout_server.vllm import _compat
from scout_server.vllm.frontdoor import front_door
from scout_server.vllm.link import EngineLink
from scout_server.vllm.metrics import register_engines
from scout_server.vllm.prefetch import keep_warm
from scout_server.vllm.settings import document_of

__all__ = ["STATE_PATH", "ScoutEndpoints"]

STATE_PATH = "/v1/scout/state"


class ScoutEndpoints:
    """vLLM's endpoint plugin; loaded only where VLLM_PLUGINS names `scout`."""

    name = "scout"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add our routes to the server's app."""
        app.add_route(_wire.EVENTS_PATH, post_events, methods=["POST"])
        app.add_route(_wire.CAPABILITIES_PATH, get_capabilities, methods=["GET"])
        app.add_route(STATE_PATH, get_state, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the routes with the engines; a wrong configuration is an error at start."""
        loaded = load(document_of(getattr(args, "additional_config", None)))
        door = front_door(state, args)
        if engine_client is None:
            return

        async def call(operation: str, argument: str) -> list[str]:
            return await _compat.call_engines(engine_client, operation, argument)

        state.scout = EngineLink(call, timeout_s=door.vllm.utility_timeout_s)
        await state.scout.introduce(door.key)
        if loaded.of(PrefetchSettings).enabled:
            state.scout_warming = asyncio.create_task(keep_warm(state.scout.warm))
        registry = _compat.metrics_registry()
        if registry is None:
            state.scout_registry = registry = CollectorRegistry()
        register_engines(registry, state.scout)


async def post_events(request: Request) -> Response:
    """Take a message of the side channel; every engine hears it, the session's holder uses it."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_EVENTS_BYTES:
            return _error(413, f"the message is over {MAX_EVENTS_BYTES} bytes")
    link = _link(request)
    door = front_door(request.app.state)
    tenant = door.reader.tenant(request.headers)
    taken = door.desk.take(body, tenant, now=door.now())
    if not taken.events:
        return JSONResponse(taken.answer(), status_code=taken.status)
    if link is None:
        return _error(503, "the engine is not connected")
    # The engines get what was understood, written anew: what they decode is small and ours.
    if await link.post(_wire.encode_events(taken.events), tenant) is None:
        return _error(503, "the engine did not answer in time")
    return JSONResponse(taken.answer(), status_code=taken.status)


async def get_capabilities(request: Request) -> Response:
    """Say what this server takes; the SDK stops sending what is not listed."""
    link = _link(request)
    known = link is not None and (bool(link.states) or await link.refresh())
    active = known and link is not None and not link.out
    door = front_door(request.app.state)
    return JSONResponse(
        {
            "version": _wire.VERSION,
            "server": {
                "name": "scout",
                "version": metadata.version("scout-sdk"),
                "engine": "vllm",
                "engine_version": _compat.installed_version(),
            },
            "features": door.features() if active else [],
            "problems": _problems(link) if known else ["the engine did not answer"],
            "limits": {
                **STATED,
                "events_per_s": door.ingress.events_per_s,
                "agents": door.policy.max_agents,
                "sessions": door.policy.max_sessions,
                "body_bytes": door.vllm.max_body_bytes,
            },
        }
    )


async def get_state(request: Request) -> Response:
    """Show every engine's condition and counters, by data-parallel rank."""
    link = _link(request)
    if link is None:
        return _error(503, "the engine is not connected")
    fresh = await link.refresh()
    reader = front_door(request.app.state).reader
    engines = [
        {**state, "core": reader.shown(state.get("core"), request.headers)} for state in link.states
    ]
    return JSONResponse(
        {"fresh": fresh, "link_failures": link.failures, "engines": engines},
        status_code=200 if link.states else 503,
    )


def _link(request: Request) -> EngineLink | None:
    link = getattr(request.app.state, "scout", None)
    return link if isinstance(link, EngineLink) else None


def _problems(link: EngineLink | None) -> list[str]:
    found: list[str] = []
    for state in link.states if link is not None else ():
        problems = state.get("problems")
        if isinstance(problems, list):
            found += [str(problem) for problem in problems]
        breaker = state.get("breaker")
        if isinstance(breaker, dict) and breaker.get("reason"):
            found.append(str(breaker["reason"]))
    return sorted(set(found))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)

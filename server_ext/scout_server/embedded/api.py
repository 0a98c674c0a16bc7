"""The HTTP side: routes, bodies, disconnects, hint headers."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib import metadata

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scout_sdk import _wire
from scout_sdk._limits import MAX_EVENTS_BYTES, STATED
from scout_server.embedded.bodies import ChatForm, CompletionForm, Form, ResponseForm
from scout_server.embedded.engine import Engine, Generation
from scout_server.embedded.errors import ApiError
from scout_server.embedded.metrics import Metrics
from scout_server.embedded.parse import Call, parse_chat, parse_completion, parse_response
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.ingress import EventDesk, IngressSettings, RequestReader, expected_tools
from scout_server.ingress.settings import features
from scout_server.policy.runtime import PolicySettings
from scout_server.recording import RecordSettings, recorder_of
from scout_server.snapshot import SnapshotSettings
from scout_server.tenancy import TenancySettings

__all__ = ["make_app"]

Parse = Callable[[Mapping[str, object], EmbeddedSettings], Call]
MakeForm = Callable[[Call, Generation, int], Form]


def make_app(
    settings: EmbeddedSettings,
    policy: PolicySettings | None = None,
    tenancy: TenancySettings | None = None,
    ingress: IngressSettings | None = None,
    snapshots: SnapshotSettings | None = None,
    record: RecordSettings | None = None,
    *,
    engine: Engine | None = None,
) -> Starlette:
    """
    Return the application; `app.state.engine` is its engine.

    It serves from one event loop: the engine's clock is that loop's.
    """
    if engine is None:
        engine = Engine(settings, policy)
    api = _Api(engine, tenancy or TenancySettings(), ingress or IngressSettings())

    if record is not None:
        engine.recorder = recorder_of(
            record, source="scout embedded engine", block_tokens=engine.settings.block_tokens
        )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if snapshots is not None:
            engine.keep(snapshots)
        yield
        engine.close()

    app = Starlette(
        routes=[
            Route(
                "/v1/chat/completions", _Completions(api, parse_chat, ChatForm), methods=["POST"]
            ),
            Route(
                "/v1/completions",
                _Completions(api, parse_completion, CompletionForm),
                methods=["POST"],
            ),
            Route(
                "/v1/responses", _Completions(api, parse_response, ResponseForm), methods=["POST"]
            ),
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/health", api.health, methods=["GET"]),
            Route("/metrics", api.metrics_text, methods=["GET"]),
            Route(_wire.EVENTS_PATH, api.events, methods=["POST"]),
            Route(_wire.CAPABILITIES_PATH, api.capabilities, methods=["GET"]),
            Route("/v1/scout/state", api.state, methods=["GET"]),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _fault},
        lifespan=lifespan,
    )
    app.state.engine = engine
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = ApiError(message, status=error.status_code).body()
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    body = ApiError(f"internal error: {type(error).__name__}", status=500).body()
    return JSONResponse(body, status_code=500)


class _Api:
    """What the routes share."""

    def __init__(self, engine: Engine, tenancy: TenancySettings, ingress: IngressSettings) -> None:
        self.engine = engine
        self.ingress = ingress
        self.reader = RequestReader(
            ingress,
            tenancy,
            max_agents=engine.policy.max_agents,
            max_sessions=engine.policy.max_sessions,
        )
        self.desk = EventDesk(ingress)
        self.metrics = Metrics(engine)
        self.started = int(time.time())

    async def health(self, request: Request) -> Response:
        """Answer 200."""
        return Response(status_code=200)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        settings = self.engine.settings
        model = {
            "id": settings.model,
            "object": "model",
            "created": self.started,
            "owned_by": "scout",
            "max_model_len": settings.limit_tokens(),
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics_text(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(
            self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def capabilities(self, request: Request) -> Response:
        """Say what this server takes; the SDK stops sending what is not listed."""
        engine, policy = self.engine, self.engine.policy
        return JSONResponse(
            {
                "version": _wire.VERSION,
                "server": {
                    "name": "scout",
                    "version": metadata.version("scout-sdk"),
                    "engine": "embedded",
                    "engine_version": metadata.version("scout-sdk"),
                },
                "features": features(policy, self.ingress) if engine.faulted is None else [],
                "problems": [] if engine.faulted is None else [engine.faulted],
                "limits": {
                    **STATED,
                    "events_per_s": self.ingress.events_per_s,
                    "agents": policy.max_agents,
                    "sessions": policy.max_sessions,
                    "body_bytes": engine.settings.max_body_bytes,
                },
            }
        )

    async def state(self, request: Request) -> Response:
        """Return counters and condition; cumulative since the start."""
        engine = self.engine
        replica, counters = engine.replica, engine.counters()
        return JSONResponse(
            {
                "mode": engine.mode,
                "breaker": {
                    "open": engine.faulted is not None,
                    "faults": engine.faults,
                    "reason": engine.faulted,
                },
                "blocks": {
                    "total": replica.pool.capacity,
                    "free": replica.pool.free_blocks,
                    "cached": replica.pool.cached_hashes,
                },
                "evictions": {"evicted": replica.pool.evicted},
                "prefix_cache": {
                    "queried_tokens": counters.queried_tokens,
                    "hit_tokens": counters.hit_tokens,
                    "recomputed_tokens": counters.recomputed_tokens,
                },
                "steps": counters.steps,
                "preemptions": counters.preemptions,
                "running": len(replica.running),
                "waiting": replica.waiting_count,
                "arrivals": dict(engine.arrivals),
                "finishes": dict(engine.finishes),
                "events": {**engine.events, "rejected": self.metrics.rejected_events},
                "core": self.reader.shown(engine.core_state(), request.headers),
            }
        )

    async def events(self, request: Request) -> Response:
        """Take side-channel events; what is malformed, or over the tenant's budget, is counted."""
        body = await read_body(request, MAX_EVENTS_BYTES)
        tenant = self.reader.tenant(request.headers)
        taken = self.desk.take(body, tenant, now=self.engine.now())
        if self.engine.policy.hints:
            for event in taken.events:
                self.engine.event(event, tenant=tenant)
        self.metrics.rejected_events += taken.rejected
        self.engine.events["clipped"] += taken.clipped
        return JSONResponse(taken.answer(), status_code=taken.status)


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of *request*; ApiError 413 when it is longer than *limit* bytes."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ApiError(f"the body is over {limit} bytes", status=413)
        chunks.append(chunk)
    return b"".join(chunks)


def _parsed(raw: bytes) -> Mapping[str, object]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON object, not {type(body).__name__}")
    return body


class _Completions:
    """One way to ask for a completion: an ASGI endpoint that frees what a lost client held."""

    def __init__(self, api: _Api, parse: Parse, form: MakeForm) -> None:
        self._api = api
        self._parse = parse
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api, request = self._api, Request(scope, receive)
        try:
            raw = await read_body(request, api.engine.settings.max_body_bytes)
        except ClientDisconnect:
            return
        try:
            body = _parsed(raw)
            call = self._parse(body, api.engine.settings)
        except RecursionError as error:
            raise ApiError("the body is nested too deeply") from error
        generation, headers = self._submit(request, body, call)
        form = self._form(call, generation, int(time.time()))
        watcher = asyncio.create_task(_watch(receive, api.engine, generation))
        try:
            if call.stream:
                await _stream(generation, form, headers, send)
            else:
                await generation.done()
                if generation.produced:
                    await JSONResponse(form.body(), headers=headers)(scope, receive, send)
        except OSError:
            pass  # the client is gone
        finally:
            watcher.cancel()
            api.engine.abort(generation)

    def _submit(
        self, request: Request, body: Mapping[str, object], call: Call
    ) -> tuple[Generation, dict[str, str]]:
        api = self._api
        arrival = api.reader.read(request.headers, body)
        if not api.engine.policy.hints or api.engine.faulted is not None:
            arrival = arrival.ignored()
        for field, outcome in arrival.outcomes.items():
            api.metrics.outcome(field, outcome)
        calls = call.reply.calls if api.ingress.tool_calls else ()
        generation = api.engine.submit(
            call.prompt,
            call.reply,
            hints=arrival.hints,
            tenant=arrival.tenant,
            salt=call.salt,
            tools=expected_tools((tool.name, tool.arguments) for tool in calls),
        )
        value = _wire.encode_outcome(arrival.outcomes)
        return generation, {_wire.OUTCOME_HEADER: value} if value else {}


async def _watch(receive: Receive, engine: Engine, generation: Generation) -> None:
    """End the generation when its client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    engine.abort(generation)


async def _stream(
    generation: Generation, form: Form, headers: Mapping[str, str], send: Send
) -> None:
    while not generation.produced and generation.finish is None:
        await generation.more()
    if generation.error is not None and not generation.produced:
        raise generation.error  # nothing is sent yet: an error status is still possible
    raw = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    await _send(send, form.start())
    sent = 0
    while True:
        produced = generation.produced
        if produced > sent:
            await _send(send, form.delta(generation.reply.text(sent, produced)))
            sent = produced
        if generation.finish is not None and generation.produced == sent:
            break
        if generation.produced == sent:
            await generation.more()
    ending = form.failure(generation.error.body()) if generation.error else form.end()
    await send({"type": "http.response.body", "body": b"".join(ending), "more_body": False})


async def _send(send: Send, chunks: Iterator[bytes]) -> None:
    data = b"".join(chunks)
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})

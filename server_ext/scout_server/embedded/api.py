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
from scout_sdk._hints import HintOutcome, Hints
from scout_sdk._limits import MAX_EVENTS, MAX_EVENTS_BYTES, MAX_HEADERS_BYTES
from scout_sdk.sleep import expected_seconds_of_call
from scout_server import foreign
from scout_server.embedded.bodies import ChatForm, CompletionForm, Form, ResponseForm
from scout_server.embedded.engine import Engine, Generation
from scout_server.embedded.errors import ApiError
from scout_server.embedded.metrics import Metrics
from scout_server.embedded.parse import Call, parse_chat, parse_completion, parse_response
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy.runtime import PolicySettings
from scout_server.tenancy import TenancySettings, tenant_of

__all__ = ["make_app"]

Parse = Callable[[Mapping[str, object], EmbeddedSettings], Call]
MakeForm = Callable[[Call, Generation, int], Form]

_FEATURES = ("events", "hints", "outcome", "retention")


def make_app(
    settings: EmbeddedSettings,
    policy: PolicySettings | None = None,
    tenancy: TenancySettings | None = None,
    *,
    engine: Engine | None = None,
) -> Starlette:
    """
    Return the application; `app.state.engine` is its engine.

    It serves from one event loop: the engine's clock is that loop's.
    """
    if engine is None:
        engine = Engine(settings, policy)
    api = _Api(engine, TenancySettings() if tenancy is None else tenancy)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
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

    def __init__(self, engine: Engine, tenancy: TenancySettings) -> None:
        self.engine = engine
        self.tenancy = tenancy
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
        engine = self.engine
        return JSONResponse(
            {
                "version": _wire.VERSION,
                "server": {
                    "name": "scout",
                    "version": metadata.version("scout-sdk"),
                    "engine": "embedded",
                    "engine_version": metadata.version("scout-sdk"),
                },
                "features": list(_FEATURES) if engine.faulted is None else [],
                "problems": [] if engine.faulted is None else [engine.faulted],
                "limits": {
                    "headers_bytes": MAX_HEADERS_BYTES,
                    "events": MAX_EVENTS,
                    "events_bytes": MAX_EVENTS_BYTES,
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
                "core": engine.core_state(),
            }
        )

    async def events(self, request: Request) -> Response:
        """Take side-channel events; what is malformed is counted."""
        body = await read_body(request, MAX_EVENTS_BYTES)
        events, rejected = _wire.decode_events(body)
        tenant = tenant_of(request.headers, self.tenancy)
        if self.engine.policy.hints:
            for event in events:
                self.engine.event(event, tenant=tenant)
        self.metrics.rejected_events += rejected
        status = 202 if events else 400
        return JSONResponse({"accepted": len(events), "rejected": rejected}, status_code=status)


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
        hints, outcomes = _hints_of(request, body)
        if not api.engine.policy.hints or api.engine.faulted is not None:
            hints, outcomes = None, dict.fromkeys(outcomes, HintOutcome.IGNORED)
        for field, outcome in outcomes.items():
            api.metrics.outcome(field, outcome)
        generation = api.engine.submit(
            call.prompt,
            call.reply,
            hints=hints,
            tenant=tenant_of(request.headers, api.tenancy),
            salt=call.salt,
            tools=_expected(call),
        )
        value = _wire.encode_outcome(outcomes)
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


def _expected(call: Call) -> tuple[tuple[str, float | None], ...]:
    """Return the tools that the reply calls, and how long their arguments say that they take."""
    tools = []
    for tool in call.reply.calls:
        expectation = expected_seconds_of_call(tool.name, tool.arguments)
        tools.append((tool.name, expectation.seconds if expectation is not None else None))
    return tuple(tools)


def _hints_of(
    request: Request, body: Mapping[str, object]
) -> tuple[Hints | None, dict[str, HintOutcome]]:
    """Return the hints of our headers, completed by those that other clients send."""
    decoded = _wire.decode(request.headers.items())
    try:
        other = foreign.read(request.headers, body)
        return foreign.merge(decoded.hints, other), {**other.outcomes, **decoded.outcomes}
    except Exception:  # a hint never fails a request
        return decoded.hints, dict(decoded.outcomes)

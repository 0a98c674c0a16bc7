"""The ingress as an ASGI application: its own routes, and the front behind all others."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from scout_sdk import SessionEvent, _wire
from scout_sdk._limits import MAX_EVENTS_BYTES
from scout_server.ray.calls import Call, PoolGoneError, Ticket
from scout_server.ray.ingress import Dispatcher, Front, PoolTeller, UnreachableError
from scout_server.ray.settings import TENANT_HEADER
from scout_server.tao.headers import to_node
from scout_server.tao.sidechannel import capabilities_of, read_bounded
from scout_server.tenancy import tenant_of

__all__ = ["PoolAsker", "create_app"]

logger = logging.getLogger(__name__)

_MAX_POSTS = 256
_POST_S = 10.0


class PoolAsker(PoolTeller, Protocol):
    """The way to the pool, and back."""

    async def ask(self, method: str, *args: object) -> Any:
        """Return what a method of the pool returns; PoolGoneError when there is no pool."""


class _Own:
    """The routes of our own."""

    def __init__(self, front: Front, replicas: Dispatcher, pool: PoolAsker) -> None:
        self.front = front
        self._replicas = replicas
        self._pool = pool
        self._posts: asyncio.Queue[tuple[Call, Ticket]] = asyncio.Queue(_MAX_POSTS)

    async def health(self, request: Request) -> Response:
        """Answer 200 while any replica is up, or the pool is being replaced; else 503."""
        try:
            up = len((await self._pool.ask("state"))["nodes"])
        except PoolGoneError:
            return JSONResponse({"status": "ok", "pool": "gone"})
        body = {"status": "ok" if up else "no replica is up", "nodes_up": up}
        return JSONResponse(body, status_code=200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the pool's metrics."""
        text = await self._pool.ask("metrics")
        return Response(text, media_type="text/plain; version=0.0.4")

    async def state(self, request: Request) -> Response:
        """Return the condition of the pool, without names of sessions."""
        return JSONResponse(await self._pool.ask("state"))

    async def sessions(self, request: Request) -> Response:
        """Return every session; needs the admin key."""
        key = self.front.settings.admin_key
        if not key:
            return _error(404, "there is no admin view: set ray.admin_key")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            return _error(401, "the admin key is missing or wrong")
        return JSONResponse({"sessions": await self._pool.ask("sessions")})

    async def capabilities(self, request: Request) -> Response:
        """Say what this application takes."""
        return JSONResponse(capabilities_of("scout-ray", self.front.settings))

    async def events(self, request: Request) -> Response:
        """Take events of the side channel, and tell the replica that holds each session."""
        body = await read_bounded(request, MAX_EVENTS_BYTES)
        if body is None:
            return _error(413, f"the message is over {MAX_EVENTS_BYTES} bytes")
        events, rejected = _wire.decode_events(body)
        if not events:
            return JSONResponse({"accepted": 0, "rejected": rejected}, status_code=400)
        tenant = tenant_of(dict(request.headers), self.front.tenancy)
        homes: dict[str, list[int]] = {}
        with contextlib.suppress(PoolGoneError):
            homes = await self._pool.ask("events", events, tenant)
        for node, indices in homes.items():
            self._pass_on(node, [events[i] for i in indices], request, tenant)
        return JSONResponse({"accepted": len(events), "rejected": rejected}, status_code=202)

    def _pass_on(
        self, node: str, events: Sequence[SessionEvent], request: Request, tenant: str
    ) -> None:
        added = {TENANT_HEADER: tenant} if tenant else {}
        headers = to_node(request.headers.raw, added=added, removed=frozenset({TENANT_HEADER}))
        call = Call(
            method="POST",
            path=_wire.EVENTS_PATH,
            headers=tuple((n.encode("latin-1"), v.encode()) for n, v in headers.items()),
            body=_wire.encode_events(events),
        )
        with contextlib.suppress(asyncio.QueueFull):
            self._posts.put_nowait((call, Ticket(node=node)))

    # ---- in the background -----------------------------------------------------------------

    async def greet(self) -> None:
        """Ask a replica once: Serve makes a router at the first call, and routers name replicas."""
        await self._exchange(Call(method="GET", path="/health"), Ticket())

    async def post(self) -> None:
        """Pass events on, one by one: calls at the same time might share an id."""
        while True:
            await self._exchange(*await self._posts.get())

    async def _exchange(self, call: Call, ticket: Ticket) -> None:
        coming = self._replicas.send(call, ticket)
        try:
            async with asyncio.timeout(_POST_S):
                while True:
                    await coming.__anext__()
        except (StopAsyncIteration, UnreachableError, TimeoutError):
            pass
        except Exception:
            logger.exception("scout: %s %s was not passed on", call.method, call.path)
        finally:
            coming.cancel()

    async def renew(self) -> None:
        """Give signs of life of what runs here."""
        while True:
            await asyncio.sleep(self.front.settings.renew_s)
            self.front.renew()


class _Fallback:
    """Sends what no route of ours takes to the front, whatever its method."""

    def __init__(self, app: Starlette, front: Front, own: frozenset[str]) -> None:
        self._app = app
        self._front = front
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _without_prefix(scope)
        if scope["type"] == "http" and scope["path"] not in self._own:
            await self._front(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _without_prefix(scope: Scope) -> Scope:
    """Return *scope* as if Serve's route prefix were `/`."""
    root = str(scope.get("root_path", "")).rstrip("/")
    if not root:
        return scope
    raw = scope.get("raw_path") or scope["path"].encode()
    return {
        **scope,
        "root_path": "",
        "path": scope["path"].removeprefix(root),
        "raw_path": raw.removeprefix(root.encode()),
    }


def create_app(front: Front, replicas: Dispatcher, pool: PoolAsker) -> ASGIApp:
    """Return the ASGI application of an ingress."""
    own = _Own(front, replicas, pool)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work()) for work in (own.greet, own.post, own.renew)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def gone(request: Request, error: Exception) -> Response:
        return _error(503, "the pool is being replaced")

    routes = [
        Route("/health", own.health, methods=["GET"]),
        Route("/metrics", own.metrics, methods=["GET"]),
        Route(_wire.CAPABILITIES_PATH, own.capabilities, methods=["GET"]),
        Route(_wire.EVENTS_PATH, own.events, methods=["POST"]),
        Route("/v1/scout/state", own.state, methods=["GET"]),
        Route("/v1/scout/sessions", own.sessions, methods=["GET"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={PoolGoneError: gone})
    return _Fallback(app, front, frozenset(route.path for route in routes))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)

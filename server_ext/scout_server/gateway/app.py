"""The gateway as an ASGI application: its own routes, and the proxy behind all others."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scout_sdk import _wire
from scout_sdk._limits import MAX_EVENTS_BYTES
from scout_server.gateway.nodes import Nodes, check_nodes
from scout_server.gateway.proxy import Proxy
from scout_server.gateway.settings import GatewaySettings
from scout_server.tao.pool import Pool
from scout_server.tao.sidechannel import capabilities_of, read_bounded
from scout_server.tenancy import TenancySettings, tenant_of

__all__ = ["Gateway", "create_app"]


class Gateway:
    """One gateway: pool, nodes, proxy and the routes of its own."""

    def __init__(self, settings: GatewaySettings, tenancy: TenancySettings | None = None) -> None:
        check_nodes(settings)  # what is wrong fails here, before anything starts
        self.settings = settings
        self.tenancy = tenancy or TenancySettings()
        self.pool = Pool(settings)
        self.nodes = Nodes(settings, self.pool)
        self.proxy = Proxy(settings, self.tenancy, self.pool, self.nodes)
        self._configuring = asyncio.Lock()

    async def start(self) -> None:
        """Start to look at nodes and to decide."""
        await self.nodes.start()
        await self.pool.start()

    async def stop(self) -> None:
        """Stop everything."""
        await self.pool.stop()
        await self.nodes.stop()

    async def reconfigure(
        self, settings: GatewaySettings, tenancy: TenancySettings | None = None
    ) -> None:
        """
        Take new settings; streams and held requests go on. ConfigError leaves the old ones.

        What is only used at the start, such as address and worker, stays as it was.
        """
        check_nodes(settings)
        async with self._configuring:
            self.pool.engine.configure(settings.tao)
            self.settings = self.proxy.settings = self.pool.settings = settings
            self.tenancy = self.proxy.tenancy = tenancy or self.tenancy
            await self.nodes.configure(settings)

    # ---- routes of our own -----------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Answer 200 while any node is up, else 503."""
        up = len(self.nodes.any_up())
        body = {"status": "ok" if up else "no node is up", "nodes_up": up}
        return JSONResponse(body, status_code=200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the gateway's metrics."""
        return Response(self.pool.meters.text(), media_type="text/plain; version=0.0.4")

    async def capabilities(self, request: Request) -> Response:
        """Say what this gateway takes."""
        return JSONResponse(capabilities_of("scout-gateway", self.settings))

    async def events(self, request: Request) -> Response:
        """Take events of the side channel, and tell the node that holds each session."""
        body = await read_bounded(request, MAX_EVENTS_BYTES)
        if body is None:
            return _error(413, f"the message is over {MAX_EVENTS_BYTES} bytes")
        events, rejected = _wire.decode_events(body)
        if not events:
            return JSONResponse({"accepted": 0, "rejected": rejected}, status_code=400)
        tenant = tenant_of(dict(request.headers), self.tenancy)
        told = self.pool.events(events, tenant=tenant)
        self.nodes.tell(told, events, request.headers.raw, tenant=tenant)
        return JSONResponse({"accepted": len(events), "rejected": rejected}, status_code=202)

    async def state(self, request: Request) -> Response:
        """Return the condition of the gateway, without names of sessions."""
        ledger = self.pool.engine.ledger
        nodes: dict[str, dict[str, object]] = {}
        for node in ledger.nodes.values():
            tokens, requests = ledger.used(node.name)
            nodes[node.name] = {
                "up": node.up,
                "draining": node.draining,
                "pressed": node.pressed,
                "capacity_tokens": node.capacity,
                "booked_tokens": tokens,
                "running": requests,
                "cache_rate": node.rate.value,
            }
            if node.name in self.nodes.kv:
                nodes[node.name]["kv_events"] = self.nodes.kv[node.name].counts()
        waiting, sessions = len(self.pool.engine.waiting), len(ledger.sessions)
        return JSONResponse({"nodes": nodes, "waiting": waiting, "sessions": sessions})

    async def sessions(self, request: Request) -> Response:
        """Return every session; needs the admin key."""
        if not self.settings.admin_key:
            return _error(404, "there is no admin view: set gateway.admin_key")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.settings.admin_key.encode()):
            return _error(401, "the admin key is missing or wrong")
        return JSONResponse({"sessions": self.pool.engine.view(now=self.pool.clock())})


class _Fallback:
    """Sends what no route of ours takes to the proxy, whatever its method."""

    def __init__(self, app: Starlette, gateway: Gateway, own: frozenset[str]) -> None:
        self._app = app
        self._gateway = gateway
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._own:
            await self._gateway.proxy(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def create_app(gateway: Gateway) -> _Fallback:
    """Return the ASGI application of *gateway*; its lifespan starts and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    routes = [
        Route("/health", gateway.health, methods=["GET"]),
        Route("/metrics", gateway.metrics, methods=["GET"]),
        Route(_wire.CAPABILITIES_PATH, gateway.capabilities, methods=["GET"]),
        Route(_wire.EVENTS_PATH, gateway.events, methods=["POST"]),
        Route("/v1/scout/state", gateway.state, methods=["GET"]),
        Route("/v1/scout/sessions", gateway.sessions, methods=["GET"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    return _Fallback(app, gateway, frozenset(route.path for route in routes))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)

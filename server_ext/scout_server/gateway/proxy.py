"""Passes requests to nodes byte for byte, holding turns until they have room."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace

import aiohttp
from multidict import CIMultiDict
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from scout_sdk import HintOutcome, SessionEvent
from scout_server.gateway.nodes import Nodes
from scout_server.gateway.reply import Reply, keeping_alive
from scout_server.gateway.settings import GatewaySettings, NodeAddress
from scout_server.policy.turns import UNNAMED
from scout_server.tao.asgi import answer, client_left, take_body
from scout_server.tao.asked import TURN_PATHS, Asked, linked, understand
from scout_server.tao.chains import Chains
from scout_server.tao.estimates import Estimates
from scout_server.tao.headers import is_open, merged_outcome, to_client, to_node
from scout_server.tao.observation import Observation
from scout_server.tao.pool import Pool, PoolFullError
from scout_server.tenancy import TenancySettings

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)

_RETRIED = frozenset({502, 503, 504})
_RENEW_S = 10.0
_MAX_LATE_ERROR = 1024 * 1024


_STALE_S = 1.0
"""A kept connection that its node had closed meanwhile fails within this time."""


class _UnreachableError(Exception):
    """A node did not begin to answer; nothing was sent to the client yet."""


class _CutError(Exception):
    """A node broke its answer off; the client has the beginning."""


class Proxy:
    """
    The ASGI application behind every route that is not the gateway's own.

    The server's task serves a request, another watches its client: when the client leaves, at any
    moment, the first is cancelled, and with it the request upstream and the place in the pool.
    """

    def __init__(
        self, settings: GatewaySettings, tenancy: TenancySettings, pool: Pool, nodes: Nodes
    ) -> None:
        self.settings = settings
        self.tenancy = tenancy
        self.pool = pool
        self.nodes = nodes
        self._estimates = Estimates()
        self._chains = Chains()
        self._turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        limit = self.settings.max_body_bytes
        body = await take_body(scope, receive, send, limit_bytes=limit, count=self._count)
        if body is None:
            return
        reply = Reply(send)
        task = asyncio.current_task()
        assert task is not None
        left = False

        async def watch() -> None:
            nonlocal left
            await client_left(receive)
            left = True
            task.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await self._serve(scope, body, reply)
        except asyncio.CancelledError:
            if not left or task.uncancel():
                raise
            self._count("client-left")
        except _CutError as error:  # the server closes the connection: the client sees it was cut
            self._count("cut")
            logger.warning("scout: %s: %r", error, error.__cause__)
        except OSError:  # the client's connection broke while we wrote
            self._count("client-left")
        except Exception:
            if reply.started:
                self._count("cut")
                raise  # the server closes the connection: the client sees it was cut
            logger.exception("scout: a request failed in the gateway")
            self._count("fault")
            await reply.refuse(502, "the gateway failed", kind="server_error")
        finally:
            watcher.cancel()

    # ---- one request -----------------------------------------------------------------------

    async def _serve(self, scope: Scope, body: bytes, reply: Reply) -> None:
        if scope["method"] == "POST" and scope["path"] in TURN_PATHS:
            await self._turn_request(scope, body, reply)
        else:
            await self._plain_request(scope, body, reply)

    async def _plain_request(self, scope: Scope, body: bytes, reply: Reply) -> None:
        """Pass a request that needs no KV room to a node that is up, each in turn."""
        if not is_open(scope["path"]):
            self._count("unknown-route")
            await answer(reply.send, 404, "only /v1 passes", kind="invalid_request_error")
            return
        nodes = list({n.url: n for n in self.nodes.open()}.values())
        self._turn += 1
        tries = self.settings.retries + 1 if scope["method"] in ("GET", "HEAD", "OPTIONS") else 1
        for attempt in range(min(tries, len(nodes))):
            node = nodes[(self._turn + attempt) % len(nodes)]
            last = attempt + 1 == min(tries, len(nodes))
            try:
                await self._send_on(
                    scope,
                    body,
                    replace(node, rank=None),
                    reply,
                    tenant=None,
                    outcomes={},
                    last=last,
                )
            except _UnreachableError:
                self.nodes.suspect(node.name)
                continue
            self._count("passed")
            return
        await self._no_node(reply)

    async def _turn_request(self, scope: Scope, body: bytes, reply: Reply) -> None:
        """Hold a turn until it has room, then pass it on; try another node if one fails."""
        settings = self.settings
        asked = understand(
            scope["headers"],
            body,
            tenancy=self.tenancy,
            output_tokens=settings.output_tokens,
            growing=settings.growing_prompts,
        )
        asked = linked(asked, self._chains)
        for outcome in asked.outcomes.values():
            self.pool.meters.hints.labels(outcome.value).inc()
        left_s = settings.hold_timeout_s
        if asked.timeout_s is not None:
            left_s = min(left_s, 0.9 * asked.timeout_s)
        deadline = self.pool.clock() + left_s
        try:
            await self._attempts(scope, body, reply, asked, deadline)
        finally:  # unless it is finished
            self.pool.cancel(asked.key)

    async def _attempts(
        self, scope: Scope, body: bytes, reply: Reply, asked: Asked, deadline: float
    ) -> None:
        """Try a turn on one node after the other, until one begins to answer."""
        settings = self.settings
        turn = self._estimates.turn(asked)
        every_s = settings.keep_alive_s if asked.stream else 0.0
        for attempt in range(settings.retries + 1):
            began = self.pool.clock()
            try:
                async with keeping_alive(reply, every_s):
                    name = await self.pool.acquire(turn, timeout_s=max(0.001, deadline - began))
            except PoolFullError:
                await self._too_many(reply, "too many requests wait for room")
                return
            except TimeoutError:
                if attempt and not self.nodes.any_up():
                    await self._no_node(reply)
                else:
                    await self._too_many(reply, "there was no room in time")
                return
            held = self.pool.clock() - began
            outcomes = dict(asked.outcomes)
            outcomes["admission"] = (
                HintOutcome.DEFERRED if held > 0.05 or attempt else HintOutcome.ACCEPTED
            )
            node = self.nodes.known.get(name)
            if node is None:  # taken out between the plan and now
                continue
            try:
                await self._run(scope, body, node, reply, asked, outcomes, attempt)
            except _UnreachableError:
                self.nodes.suspect(name)
                self.pool.meters.retries.inc()
                turn = replace(turn, avoid=turn.avoid | {name})
                continue
            self._count("served" if reply.status < 400 else "refused-by-node")
            return
        await self._no_node(reply)

    async def _run(
        self,
        scope: Scope,
        body: bytes,
        node: NodeAddress,
        reply: Reply,
        asked: Asked,
        outcomes: dict[str, HintOutcome],
        attempt: int,
    ) -> None:
        """Run an admitted turn on its node; learn from its answer when that is whole and good."""
        usage = Observation()
        self.nodes.runs(asked.session, asked.tenant)
        try:
            await self._send_on(
                scope,
                body,
                node,
                reply,
                tenant=asked.tenant,
                outcomes=outcomes,
                last=attempt == self.settings.retries,
                usage=usage,
                alive=lambda: self.pool.renew(asked.key),
            )
        except _CutError:
            self.nodes.suspect(node.name)
            raise
        if reply.status >= 400:
            return
        if asked.final and not asked.session.startswith(UNNAMED):
            end = SessionEvent(session=asked.session, final=True)
            others = set(self.pool.engine.concerned(end, tenant=asked.tenant)) - {node.name}
            told = dict.fromkeys(others, (0,))
            self.nodes.tell(told, (end,), scope["headers"], tenant=asked.tenant)
        prompt, output, cached = usage.tokens()
        tools = usage.calls()
        session = self.pool.engine.ledger.sessions.get((asked.tenant, asked.session))
        self._estimates.learn(
            asked,
            prompt_tokens=prompt,
            cached_tokens=cached,
            first=session is not None and session.turns == 0,
        )
        self.pool.finish(
            asked.key,
            prompt_tokens=prompt,
            output_tokens=output if output is not None else usage.events,
            cached_tokens=cached,
            held_tokens=self.nodes.held(node.name, asked.session, asked.tenant),
            tools=tools,
            final=asked.final or (asked.tentative and not tools),
        )

    async def _send_on(
        self,
        scope: Scope,
        body: bytes,
        node: NodeAddress,
        reply: Reply,
        *,
        tenant: str | None,
        outcomes: dict[str, HintOutcome],
        last: bool,
        usage: Observation | None = None,
        alive: Callable[[], None] | None = None,
    ) -> None:
        """Send a request to *node* and its answer, as it comes, to the client."""
        added: dict[str, str] = {}
        removed = frozenset(filter(None, (self.settings.tenant_to_nodes,)))
        if tenant and self.settings.tenant_to_nodes:
            added[self.settings.tenant_to_nodes] = tenant
        if node.rank is not None:
            added["x-data-parallel-rank"] = str(node.rank)
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope["query_string"]
        target = (
            node.url + path.decode("latin-1") + ("?" + query.decode("latin-1") if query else "")
        )
        response, first = await self._begin(
            node,
            scope["method"],
            URL(target, encoded=True),
            to_node(scope["headers"], added=added, removed=removed),
            body if body or scope["method"] in ("POST", "PUT", "PATCH") else None,
        )
        try:
            if response.status in _RETRIED and not last:
                raise _UnreachableError
            await self._pass_back(response, first, reply, outcomes, usage, alive)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()  # the node notices, and stops to generate

    async def _begin(
        self,
        node: NodeAddress,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: bytes | None,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """
        Return a node's answer up to its first bytes; a node that goes down meanwhile fails.

        A connection that broke at once may have been a kept one that the node had closed already:
        that says nothing of the node, which is asked once more.
        """
        began = self.pool.clock()
        for again in (True, False):
            response: aiohttp.ClientResponse | None = None
            try:
                async with asyncio.timeout(None) as patience:
                    with self.nodes.expecting(node.name, patience):
                        response = await self.nodes.client.request(
                            method, url, headers=headers, data=body, allow_redirects=False
                        )
                        return response, await response.content.readany()
            except BaseException as error:
                if response is not None:
                    response.close()
                broken = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError)
                refused = isinstance(error, aiohttp.ClientConnectorError)
                at_once = self.pool.clock() - began < _STALE_S
                if again and response is None and broken and not refused and at_once:
                    continue
                if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                    raise _UnreachableError from error
                raise
        raise AssertionError

    async def _pass_back(
        self,
        response: aiohttp.ClientResponse,
        first: bytes,
        reply: Reply,
        outcomes: dict[str, HintOutcome],
        usage: Observation | None,
        alive: Callable[[], None] | None,
    ) -> None:
        outcome = merged_outcome(outcomes, response.headers.get("x-scout-outcome"))
        reply.started, reply.status = True, response.status
        if not reply.kept_alive:
            start: Message = {
                "type": "http.response.start",
                "status": response.status,
                "headers": to_client(response.raw_headers, outcome=outcome),
            }
            await reply.send(start)
        elif response.status >= 400:
            await self._late_error(response, first, reply)
            return
        renew_at = self.pool.clock() + _RENEW_S
        chunk = first
        if usage is not None and self.settings.tool_calls:
            usage.start(response.status, response.raw_headers)
        while chunk:
            await reply.send({"type": "http.response.body", "body": chunk, "more_body": True})
            if usage is not None:
                usage.feed(chunk)
            if alive is not None and self.pool.clock() >= renew_at:
                renew_at = self.pool.clock() + _RENEW_S
                alive()
            chunk = await _read(response)
        await reply.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _late_error(
        self, response: aiohttp.ClientResponse, first: bytes, reply: Reply
    ) -> None:
        """Send a node's error as an event, after comments have promised an event stream."""
        body = first
        while len(body) <= _MAX_LATE_ERROR and (chunk := await _read(response)):
            body += chunk
        try:
            text = json.dumps(json.loads(body))
        except (ValueError, RecursionError):
            message, kind = "the node answered an error", "server_error"
            await reply.refuse(response.status, message, kind=kind)
            return
        event = b"data: " + text.encode() + b"\n\n"
        await reply.send({"type": "http.response.body", "body": event, "more_body": False})

    # ---- refusals --------------------------------------------------------------------------

    async def _too_many(self, reply: Reply, message: str) -> None:
        self._count("held-too-long")
        retry = str(self.settings.retry_after_s)
        await reply.refuse(429, message, kind="rate_limit_error", headers={"Retry-After": retry})

    async def _no_node(self, reply: Reply) -> None:
        self._count("no-node")
        retry = str(self.settings.retry_after_s)
        await reply.refuse(
            503, "no node answers", kind="server_error", headers={"Retry-After": retry}
        )

    def _count(self, outcome: str) -> None:
        self.pool.meters.requests.labels(outcome).inc()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the next bytes of an answer, none at its end."""
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _CutError(f"{response.url.origin()} broke an answer off") from error

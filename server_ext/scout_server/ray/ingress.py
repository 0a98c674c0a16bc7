"""The OpenAI-compatible front: what the gateway is before servers, before LLM replicas."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive, Scope, Send

from scout_sdk import HintOutcome
from scout_server.ray import notes
from scout_server.ray.calls import Call, Head, Refusal, Ticket
from scout_server.ray.settings import TENANT_HEADER, RaySettings
from scout_server.tao.asgi import answer, client_left, take_body
from scout_server.tao.asked import TURN_PATHS, Asked, understand
from scout_server.tao.headers import is_open, merged_outcome, to_client, to_node
from scout_server.tao.observation import Observation
from scout_server.tenancy import TenancySettings

__all__ = ["Answer", "Dispatcher", "Front", "PoolTeller", "UnreachableError"]

logger = logging.getLogger(__name__)

_RETRIED = frozenset({502, 503, 504})
_GRACE_S = 1.0


class UnreachableError(Exception):
    """A replica did not begin to answer, or stopped in the middle."""


class Answer(Protocol):
    """An answer on its way."""

    async def __anext__(self) -> Head | bytes:
        """Return the Head, then the body; UnreachableError when the replica fails."""

    def cancel(self) -> None:
        """Abort, wherever it is: waiting for a replica, or running there."""


class Dispatcher(Protocol):
    """The way to the replicas, through the router."""

    def send(self, call: Call, ticket: Ticket) -> Answer:
        """Send a call on its way."""


class PoolTeller(Protocol):
    """The way to the pool; on the ingress's event loop."""

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the pool and forget it; never raises."""


@dataclass(slots=True)
class _Reply:
    """How far the answer to one client has come."""

    send: Send
    started: bool = False


class _RefusedError(Exception):
    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


class Front:
    """
    The ASGI application behind every route that is not our own.

    One task serves a request, another watches its client: Serve cancels a handler whose client
    left, but not everywhere and always at once, and a dead client must not get room.
    """

    def __init__(
        self,
        settings: RaySettings,
        tenancy: TenancySettings,
        replicas: Dispatcher,
        pool: PoolTeller,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.tenancy = tenancy
        self._replicas = replicas
        self._pool = pool
        self._clock = clock
        self._open: dict[str, tuple[Asked, int, notes.Note]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = _Reply(send)
        body = await take_body(
            scope,
            receive,
            send,
            limit_bytes=self.settings.max_body_bytes,
            count=lambda outcome: self._pool.tell("count", outcome),
        )
        if body is None:
            return
        serve = asyncio.ensure_future(self._serve(scope, body, reply))
        watch = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({serve, watch}, return_when=asyncio.FIRST_COMPLETED)
            serve.cancel()
            await asyncio.gather(serve, return_exceptions=True)
        finally:
            watch.cancel()
            serve.cancel()
        if not serve.cancelled() and (fault := serve.exception()) is not None:
            if reply.started:
                raise fault  # the connection is closed: the client sees that it was cut
            logger.error("scout: a request failed in the ingress", exc_info=fault)
            await answer(send, 502, "the ingress failed", kind="server_error")

    def renew(self) -> None:
        """Tell the pool which turns run here."""
        running = [
            (asked, attempt, note.placed.node)
            for asked, attempt, note in self._open.values()
            if note.placed is not None
        ]
        if running:
            self._pool.tell("renew", running)

    async def _serve(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        if scope["method"] == "POST" and scope["path"] in TURN_PATHS:
            await self._turn(scope, body, reply)
        else:
            await self._plain(scope, body, reply)

    async def _plain(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        """Pass a request that needs no KV room to any replica."""
        if not is_open(scope["path"]):
            self._pool.tell("count", "unknown-route")
            await answer(reply.send, 404, "only /v1 passes", kind="invalid_request_error")
            return
        tries = self.settings.retries + 1 if scope["method"] in ("GET", "HEAD", "OPTIONS") else 1
        call = _call(scope, body, tenant="")
        for attempt in range(tries):
            coming = self._replicas.send(call, Ticket())
            try:
                head = await _first(coming, None, self.settings.hold_timeout_s)
                if head.status in _RETRIED and attempt + 1 < tries:
                    continue
                await self._pass_back(coming, head, reply, {}, None)
            except UnreachableError:
                if reply.started:
                    self._pool.tell("count", "cut")
                    raise
                continue
            except _RefusedError:
                break
            finally:
                coming.cancel()
            self._pool.tell("count", "passed")
            return
        self._pool.tell("count", "no-node")
        await self._no_replica(reply)

    async def _turn(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        """Send a turn on its way; it is held in the router until the pool has placed it."""
        settings = self.settings
        asked = understand(
            scope["headers"],
            body,
            tenancy=self.tenancy,
            output_tokens=settings.output_tokens,
            growing=settings.growing_prompts,
        )
        left_s = settings.hold_timeout_s
        if asked.timeout_s is not None:
            left_s = min(left_s, 0.9 * asked.timeout_s)
        deadline = self._clock() + left_s
        call = _call(scope, body, tenant=asked.tenant)
        avoid: frozenset[str] = frozenset()
        for attempt in range(settings.retries + 1):
            ticket = Ticket(
                asked=asked,
                attempt=attempt,
                avoid=avoid,
                timeout_s=max(0.001, deadline - self._clock()),
            )
            note = notes.open_note(asked.key)
            try:
                await self._attempt(call, ticket, asked, note, reply)
            except _RefusedError as refused:
                await self._too_many(reply, refused.refusal)
                return
            except UnreachableError:
                if reply.started:
                    raise
                if note.placed is not None:
                    avoid |= {note.placed.node}
                continue
            finally:
                notes.close(asked.key)
            return
        self._pool.tell("count", "no-node")
        await self._no_replica(reply)

    async def _attempt(
        self, call: Call, ticket: Ticket, asked: Asked, note: notes.Note, reply: _Reply
    ) -> None:
        """Send a turn once and give its room back, whatever happens."""
        usage = Observation()
        attempt = ticket.attempt
        outcome = Refusal.GONE.value
        whole = again = False
        coming = self._replicas.send(call, ticket)
        self._open[asked.key] = (asked, attempt, note)
        try:
            head = await _first(coming, note, ticket.timeout_s + _GRACE_S)
            if head.status in _RETRIED and attempt < self.settings.retries:
                raise UnreachableError
            outcomes = {**asked.outcomes, "admission": _admission(note, attempt)}
            await self._pass_back(coming, head, reply, outcomes, usage)
            whole = head.status < 400
            outcome = "" if whole else "refused-by-node"
        except UnreachableError:
            outcome = "cut" if reply.started else ""
            again = not reply.started and attempt < self.settings.retries
            raise
        except _RefusedError as refused:
            outcome = refused.refusal.value
            raise
        finally:
            self._open.pop(asked.key, None)
            if whole:
                prompt, output, cached = usage.tokens()
                output = output if output is not None else usage.events
                tools = tuple(usage.calls())
                self._pool.tell("finish", asked.key, attempt, prompt, output, cached, tools)
            else:
                coming.cancel()
                if again:
                    self._pool.tell("failed", asked.key, attempt)
                else:
                    self._pool.tell("cancel", asked.key, attempt, outcome)

    async def _pass_back(
        self,
        coming: Answer,
        head: Head,
        reply: _Reply,
        outcomes: dict[str, HintOutcome],
        usage: Observation | None,
    ) -> None:
        theirs = next((v for n, v in head.headers if n.lower() == b"x-scout-outcome"), None)
        outcome = merged_outcome(outcomes, theirs.decode("latin-1") if theirs else None)
        reply.started = True
        await reply.send(
            {
                "type": "http.response.start",
                "status": head.status,
                "headers": to_client(head.headers, outcome=outcome),
            }
        )
        if usage is not None and self.settings.tool_calls:
            usage.start(head.status, head.headers)
        async for chunk in _body(coming):
            await reply.send({"type": "http.response.body", "body": chunk, "more_body": True})
            if usage is not None:
                usage.feed(chunk)
        await reply.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _too_many(self, reply: _Reply, refusal: Refusal) -> None:
        why = {Refusal.FULL: "too many requests wait for room"}
        message = why.get(refusal, "there was no room in time")
        headers = {"Retry-After": str(self.settings.retry_after_s)}
        await answer(reply.send, 429, message, kind="rate_limit_error", headers=headers)

    async def _no_replica(self, reply: _Reply) -> None:
        headers = {"Retry-After": str(self.settings.retry_after_s)}
        await answer(reply.send, 503, "no replica answers", kind="server_error", headers=headers)


def _admission(note: notes.Note, attempt: int) -> HintOutcome:
    if note.placed is None:
        return HintOutcome.IGNORED  # the pool was not there: sent anywhere
    waited = note.placed.held_s > 0.05 or attempt > 0
    return HintOutcome.DEFERRED if waited else HintOutcome.ACCEPTED


def _call(scope: Scope, body: bytes, *, tenant: str) -> Call:
    path = scope.get("raw_path") or scope["path"].encode()
    added = {TENANT_HEADER: tenant} if tenant else {}
    headers = to_node(scope["headers"], added=added, removed=frozenset({TENANT_HEADER}))
    return Call(
        method=scope["method"],
        path=path.decode("latin-1"),
        query=scope["query_string"],
        headers=tuple((n.lower().encode("latin-1"), v.encode()) for n, v in headers.items()),
        body=body,
    )


async def _first(coming: Answer, note: notes.Note | None, timeout_s: float) -> Head:
    """
    Return the head of an answer; _RefusedError when the router says that there is no room.

    Serve asks no router while there is no replica at all: then the time-out is kept here.
    """
    first = asyncio.ensure_future(coming.__anext__())
    signs = {first} | ({note.refusal} if note is not None else set())
    try:
        done, _ = await asyncio.wait(signs, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done and (note is None or not note.sent):
            raise _RefusedError(Refusal.LATE)
        if not done:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and note is not None:
            raise _RefusedError(note.refusal.result())
        head = first.result()
    except StopAsyncIteration:
        raise UnreachableError from None
    finally:
        first.cancel()
    if not isinstance(head, Head):
        raise UnreachableError
    return head


async def _body(coming: Answer) -> AsyncIterator[bytes]:
    while True:
        try:
            part = await coming.__anext__()
        except StopAsyncIteration:
            return
        if isinstance(part, bytes):
            yield part

"""
What arrives at vLLM's API server, and what leaves it.

Hints of any sender become extra arguments in the request's body, which vLLM takes to the engine;
the tools that a response calls are told to the engine beside it.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from scout_sdk import _wire
from scout_sdk._hints import HintOutcome
from scout_server.ingress import Arrival, Ending, ResponseObserver
from scout_server.priority import Polarity
from scout_server.vllm.bodies import Body, parsed_body, with_xargs
from scout_server.vllm.frontdoor import FrontDoor, front_door
from scout_server.vllm.link import EngineLink
from scout_server.vllm.metrics import OUTCOMES
from scout_server.vllm.seal import CALL_XARG, sealed

__all__ = ["PATHS", "ScoutMiddleware"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Where vLLM takes a body with `vllm_xargs`."""


class ScoutMiddleware:
    """
    Pure ASGI; vLLM adds it with no arguments but the app, outside of its own authentication.

    Only request bodies are read, and only where there is something to add; responses pass through
    as they come. A fault of ours passes the request on as it was.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = _path(scope)
        if path in PATHS and scope.get("method") == "POST":
            await self._generate(scope, receive, send)
            return
        if path == "/metrics":
            link = _link(scope)
            if link is not None:
                await link.refresh()
            extra = getattr(getattr(scope.get("app"), "state", None), "scout_registry", None)
            if isinstance(extra, CollectorRegistry):
                send = _Appender(send, extra)
        await self.app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcomes: Mapping[str, HintOutcome] = {}
        observer: ResponseObserver | None = None
        body = Body(scope, receive)
        try:
            door = front_door(getattr(scope.get("app"), "state", None))
            link = _link(scope)
            if not door.identifies or (link is not None and link.out):
                # The engine learns nothing from it, and reads no xargs.
                outcomes = door.reader.read(scope["headers"]).ignored().outcomes
            else:
                raw = await body.read(door.vllm.max_body_bytes)
                parsed = parsed_body(raw)
                arrival = door.reader.read(scope["headers"], parsed)
                if not door.policy.hints or parsed is None:
                    arrival = arrival.ignored()
                outcomes = arrival.outcomes
                if raw is not None and parsed is not None:
                    xargs = _xargs(door, arrival, link)
                    rewritten = with_xargs(raw, parsed, xargs, _members(door, arrival, parsed))
                    if rewritten is not raw:
                        body.replace(rewritten)
                    if link is not None and CALL_XARG in xargs and door.ingress.tool_calls:
                        observer = _observer(link, str(xargs[CALL_XARG]))
        except Exception:
            _log.exception("scout: a request's hints were left out")
        if outcomes or observer is not None:
            send = _Reporter(send, outcomes, observer)
        await self.app(body.scope, body.receive, send)


class _Reporter:
    """Adds the outcome header to a response's start, and lets the response be looked at."""

    def __init__(
        self,
        send: Send,
        outcomes: Mapping[str, HintOutcome],
        observer: ResponseObserver | None,
    ) -> None:
        self._send = send
        self._outcomes = outcomes
        self._observer = observer

    async def __call__(self, message: Message) -> None:
        kind, observer = message["type"], self._observer
        if kind == "http.response.start":
            if observer is not None:
                observer.start(message["status"], message.get("headers", ()))
            message = {**message, "headers": [*message.get("headers", ()), *self._report()]}
        await self._send(message)
        if observer is not None and kind == "http.response.body":
            observer.feed(message.get("body", b""))
            if not message.get("more_body", False):
                observer.end()

    def _report(self) -> list[tuple[bytes, bytes]]:
        try:
            for field, outcome in self._outcomes.items():
                OUTCOMES.labels(field, outcome.value).inc()
            value = _wire.encode_outcome(self._outcomes)
            return [(_wire.OUTCOME_HEADER.encode(), value.encode("ascii"))] if value else []
        except Exception:
            _log.exception("scout: a response goes without its outcome header")
            return []


class _Appender:
    """
    Adds a registry to the text of /metrics.

    Several API servers share their metrics through files, which knows no collectors: only there.
    """

    def __init__(self, send: Send, registry: CollectorRegistry) -> None:
        self._send = send
        self._registry = registry
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            plain = headers.get(b"content-type", b"").startswith(b"text/plain")
            if message["status"] == 200 and plain and b"content-encoding" not in headers:
                lengthless = [
                    pair for pair in message["headers"] if pair[0].lower() != b"content-length"
                ]
                self._start = message = {**message, "headers": lengthless}
        elif self._start is not None and not message.get("more_body", False):
            body = message.get("body", b"")
            gap = b"" if body.endswith(b"\n") or not body else b"\n"
            message = {**message, "body": body + gap + generate_latest(self._registry)}
        await self._send(message)


def _xargs(door: FrontDoor, arrival: Arrival, link: EngineLink | None) -> dict[str, object]:
    """Return what the engine is told of a request beside its body; empty: nothing."""
    xargs: dict[str, object] = {}
    if arrival.hints is not None:
        xargs.update(_wire.to_xargs(arrival.hints))
    if arrival.tenant or (link is not None and door.ingress.tool_calls):
        xargs.update(sealed(door.key, arrival.tenant))
    return xargs


def _members(door: FrontDoor, arrival: Arrival, parsed: Mapping[str, object]) -> dict[str, object]:
    """Return the members of the body that say what another client says in its own way."""
    if arrival.priority is None or not door.prioritises or "priority" in parsed:
        return {}
    return {"priority": arrival.priority.as_(Polarity.LOW_FIRST)}


def _observer(link: EngineLink, call: str) -> ResponseObserver:
    def ended(ending: Ending) -> None:
        if ending.tools:  # every other end the engine knows by itself
            link.tell({"call": call, "finish": ending.finish.value, "tools": ending.tools})

    return ResponseObserver(ended)


def _link(scope: Scope) -> EngineLink | None:
    link = getattr(getattr(scope.get("app"), "state", None), "scout", None)
    return link if isinstance(link, EngineLink) else None


def _path(scope: Scope) -> str:
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", "") or getattr(scope.get("app"), "root_path", "") or "")
    return path.removeprefix(root) if root else path

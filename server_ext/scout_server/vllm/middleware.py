"""Hint headers of a request become extra arguments in its body, which vLLM takes to the engine."""

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from scout_sdk import _wire
from scout_sdk._hints import HintOutcome
from scout_server.config import load
from scout_server.tenancy import TenancySettings, tenant_of
from scout_server.vllm.link import EngineLink
from scout_server.vllm.metrics import OUTCOMES
from scout_server.vllm.settings import VllmSettings, document_of

__all__ = ["PATHS", "ScoutMiddleware", "with_xargs"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Xargs = Mapping[str, object]

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Where vLLM takes a body with `vllm_xargs`."""
TENANT_XARG = "scout_tenant"
"""Set by us alone; what a client writes there is overwritten."""


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
        try:
            decoded = _wire.decode(scope["headers"])
            outcomes = decoded.outcomes
            settings = _settings(scope)
            xargs: dict[str, object] = {}
            if decoded.hints is not None:
                xargs.update(_wire.to_xargs(decoded.hints))
            tenant = tenant_of(_headers(scope), settings.tenancy)
            if tenant:
                xargs[TENANT_XARG] = tenant
        except Exception:
            _log.exception("scout: a request's hints were left out")
            xargs = {}
        if xargs:
            body = _Body(scope, receive)
            await body.read(settings.vllm.max_body_bytes)
            rewritten = body.replace(xargs)
            if not rewritten or _out(scope):
                outcomes = _ignored(outcomes)
            scope, receive = body.scope, body.receive
        await self.app(scope, receive, _Reporter(send, outcomes) if outcomes else send)


class _Body:
    """A request body: read up to a bound, replaced, and given on message by message."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        self._read: list[Message] = []
        self._whole = False

    async def read(self, bound: int) -> None:
        """Read until the body's end, a message of another kind, or more than *bound* bytes."""
        size = 0
        while size <= bound:
            message = await self._receive()
            self._read.append(message)
            if message["type"] != "http.request":
                return
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                self._whole = size <= bound
                return

    def replace(self, xargs: Xargs) -> bool:
        """Add *xargs* to the body; False, and nothing changed, where that cannot be done."""
        if not self._whole:
            return False
        body = with_xargs(b"".join(message.get("body", b"") for message in self._read), xargs)
        if body is None:
            return False
        headers = [
            (name, str(len(body)).encode() if name.lower() == b"content-length" else value)
            for name, value in self.scope["headers"]
        ]
        self.scope = {**self.scope, "headers": headers}
        self._read = [{"type": "http.request", "body": body, "more_body": False}]
        return True

    async def receive(self) -> Message:
        """Return the next message."""
        return self._read.pop(0) if self._read else await self._receive()


class _Reporter:
    """Adds the outcome header to a response's start and counts the outcomes once."""

    def __init__(self, send: Send, outcomes: Mapping[str, HintOutcome]) -> None:
        self._send = send
        self._outcomes = outcomes

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._report()]}
        await self._send(message)

    def _report(self) -> list[tuple[bytes, bytes]]:
        try:
            for outcome in self._outcomes.values():
                OUTCOMES.labels(outcome.value).inc()
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


def with_xargs(body: bytes, xargs: Xargs) -> bytes | None:
    """
    Return *body* with *xargs* in its `vllm_xargs`, or None where it is not a JSON object.

    What the body already says there wins, save for the tenant, which is ours. Everything else in
    the body keeps its bytes unless it has `vllm_xargs` of its own.
    """
    try:
        if json.detect_encoding(body) != "utf-8":
            return None
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    theirs = parsed.get("vllm_xargs")
    if "vllm_xargs" in parsed:
        if theirs is not None and not isinstance(theirs, dict):
            return None  # invalid; vLLM says so
        ours_only = {key: xargs[key] for key in (TENANT_XARG,) if key in xargs}
        parsed["vllm_xargs"] = {**xargs, **(theirs or {}), **ours_only}
        return json.dumps(parsed, separators=(",", ":")).encode()
    start = body.index(b"{") + 1
    member = b'"vllm_xargs":' + json.dumps(dict(xargs), separators=(",", ":")).encode()
    return b"".join((body[:start], member, b"," if parsed else b"", body[start:]))


class _Settings:
    __slots__ = ("tenancy", "vllm")

    def __init__(self, tenancy: TenancySettings, vllm: VllmSettings) -> None:
        self.tenancy = tenancy
        self.vllm = vllm


def _settings(scope: Scope) -> _Settings:
    """The settings of the server that serves *scope*; read once and kept with it."""
    state = getattr(scope.get("app"), "state", None)
    kept = getattr(state, "scout_settings", None)
    if isinstance(kept, _Settings):
        return kept
    additional = getattr(getattr(state, "args", None), "additional_config", None)
    loaded = load(document_of(additional))
    settings = _Settings(loaded.of(TenancySettings), loaded.of(VllmSettings))
    if state is not None:
        state.scout_settings = settings
    return settings


def _link(scope: Scope) -> EngineLink | None:
    link = getattr(getattr(scope.get("app"), "state", None), "scout", None)
    return link if isinstance(link, EngineLink) else None


def _out(scope: Scope) -> bool:
    """Whether the engine is known to run without our code."""
    link = _link(scope)
    return link is not None and link.out


def _ignored(outcomes: Mapping[str, HintOutcome]) -> dict[str, HintOutcome]:
    used = (HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.DEFERRED)
    return {
        field: HintOutcome.IGNORED if outcome in used else outcome
        for field, outcome in outcomes.items()
    }


def _path(scope: Scope) -> str:
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", "") or getattr(scope.get("app"), "root_path", "") or "")
    return path.removeprefix(root) if root else path


def _headers(scope: Scope) -> dict[str, str]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}

"""
Hint headers on requests of the openai package: patched in, or attached to one client.

The patch wraps `BaseClient._build_request`, which exists once, runs for every attempt of every
call, sync or async, streaming or not, and in the caller's context (openai 1.x, 2.x and 3.x).
`attach` puts a request hook on the httpx or httpx2 client behind one object instead.
"""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from scout_sdk import _wire
from scout_sdk._context import is_ours, take
from scout_sdk._env import Environment, announce, read_environment
from scout_sdk._errors import ConfigError
from scout_sdk._guard import guarded, warn_once
from scout_sdk._hints import Hints
from scout_sdk._locks import ProcessLock
from scout_sdk._refusals import refuses_hints
from scout_sdk._sessions import SESSIONS, is_this_machine

__all__ = [
    "allow",
    "allow_host",
    "allowed",
    "attach",
    "install",
    "install_if_imported",
    "label",
    "observe",
    "recorder",
    "set_recorder",
    "uninstall",
]

T = TypeVar("T")

_MARK = "scout"
_RECORDED = "scout_recorded"
_PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
_RETRY_HEADER = "x-stainless-retry-count"

_MAX_STRANGERS = 64

_logger = logging.getLogger("scout_sdk")
_hosts: set[str] = set()
_strangers: set[str] = set()
"""Hosts of which was said that they get no hints."""
_lock = ProcessLock()
_wanted = True  # False after uninstall(): nothing installs the patch unasked
_active = False


class Recorder(Protocol):
    """Takes note of requests and their answers."""

    def started(self, request: Any, hints: Hints | None, key: str) -> str:
        """Note that *request* is about to be sent; return a name for it."""

    def answered(self, name: str, response: Any) -> None:
        """Note that *response* has begun."""


_recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """Return what takes note of this process's requests, or None."""
    return _recorder


def set_recorder(recorder: Recorder | None) -> None:
    """Let *recorder* take note from now on; None: nobody."""
    global _recorder
    _recorder = recorder


@functools.lru_cache(maxsize=16)
def _parsed(base_url: str, enabled: str) -> Environment:
    return read_environment({"SCOUT_BASE_URL": base_url, "SCOUT_SDK_ENABLED": enabled})


def _environment() -> Environment:
    """Return what the environment says of where and whether; asked at every request."""
    get = os.environ.get
    return _parsed(get("SCOUT_BASE_URL", ""), get("SCOUT_SDK_ENABLED", ""))


@functools.lru_cache(maxsize=64)
def _host_of(base_url: str) -> str | None:
    parts = urlsplit(base_url if "//" in base_url else f"//{base_url}")
    try:
        return parts.hostname
    except ValueError:
        return None


def allow(base_url: str) -> None:
    """Let requests to the server at *base_url* carry hints. Raises ConfigError for a wrong URL."""
    from scout_sdk._capabilities import Endpoint  # only for those who name a server

    _hosts.add(Endpoint.parse(base_url).host)


def allow_host(host: str) -> None:
    """Let requests to *host*, a name or a base URL, carry hints."""
    name = _host_of(host)
    if name is None:
        raise ConfigError(f"no host in {host!r}; expected something like http://host:8000")
    _hosts.add(name)


def allowed(host: str) -> bool:
    """
    Whether requests to *host* may carry hints.

    Agent names and tool data must not leak to strangers: only this machine, the host of
    SCOUT_BASE_URL, and hosts named by `allow` or a `base_url` argument.
    """
    host = host.strip("[]").lower()
    if host in _hosts or is_this_machine(host):
        return True
    base_url = _environment().base_url
    return base_url is not None and host == _host_of(base_url)


def _say_stranger(host: str) -> None:
    """Say once that *host* gets no hints, though there are some: else nobody would notice."""
    if host in _strangers or len(_strangers) >= _MAX_STRANGERS:
        return
    _strangers.add(host)
    # Whoever named a server knows, and talks to others on purpose.
    named = bool(_hosts) or _environment().base_url is not None
    _logger.log(
        logging.DEBUG if named else logging.WARNING,
        "scout: requests to %s carry no hints; if that is your server, name it: SCOUT_BASE_URL,"
        " or base_url=",
        host,
    )


def _endpoint(url: Any, path: str) -> str:
    """Return the server's root: what stands before `/v1/...`."""
    head, found, _ = path.partition("/v1/")
    return f"{url.scheme}://{url.netloc.decode()}{head if found else ''}"


@guarded
def label(request: Any, key: str = "", retries: int = 0) -> None:
    """
    Add the hint headers to *request*, an httpx or httpx2 one; headers already set stay.

    They go to hosts that may have them; a recorder takes note of requests to any host.
    key: the same for all attempts of one call. retries: number of earlier attempts.
    """
    extensions = request.extensions
    if _MARK in extensions:
        return
    url = request.url
    path: str = url.path
    if not path.endswith(_PATHS):
        return
    enabled = _environment().enabled
    known = allowed(url.host)
    if enabled and not known and is_ours(key, retries):
        _say_stranger(url.host)
    tells = known and enabled and not refuses_hints(url.scheme == "https", url.host, url.port)
    if not tells and _recorder is None:
        return
    taken = take(key, retries)
    if _recorder is not None and _RECORDED not in extensions:
        extensions[_RECORDED] = _recorder.started(request, taken[0] if taken else None, key)
    if taken is None:
        return
    hints, slot = taken
    extensions[_MARK] = True
    if not tells:
        return
    headers = request.headers
    for name, value in _wire.encode(hints).items():
        if name not in headers:
            headers[name] = value
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug(
            "scout: request to %s: agent %r, session %r, turn %s, %d tools",
            url.host,
            hints.agent,
            hints.session,
            hints.turn,
            len(hints.tools),
        )
    if hints.session is not None:
        server = _endpoint(url, path)
        SESSIONS.learn_endpoint(
            hints.session, server, _wire.credentials_in(headers), endpoint=slot.endpoint
        )


@guarded
def observe(request: Any, response: Any) -> None:
    """Let the recorder see the answer to *request*; the first that calls for it counts."""
    if _recorder is not None:
        name = request.extensions.get(_RECORDED)
        if name is not None and not response.extensions.get(_RECORDED):
            response.extensions[_RECORDED] = True
            _recorder.answered(name, response)


def _patched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _build_request(self: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, options, *args, **kwargs)
        if _active:
            retries = kwargs.get("retries_taken", 0)
            label(request, getattr(options, "idempotency_key", None) or "", retries)
            if _recorder is not None:
                guarded(_hook_answers)(self._client)
        return request

    _build_request._scout = True  # type: ignore[attr-defined]
    return _build_request


def install_if_imported() -> bool:
    """Patch the openai package if it is imported and nobody called `uninstall`."""
    return _active or (_wanted and _install())


def install() -> bool:
    """
    Patch the openai package, so that its requests carry the hints in force; idempotent.

    Imports openai. Returns False when it is not installed, or is a version whose requests are
    built elsewhere (a warning says so; use `attach`).
    """
    global _wanted
    _wanted = True
    try:
        importlib.import_module("openai._base_client")
    except ImportError:
        return False
    return _install()


@guarded
def _install_locked() -> bool:
    global _active
    module = sys.modules.get("openai._base_client")
    if module is None:
        return False
    client = getattr(module, "BaseClient", None)
    original = getattr(client, "_build_request", None)
    if client is None or original is None:
        version = getattr(sys.modules.get("openai"), "__version__", "unknown")
        warn_once("install", f"openai {version} is not supported; use scout_sdk.attach(client)")
        return False
    wrapped: Any = original
    while wrapped is not None and not hasattr(wrapped, "_scout"):
        wrapped = getattr(wrapped, "__wrapped__", None)
    if wrapped is None:
        client._build_request = _patched(original)
    _active = True
    announce(read_environment())
    return True


def _install() -> bool:
    with _lock:
        return bool(_install_locked())


def uninstall() -> None:
    """Take the patch out; idempotent. Contexts and callbacks do not put it back by themselves."""
    global _active, _wanted
    with _lock:
        _active = _wanted = False
        module = sys.modules.get("openai._base_client")
        client = getattr(module, "BaseClient", None)
        current = getattr(client, "_build_request", None)
        # Somebody else's wrapper over ours stays; ours inside it passes requests on untouched.
        if client is not None and hasattr(current, "_scout"):
            client._build_request = current.__wrapped__  # type: ignore[union-attr]


def _hook(request: Any) -> None:
    _hook_guarded(request)


async def _async_hook(request: Any) -> None:
    _hook_guarded(request)


def _answer_hook(response: Any) -> None:
    observe(response.request, response)


async def _async_answer_hook(response: Any) -> None:
    observe(response.request, response)


def _hook_answers(client: Any) -> None:
    hook = _async_answer_hook if hasattr(client, "aclose") else _answer_hook
    hooks = client.event_hooks.setdefault("response", [])
    if hook not in hooks:
        hooks.append(hook)


@guarded
def _hook_guarded(request: Any) -> None:
    count = request.headers.get(_RETRY_HEADER, "0")
    label(request, "", int(count) if count.isdigit() else 0)


_INNER = ("root_client", "root_async_client", "client", "async_client", "_client", "_model_client")


def _http_clients(obj: Any, depth: int = 4) -> list[Any]:
    if isinstance(getattr(obj, "event_hooks", None), dict):
        return [obj]
    if depth == 0:
        return []
    found: list[Any] = []
    for name in _INNER:
        inner = getattr(obj, name, None)
        if inner is not None:
            found.extend(_http_clients(inner, depth - 1))
    return found


def attach(obj: T) -> T:
    """
    Hook the HTTP clients behind *obj*, so that their requests carry hints; return *obj*.

    For those who want no patch: an openai client, a LangChain chat model, an AutoGen model
    client, an httpx or httpx2 client. Idempotent. Default clients of LangChain are shared by
    (base_url, timeout), so one call may cover several models. Raises ConfigError when there is
    no HTTP client behind *obj*.
    """
    clients = _http_clients(obj)
    if not clients:
        raise ConfigError(
            f"found no HTTP client behind a {type(obj).__name__}; expected an OpenAI or AsyncOpenAI"
            " client, a LangChain or AutoGen model that holds one, or an httpx or httpx2 client"
        )
    announce(read_environment())
    for client in clients:
        hook = _async_hook if hasattr(client, "aclose") else _hook
        # The property returns the live dict; its setter would drop nothing, but wraps lists anew.
        hooks = client.event_hooks.setdefault("request", [])
        if hook not in hooks:
            hooks.append(hook)
        _hook_answers(client)
    return obj

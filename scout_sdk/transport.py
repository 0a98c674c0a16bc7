"""
Transports that add the hint headers, for people who build their own HTTP clients.

They derive from httpx's base classes and use nothing else of it, so they wrap httpx2
transports (openai 3 and later) as well:

    httpx.Client(transport=HintTransport())
    httpx2.AsyncClient(transport=AsyncHintTransport(httpx2.AsyncHTTPTransport()))
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import httpx

from scout_sdk import _openai, _wire
from scout_sdk._guard import guarded
from scout_sdk._hints import Hints

__all__ = ["AsyncHintTransport", "HintTransport", "add_hints"]

_PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
_RETRIES = "x-stainless-retry-count"


@guarded
def add_hints(request: Any, hints: Callable[[], Hints | None] | None = None) -> None:
    """
    Add hint headers to *request*, of httpx or httpx2, if it asks an allowed host for a completion.

    *hints* says which; None: those in force here, counted as a turn. Headers that are
    already set stay. Never raises, except in strict mode.
    """
    if hints is None:
        count = request.headers.get(_RETRIES, "0")
        _openai.label(request, "", int(count) if count.isdigit() else 0)
        return
    if not request.url.path.endswith(_PATHS) or not _openai.allowed(request.url.host):
        return
    given = hints()
    if given is not None:
        headers = request.headers
        for name, value in _wire.encode(given).items():
            if name not in headers:
                headers[name] = value


class HintTransport(httpx.BaseTransport):
    """Adds hint headers, then delegates."""

    def __init__(
        self,
        inner: Any = None,
        *,
        hints: Callable[[], Hints | None] | None = None,
        hosts: Iterable[str] = (),
    ) -> None:
        """
        Wrap *inner*, a synchronous transport; None: a new httpx.HTTPTransport.

        hints: asked at every request; None: the hints in force. hosts: host names or base
        URLs that may get hints from now on, besides this machine and SCOUT_BASE_URL.
        """
        self._inner = httpx.HTTPTransport() if inner is None else inner
        self._hints = hints
        for host in hosts:
            _openai.allow_host(host)

    def handle_request(self, request: Any) -> Any:
        """Send *request* with the hint headers set."""
        add_hints(request, self._hints)
        response = self._inner.handle_request(request)
        _openai.observe(request, response)
        return response

    def close(self) -> None:
        """Close the wrapped transport."""
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(exc_type, exc_value, traceback)


class AsyncHintTransport(httpx.AsyncBaseTransport):
    """Adds hint headers, then delegates."""

    def __init__(
        self,
        inner: Any = None,
        *,
        hints: Callable[[], Hints | None] | None = None,
        hosts: Iterable[str] = (),
    ) -> None:
        """
        Wrap *inner*, an asynchronous transport; None: a new httpx.AsyncHTTPTransport.

        hints and hosts: as for HintTransport.
        """
        self._inner = httpx.AsyncHTTPTransport() if inner is None else inner
        self._hints = hints
        for host in hosts:
            _openai.allow_host(host)

    async def handle_async_request(self, request: Any) -> Any:
        """Send *request* with the hint headers set."""
        add_hints(request, self._hints)
        response = await self._inner.handle_async_request(request)
        _openai.observe(request, response)
        return response

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc_value, traceback)

"""A transport that records requests and answers them itself, without a socket."""

import importlib
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from scout_sdk._recording import RecordedRequest
from scout_sdk._replies import Reply, reply_body, reply_stream

__all__ = ["RecordingTransport"]


class RecordingTransport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """
    Records every request in `requests` and answers as an OpenAI-compatible server would.

    For httpx and httpx2 clients, synchronous or not: its responses are of the library that
    the request is of. *reply* says what to answer; None, or a None from it: `done`.
    """

    def __init__(self, reply: Callable[[RecordedRequest], Reply | None] | None = None) -> None:
        self.requests: list[RecordedRequest] = []
        self.closed = False
        self._reply = reply

    def handle_request(self, request: Any) -> Any:
        """Record *request* and answer it."""
        return self._answer(request, request.read())

    async def handle_async_request(self, request: Any) -> Any:
        """Record *request* and answer it."""
        return self._answer(request, await request.aread())

    def close(self) -> None:
        """Note that a client closed it."""
        self.closed = True

    async def aclose(self) -> None:
        """Note that a client closed it."""
        self.closed = True

    def _answer(self, request: Any, body: bytes) -> Any:
        try:
            parsed = json.loads(body) if body else None
        except ValueError:
            parsed = None
        recorded = RecordedRequest(
            method=request.method,
            path=request.url.path,
            headers=tuple((name.lower(), value) for name, value in request.headers.multi_items()),
            body=body,
            received_s=time.monotonic(),
            json=parsed,
        )
        self.requests.append(recorded)
        library = importlib.import_module(type(request).__module__.partition(".")[0])
        reply = (self._reply(recorded) if self._reply is not None else None) or Reply()
        headers = dict(reply.headers)
        if reply.status != 200:
            return library.Response(reply.status, headers=headers, json={"error": {}})
        if isinstance(parsed, dict) and parsed.get("stream"):
            usage = bool((parsed.get("stream_options") or {}).get("include_usage"))
            content = b"".join(reply_stream(recorded.path, reply, usage=usage))
            headers["content-type"] = "text/event-stream"
            return library.Response(200, headers=headers, content=content)
        return library.Response(200, headers=headers, json=reply_body(recorded.path, reply))

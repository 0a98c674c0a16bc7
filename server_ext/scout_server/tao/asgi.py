"""Parts of an ASGI application that holds requests: bodies, errors, clients that leave."""

import json
from collections.abc import Callable, Mapping

from starlette.types import Receive, Scope, Send

__all__ = ["answer", "client_left", "take_body"]


class _TooLargeError(Exception):
    """A request's body is over the limit."""


async def answer(
    send: Send, status: int, message: str, *, kind: str, headers: Mapping[str, str] | None = None
) -> None:
    """Send an error in OpenAI's format."""
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(n.lower().encode(), v.encode()) for n, v in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def take_body(
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    limit_bytes: int,
    count: Callable[[str], None],
) -> bytes | None:
    """
    Return the whole body.

    None: it was over the limit, and answered with 413, or the client left; *count* was told which.
    """
    try:
        body = await _read_body(scope, receive, limit_bytes=limit_bytes)
    except _TooLargeError:
        kind = "invalid_request_error"
        await answer(send, 413, f"the body is over {limit_bytes} bytes", kind=kind)
        count("too-large")
        return None
    if body is None:
        count("client-left")
    return body


async def _read_body(scope: Scope, receive: Receive, *, limit_bytes: int) -> bytes | None:
    """Return the whole body, None when the client left meanwhile; _TooLargeError over the limit."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise _TooLargeError
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise _TooLargeError
        parts.append(chunk)
        if not message.get("more_body", False):
            return b"".join(parts) if len(parts) > 1 else parts[0]


async def client_left(receive: Receive) -> None:
    """Return when the client has left; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""Parts of an ASGI application that holds requests: bodies, errors, clients that leave."""

import json
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

__all__ = ["TooLargeError", "answer", "client_left", "read_body"]


class TooLargeError(Exception):
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


async def read_body(scope: Scope, receive: Receive, *, limit_bytes: int) -> bytes | None:
    """Return the whole body, None when the client left meanwhile; TooLargeError over the limit."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise TooLargeError
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise TooLargeError
        parts.append(chunk)
        if not message.get("more_body", False):
            return b"".join(parts) if len(parts) > 1 else parts[0]


async def client_left(receive: Receive) -> None:
    """Return when the client has left; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""What the gateway and the Ray application both say and take beside requests."""

from importlib import metadata

from starlette.requests import ClientDisconnect, Request

from scout_sdk import _wire
from scout_sdk._limits import MAX_EVENTS, MAX_EVENTS_BYTES, MAX_HEADERS_BYTES

__all__ = ["capabilities_of", "read_bounded"]


def capabilities_of(
    server: str, *, tool_calls: bool, sessions: bool, body_bytes: int
) -> dict[str, object]:
    """
    Return what *server* takes, as `GET /v1/scout/capabilities` says it, in its engines' words.

    *tool_calls*: it reads their arguments off answers; *sessions*: it has an admin view.
    """
    features = {"admission", "events", "foreign-hints", "hints", "outcome", "state"}
    if tool_calls:
        features.add("tool-calls")
    if sessions:
        features.add("sessions")
    return {
        "version": _wire.VERSION,
        "features": sorted(features),
        "server": {"name": server, "version": metadata.version("scout-sdk")},
        "limits": {
            "headers_bytes": MAX_HEADERS_BYTES,
            "events": MAX_EVENTS,
            "events_bytes": MAX_EVENTS_BYTES,
            "body_bytes": body_bytes,
        },
    }


async def read_bounded(request: Request, limit: int) -> bytes | None:
    """Return the body of *request*, nothing of one whose client left; None: over *limit* bytes."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                return None
    except ClientDisconnect:
        return b""
    return body

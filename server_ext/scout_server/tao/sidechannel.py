"""What the gateway and the Ray application both say and take beside requests."""

from starlette.requests import Request

from scout_sdk import _wire

__all__ = ["capabilities_of", "read_bounded"]


def capabilities_of(server: str) -> dict[str, object]:
    """Return what *server* takes, as `GET /v1/scout/capabilities` says it."""
    return {
        "version": _wire.VERSION,
        "features": ["admission", "events", "hints", "outcome", "sessions", "state"],
        "server": {"name": server},
    }


async def read_bounded(request: Request, limit: int) -> bytes | None:
    """Return the body of *request*; None as soon as it is over *limit* bytes."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            return None
    return body

"""What the gateway and the Ray application both say and take beside requests."""

from importlib import metadata
from typing import Protocol

from starlette.requests import ClientDisconnect, Request

from scout_sdk import _wire
from scout_sdk._limits import STATED

__all__ = ["Taking", "capabilities_of", "read_bounded"]


class Taking(Protocol):
    """Settings that say what a server takes."""

    @property
    def tool_calls(self) -> bool:
        """Whether their arguments are read off answers."""

    @property
    def admin_key(self) -> str:
        """Key of the admin view; empty: there is none."""

    @property
    def max_body_bytes(self) -> int:
        """Longest body."""


def capabilities_of(server: str, settings: Taking) -> dict[str, object]:
    """Return what *server* takes (`GET /v1/scout/capabilities`), in its engines' words."""
    features = {"admission", "events", "foreign-hints", "hints", "outcome", "state"}
    if settings.tool_calls:
        features.add("tool-calls")
    if settings.admin_key:
        features.add("sessions")
    return {
        "version": _wire.VERSION,
        "features": sorted(features),
        "server": {"name": server, "version": metadata.version("scout-sdk")},
        "limits": {**STATED, "body_bytes": settings.max_body_bytes},
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

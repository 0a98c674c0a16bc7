"""Servers that said that they take no hints; known to whoever adds hint headers."""

import time
from collections.abc import Callable

__all__ = ["note_refusal", "refuses_hints"]

_REMEMBERED_S = 60.0
_MAX_SERVERS = 64

_refusing: dict[tuple[str, int], float] = {}
"""Until when it is believed, by host and port."""


def note_refusal(
    host: str, port: int, refuses: bool, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Remember for a minute that the server there takes no hints, or that it does."""
    if not refuses:
        _refusing.pop((host, port), None)
        return
    if len(_refusing) >= _MAX_SERVERS:
        _refusing.clear()
    _refusing[(host, port)] = clock() + _REMEMBERED_S


def refuses_hints(
    secure: bool, host: str, port: int | None, *, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Whether the server there said within the last minute that it takes no hints; asks nobody."""
    if not _refusing:
        return False
    until = _refusing.get((host.strip("[]"), port or (443 if secure else 80)))
    return until is not None and clock() < until

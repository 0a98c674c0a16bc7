"""
What the router tells the ingress of the same process about a request on its way.

The two run in different threads with an event loop each, and Serve gives a router no way to answer
a request. Only functions of this module may touch `_notes`: Serve pickles the router's module by
value, so anything there would be a copy.
"""

import asyncio
from dataclasses import dataclass, field

from scout_server.ray.calls import Placed, Refusal

__all__ = ["Note", "close", "open_note", "placed", "refused"]


@dataclass(slots=True)
class Note:
    """Where one request stands."""

    placed: Placed | None = None
    """Its latest placement by a plan; None: it has none, or was sent without the pool."""
    sent: bool = False
    """A replica was chosen for it, with or without a plan."""
    refusal: asyncio.Future[Refusal] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Belongs to the ingress's event loop."""


_notes: dict[str, Note] = {}


def open_note(key: str) -> Note:
    """Return a new note for a request; close() it."""
    note = _notes[key] = Note()
    return note


def close(key: str) -> None:
    """Forget a request."""
    _notes.pop(key, None)


def placed(key: str, placement: Placed | None) -> None:
    """Say where a request goes (None: anywhere, without a plan); unknown requests are ignored."""
    note = _notes.get(key)
    if note is not None:
        note.placed, note.sent = placement, True


def refused(key: str, refusal: Refusal) -> bool:
    """Say that a request gets no room; False: nobody waits for it."""
    note = _notes.get(key)
    if note is None:
        return False
    loop = note.refusal.get_loop()
    if loop.is_closed():
        return False
    loop.call_soon_threadsafe(_settle, note.refusal, refusal)
    return True


def _settle(future: asyncio.Future[Refusal], refusal: Refusal) -> None:
    if not future.done():
        future.set_result(refusal)

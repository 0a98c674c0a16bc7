"""What ingress, router, pool and replicas of one application tell each other. Values only."""

import enum
from dataclasses import dataclass

from scout_server.tao.asked import Asked

__all__ = ["Call", "Head", "NodeFacts", "Placed", "PoolGoneError", "Refusal", "Ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request on its way to a replica."""

    method: str
    path: str
    """Percent-encoded."""
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What the router needs to know of a call; the headers are in it as they were understood."""

    asked: Asked | None = None
    """The turn; None: the call needs no room."""
    attempt: int = 0
    """Counts how often the ingress sent this turn."""
    avoid: frozenset[str] = frozenset()
    """Replicas that just failed it."""
    timeout_s: float = 0.0
    """How long it may be held."""
    node: str | None = None
    """Where a call without a turn should go; None: anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first thing that a replica answers."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a router knows of a replica; None: not said."""

    name: str
    capacity_tokens: int | None = None
    waiting: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A turn has room."""

    node: str
    held_s: float


class Refusal(enum.Enum):
    """Why a turn gets no room; labels the requests metric."""

    FULL = "too-many-wait"
    LATE = "held-too-long"
    GONE = "client-left"


class PoolGoneError(Exception):
    """The pool does not answer: decide without it."""

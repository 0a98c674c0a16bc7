"""What the ledger keeps: nodes, sessions, and what is booked for whom."""

import enum
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from scout_server.policy.credit import CacheRate, Residue
from scout_server.policy.pace import Pace

__all__ = ["Booking", "LedgerSettings", "Node", "Session", "SessionState", "Tally"]


class SessionState(enum.Enum):
    """Where a session stands; labels metrics and the admin view."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    TOOL = "tool"
    """In a gap; its room is kept."""
    PAUSED = "paused"
    """In a gap; its room may be given away."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Settings of the session ledger."""

    lease_s: Annotated[float, Gt(0)] = 600.0
    """A running request that nobody spoke of for this long is taken for lost."""
    session_s: Annotated[float, Gt(0)] = 1800.0
    """A session without requests is forgotten after this time, final message or not."""
    max_sessions: Annotated[int, Ge(1)] = 16384
    """Sessions remembered; the one heard of longest ago is forgotten first."""


@dataclass(slots=True)
class Node:
    """One engine as the ledger knows it."""

    name: str
    capacity: int
    """KV room in tokens."""
    slots: int
    up: bool = True
    draining: bool = False
    """Takes no new session, serves the old ones."""
    pressed: bool = False
    """The engine itself makes requests wait: nothing more is sent while ours run there."""
    served: int = 0
    """Turns that were booked there so far."""
    rate: CacheRate = field(default_factory=lambda: CacheRate(0.1))
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True)
class Booking:
    """Room that one running request has on one node."""

    key: str
    session: tuple[str, str]
    node: str
    tokens: int
    prefix: str | None
    prefix_tokens: int
    since: float
    lease: float
    """Until when it counts without news."""
    forced: bool = False
    """It was placed because it was held too long."""
    beside: int = 0
    """How many of *tokens* its session's other agents hold."""


@dataclass(slots=True)
class Session:
    """One agent program. Its id is (tenant, session)."""

    id: tuple[str, str]
    state: SessionState = SessionState.NEW
    waiting: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    residues: dict[str, Residue] = field(default_factory=dict)
    """Node -> what it held at the session's last turn there."""
    origin: str | None = None
    footprint: int = 0
    """Tokens of its latest turn, prompt and output."""
    turns: int = 0
    attained: int = 0
    moves: int = 0
    seen: float = 0.0
    version: int = 0
    """Counts changes of what is known of it, but for states and for what time alone does."""


@dataclass(slots=True)
class Tally:
    """What is booked on one node."""

    tokens: int = 0
    requests: int = 0
    forced: int = 0
    prefixes: dict[str, list[int]] = field(default_factory=dict)
    """Prefix -> sizes, one per request that has it; the largest counts."""

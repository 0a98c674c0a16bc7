"""Frozen types of what a client may tell a server. All durations are relative, in seconds."""

import enum
from dataclasses import dataclass

__all__ = [
    "HUMAN",
    "Evidence",
    "HintOutcome",
    "Hints",
    "SessionEvent",
    "ToolEvent",
    "ToolState",
]

HUMAN = "human"
"""Tool name that says: the session waits for a person (interrupt, approval)."""


class ToolState(enum.Enum):
    """Where a tool call stands."""

    STARTED = "started"
    PROGRESS = "progress"
    ENDED = "ended"
    FAILED = "failed"


class Evidence(enum.Enum):
    """Where an expected remaining time comes from."""

    DEADLINE = "deadline"
    """An upper bound that the caller enforces, such as `timeout 30`."""
    PROGRESS = "progress"
    """Extrapolated from reported progress."""
    SLEEP = "sleep"
    """Parsed from a sleeping command."""
    DECLARED = "declared"
    """Stated by the application."""


class HintOutcome(enum.Enum):
    """What a server did with one hint; labels metrics and the X-Scout-Outcome header."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEvent:
    """One change in the life of one tool call."""

    name: str
    state: ToolState
    call_id: str | None = None
    elapsed_s: float | None = None
    """Seconds since the call started."""
    remaining_s: float | None = None
    """Expected seconds until the call ends, counted from the moment of sending."""
    evidence: Evidence | None = None
    """Where *remaining_s* comes from; None when it is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What one request says about its agent program. None or empty means: not said."""

    session: str | None = None
    agent: str | None = None
    path: str | None = None
    """Place of the agent in its graph, stable over runs: `research/model`."""
    anchor: str | None = None
    """Fingerprint of the fixed prefix (see scout_sdk.fingerprint)."""
    turn: int | None = None
    """Number of this call among the calls of (session, agent), from 1; retries keep it."""
    parent: str | None = None
    """Session that spawned this one."""
    tools: tuple[ToolEvent, ...] = ()
    """Tool calls of this session since its last request, oldest first."""
    next_agents: tuple[str, ...] = ()
    """Agents that are certain to follow, from static graph edges."""
    final: bool = False
    """True on the session's last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """One message of the side channel: something happened to a session between requests."""

    session: str
    agent: str | None = None
    tool: ToolEvent | None = None
    final: bool = False
    """True: the session will send no further request."""
    age_s: float = 0.0
    """Seconds between the event and its sending."""

"""What an adapter tells the policy core, and what it gets back. Values only."""

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scout_sdk._hints import Hints

__all__ = ["UNHASHED", "UNOWNED", "Assignment", "Finish", "FinishFacts", "RequestFacts", "Segment"]

UNHASHED = -1
"""Group of blocks whose content nobody can ask for again; they are evicted first."""
UNOWNED = 0
"""Group of cached blocks of which the policy knows nothing."""


class Finish(enum.Enum):
    """How a request ended, as far as it tells whether the session comes back."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    ABORT = "abort"
    PREEMPTED = "preempted"
    """Not an end: the engine took the blocks back and will run the request again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """One request as it arrives at a replica."""

    request_id: str
    hints: Hints | None
    """None: no (valid) hint came with it."""
    block_hashes: Sequence[Hashable]
    """Chained hash of every full block of the prompt, head first."""
    prompt_tokens: int
    tenant: str = ""
    warmup: bool = False
    """True for a warm-up request of our own: it teaches nothing and is in no hit metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishFacts:
    """One request as it leaves a replica."""

    request_id: str
    finish: Finish
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the cache when it was scheduled; None when not known."""
    tools: tuple[tuple[str, float | None], ...] = ()
    """Names of the tool calls in its output and their expected seconds, where parsed."""


class Assignment(NamedTuple):
    """Whom the core takes a request for. None: nobody it knows."""

    agent: str | None
    session: str | None
    from_hint: bool


class Segment(NamedTuple):
    """The blocks of a chain up to *end_block* (exclusive) that belong to *group*."""

    end_block: int
    group: int

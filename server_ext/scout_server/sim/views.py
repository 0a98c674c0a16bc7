"""What a policy may see: the past, never a turn's output or a gap's true length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ReplicaView", "TurnView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn as it is released: what its request shows, and what its program did before."""

    program: str
    session: str
    """Program and sub-agent: what routing keeps together."""
    agent: str | None
    turn: int
    """Turns of this session so far, this one included."""
    prompt_tokens: int
    prompt_hashes: Sequence[int]
    program_arrival: float
    attained_tokens: int
    """Tokens computed for the program so far."""
    tool: str | None
    """The tool that has just returned."""
    tenant: str = ""


class ReplicaView(Protocol):
    """What a router may see of one replica at one instant."""

    @property
    def index(self) -> int:
        """Place among the replicas."""

    @property
    def waiting(self) -> int:
        """Requests that wait there."""

    @property
    def running(self) -> int:
        """Requests that run there."""

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens sent there and not finished, less those that were found cached."""

    @property
    def used_fraction(self) -> float:
        """Share of the KV blocks in use; cached ones count as free."""

    def cached_blocks(self, hashes: Sequence[int]) -> int:
        """Return the length, in blocks, of the longest cached prefix."""

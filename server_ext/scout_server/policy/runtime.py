"""The policy core of one replica: the one object that every adapter drives, from one thread."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from scout_sdk._hints import SessionEvent
from scout_server.policy.facts import (
    UNOWNED,
    Assignment,
    FinishFacts,
    RequestFacts,
    Segment,
)
from scout_server.policy.retention import RetentionOrder

__all__ = ["PolicyCore", "PolicySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of the policy core; every adapter has the same."""

    hints: bool = True
    """Use client hints. With *fingerprints* off too, eviction is exactly LRU."""
    fingerprints: bool = True
    """Recognise agents and sessions of unhinted requests by their prefixes."""
    max_agents: Annotated[int, Ge(1)] = 256
    max_sessions: Annotated[int, Ge(1)] = 4096


class PolicyCore:
    """
    Learns from facts, orders the free blocks of one replica.

    Calls for one request come in this order: arrive, then any number of (segments, order.append...)
    as the engine hands its blocks back (preemption, end), then finish. `now` never goes back.
    """

    def __init__(
        self, settings: PolicySettings, *, capacity_blocks: int, block_tokens: int
    ) -> None:
        self.settings = settings
        self.block_tokens = block_tokens
        self.order = RetentionOrder(capacity_blocks)

    def arrive(self, facts: RequestFacts, *, now: float) -> Assignment:
        """Learn from a request's arrival; return whom it was taken for."""
        return Assignment(agent=None, session=None, from_hint=False)

    def segments(self, request_id: str, block_hashes: Sequence[Hashable]) -> list[Segment]:
        """
        Return the owners of a request's chain: segments in order, the last covers the rest.

        *block_hashes* has every full block so far, output included. Ask before its blocks are
        handed to `order`; unknown requests give one unowned segment.
        """
        return [Segment(len(block_hashes), UNOWNED)]

    def finish(self, facts: FinishFacts, *, now: float) -> None:
        """Learn from a request's end; unknown requests are ignored."""

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Learn from the side channel; unknown sessions are remembered within bounds."""

    def tick(self, *, now: float) -> None:
        """Do the work that need not wait for an eviction; call once per engine step."""

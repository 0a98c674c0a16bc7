"""A request under way: whose it is, and whose its blocks are."""

from dataclasses import dataclass

from scout_server.policy.agents import Agent
from scout_server.policy.facts import Finish, Segment
from scout_server.policy.sessions import Chain, Session
from scout_server.policy.tenant import Tenant

__all__ = ["Underway"]

Parts = list[tuple[int, int]]


@dataclass(slots=True)
class Underway:
    """One request that a core was told of, until a while after its end."""

    tenant: Tenant
    session: Session
    agent: Agent
    chain: Chain
    parts: list[Segment]
    """The anchor's parts that the prompt has."""
    blocks: int
    total: int
    known: int
    """Leading blocks that were in use less than a minute ago."""
    final: bool
    warmup: bool
    prompt_tokens: int
    ended: float = 0.0
    """When it ended."""
    said: tuple[Finish, tuple[tuple[str, float | None], ...]] | None = None
    """What its output was said to end with, before it ended."""

    def segments(self, total: int) -> list[Segment]:
        """Return the owners of its chain, which has *total* full blocks by now."""
        self.total = total
        found = self.parts
        if found and found[-1].end_block > total:
            found = [part for part in found if part.end_block <= total]
        if found and found[-1].end_block == total:
            return found.copy()
        return [*found, Segment(total, self.chain.group)]

    def owners(self) -> tuple[Parts, Parts]:
        """Return (group, blocks) of what it asked for, and of what it left behind."""
        parts: Parts = []
        start = 0
        for end, group in self.parts:
            parts.append((group, end - start))
            start = end
        final = parts.copy()
        if self.blocks > start:
            parts.append((self.chain.group, self.blocks - start))
        if self.total > start:
            final.append((self.chain.group, self.total - start))
        return parts, final

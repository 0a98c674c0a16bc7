"""What the policy core shows of itself: values only, for endpoints and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from scout_server.policy.usage import AgentUsage

__all__ = ["AgentState", "CoreState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """One agent as the core sees it."""

    tenant: str
    name: str
    hinted: bool
    anchor_blocks: int
    uses: int
    score: float
    """Probability that its anchor is used within the turnover time, as last computed."""
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreState:
    """One moment of the policy core."""

    mode: str
    """`off` (no identity), `lru` (the engine's own order leads) or `scout`."""
    following: str | None
    """Which of our orders is followed: `use` (expected use), `rate` (frequency), None: neither."""
    predictability: float
    """R of the busiest tenant, in [0, 1]."""
    agents: tuple[AgentState, ...]
    """Most used first."""
    sessions_running: int
    sessions_gap: int
    sessions_ended: int
    """Ended sessions that are still remembered."""
    horizon_s: float
    """Time in which the pool turns over."""
    evicted_blocks: int
    renewals: int
    """How often all scores were computed."""
    shadow_requests: int
    shadow_hits: Mapping[str, int]
    """Hit blocks of the shadow caches under each of our orders: `use` and `rate`."""
    shadow_hits_lru: int
    shadow_leads: Mapping[str, float]
    """Recent hit blocks of each order less LRU's; the highest above zero is followed."""
    regretted_blocks: int
    """Blocks that were asked for again within a minute of their last use and had been evicted."""
    clipped_blocks: int
    """Free blocks that are over their tenant's share, and are kept like any unknown ones."""
    agent_tokens: tuple[AgentUsage, ...]
    """Prompt tokens and hits by agent, bounded; no recomputation and no warm-ups in it."""
    requests: int
    requests_hinted: int
    requests_recognised: int
    """Requests without a hint that were taken for a known agent."""

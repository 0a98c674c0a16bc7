"""Which cached blocks stay: Scout's core, LRU, and the policies it is compared with."""

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from annotated_types import Ge, Gt

from scout_sdk._errors import ConfigError
from scout_server.policy import Finish, FinishFacts, PolicyCore, PolicySettings, Segment
from scout_server.replica import BlockPool
from scout_server.sim.chains import SessionCore
from scout_server.sim.oracle import Future

__all__ = ["RESIDENCY", "DiscardCore", "ResidencySettings", "make_core"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySettings:
    """Which policy decides what stays in HBM."""

    policy: str = "scout"
    """scout, lru, discard, keep, static-ttl, adaptive-ttl, min-waste,
    oracle-next-use."""
    ttl_s: Annotated[float, Gt(0)] = 10.0
    """static-ttl: seconds that a session's blocks are kept after a turn; adaptive-ttl: before
    anything is learnt."""
    waste_s_per_token: Annotated[float, Ge(0)] = 0.0
    """min-waste: seconds to compute one token again; 0: as the latency model says."""
    grid_s: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
    """adaptive-ttl: the values among which it chooses."""


class DiscardCore(SessionCore):
    """
    Gives up a turn's own blocks when it ends: the evict-always baseline.

    What several sessions share stays, in LRU order. Needs *pool* before the first request.
    """

    def __init__(self, *, capacity_blocks: int, block_tokens: int) -> None:
        super().__init__(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self.pool: BlockPool | None = None
        self._own: dict[str, Sequence[Hashable]] = {}

    def segments(self, request_id: str, block_hashes: Sequence[Hashable]) -> list[Segment]:
        """Return the owners, and remember what is the session's own."""
        parts = super().segments(request_id, block_hashes)
        if request_id in self._kept_requests:
            start = parts[-2].end_block if len(parts) > 1 else 0
            self._own[request_id] = block_hashes[start:]
        return parts

    def finish(self, facts: FinishFacts, *, now: float) -> None:
        """Make the turn's own blocks unfindable, unless it was preempted."""
        super().finish(facts, now=now)
        own = self._own.pop(facts.request_id, ())
        if facts.finish is Finish.PREEMPTED or self.pool is None:
            return
        pool = self.pool
        for block_hash in own:
            block = pool.find(cast(int, block_hash))
            if block is not None and not pool.refs[block]:
                pool.forget([block])

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return the past."""
        return -1.0

    def score(self, deadline: float, now: float) -> float:
        """Return a score below that of everything else once a turn has ended."""
        return deadline


class _Keep(SessionCore):
    """Keeps every session's blocks until its program has ended; of two, the older one goes."""

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return the end of time."""
        return math.inf


class _StaticTtl(SessionCore):
    """Keeps a session's blocks for a fixed time after every turn."""

    def __init__(self, ttl_s: float, *, capacity_blocks: int, block_tokens: int) -> None:
        super().__init__(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self._ttl_s = ttl_s

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return a fixed time from now."""
        return now + self._ttl_s


class _AdaptiveTtl(SessionCore):
    """
    Chooses each tool's time to keep by what it would have saved (after Continuum, 2511.02230).

    Of a grid, the value with the most benefit over the tool's last gaps: a gap within it saves
    computing the context again; every gap costs the memory for the time it was held.
    """

    def __init__(
        self, settings: ResidencySettings, cost: "_Cost", *, capacity_blocks: int, block_tokens: int
    ) -> None:
        super().__init__(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self._default = settings.ttl_s
        self._grid = settings.grid_s
        self._cost = cost
        self._gaps: dict[str | None, list[float]] = {}
        self._best: dict[str | None, float] = {}

    def learn(self, tool: str | None, gap_s: float) -> None:
        """Count the gap."""
        gaps = self._gaps.setdefault(tool, [])
        gaps.append(gap_s)
        if len(gaps) > 400:
            del gaps[:200]
        if len(gaps) >= 8 and (len(gaps) % 8 == 0 or tool not in self._best):
            self._best[tool] = self._choose(gaps)

    def _choose(self, gaps: Sequence[float]) -> float:
        best, most = 0.0, 0.0
        for ttl in self._grid:
            # In seconds of one token's computation: what a hit saves, what holding costs others.
            saved = sum(self._cost.recompute for gap in gaps if gap <= ttl)
            held = sum(min(gap, ttl) for gap in gaps) * self._cost.hold_per_s
            if saved - held > most:
                best, most = ttl, saved - held
        return best

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return the tool's best time from now."""
        return now + self._best.get(tool, self._default)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Per token: seconds to compute it again, and seconds of others' work that a second of holding
    it displaces (a full pool turns over once in about *turnover_s*)."""

    recompute: float
    hold_per_s: float


class _MinWaste(SessionCore):
    """
    Preserves or discards by the smaller waste (after InferCept, 2402.01869).

    Preserving wastes memory x expected gap, discarding wastes the recomputation; swapping is the
    tiers' part here. The expected gap of a tool is its past mean.
    """

    def __init__(self, cost: _Cost, *, capacity_blocks: int, block_tokens: int) -> None:
        super().__init__(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self._cost = cost
        self._sum: dict[str | None, tuple[int, float]] = {}

    def learn(self, tool: str | None, gap_s: float) -> None:
        """Count the gap."""
        count, total = self._sum.get(tool, (0, 0.0))
        self._sum[tool] = (count + 1, total + gap_s)

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return twice the expected gap from now, or the past when discarding wastes less."""
        count, total = self._sum.get(tool, (0, 0.0))
        if not count:
            return now + 1.0
        expected = total / count
        preserve = expected * self._cost.hold_per_s
        if preserve > self._cost.recompute:
            return -1.0
        return now + 2 * expected


class _OracleNextUse(SessionCore):
    """
    Oracle: knows who speaks next in every program, and when; evicts what is used furthest ahead.

    The rule is Bélády's, over chains. When turns after the next one come is estimated from true
    gaps and the mean turn so far, so it is a strong oracle, not a proven optimum. A shared prefix
    counts as used when the first of its agent's chains is.
    """

    def __init__(self, future: Future, *, capacity_blocks: int, block_tokens: int) -> None:
        super().__init__(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self._future = future
        self._coming: dict[str, list[tuple[float, str]]] = {}
        future.listen(self._revise)

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return when the chain is used next."""
        return self._future.next_use(session)

    def score(self, deadline: float, now: float) -> float:
        """Return a score that falls with the time until the next use."""
        return -1e18 if deadline == math.inf or deadline < 0 else -deadline

    def segments(self, request_id: str, block_hashes: Sequence[Hashable]) -> list[Segment]:
        """Return the agent's part, the session's part that comes again, and the rest."""
        again = self._future.take_again(request_id)
        parts = super().segments(request_id, block_hashes)
        if again >= len(block_hashes):
            return parts
        kept = [Segment(min(s.end_block, again), s.group) for s in parts[:-1]]
        dead = self._kept_group("(never again)")
        self.order.set_score(dead, -1e18)
        # Blocks before *again* keep their owner; an agent's part is for all its sessions.
        head = [s for s in parts[:-1] if s.end_block > again] or kept
        first = head[-1].end_block if head else 0
        if again > first:
            head = [*head, Segment(again, parts[-1].group)]
        return [*head, Segment(len(block_hashes), dead)]

    def while_used(self, now: float) -> float:
        """Return the present: a waiting turn's blocks are used next of all."""
        return now

    def _kept_shared(self, agent: str, deadline: float, now: float) -> None:
        """Leave it to `_revise`, which knows the first use."""

    def _revise(self, name: str, agent: str | None, at: float) -> None:
        if name in self._kept_sessions:
            self._kept_until(name, at, 0.0)
        if agent is None:
            return
        coming = self._coming.setdefault(agent, [])
        if at < math.inf:
            heapq.heappush(coming, (at, name))
        while coming and self._future.next_use(coming[0][1]) != coming[0][0]:
            heapq.heappop(coming)
        first = coming[0][0] if coming else math.inf
        self.order.set_score(self._kept_group(f"agent {agent}"), self.score(first, 0.0))


RESIDENCY = (
    "adaptive-ttl",
    "discard",
    "keep",
    "lru",
    "min-waste",
    "oracle-next-use",
    "scout",
    "static-ttl",
)
"""Names of the policies."""


def make_core(
    settings: ResidencySettings,
    policy: PolicySettings,
    *,
    capacity_blocks: int,
    block_tokens: int,
    prefill_s_per_token: float,
    future: Future | None = None,
) -> PolicyCore:
    """Return the core for *settings.policy*; ConfigError with the known names otherwise."""
    from dataclasses import replace

    name = settings.policy
    if name == "scout":
        return PolicyCore(policy, capacity_blocks=capacity_blocks, block_tokens=block_tokens)
    if name == "lru":
        off = replace(policy, hints=False, fingerprints=False)
        return PolicyCore(off, capacity_blocks=capacity_blocks, block_tokens=block_tokens)
    recompute = settings.waste_s_per_token or prefill_s_per_token
    # Holding one token keeps one token's place from others; filling the whole pool anew takes
    # capacity x recompute seconds, in which the place would have been used once.
    turnover = max(capacity_blocks * block_tokens * recompute, 1e-6)
    cost = _Cost(recompute=recompute, hold_per_s=recompute / turnover)
    size = {"capacity_blocks": capacity_blocks, "block_tokens": block_tokens}
    if name == "discard":
        return DiscardCore(**size)
    if name == "keep":
        return _Keep(**size)
    if name == "static-ttl":
        return _StaticTtl(settings.ttl_s, **size)
    if name == "adaptive-ttl":
        return _AdaptiveTtl(settings, cost, **size)
    if name == "min-waste":
        return _MinWaste(cost, **size)
    if name == "oracle-next-use":
        if future is None:
            msg = "oracle-next-use needs to know the future of the run"
            raise ConfigError(msg)
        return _OracleNextUse(future, **size)
    msg = f"unknown residency policy {name!r}; known: {', '.join(RESIDENCY)}"
    raise ConfigError(msg)

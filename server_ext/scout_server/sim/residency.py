"""Which cached blocks stay: Scout's core, LRU, and the policies it is compared with."""

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from annotated_types import Ge, Gt

from scout_sdk._errors import ConfigError
from scout_sdk._hints import SessionEvent, ToolState
from scout_server.policy import (
    UNOWNED,
    Assignment,
    Finish,
    FinishFacts,
    PolicyCore,
    PolicySettings,
    RequestFacts,
    Segment,
)
from scout_server.replica import BlockPool
from scout_server.sim.oracle import Future

__all__ = ["RESIDENCY", "DiscardCore", "ResidencySettings", "SessionCore", "make_core"]


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


class SessionCore(PolicyCore):
    """
    Base of the retention policies: blocks belong to chains, chains have a deadline.

    A chain is what one agent of one session sends again and again.
    A subclass says until when a finished turn's blocks are kept. Kept blocks go last, those kept
    longest of all last; nothing is pinned: when only kept blocks are left, they go too. A prefix
    that several sessions of an agent have sent belongs to the agent, once, and is kept as long as
    any of them.
    """

    def __init__(self, *, capacity_blocks: int, block_tokens: int) -> None:
        settings = PolicySettings(hints=False, fingerprints=False)
        super().__init__(settings, capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self.order.scout = True
        self._kept_groups: dict[str, int] = {}
        self._kept_next = 1
        self._kept_requests: dict[str, str] = {}
        self._kept_sessions: dict[str, _Session] = {}
        self._kept_chains: dict[str, set[str]] = {}
        self._kept_anchors: dict[str, _Anchor] = {}
        self._kept_expiry: list[tuple[float, int, str]] = []

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return until when, in seconds of the clock, the session's blocks are kept."""
        raise NotImplementedError

    def learn(self, tool: str | None, gap_s: float) -> None:
        """Learn that a session came back *gap_s* after it had called *tool*."""

    def while_used(self, now: float) -> float:
        """Return the deadline of a chain whose turn waits or runs."""
        return math.inf

    def score(self, deadline: float, now: float) -> float:
        """Return the score of blocks kept until *deadline*; a higher one goes later."""
        return deadline if deadline > now else 0.0

    def arrive(self, facts: RequestFacts, *, now: float) -> Assignment:
        """Learn the gap of the session that came back."""
        hints = facts.hints
        if hints is None or hints.session is None:
            return Assignment(agent=None, session=None, from_hint=False)
        agent = hints.agent
        name = chain_name(hints.session, agent)
        self._kept_chains.setdefault(hints.session, set()).add(name)
        self._kept_requests[facts.request_id] = name
        session = self._kept_sessions.get(name)
        if session is None:
            session = self._kept_sessions[name] = _Session()
        elif session.ended_at is not None:
            self.learn(session.tool, now - session.ended_at)
        session.ended_at = session.tool = None
        session.tokens = facts.prompt_tokens
        session.agent = agent
        self._kept_share(name, agent, facts.block_hashes)
        self._kept_until(name, self.while_used(now), now)
        return Assignment(agent=agent, session=hints.session, from_hint=True)

    def _kept_share(self, name: str, agent: str | None, hashes: Sequence[Hashable]) -> None:
        if agent is None:
            return
        anchor = self._kept_anchors.get(agent)
        if anchor is None:
            self._kept_anchors[agent] = _Anchor(name, hashes)
        elif anchor.session != name:
            most = min(len(anchor.hashes), len(hashes))
            if anchor.blocks is not None:
                most = min(most, anchor.blocks)
            same = 0
            while same < most and anchor.hashes[same] == hashes[same]:
                same += 1
            anchor.blocks = same
            anchor.hashes = anchor.hashes[:same]

    def segments(self, request_id: str, block_hashes: Sequence[Hashable]) -> list[Segment]:
        """Return the agent's part, then the session's."""
        name = self._kept_requests.get(request_id)
        if name is None:
            return [Segment(len(block_hashes), UNOWNED)]
        session = self._kept_sessions.get(name)
        own = Segment(len(block_hashes), self._kept_group(name))
        anchor = self._kept_anchors.get(session.agent) if session and session.agent else None
        if anchor is None or not anchor.blocks or anchor.blocks >= len(block_hashes):
            return [own]
        return [
            Segment(anchor.blocks, self._kept_group(f"agent {session.agent}" if session else "")),
            own,
        ]

    def finish(self, facts: FinishFacts, *, now: float) -> None:
        """Keep the session's blocks as long as the policy says."""
        if facts.finish is Finish.PREEMPTED:
            return
        name = self._kept_requests.pop(facts.request_id, None)
        session = self._kept_sessions.get(name) if name is not None else None
        if name is None or session is None:
            return
        session.ended_at = now
        session.tool = facts.tools[0][0] if facts.tools else None
        tokens = session.tokens + facts.output_tokens
        self._kept_until(name, self.deadline(name, session.tool, tokens, now), now)

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Let go of a session that has ended; remember its tool."""
        if event.final:
            for name in sorted(self._kept_chains.pop(event.session, ())):
                self._kept_until(name, -1.0, now)
                self._kept_sessions.pop(name)
                self._kept_groups.pop(name, None)
        elif event.tool is not None and event.tool.state is ToolState.STARTED:
            for name in self._kept_chains.get(event.session, ()):
                chain = self._kept_sessions[name]
                if chain.ended_at == now:
                    chain.tool = event.tool.name

    def tick(self, *, now: float) -> None:
        """Let go of what has been kept long enough."""
        while self._kept_expiry and self._kept_expiry[0][0] <= now:
            at, _, name = heapq.heappop(self._kept_expiry)
            session = self._kept_sessions.get(name)
            if session is not None and session.deadline == at:
                self.order.set_score(self._kept_group(name), self.score(at, now))
            anchor = self._kept_anchors.get(name.removeprefix("agent "))
            if anchor is not None and name.startswith("agent ") and anchor.deadline == at:
                self.order.set_score(self._kept_group(name), self.score(at, now))

    def _kept_group(self, name: str) -> int:
        group = self._kept_groups.get(name)
        if group is None:
            group = self._kept_groups[name] = self._kept_next
            self._kept_next += 1
        return group

    def _kept_until(self, name: str, deadline: float, now: float) -> None:
        session = self._kept_sessions[name]
        session.deadline = deadline
        group = self._kept_group(name)
        self.order.set_score(group, self.score(deadline, now))
        if now < deadline < math.inf:
            heapq.heappush(self._kept_expiry, (deadline, group, name))
        if session.agent is not None:
            self._kept_shared(session.agent, deadline, now)

    def _kept_shared(self, agent: str, deadline: float, now: float) -> None:
        """Keep an agent's shared prefix as long as the chain that is kept longest."""
        anchor = self._kept_anchors.get(agent)
        if anchor is not None and now < deadline < math.inf and deadline > anchor.deadline:
            anchor.deadline = deadline
            key = f"agent {agent}"
            group = self._kept_group(key)
            self.order.set_score(group, self.score(deadline, now))
            heapq.heappush(self._kept_expiry, (deadline, group, key))


class _Session:
    """What a retention policy remembers of one session."""

    __slots__ = ("agent", "deadline", "ended_at", "tokens", "tool")

    def __init__(self) -> None:
        self.agent: str | None = None
        self.deadline = 0.0
        self.ended_at: float | None = None
        self.tokens = 0
        self.tool: str | None = None


class _Anchor:
    """The prefix that an agent's sessions share."""

    __slots__ = ("blocks", "deadline", "hashes", "session")

    def __init__(self, session: str, hashes: Sequence[Hashable]) -> None:
        self.session = session
        self.hashes = hashes
        self.blocks: int | None = None
        """None until a second session has been seen."""
        self.deadline = 0.0


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


def chain_name(session: str, agent: str | None) -> str:
    """Return the name of the chain of *agent* in *session*."""
    return f"{session}\n{agent or ''}"


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

"""
Answers: which cold anchor is worth rebuilding now, while nobody else needs the engine?

CacheScout's prefetch (issue 3, section 3; cf. CacheSage, arXiv 2605.27744): between requests, when
execution is predictable, the anchor that will most probably be asked for is computed by a warm-up
request. A warm-up is a bet. Whether bets pay is learnt: the confidence that a candidate needs rises
when warm-ups are wasted and falls when they are used.
"""

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

__all__ = [
    "AnchorView",
    "PrefetchCounters",
    "PrefetchPlanner",
    "PrefetchSettings",
    "Refusal",
    "WarmUp",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchSettings:
    """Bounds of prefetching."""

    enabled: bool = False
    """Send warm-up requests in idle time."""
    min_predictability: Annotated[float, Ge(0), Le(1)] = 0.5
    """No warm-ups while the transitions are less predictable than this."""
    min_probability: Annotated[float, Gt(0), Le(1)] = 0.35
    """Lowest probability of use at which a bet is ever made."""
    horizon_s: Annotated[float, Gt(0)] = 30.0
    """A warm-up that nobody used after this time is wasted."""
    per_tenant_per_min: Annotated[float, Gt(0)] = 60.0
    """Warm-ups a minute and tenant."""
    min_tokens: Annotated[int, Ge(1)] = 64
    """Anchors that miss fewer tokens are not worth a request."""
    chunk_tokens: Annotated[int, Ge(16)] = 512
    """Tokens that one engine step of a warm-up computes at most: what a user may wait for."""
    idle_after_s: Annotated[float, Ge(0)] = 0.05
    """An engine is idle when it had no request for this long, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorView:
    """What the planner may know of one anchor."""

    tenant: str
    agent: Hashable
    missing_tokens: int
    """Tokens of it that are not in the cache."""
    missing_blocks: int
    probability: float
    """Probability that it is asked for within the horizon, in [0, 1]."""
    worth: float | None = None
    """What its blocks are worth, in the units of *worth_of_blocks*; None: the probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The anchor to rebuild by one request with max_tokens=1 at the lowest priority."""

    tenant: str
    agent: Hashable
    tokens: int
    """Tokens that it computes."""


class Refusal(enum.Enum):
    """Why nothing is warmed up; labels a metric."""

    DISABLED = "disabled"
    BUSY = "busy"
    UNPREDICTABLE = "unpredictable"
    NOTHING_COLD = "nothing-cold"
    IMPROBABLE = "improbable"
    POOL_WORTH_MORE = "pool-worth-more"
    OVER_BUDGET = "over-budget"


@dataclass(slots=True)
class PrefetchCounters:
    """Totals since the start."""

    started: int = 0
    used: int = 0
    wasted: int = 0
    cancelled: int = 0
    tokens: int = 0


class PrefetchPlanner:
    """
    Decides on at most one warm-up at a time, and keeps the score of past ones.

    The caller says when a warm-up ended (`done`) or was cancelled, and when a user's request asked
    for an anchor (`asked`).
    """

    STEP = 0.05
    """How far one wasted warm-up raises the confidence needed; a used one lowers it by a third."""
    CEILING = 0.95

    def __init__(self, settings: PrefetchSettings) -> None:
        self.settings = settings
        self.counters = PrefetchCounters()
        self.refused: Counter[Refusal] = Counter()
        """How often nothing was warmed up, by reason."""
        self.confidence = settings.min_probability
        """Probability of use that a candidate needs at present."""
        self._running: WarmUp | None = None
        self._bets: OrderedDict[tuple[str, Hashable], float] = OrderedDict()
        """Warm anchors that nobody has asked for yet, with the time at which the bet is lost."""
        self._tenants: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def plan(
        self,
        anchors: Sequence[AnchorView],
        *,
        idle: bool,
        predictability: float,
        worth_of_blocks: Callable[[AnchorView], float],
        now: float,
    ) -> WarmUp | Refusal:
        """
        Return the warm-up to start now, which counts as started, or why there is none.

        *worth_of_blocks(anchor)* is the highest worth among the blocks that its warm-up would
        evict. Ties go to the first of *anchors*.
        """
        plan = self._plan(
            anchors,
            idle=idle,
            predictability=predictability,
            worth_of_blocks=worth_of_blocks,
            now=now,
        )
        if isinstance(plan, Refusal):
            self.refused[plan] += 1
        return plan

    def _plan(
        self,
        anchors: Sequence[AnchorView],
        *,
        idle: bool,
        predictability: float,
        worth_of_blocks: Callable[[AnchorView], float],
        now: float,
    ) -> WarmUp | Refusal:
        settings = self.settings
        self.expire(now=now)
        if not settings.enabled:
            return Refusal.DISABLED
        if not idle or self._running is not None:
            return Refusal.BUSY
        if not anchors:
            return Refusal.NOTHING_COLD
        if predictability < settings.min_predictability:
            return Refusal.UNPREDICTABLE
        cold = [
            view
            for view in anchors
            if view.missing_tokens >= settings.min_tokens
            and (view.tenant, view.agent) not in self._bets
        ]
        if not cold:
            return Refusal.NOTHING_COLD
        likely = [view for view in cold if view.probability >= self.confidence]
        if not likely:
            return Refusal.IMPROBABLE
        paying = [
            view
            for view in likely
            if worth_of_blocks(view) < (view.probability if view.worth is None else view.worth)
        ]
        if not paying:
            return Refusal.POOL_WORTH_MORE
        affordable = [view for view in paying if self._budget(view.tenant, now) >= 1.0]
        if not affordable:
            return Refusal.OVER_BUDGET
        best = max(affordable, key=lambda view: view.probability * view.missing_tokens)
        left = self._budget(best.tenant, now)
        self._tenants[best.tenant] = (left - 1.0, now)
        self._tenants.move_to_end(best.tenant)
        if len(self._tenants) > 1024:
            self._tenants.popitem(last=False)
        warm = WarmUp(tenant=best.tenant, agent=best.agent, tokens=best.missing_tokens)
        self._running = warm
        self.counters.started += 1
        self.counters.tokens += warm.tokens
        return warm

    def done(self, *, now: float) -> None:
        """Note that the running warm-up has computed its anchor."""
        if self._running is not None:
            key = (self._running.tenant, self._running.agent)
            self._bets[key] = now + self.settings.horizon_s
            self._bets.move_to_end(key)
            self._running = None

    def cancel(self) -> WarmUp | None:
        """Give up the running warm-up because a user's request came; return it."""
        warm, self._running = self._running, None
        if warm is not None:
            self.counters.cancelled += 1
        return warm

    def asked(self, tenant: str, agent: Hashable, *, now: float, cached: bool = True) -> bool:
        """
        Note that a user's request asks for an anchor; return whether a warm-up served it.

        *cached*: whether the anchor is still there; one evicted before its use was wasted.
        """
        self.expire(now=now)
        if self._bets.pop((tenant, agent), None) is None:
            return False
        if cached:
            self.counters.used += 1
            self.confidence = max(self.settings.min_probability, self.confidence - self.STEP / 3)
        else:
            self._waste()
        return cached

    def expire(self, *, now: float) -> None:
        """Count the bets that are lost by *now*."""
        while self._bets:
            key, deadline = next(iter(self._bets.items()))
            if deadline > now:
                return
            del self._bets[key]
            self._waste()

    def _waste(self) -> None:
        self.counters.wasted += 1
        self.confidence = min(self.CEILING, self.confidence + self.STEP)

    def _budget(self, tenant: str, now: float) -> float:
        """Return the warm-ups that *tenant* may start now; at most ten seconds' worth."""
        rate = self.settings.per_tenant_per_min / 60.0
        burst = max(1.0, 10.0 * rate)
        left, then = self._tenants.get(tenant, (burst, now))
        return min(burst, left + max(0.0, now - then) * rate)

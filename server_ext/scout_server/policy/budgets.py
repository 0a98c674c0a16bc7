"""What one tenant may ask of the policy core; beyond it, requests are served and hints clipped."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

__all__ = ["Budget", "EventBudget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bounds for each tenant (issue 3, section 5)."""

    agents: Annotated[int, Ge(1)] = 256
    """Agents remembered; the least recently used is forgotten."""
    sessions: Annotated[int, Ge(1)] = 4096
    """Live sessions remembered; the least recently used is forgotten."""
    events_per_s: Annotated[float, Ge(0)] = 200.0
    """Side-channel events a second, averaged; bursts of ten seconds' worth are fine."""
    retained_share: Annotated[float, Ge(0), Le(1)] = 1.0
    """Largest share of the pool that may be ordered by this tenant's hints."""


class EventBudget:
    """
    One token bucket a tenant, for side-channel events; bounded in tenants.

    A tenant that was forgotten starts with a full bucket again.
    """

    BURST_S = 10.0

    def __init__(self, budget: Budget, *, max_tenants: int = 1024) -> None:
        self._rate = budget.events_per_s
        self._burst = budget.events_per_s * self.BURST_S
        self._max = max_tenants
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, tenant: str, n: int, *, now: float) -> int:
        """Return how many of *n* events *tenant* may send at *now*, and book them."""
        left, then = self._buckets.pop(tenant, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - then) * self._rate)
        granted = min(n, int(left))
        self._buckets[tenant] = (left - granted, now)
        if len(self._buckets) > self._max:
            self._buckets.popitem(last=False)
        return granted

"""
Which waiting request comes next when the engine may look at programs, not only at requests.

Orders: first come first served by request or by program, attained service (Autellix, arXiv
2502.13965), shortest prompt first, and programs that return from a tool first (ThunderAgent).
Whatever the order, a request that has waited for `max_wait_s` goes before all that came after it:
no order starves anybody. While somebody is served whenever somebody waits, a request so waits at
most `max_wait_s` longer than first come, first served would let it, but for those that were served
when its time came, and for preempted ones.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from scout_sdk._errors import ConfigError

__all__ = ["ORDERS", "AgedQueue", "WaitingOrder", "WaitingView", "order_named"]

K = TypeVar("K", bound=Hashable)
_Entry = tuple[float, float, int]
"""Key of the order, arrival, number of the push: the smallest goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """What an order may know of one waiting request."""

    arrival: float
    """When the request arrived, in seconds on the caller's clock."""
    program_arrival: float
    """When its session's first request arrived."""
    prompt_tokens: int
    attained_tokens: int = 0
    """Tokens computed for its session before."""
    returning: bool = False
    """Whether the session has been served before: it comes back from a tool or a person."""


WaitingOrder = Callable[[WaitingView], float]
"""Returns the key of a request, fixed while it waits; the smallest goes first."""


def _fcfs(view: WaitingView) -> float:
    return view.arrival


def _program_fcfs(view: WaitingView) -> float:
    return view.program_arrival


def _attained_service(view: WaitingView) -> float:
    # In powers of two, so that programs of about equal service are first come, first served.
    return float((view.attained_tokens + 1).bit_length())


def _shortest_first(view: WaitingView) -> float:
    return float(view.prompt_tokens)


def _ready_first(view: WaitingView) -> float:
    return 0.0 if view.returning else 1.0


ORDERS: Mapping[str, WaitingOrder] = {
    "attained-service": _attained_service,
    "fcfs": _fcfs,
    "program-fcfs": _program_fcfs,
    "ready-first": _ready_first,
    "shortest-first": _shortest_first,
}
"""Every order by name."""


def order_named(name: str) -> WaitingOrder:
    """Return the order called *name*; ConfigError with the known names otherwise."""
    if name not in ORDERS:
        msg = f"unknown waiting order {name!r}; known: {', '.join(sorted(ORDERS))}"
        raise ConfigError(msg)
    return ORDERS[name]


class AgedQueue(Generic[K]):
    """
    Waiting requests by an order, ties first come first served, with a bound on being overtaken.

    A request that has waited *max_wait_s* goes before every request that arrived after it; such
    requests are served in order of arrival. A request that was taken out may be pushed again with
    the same view: it then stands where it stood. Requests put back after a preemption go before all
    others, the last one put back first, as in the engine.
    """

    def __init__(self, order: WaitingOrder, *, max_wait_s: float) -> None:
        if not max_wait_s > 0:
            msg = f"max_wait_s is {max_wait_s}; it must be above 0"
            raise ConfigError(msg)
        self._order = order
        self._max_wait_s = max_wait_s
        self._sequence = 0
        self._live: dict[K, _Entry] = {}
        self._heap: list[tuple[float, float, int, K]] = []  # by the order
        self._ages: list[tuple[float, int, K]] = []  # by arrival
        self._back: dict[K, None] = {}

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._live) + len(self._back)

    def __contains__(self, key: K) -> bool:
        """Whether *key* waits here."""
        return key in self._live or key in self._back

    def __iter__(self) -> Iterator[K]:
        """Iterate over those put back, then over the others by the order; ageing left out."""
        yield from reversed(self._back)
        yield from sorted(self._live, key=lambda key: self._live[key])

    def push(self, key: K, view: WaitingView) -> None:
        """Add *key*; ValueError when it waits here already."""
        if key in self:
            msg = f"{key!r} waits already"
            raise ValueError(msg)
        self._sequence += 1
        entry = self._live[key] = (self._order(view), view.arrival, self._sequence)
        heapq.heappush(self._heap, (*entry, key))
        heapq.heappush(self._ages, (*entry[1:], key))

    def push_back(self, key: K) -> None:
        """Put a preempted request before all others."""
        if key in self:
            msg = f"{key!r} waits already"
            raise ValueError(msg)
        self._back[key] = None

    def peek(self, *, now: float) -> K | None:
        """Return the request to serve next, or None when nobody waits."""
        if self._back:
            return next(reversed(self._back))
        if not self._live:
            return None
        while True:
            arrival, sequence, key = self._ages[0]
            if self._alive(key, sequence):
                break
            heapq.heappop(self._ages)
        if now - arrival >= self._max_wait_s:
            return key
        while True:
            _, _, sequence, key = self._heap[0]
            if self._alive(key, sequence):
                return key
            heapq.heappop(self._heap)

    def remove(self, key: K) -> None:
        """Take *key* out; KeyError when it does not wait here."""
        if key in self._live:
            del self._live[key]
            if len(self._heap) > 2 * len(self._live) + 16:
                self._heap = [(*entry, key) for key, entry in self._live.items()]
                heapq.heapify(self._heap)
            if len(self._ages) > 2 * len(self._live) + 16:
                self._ages = [(*entry[1:], key) for key, entry in self._live.items()]
                heapq.heapify(self._ages)
        elif key in self._back:
            del self._back[key]
        else:
            raise KeyError(key)

    def _alive(self, key: K, sequence: int) -> bool:
        entry = self._live.get(key)
        return entry is not None and entry[2] == sequence

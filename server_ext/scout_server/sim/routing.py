"""Which replica serves a turn: affinity that knows what moving costs, and the usual baselines."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from annotated_types import Gt, Interval

from scout_sdk._errors import ConfigError
from scout_server.sim.views import ReplicaView, TurnView

__all__ = ["ROUTERS", "MoveCosts", "Route", "Router", "RouterSettings", "make_router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How turns find a replica."""

    policy: str = "affinity"
    """One of round-robin, least-loaded, prefix-aware, power-of-two, affinity."""
    pressure: Annotated[float, Interval(gt=0, le=1)] = 0.95
    """Share of the KV in use above which home counts as over its limit."""
    queue_limit: Annotated[int, Gt(0)] = 8
    """Waiting requests above which home counts as over its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What a router needs to compare waiting, moving the KV and computing it again."""

    block_tokens: int
    prefill_s_per_token: float
    kv_bytes_per_token: float
    link_bytes_per_s: float
    link_latency_s: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a turn goes."""

    replica: int
    migrate_from: int | None = None
    """Replica whose KV of this session is copied over the link first."""
    migrate_blocks: int = 0


class Router(Protocol):
    """Answers: which replica serves this turn?"""

    def route(self, turn: TurnView, home: int | None, replicas: Sequence[ReplicaView]) -> Route:
        """Return the place of *turn*; *home* served the session's turn before, if any did."""


def _load(view: ReplicaView) -> tuple[float, int]:
    # Waiting counts four times: the load score of vLLM's own balancer.
    return (4 * view.waiting + view.running, view.index)


class _RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def route(self, turn: TurnView, home: int | None, replicas: Sequence[ReplicaView]) -> Route:
        chosen = self._next % len(replicas)
        self._next += 1
        return Route(replica=chosen)


class _LeastLoaded:
    def route(self, turn: TurnView, home: int | None, replicas: Sequence[ReplicaView]) -> Route:
        return Route(replica=min(replicas, key=_load).index)


class _PrefixAware:
    """The longest cached prefix wins, less the load above the least loaded (in cached blocks)."""

    def route(self, turn: TurnView, home: int | None, replicas: Sequence[ReplicaView]) -> Route:
        least = min(_load(view)[0] for view in replicas)

        def worth(view: ReplicaView) -> tuple[float, float, int]:
            cached = view.cached_blocks(turn.prompt_hashes)
            share = cached / max(len(turn.prompt_hashes), 1)
            load = (_load(view)[0] - least) / 16
            return (load - share, _load(view)[0], view.index)

        return Route(replica=min(replicas, key=worth).index)


class _PowerOfTwo:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"power of two {seed}")

    def route(self, turn: TurnView, home: int | None, replicas: Sequence[ReplicaView]) -> Route:
        if len(replicas) == 1:
            return Route(replica=0)
        pair = self._rng.sample(range(len(replicas)), 2)
        return Route(replica=min((replicas[i] for i in pair), key=_load).index)


class _Affinity:
    """
    Stays home; when home is over its limit, does the cheapest of three things.

    Queue there, copy the session's KV to another replica (bytes over the link), or compute it
    again elsewhere. Times are estimated from outstanding prompt tokens.
    """

    def __init__(self, settings: RouterSettings, costs: MoveCosts) -> None:
        self._settings = settings
        self._costs = costs

    def route(self, turn: TurnView, home: int | None, replicas: Sequence[ReplicaView]) -> Route:
        if home is None:
            return Route(replica=self._place(turn, replicas))
        at_home = replicas[home]
        settings, costs = self._settings, self._costs
        over = at_home.waiting > settings.queue_limit or (
            at_home.used_fraction > settings.pressure and at_home.waiting > 0
        )
        if not over or len(replicas) == 1:
            return Route(replica=home)
        per_token = costs.prefill_s_per_token
        bt = costs.block_tokens
        cached = at_home.cached_blocks(turn.prompt_hashes)
        missing = turn.prompt_tokens - cached * bt
        best = Route(replica=home)
        cost = (at_home.outstanding_tokens + missing) * per_token
        for view in replicas:
            under = view.waiting <= settings.queue_limit and view.used_fraction <= settings.pressure
            if view.index == home or not under:
                continue
            there = view.cached_blocks(turn.prompt_hashes)
            queue = view.outstanding_tokens * per_token
            again = queue + (turn.prompt_tokens - there * bt) * per_token
            if again < cost:
                best, cost = Route(replica=view.index), again
            moved = cached - there
            if moved > 0:
                size = moved * bt * costs.kv_bytes_per_token
                transfer = costs.link_latency_s + size / costs.link_bytes_per_s
                copied = max(queue, transfer) + missing * per_token
                if copied < cost:
                    cost = copied
                    best = Route(replica=view.index, migrate_from=home, migrate_blocks=cached)
        return best

    def _place(self, turn: TurnView, replicas: Sequence[ReplicaView]) -> int:
        """Place a new session where load is least; of equals, where its prefix is cached."""
        least = min(_load(view)[0] for view in replicas)
        near = [view for view in replicas if _load(view)[0] <= least + 1]
        return min(
            near,
            key=lambda v: (-v.cached_blocks(turn.prompt_hashes), v.outstanding_tokens, v.index),
        ).index


ROUTERS: dict[str, Callable[[RouterSettings, MoveCosts, int], Router]] = {
    "affinity": lambda settings, costs, seed: _Affinity(settings, costs),
    "least-loaded": lambda settings, costs, seed: _LeastLoaded(),
    "power-of-two": lambda settings, costs, seed: _PowerOfTwo(seed),
    "prefix-aware": lambda settings, costs, seed: _PrefixAware(),
    "round-robin": lambda settings, costs, seed: _RoundRobin(),
}


def make_router(settings: RouterSettings, costs: MoveCosts, seed: int) -> Router:
    """Return the router called *settings.policy*; ConfigError with the known names otherwise."""
    if settings.policy not in ROUTERS:
        msg = f"unknown router {settings.policy!r}; known: {', '.join(sorted(ROUTERS))}"
        raise ConfigError(msg)
    return ROUTERS[settings.policy](settings, costs, seed)

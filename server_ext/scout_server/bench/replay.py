"""Replays a request sequence through a block pool, one request at a time, under one policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scout_server.bench.workloads import Request
from scout_server.policy.facts import UNHASHED

__all__ = ["Parts", "Policy", "Result", "replay"]

Parts = list[tuple[int, int]]
"""(end block, group) of a request's chain, head first."""


class Policy(Protocol):
    """What decides in a replay; `take`, `give` and `pop` are the free blocks' queue."""

    def arrive(self, request: Request, index: int) -> None:
        """Learn that *request*, the *index*-th, arrives."""

    def take(self, blocks: list[int]) -> None:
        """Use free *blocks* again."""

    def admit(self, blocks: list[int], names: list[int]) -> None:
        """Note that *blocks* from now on hold the content *names*."""

    def give(self, blocks: list[int], names: list[int], request: Request) -> None:
        """Take back the *blocks* of a request's chain, head first; its tail is to go first."""

    def pop(self, n: int, now: float) -> list[int]:
        """Choose *n* victims."""

    def finish(self, request: Request, index: int) -> None:
        """Learn that *request* has ended; before its blocks come back."""

    def fill(self, blocks: Sequence[int]) -> None:
        """Take *blocks* that hold nothing."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a replay found."""

    hits: list[int]
    """Hit blocks per request."""
    queried: list[int]
    """Prompt blocks per request."""

    @property
    def rate(self) -> float:
        """Hit blocks over queried blocks."""
        return sum(self.hits) / max(1, sum(self.queried))

    def rate_after(self, first: int) -> float:
        """The same, without the first requests."""
        return sum(self.hits[first:]) / max(1, sum(self.queried[first:]))


def replay(
    requests: Sequence[Request], capacity: int, policy: Policy, *, working: int = 0
) -> Result:
    """
    Return the hits of *requests* in a pool of *capacity* blocks.

    A hit is a block of the longest prefix that is cached. A request's misses are allocated before
    its blocks come back, as in an engine. With *working*, the pool has that many more blocks, but
    keeps no more than *capacity* between requests: the memory of running requests is apart.
    """
    found_hits: list[int] = []
    queried: list[int] = []
    cached: dict[int, int] = {}
    names = [UNHASHED] * (capacity + working)
    spare = list(range(capacity, capacity + working))
    policy.fill(range(capacity))
    for index, request in enumerate(requests):
        now = request.time
        policy.arrive(request, index)
        prompt = request.prompt
        found: list[int] = list(iter(map(cached.get, prompt).__next__, None))
        policy.take(found)
        chain = prompt + request.output if request.output else prompt
        hits = len(found)
        need = len(chain) - hits
        if need:
            new = spare[:need]
            del spare[:need]
            if len(new) < need:
                victims = policy.pop(need - len(new), now)
                _uncache(cached, names, victims)
                new += victims
            fresh = chain[hits:]
            cached.update(zip(fresh, new, strict=True))
            for block, name in zip(new, fresh, strict=True):
                names[block] = name
            policy.admit(new, fresh)
            found += new
        policy.finish(request, index)
        policy.give(found, chain, request)
        excess = working - len(spare)
        if excess:
            victims = policy.pop(excess, now)
            _uncache(cached, names, victims)
            for block in victims:
                names[block] = UNHASHED
            spare += victims
        found_hits.append(hits)
        queried.append(len(prompt))
    return Result(found_hits, queried)


def _uncache(cached: dict[int, int], names: list[int], blocks: list[int]) -> None:
    """Forget *blocks*, but where a later one holds the same content: that one stays findable."""
    for block in blocks:
        name = names[block]
        if cached.get(name) == block:
            del cached[name]

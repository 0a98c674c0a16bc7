"""Replays a request sequence through a block pool, one request at a time, under one policy."""

from collections.abc import Iterator, Sequence
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
    return Result(*zip(*_steps(requests, capacity, policy, working), strict=True))  # type: ignore[arg-type]


def _steps(
    requests: Sequence[Request], capacity: int, policy: Policy, working: int
) -> Iterator[tuple[int, int]]:
    cached: dict[int, int] = {}
    names = [UNHASHED] * (capacity + working)
    spare = list(range(capacity, capacity + working))
    policy.fill(range(capacity))
    for index, request in enumerate(requests):
        now = request.time
        policy.arrive(request, index)
        prompt = request.prompt
        found: list[int] = []
        for name in prompt:
            block = cached.get(name)
            if block is None:
                break
            found.append(block)
        policy.take(found)
        chain = prompt + request.output if request.output else prompt
        hits = len(found)
        need = len(chain) - hits
        if need:
            new = spare[:need]
            del spare[:need]
            if len(new) < need:
                victims = policy.pop(need - len(new), now)
                for block in victims:
                    _uncache(cached, names[block], block)
                new += victims
            fresh = chain[hits:]
            for block, name in zip(new, fresh, strict=True):
                names[block] = name
                cached[name] = block
            policy.admit(new, fresh)
            found += new
        policy.finish(request, index)
        policy.give(found, chain, request)
        excess = working - len(spare)
        if excess:
            victims = policy.pop(excess, now)
            for block in victims:
                _uncache(cached, names[block], block)
                names[block] = UNHASHED
            spare += victims
        yield hits, len(prompt)


def _uncache(cached: dict[int, int], name: int, block: int) -> None:
    """Forget *block*, unless a later one holds the same content: that one stays findable."""
    if cached.get(name) == block:
        del cached[name]

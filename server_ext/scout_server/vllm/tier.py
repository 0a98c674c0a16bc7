"""Which chunk leaves a second place for blocks (a CPU tier) first, by the policy core's scores."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scout_server.policy import UNOWNED, PolicyCore, Segment
from scout_server.vllm.breaker import Breaker

__all__ = ["MAX_RELEASED", "Guide", "TierOrder", "attach", "attached"]

MAX_RELEASED = 1024
"""Requests that ended last and whose owners are still known: their chunks are stored after it."""

K = TypeVar("K", bound=Hashable)
Rank = tuple[int, int, int]
"""Use, distance from the tail (negative position), sequence number; the smallest goes first."""


class TierOrder(Generic[K]):
    """
    The chunks of one tier in the order of eviction.

    The group with the lowest score goes first, of equals the one used longest ago; inside a group
    what was used longest ago, and of one use the tail before the head. A pinned chunk keeps its
    rank and is passed over.

    Scores are read when *version* changes, when a group's turn comes, and after evictions of an
    eighth of the groups' number: a score that fell is noticed by then, and a choice costs the same
    however many groups there are.
    """

    def __init__(self, score: Callable[[int], float], version: Callable[[], int]) -> None:
        self._score = score
        self._version = version
        self._entries: dict[K, _Entry] = {}
        self._groups: dict[int, _Group[K]] = {}
        self._ranking: list[tuple[float, int, int]] = []
        self._read: int | None = None
        self._chosen = 0
        self._uses = 0
        self._sequence = 0

    def __len__(self) -> int:
        """Return the number of chunks, pinned ones included."""
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Whether *key* is in the tier."""
        return key in self._entries

    def use(self) -> int:
        """Return a number for one use, later than all before."""
        self._uses += 1
        return self._uses

    def put(self, key: K, *, group: int, use: int, position: int) -> None:
        """Add *key*, pinned, or say that it was used: who owns it and how far from the head."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(group)
        self._sequence += 1
        evictable = entry.evictable
        if evictable and entry.group != group:
            self._leave(entry)
        entry.rank = (use, -position, self._sequence)
        if evictable and entry.group != group:
            self._join(group).evictable += 1
        entry.group = group
        if evictable:
            self._push(key, entry)

    def group(self, key: K) -> int:
        """Return who owns *key*; UNOWNED when it is not here."""
        entry = self._entries.get(key)
        return UNOWNED if entry is None else entry.group

    def release(self, key: K) -> None:
        """Let *key* be evicted; again is harmless."""
        entry = self._entries[key]
        if not entry.evictable:
            entry.evictable = True
            self._join(entry.group).evictable += 1
            self._push(key, entry)

    def pin(self, key: K) -> None:
        """Pass *key* over until it is released; its rank stays."""
        entry = self._entries[key]
        if entry.evictable:
            self._leave(entry)
            entry.evictable = False

    def remove(self, key: K) -> None:
        """Forget *key*; unknown keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave(entry)

    def clear(self) -> None:
        """Forget every chunk."""
        self._entries.clear()
        self._groups.clear()
        self._ranking.clear()

    def choose(self, n: int, protected: Collection[K]) -> list[K] | None:
        """Return exactly *n* evictable keys, or None; change nothing."""
        if self._read != self._version() or 8 * self._chosen >= 64 + len(self._groups):
            self._rank()
        found: list[K] = []
        visited: dict[int, tuple[float, int, int]] = {}
        while self._ranking and len(found) < n:
            score, last, number = heapq.heappop(self._ranking)
            owner = self._groups.get(number)
            if owner is None or number in visited:
                continue  # it has no chunk left, or stands here twice
            now = (self._score(number), owner.last)
            if now > (score, last):
                heapq.heappush(self._ranking, (*now, number))
                continue
            visited[number] = (*now, number)
            found += self._of(owner, n - len(found), protected)
        for entry in visited.values():
            heapq.heappush(self._ranking, entry)
        if len(found) < n:
            return None
        self._chosen += n
        return found

    def _of(self, owner: "_Group[K]", n: int, protected: Collection[K]) -> list[K]:
        """Return up to *n* keys of one group, in order."""
        found: list[K] = []
        kept: list[tuple[Rank, K]] = []
        while owner.heap and len(found) < n:
            rank, key = heapq.heappop(owner.heap)
            entry = self._entries.get(key)
            if entry is None or not entry.evictable or entry.rank != rank:
                continue  # moved, pinned or gone
            if kept and kept[-1][1] == key:
                continue  # the same once more: it was pinned and released in between
            kept.append((rank, key))
            if key not in protected:
                found.append(key)
        for each in kept:
            heapq.heappush(owner.heap, each)
        return found

    def _rank(self) -> None:
        self._read = self._version()
        self._chosen = 0
        self._ranking = [
            (self._score(number), owner.last, number) for number, owner in self._groups.items()
        ]
        heapq.heapify(self._ranking)

    def _join(self, number: int) -> "_Group[K]":
        owner = self._groups.get(number)
        if owner is None:
            owner = self._groups[number] = _Group()
        return owner

    def _leave(self, entry: "_Entry") -> None:
        if entry.evictable:
            owner = self._groups[entry.group]
            owner.evictable -= 1
            if not owner.evictable:
                del self._groups[entry.group]

    def _push(self, key: K, entry: "_Entry") -> None:
        owner = self._groups[entry.group]
        owner.last = max(owner.last, entry.rank[0])
        heapq.heappush(owner.heap, (entry.rank, key))
        if len(owner.heap) > 16 + 2 * owner.evictable:
            live = {
                k: rank
                for rank, k in owner.heap
                if (e := self._entries.get(k)) is not None and e.evictable and e.rank == rank
            }
            owner.heap = [(rank, k) for k, rank in live.items()]
            heapq.heapify(owner.heap)
        if not owner.ranked:
            owner.ranked = True
            ranking = (self._score(entry.group), owner.last, entry.group)
            heapq.heappush(self._ranking, ranking)


@dataclass(slots=True)
class _Entry:
    group: int
    rank: Rank = (0, 0, 0)
    evictable: bool = False


@dataclass(slots=True)
class _Group(Generic[K]):
    heap: list[tuple[Rank, K]] = field(default_factory=list)
    last: int = 0
    evictable: int = 0
    ranked: bool = False


class Guide:
    """
    What the tiers of one engine process may ask: its policy core, and who owned what lately.

    The owners of a request's blocks are remembered for a while after its end, because a tier stores
    the last of them then.
    """

    def __init__(self, core: PolicyCore, breaker: Breaker) -> None:
        self.core = core
        self.breaker = breaker
        self.used = False
        """Whether a tier asks at all; until then nothing is remembered."""
        self.evicted: Counter[str] = Counter()
        """Chunks evicted so far: `scout` by the scores, `lru` by the engine's own order."""
        self._released: OrderedDict[str, tuple[Segment, ...]] = OrderedDict()

    @property
    def leads(self) -> bool:
        """Whether the core follows an order of its own."""
        return not self.breaker.open and self.core.order.scout

    def score(self, group: int) -> float:
        """Return the score of *group*; a higher score goes later."""
        return self.core.order.score(group)

    @property
    def version(self) -> int:
        """Another number after all scores were renewed."""
        return self.core.scoring.renewals

    def released(self, request_id: str, segments: Sequence[Segment]) -> None:
        """Remember the owners of a request that gives its blocks back."""
        if self.used:
            self._released[request_id] = tuple(segments)
            self._released.move_to_end(request_id)
            if len(self._released) > MAX_RELEASED:
                self._released.popitem(last=False)

    def owners(self, request_id: str, tokens: int) -> Sequence[Segment]:
        """Return the owners of a request's blocks up to *tokens*; the last covers the rest."""
        self.used = True
        known = self._released.get(request_id)
        if known is None:
            blocks = -(-tokens // self.core.block_tokens)
            known = tuple(self.core.segments(request_id, range(blocks)))
        return known

    def owner(self, segments: Sequence[Segment], position: int) -> int:
        """Return the group of the block that ends at token *position*."""
        block = -(-position // self.core.block_tokens)
        return next((s.group for s in segments if block <= s.end_block), segments[-1].group)


_attached: list[Guide] = []


def attach(guide: Guide) -> None:
    """Let the tiers of this process ask *guide*: the engine that was made last."""
    _attached[:] = [guide]


def attached() -> Guide | None:
    """Return the engine process's guide, or None while Scout is not in it."""
    return _attached[0] if _attached else None

"""Is our order better than the engine's here? Shadow caches decide whom to follow."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["Duel", "ShadowCache"]

Part = tuple[int, int]  # group, blocks


class ShadowCache:
    """
    What a pool would hold under one policy, counted in blocks per group.

    A group's blocks are a prefix of its chain, so a number says it all: no block is touched here.
    """

    def __init__(self, capacity: int, score: Callable[[int], float] | None) -> None:
        self.capacity = capacity
        self._score = score
        self._held: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._size = 0
        self._heap: list[tuple[float, int, int]] = []
        self._place: dict[int, int] = {}
        self._sequence = 0

    def rescored(self) -> None:
        """Take note that all scores may have changed."""
        self._heap = []

    def step(self, parts: Sequence[Part], final: Sequence[Part]) -> int:
        """Return the hits of a request for *parts*, head first, that ends up as *final*."""
        held = self._held
        hits = 0
        for group, blocks in parts:
            have = held.get(group, 0)
            if have < blocks:
                hits += have
                break
            hits += blocks
        own = 0
        total = 0
        for group, blocks in final:
            own += held.pop(group, 0)
            total += blocks
        self._size -= own
        self._evict(self._size + total - self.capacity)
        room = self.capacity - self._size
        for group, blocks in reversed(final):
            held[group] = blocks
        if total > room:
            excess = total - room
            for group, blocks in reversed(final):
                cut = min(blocks, excess)
                held[group] -= cut
                excess -= cut
                if not excess:
                    break
            total = room
        self._size += total
        if self._score is not None and self._heap:
            for group, _ in final:
                self._push(group)
        return hits

    def _push(self, group: int) -> None:
        assert self._score is not None
        self._sequence += 1
        self._place[group] = self._sequence
        heapq.heappush(self._heap, (self._score(group), self._sequence, group))

    def _evict(self, excess: int) -> None:
        held = self._held
        if excess <= 0:
            return
        if self._score is None:
            while excess > 0 and held:
                group = next(iter(held))
                have = held[group]
                if have > excess:
                    held[group] = have - excess
                    self._size -= excess
                    return
                del held[group]
                self._size -= have
                excess -= have
            return
        if not self._heap:
            score = self._score
            self._place = {group: place for place, group in enumerate(held)}
            self._heap = [(score(group), place, group) for group, place in self._place.items()]
            self._sequence = len(held)
            heapq.heapify(self._heap)
        while excess > 0 and held and self._heap:
            _, place, group = self._heap[0]
            have = held.get(group, 0)
            if self._place.get(group) != place or not have:
                heapq.heappop(self._heap)
                if group in held and not have:
                    del held[group]
                continue
            if have > excess:
                held[group] = have - excess
                self._size -= excess
                return
            heapq.heappop(self._heap)
            del held[group]
            self._size -= have
            excess -= have


class Duel:
    """
    Answers: would our scores or the engine's own order have had more hits lately?

    Both run in shadow over the same requests; their difference in hit blocks fades with a half-life
    counted in requests. Following the better of two experts costs little when they are equal and
    bounds the loss when one fails (Ari, ARC and adaptive replacement use the same idea).
    """

    def __init__(
        self,
        capacity: int,
        score: Callable[[int], float],
        *,
        half_life: float = 60.0,
        margin: float = 0.0,
    ) -> None:
        self.ours = ShadowCache(capacity, score)
        self.lru = ShadowCache(capacity, None)
        self._fade = 0.5 ** (1.0 / half_life)
        self._margin = margin
        self.lead = 0.0
        """Faded difference of hit blocks, ours less LRU's."""
        self.requests = 0
        self.hits_ours = 0
        self.hits_lru = 0

    def step(self, parts: Sequence[Part], final: Sequence[Part]) -> None:
        """Let both shadows serve one request."""
        ours = self.ours.step(parts, final)
        lru = self.lru.step(parts, final)
        self.requests += 1
        self.hits_ours += ours
        self.hits_lru += lru
        self.lead = self.lead * self._fade + (ours - lru)

    @property
    def won(self) -> bool:
        """Whether our order leads."""
        return self.lead > self._margin

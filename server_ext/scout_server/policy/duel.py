"""Is our order better than the engine's here? Shadow caches decide whom to follow."""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

__all__ = ["Duel", "ShadowCache"]

Part = tuple[int, int]  # group, blocks
_MEMORY = 16.0  # half-lives of what was won over a longer time
_SAVED = 0.25  # how much of that counts
_WATCHED = 512  # groups that shadows hold; of more, every other one is watched
_SCATTER = 0x9E3779B1
_LEAST = 512  # blocks that a shadow has at least before it is halved


class ShadowCache:
    """
    What a pool would hold under one policy, counted in blocks per group.

    A group's blocks are a prefix of its chain, so a number says it all: no block is touched here.
    """

    def __init__(self, capacity: int, score: Callable[[int], float] | None) -> None:
        self.capacity = capacity
        self._score = score
        self._held: dict[int, int] = {}  # least recently used first
        self._size = 0
        self._heap: list[tuple[float, int, int]] = []
        self._place: dict[int, int] = {}
        self._sequence = 0

    def __len__(self) -> int:
        """Return how many groups it holds."""
        return len(self._held)

    def rescored(self) -> None:
        """Take note that all scores may have changed."""
        self._heap = []

    def changed(self, groups: Iterable[int]) -> None:
        """Take note that the scores of *groups* have changed."""
        held, heap, score = self._held, self._heap, self._score
        if not heap or score is None:
            return
        for group in groups:
            if held.get(group):
                self._sequence += 1
                self._place[group] = self._sequence
                heapq.heappush(heap, (score(group), self._sequence, group))

    def halve(self, kept: Callable[[int], bool]) -> None:
        """Go on with half the capacity and those groups that are *kept*."""
        self.capacity = max(1, self.capacity // 2)
        for group in [group for group in self._held if not kept(group)]:
            self._size -= self._held.pop(group)
        self._heap = []
        if self._size > self.capacity:
            self._evict(self._size - self.capacity)

    def step(self, parts: Sequence[Part], final: Sequence[Part]) -> int:
        """Return the hits of a request for *parts*, head first, that ends up as *final*."""
        return self.serve(parts, final, final[::-1], sum(blocks for _, blocks in final))

    def serve(
        self, parts: Sequence[Part], final: Sequence[Part], tail_first: Sequence[Part], total: int
    ) -> int:
        """Do as `step`, told what all shadows need to know: *final* turned round, and its sum."""
        held = self._held
        hits = 0
        for group, blocks in parts:
            have = held.get(group, 0)
            if have < blocks:
                hits += have
                break
            hits += blocks
        size, capacity = self._size, self.capacity
        for group, _ in final:
            size -= held.pop(group, 0)
        self._size = size
        if size + total > capacity:
            self._evict(size + total - capacity)
            size = self._size
        for group, blocks in tail_first:
            held[group] = blocks
        size += total
        if size > capacity:
            excess = size - capacity
            for group, blocks in tail_first:
                cut = min(blocks, excess)
                held[group] -= cut
                excess -= cut
                if not excess:
                    break
            size = capacity
        self._size = size
        heap, score = self._heap, self._score
        if heap and score is not None:
            sequence, place = self._sequence, self._place
            for group, _ in final:
                sequence += 1
                place[group] = sequence
                heapq.heappush(heap, (score(group), sequence, group))
            self._sequence = sequence
        return hits

    def _evict(self, excess: int) -> None:
        held = self._held
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
    Answers: which order would have had the most hits lately, the engine's or one of ours?

    All run in shadow over the same requests; their hits above LRU's fade with a half-life counted
    in requests. Following the best of several experts costs little when they are equal and bounds
    the loss when one fails. What an order won over a longer time counts too, in part: where its
    gains are few and large, it must not be left over a handful of requests.

    A pool of many groups is watched through a sample of them, in shadows that are as much smaller
    (spatial sampling after SHARDS, Waldspurger and others, FAST 2015), so that a request costs the
    same, or nothing, however large the pool is.
    """

    def __init__(
        self,
        capacity: int,
        scores: Mapping[str, Callable[[int], float]],
        *,
        half_life: float = 60.0,
        watched: int = _WATCHED,
    ) -> None:
        self.ours = {name: ShadowCache(capacity, score) for name, score in scores.items()}
        self.lru = ShadowCache(capacity, None)
        self._fade = 0.5 ** (1.0 / half_life)
        self._slow_fade = 0.5 ** (1.0 / (_MEMORY * half_life))
        self._savings = dict.fromkeys(scores, 0.0)
        self.leads = dict.fromkeys(scores, 0.0)
        """Faded hit blocks of each order, less LRU's."""
        self.requests = 0
        self.hits = dict.fromkeys(scores, 0)
        self.hits_lru = 0
        self.sampled = 1
        """One of how many groups is watched."""
        self._limit = watched
        self.leader: str | None = None
        """The order to follow; None: the engine's."""

    def step(self, parts: Sequence[Part], final: Sequence[Part]) -> None:
        """Let all shadows serve one request."""
        self.requests += 1
        one_of = self.sampled
        if one_of > 1:
            others = one_of - 1
            final = [part for part in final if not part[0] * _SCATTER >> 12 & others]
            if not final:
                return
            parts = [part for part in parts if not part[0] * _SCATTER >> 12 & others]
        tail_first = final[::-1]
        total = 0
        for _, blocks in final:
            total += blocks
        base = self.lru.serve(parts, final, tail_first, total) * one_of
        self.hits_lru += base
        best, leader = 0.0, None
        leads, savings = self.leads, self._savings
        for name, shadow in self.ours.items():
            hits = shadow.serve(parts, final, tail_first, total) * one_of
            self.hits[name] += hits
            won = hits - base
            lead = leads[name] = leads[name] * self._fade + won
            saved = savings[name] = savings[name] * self._slow_fade + won
            standing = lead + _SAVED * saved
            if standing > best:
                best, leader = standing, name
        self.leader = leader
        if len(self.lru) > self._limit and self.lru.capacity > _LEAST:
            self.sampled *= 2
            for each in (self.lru, *self.ours.values()):
                each.halve(self._watched)

    def _watched(self, group: int) -> bool:
        return not group * _SCATTER >> 12 & self.sampled - 1

    def rescored(self) -> None:
        """Take note that all scores may have changed."""
        for shadow in self.ours.values():
            shadow.rescored()

    def changed(self, groups: Collection[int]) -> None:
        """Take note that the scores of *groups* have changed."""
        for shadow in self.ours.values():
            shadow.changed(groups)

"""In which order free blocks are evicted."""

import heapq
from collections.abc import Iterable, Iterator, Mapping

from scout_server.policy.facts import UNHASHED

__all__ = ["RetentionOrder"]

_NOT_FREE = -1


class RetentionOrder:
    """
    The free blocks of one pool in eviction order. Keys are block ids in [0, capacity).

    It has the engine's own queue semantics (append = reuse last, prepend = reuse first) and, where
    the policy knows better, another order of eviction. Everything in it can be evicted. In LRU mode
    the order is exactly that of the engine's queue.

    Two orders are kept at once, each a doubly linked list in arrays, so that switching between them
    is free: the engine's, over all blocks; and one per group. In scout mode the group with the
    lowest score goes first (of equals the one used longest ago), and inside a group the engine's
    order holds, which is tail before head. Scores are set from outside, never computed here: a pop
    costs the same whatever the pool's size.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.scout = False
        """False: the engine's own order. Switch at any time, at no cost."""
        self.popped = 0
        """Blocks evicted so far, ever."""
        self.passed = 0
        """Of those in scout mode, blocks of groups that were given back only just before."""
        self._given = 0
        self._stamps: dict[int, int] = {}  # sentinel -> blocks given back before its last one
        unused = [_NOT_FREE] * (capacity + 1)
        self._next = list(unused)  # the engine's order; index `capacity` is its sentinel
        self._prev = list(unused)
        self._next[capacity] = self._prev[capacity] = capacity
        self._gnext = list(unused)  # order inside groups; a group's sentinel is > capacity
        self._gprev = list(unused)
        self._at = list(unused)  # sentinel of a free block's group
        self._free = 0
        self._sentinel: dict[int, int] = {}  # group -> sentinel, for groups with blocks
        self._group: dict[int, int] = {}  # sentinel -> group
        self._sizes: dict[int, int] = {}  # sentinel -> blocks
        self._idle: list[int] = []  # sentinels to use again
        self._keys: dict[int, int] = {}  # group -> sequence of its current place in the heap
        self._heap: list[tuple[float, int, int]] = []  # (score, sequence, group), lazily valid
        self._sequence = 0
        self._scores: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return self._free

    def __contains__(self, block: int) -> bool:
        """Whether *block* is free."""
        return 0 <= block < self.capacity and self._at[block] != _NOT_FREE

    def size(self, group: int) -> int:
        """Return how many free blocks *group* has."""
        sentinel = self._sentinel.get(group)
        return 0 if sentinel is None else self._sizes[sentinel]

    def append(self, block: int, group: int) -> None:
        """Add *block*, owned by *group*, at the end: reused last; ValueError if it is free."""
        if self._at[block] != _NOT_FREE:
            raise ValueError(f"block {block} is already free")
        sentinel = self._sentinel.get(group)
        if sentinel is None:
            sentinel = self._open(group)
        end = self.capacity
        nxt, prv = self._next, self._prev
        last = prv[end]
        nxt[last] = block
        prv[block] = last
        nxt[block] = end
        prv[end] = block
        nxt, prv = self._gnext, self._gprev
        last = prv[sentinel]
        nxt[last] = block
        prv[block] = last
        nxt[block] = sentinel
        prv[sentinel] = block
        self._at[block] = sentinel
        self._sizes[sentinel] += 1
        self._free += 1
        self._given += 1
        self._stamps[sentinel] = self._given

    def prepend(self, block: int, group: int) -> None:
        """Add *block*, owned by *group*, at the front: reused first; ValueError if it is free."""
        if self._at[block] != _NOT_FREE:
            raise ValueError(f"block {block} is already free")
        sentinel = self._sentinel.get(group)
        if sentinel is None:
            sentinel = self._open(group)
        for nxt, prv, head in (
            (self._next, self._prev, self.capacity),
            (self._gnext, self._gprev, sentinel),
        ):
            first = nxt[head]
            prv[first] = block
            nxt[block] = first
            prv[block] = head
            nxt[head] = block
        self._at[block] = sentinel
        self._sizes[sentinel] += 1
        self._free += 1

    def remove(self, block: int) -> None:
        """Take *block* out because it is used again; KeyError when it is not free."""
        if block not in self:
            raise KeyError(block)
        self._take(block)

    def pop(self, n: int, *, now: float) -> list[int]:
        """Take out and return *n* victims, first one first; ValueError if fewer are free."""
        if n > self._free:
            msg = f"cannot evict {n} blocks: {self._free} are free"
            raise ValueError(msg)
        self.popped += n
        victims: list[int] = []
        if not self.scout:
            nxt, end = self._next, self.capacity
            for _ in range(n):
                block = nxt[end]
                self._take(block)
                victims.append(block)
            return victims
        recent = self.capacity // 4
        while n > 0:
            sentinel = self._first_group()
            count = min(n, self._sizes[sentinel])
            if self._given - self._stamps.get(sentinel, 0) < recent:
                self.passed += count
            self._take_first(sentinel, count, victims)
            n -= count
        return victims

    def __iter__(self) -> Iterator[int]:
        """Iterate in the order of eviction as it stands."""
        return iter(list(self._walk()))

    def lru(self) -> Iterator[int]:
        """Iterate in the engine's own order (for handing the queue back)."""
        return iter(list(self._chain(self._next, self.capacity, self.capacity)))

    def after(self, block: int | None) -> Iterator[int]:
        """
        Iterate lazily over the blocks that go after *block*, or over all for None.

        KeyError when *block* is not free. The order must not change while iterating.
        """
        if block is None:
            return self._walk()
        if block not in self:
            raise KeyError(block)
        if not self.scout:
            return self._chain(self._next, block, self.capacity)
        return self._walk_after(block)

    def extend(self, blocks: Iterable[int], group: int) -> None:
        """Append every block of *blocks* in turn, faster than one by one."""
        sentinel = self._sentinel.get(group)
        nxt, prv, gnext, gprev = self._next, self._prev, self._gnext, self._gprev
        at, end = self._at, self.capacity
        last = prv[end]
        count = 0
        glast = -1 if sentinel is None else gprev[sentinel]
        for block in blocks:
            if at[block] != _NOT_FREE:
                break
            if sentinel is None:
                sentinel = self._open(group)
                glast = gprev[sentinel]
            nxt[last] = block
            prv[block] = last
            gnext[glast] = block
            gprev[block] = glast
            at[block] = sentinel
            last = glast = block
            count += 1
        else:
            block = -1
        if count:
            assert sentinel is not None
            nxt[last] = end
            prv[end] = last
            gnext[glast] = sentinel
            gprev[sentinel] = glast
            self._sizes[sentinel] += count
            self._free += count
            self._given += count
            self._stamps[sentinel] = self._given
        if block >= 0:
            raise ValueError(f"block {block} is already free")

    def discard_all(self, blocks: Iterable[int]) -> None:
        """Take out every block of *blocks*; those that are not free are passed over."""
        at, sizes = self._at, self._sizes
        nxt, prv, gnext, gprev = self._next, self._prev, self._gnext, self._gprev
        for block in blocks:
            sentinel = at[block]
            if sentinel == _NOT_FREE:
                continue
            before, behind = prv[block], nxt[block]
            nxt[before] = behind
            prv[behind] = before
            before, behind = gprev[block], gnext[block]
            gnext[before] = behind
            gprev[behind] = before
            at[block] = _NOT_FREE
            self._free -= 1
            size = sizes[sentinel] - 1
            if size:
                sizes[sentinel] = size
            else:
                self._close(sentinel)

    def group_sizes(self) -> dict[int, int]:
        """Return how many free blocks each group has, groups without any left out."""
        return {group: self._sizes[sentinel] for group, sentinel in self._sentinel.items()}

    def groups(self) -> Iterable[int]:
        """Return the groups that have free blocks, in no particular order."""
        return self._sentinel.keys()

    def score(self, group: int) -> float:
        """Return the score of *group*; 0 when none was set."""
        return self._scores.get(group, 0.0)

    def set_score(self, group: int, score: float) -> None:
        """Give *group* a score from now on; a higher score goes later."""
        if group not in self._keys:
            self._scores[group] = score
        elif self._scores.get(group, 0.0) != score:
            self._scores[group] = score
            self._place(group)

    def set_scores(self, scores: Iterable[tuple[int, float]]) -> None:
        """Give many groups a score from now on, faster than one by one."""
        keys, heap, known, sequence = self._keys, self._heap, self._scores, self._sequence
        for group, score in scores:
            if group in keys and group != UNHASHED and known.get(group, 0.0) != score:
                sequence += 1
                keys[group] = sequence
                heapq.heappush(heap, (score, sequence, group))
            known[group] = score
        self._sequence = sequence
        self._trim()

    def rescore(self, scores: Mapping[int, float]) -> None:
        """Replace all scores; groups without a score have 0."""
        self._scores = dict(scores)
        get = self._scores.get
        self._heap = [(get(group, 0.0), at, group) for group, at in self._keys.items()]
        if UNHASHED in self._keys:
            at = self._keys[UNHASHED]
            self._heap.remove((get(UNHASHED, 0.0), at, UNHASHED))
            self._heap.append((float("-inf"), at, UNHASHED))
        heapq.heapify(self._heap)

    def used(self, group: int) -> None:
        """Say that *group* was used just now: of equal scores it goes last."""
        if group in self._sentinel:
            self._place(group)

    def _open(self, group: int) -> int:
        if self._idle:
            sentinel = self._idle.pop()
        else:
            sentinel = len(self._gnext)
            self._gnext.append(sentinel)
            self._gprev.append(sentinel)
        self._gnext[sentinel] = self._gprev[sentinel] = sentinel
        self._sentinel[group] = sentinel
        self._group[sentinel] = group
        self._sizes[sentinel] = 0
        self._place(group)
        return sentinel

    def _place(self, group: int) -> None:
        self._sequence += 1
        self._keys[group] = self._sequence
        heapq.heappush(self._heap, (self._rank(group), self._sequence, group))
        self._trim()

    def _trim(self) -> None:
        if len(self._heap) > 64 + 4 * len(self._sentinel):
            self._heap = [(self._rank(each), at, each) for each, at in self._keys.items()]
            heapq.heapify(self._heap)

    def _rank(self, group: int) -> float:
        return float("-inf") if group == UNHASHED else self._scores.get(group, 0.0)

    def _take(self, block: int) -> None:
        nxt, prv = self._next, self._prev
        before, behind = prv[block], nxt[block]
        nxt[before] = behind
        prv[behind] = before
        nxt, prv = self._gnext, self._gprev
        before, behind = prv[block], nxt[block]
        nxt[before] = behind
        prv[behind] = before
        sentinel = self._at[block]
        self._at[block] = _NOT_FREE
        self._free -= 1
        size = self._sizes[sentinel] - 1
        if size:
            self._sizes[sentinel] = size
        else:
            self._close(sentinel)

    def _take_first(self, sentinel: int, count: int, taken: list[int]) -> None:
        """Take the first *count* blocks out of a group, and add them to *taken*."""
        nxt, prv, gnext, at = self._next, self._prev, self._gnext, self._at
        block = gnext[sentinel]
        for _ in range(count):
            taken.append(block)
            before, behind = prv[block], nxt[block]
            nxt[before] = behind
            prv[behind] = before
            at[block] = _NOT_FREE
            block = gnext[block]
        gnext[sentinel] = block
        self._gprev[block] = sentinel
        self._free -= count
        size = self._sizes[sentinel] - count
        if size:
            self._sizes[sentinel] = size
        else:
            self._close(sentinel)

    def _close(self, sentinel: int) -> None:
        group = self._group.pop(sentinel)
        del self._sizes[sentinel], self._sentinel[group], self._keys[group]
        self._stamps.pop(sentinel, None)
        self._idle.append(sentinel)

    def _first_group(self) -> int:
        heap, keys = self._heap, self._keys
        while True:
            _, sequence, group = heap[0]
            if keys.get(group) == sequence:
                return self._sentinel[group]
            heapq.heappop(heap)

    def _ranked(self) -> list[int]:
        keys = self._keys
        return sorted(self._sentinel, key=lambda group: (self._rank(group), keys[group]))

    def _walk(self) -> Iterator[int]:
        if not self.scout:
            yield from self._chain(self._next, self.capacity, self.capacity)
            return
        for group in self._ranked():
            sentinel = self._sentinel[group]
            yield from self._chain(self._gnext, sentinel, sentinel)

    def _walk_after(self, block: int) -> Iterator[int]:
        sentinel = self._at[block]
        yield from self._chain(self._gnext, block, sentinel)
        ranked = self._ranked()
        for group in ranked[ranked.index(self._group[sentinel]) + 1 :]:
            yield from self._chain(self._gnext, self._sentinel[group], self._sentinel[group])

    @staticmethod
    def _chain(follow: list[int], start: int, end: int) -> Iterator[int]:
        at = follow[start]
        while at != end:
            yield at
            at = follow[at]

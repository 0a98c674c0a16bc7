"""In which order free blocks are evicted."""

import heapq
from collections.abc import Iterable, Iterator, Mapping

from scout_server.policy.facts import UNHASHED
from scout_server.policy.runs import Group, Run, add_run

__all__ = ["RetentionOrder"]

_LONGEST = 64  # blocks of a run
_WORST = float("-inf")


class RetentionOrder:
    """
    The free blocks of one pool in eviction order. Keys are block ids in [0, capacity).

    It has the engine's own queue semantics (append = reuse last, prepend = reuse first) and, where
    the policy knows better, another order of eviction. Everything in it can be evicted. In LRU mode
    the order is exactly that of the engine's queue.

    Two orders are kept at once, as linked lists of runs, so that switching between them is free:
    the engine's, over all blocks; and one per group. In scout mode the group with the lowest score
    goes first (of equals the one used longest ago), and inside a group the engine's order holds,
    which is tail before head. Scores are set from outside, never computed here: a pop costs the
    same whatever the pool's size.
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
        self._free = 0
        self._run: list[Run | None] = [None] * capacity  # of each free block
        end = self._end = Group()  # before the first run of the engine's order, after the last
        end.next = end.prev = end.gnext = end.gprev = end.owner = end
        self._groups: dict[int, Group] = {}  # those that have blocks
        self._heap: list[tuple[float, int, Group]] = []  # (score, sequence, group), lazily valid
        self._stale = False  # whether the heap is to be made anew before it is used
        self._sequence = 0
        self._scores: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return self._free

    def __contains__(self, block: int) -> bool:
        """Whether *block* is free."""
        return 0 <= block < self.capacity and self._run[block] is not None

    def size(self, group: int) -> int:
        """Return how many free blocks *group* has."""
        owner = self._groups.get(group)
        return 0 if owner is None else owner.size

    def append(self, block: int, group: int) -> None:
        """Add *block*, owned by *group*, at the end: reused last; ValueError if it is free."""
        if self._run[block] is not None:
            raise ValueError(f"block {block} is already free")
        owner = self._groups.get(group)
        if owner is None:
            owner = self._open(group)
        run = self._end.prev
        if (
            run.owner is owner
            and run.live == len(run.blocks) - run.start
            and len(run.blocks) < _LONGEST
        ):
            run.blocks.append(block)
            run.live += 1
        else:
            run = add_run(Run(), [block], owner, before=self._end, within=owner)
        self._run[block] = run
        owner.size += 1
        self._free += 1
        self._given += 1
        owner.stamp = self._given

    def prepend(self, block: int, group: int) -> None:
        """Add *block*, owned by *group*, at the front: reused first; ValueError if it is free."""
        if self._run[block] is not None:
            raise ValueError(f"block {block} is already free")
        owner = self._groups.get(group)
        if owner is None:
            owner = self._open(group)
        self._run[block] = add_run(Run(), [block], owner, before=self._end.next, within=owner.gnext)
        owner.size += 1
        self._free += 1

    def extend(self, blocks: Iterable[int], group: int) -> None:
        """Append every block of *blocks* in turn, faster than one by one."""
        added = list(blocks)
        if len(added) > _LONGEST:
            for first in range(0, len(added), _LONGEST):
                self.extend(added[first : first + _LONGEST], group)
            return
        runs, run = self._run, Run()
        wrong = None
        for place, block in enumerate(added):
            if runs[block] is not None:
                wrong = block
                del added[place:]
                break
            runs[block] = run
        if added:
            owner = self._groups.get(group)
            if owner is None:
                owner = self._open(group)
            count = len(added)
            add_run(run, added, owner, before=self._end, within=owner)
            owner.size += count
            self._free += count
            owner.stamp = self._given = self._given + count
        if wrong is not None:
            raise ValueError(f"block {wrong} is already free")

    def remove(self, block: int) -> None:
        """Take *block* out because it is used again; KeyError when it is not free."""
        run = self._run[block] if 0 <= block < self.capacity else None
        if run is None:
            raise KeyError(block)
        self._run[block] = None
        self._taken(run, 1)

    def discard_all(self, blocks: Iterable[int]) -> None:
        """Take out every block of *blocks*; those that are not free are passed over."""
        runs = self._run
        current, count = None, 0
        for block in blocks:
            run = runs[block]
            if run is not current:
                if current is not None:
                    self._taken(current, count)
                current, count = run, 0
            if run is not None:
                runs[block] = None
                count += 1
        if current is not None:
            self._taken(current, count)

    def pop(self, n: int, *, now: float) -> list[int]:
        """Take out and return *n* victims, first one first; ValueError if fewer are free."""
        if n > self._free:
            msg = f"cannot evict {n} blocks: {self._free} are free"
            raise ValueError(msg)
        self.popped += n
        victims: list[int] = []
        if not self.scout:
            while n > 0:
                n -= self._take_first(self._end.next, n, victims)
            return victims
        recent = self.capacity // 4
        while n > 0:
            owner = self._first_group()
            count = owner.size
            if count > n:
                count = n
            if self._given - owner.stamp < recent:
                self.passed += count
            n -= count
            while count > 0:
                count -= self._take_first(owner.gnext, count, victims)
        return victims

    def __iter__(self) -> Iterator[int]:
        """Iterate in the order of eviction as it stands."""
        return iter(list(self._walk()))

    def lru(self) -> Iterator[int]:
        """Iterate in the engine's own order (for handing the queue back)."""
        return iter(list(self._engine_order(self._end)))

    def after(self, block: int | None) -> Iterator[int]:
        """
        Iterate lazily over the blocks that go after *block*, or over all for None.

        KeyError when *block* is not free. The order must not change while iterating.
        """
        if block is None:
            return self._walk()
        run = self._run[block] if 0 <= block < self.capacity else None
        if run is None:
            raise KeyError(block)
        return self._walk_after(block, run)

    def group_sizes(self) -> dict[int, int]:
        """Return how many free blocks each group has, groups without any left out."""
        return {group: owner.size for group, owner in self._groups.items()}

    def groups(self) -> Iterable[int]:
        """Return the groups that have free blocks, in no particular order."""
        return self._groups.keys()

    def score(self, group: int) -> float:
        """Return the score of *group*; 0 when none was set."""
        return self._scores.get(group, 0.0)

    def set_score(self, group: int, score: float) -> None:
        """Give *group* a score from now on; a higher score goes later."""
        self.set_scores({group: score})

    def set_scores(self, scores: Mapping[int, float]) -> None:
        """Give many groups a score from now on, in their order, faster than one by one."""
        groups, heap, known, sequence = self._groups, self._heap, self._scores, self._sequence
        stale, push = self._stale, heapq.heappush
        for group in filter(groups.__contains__, scores):  # most have no free blocks
            score = scores[group]
            if known.get(group, 0.0) != score and group != UNHASHED:
                owner = groups[group]
                sequence += 1
                owner.key = sequence
                if not stale:
                    push(heap, (score, sequence, owner))
        known.update(scores)
        self._sequence = sequence
        if len(heap) > 64 + 4 * len(groups):
            self._stale = True

    def rescore(self, scores: Mapping[int, float]) -> None:
        """Replace all scores; groups without a score have 0."""
        self._scores = dict(scores)
        self._heap.clear()
        self._stale = True

    def used(self, group: int) -> None:
        """Say that *group* was used just now: of equal scores it goes last."""
        owner = self._groups.get(group)
        if owner is not None:
            self._place(owner)

    # ---- runs ------------------------------------------------------------------------------

    def _taken(self, run: Run, count: int) -> None:
        """Note that *count* blocks of *run* were taken out; drop it when it has no more."""
        owner = run.owner
        self._free -= count
        left = run.live - count
        if left:
            run.live = left
            if 4 * left < len(run.blocks):
                runs = self._run
                run.blocks = [block for block in run.blocks[run.start :] if runs[block] is run]
                run.start = 0
        else:
            before, behind = run.prev, run.next
            before.next = behind
            behind.prev = before
            before, behind = run.gprev, run.gnext
            before.gnext = behind
            behind.gprev = before
        owner.size -= count
        if not owner.size:
            owner.key = 0
            owner.gnext = owner.gprev = self._end  # no cycle: freed at once, not by the collector
            del self._groups[owner.group]

    def _take_first(self, run: Run, most: int, taken: list[int]) -> int:
        """Take at most *most* blocks from the front of *run* into *taken*; return how many."""
        runs, blocks, start, count = self._run, run.blocks, run.start, run.live
        if count == len(blocks) - start:
            if count > most:
                count = most
                run.start = start + count
                found = blocks[start : start + count]
            else:
                found = blocks[start:] if start else blocks
        else:
            count = min(count, most)
            found = []
            while len(found) < count:
                if runs[blocks[start]] is run:
                    found.append(blocks[start])
                start += 1
            run.start = start
        for block in found:
            runs[block] = None
        taken += found
        self._taken(run, count)
        return count

    # ---- groups ----------------------------------------------------------------------------

    def _open(self, group: int) -> Group:
        owner = Group()
        owner.gnext = owner.gprev = owner
        owner.group = group
        owner.size = owner.stamp = 0
        self._groups[group] = owner
        self._place(owner)
        return owner

    def _place(self, owner: Group) -> None:
        sequence = owner.key = self._sequence = self._sequence + 1
        if not self._stale:
            heapq.heappush(self._heap, (self._rank(owner.group), sequence, owner))
            self._stale = len(self._heap) > 64 + 4 * len(self._groups)

    def _rank(self, group: int) -> float:
        return _WORST if group == UNHASHED else self._scores.get(group, 0.0)

    def _first_group(self) -> Group:
        if self._stale:
            get = self._scores.get
            self._heap = [
                (_WORST if group == UNHASHED else get(group, 0.0), each.key, each)
                for group, each in self._groups.items()
            ]
            heapq.heapify(self._heap)
            self._stale = False
        heap = self._heap
        while True:
            _, sequence, owner = heap[0]
            if owner.key == sequence:
                return owner
            heapq.heappop(heap)

    def _ranked(self) -> list[Group]:
        return sorted(self._groups.values(), key=lambda each: (self._rank(each.group), each.key))

    def _walk(self) -> Iterator[int]:
        if not self.scout:
            yield from self._engine_order(self._end)
            return
        for owner in self._ranked():
            yield from self._group_order(owner, owner)

    def _walk_after(self, block: int, run: Run) -> Iterator[int]:
        yield from self._rest(run, run.blocks.index(block, run.start) + 1)
        if not self.scout:
            yield from self._engine_order(run)
            return
        owner = run.owner
        yield from self._group_order(run, owner)
        ranked = self._ranked()
        for each in ranked[ranked.index(owner) + 1 :]:
            yield from self._group_order(each, each)

    def _engine_order(self, run: Run) -> Iterator[int]:
        """Yield the blocks after *run* in the engine's order."""
        run = run.next
        while run is not self._end:
            yield from self._rest(run, run.start)
            run = run.next

    def _group_order(self, run: Run, owner: Group) -> Iterator[int]:
        """Yield the blocks after *run* in its group."""
        run = run.gnext
        while run is not owner:
            yield from self._rest(run, run.start)
            run = run.gnext

    def _rest(self, run: Run, start: int) -> list[int]:
        """Return the blocks of *run* from place *start* on."""
        runs = self._run
        return [block for block in run.blocks[start:] if runs[block] is run]

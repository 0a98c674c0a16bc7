"""How much of a trace's prompts could be found in a cache of a given size."""

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scout_server.sim.traces.records import HashScope, Program, Runs, TraceInfo

__all__ = [
    "Access",
    "IntervalSet",
    "accesses",
    "belady_hits",
    "lru_hits",
    "unlimited_hits",
    "working_set",
]


class IntervalSet:
    """A set of integers, kept as disjoint ranges."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def covered(self, first: int, length: int) -> int:
        """Return how many of first, first + 1, ... up to *length* are in the set, from first on."""
        at = bisect_right(self._starts, first) - 1
        if at < 0 or self._ends[at] <= first:
            return 0
        return min(self._ends[at] - first, length)

    def add(self, first: int, length: int) -> int:
        """Add a range; return how many of it are new."""
        end = first + length
        left = bisect_right(self._starts, first) - 1
        if left >= 0 and self._ends[left] >= first:
            first = self._starts[left]
        else:
            left += 1
        right = left
        had = 0
        while right < len(self._starts) and self._starts[right] <= end:
            end = max(end, self._ends[right])
            had += self._ends[right] - self._starts[right]
            right += 1
        self._starts[left:right] = [first]
        self._ends[left:right] = [end]
        return end - first - had


def unlimited_hits(seen: IntervalSet, runs: Runs) -> int:
    """Return the blocks of *runs* that a cache without limit would find, and add all of them."""
    found = 0
    missed = False
    for first, length in runs:
        if not missed:
            part = seen.covered(first, length)
            found += part
            missed = part < length
        seen.add(first, length)
    return found


def working_set(info: TraceInfo, programs: Sequence[Program], live: float) -> float:
    """
    Return the tokens that *live* programs under way hold: all their agents' contexts.

    The mean over turns of what a program has sent so far, every block once; what programs share
    counts once for all. Without hashes, the contexts of its agents are taken as their own.
    """
    shared = IntervalSet()
    distinct = total = turns = 0
    so_far = 0.0
    for program in programs:
        seen = IntervalSet()
        chains: dict[tuple[str, str | None], int] = {}
        size = 0
        for turn in program.turns:
            for first, length in turn.hash_runs:
                size += seen.add(first, length) * info.block_tokens
                distinct += shared.add(first, length) * info.block_tokens
            if not turn.hash_runs:
                key = (turn.session, turn.agent)
                tokens = turn.input_tokens + turn.output_tokens
                size += max(tokens - chains.get(key, 0), 0)
                distinct += max(tokens - chains.get(key, 0), 0)
                chains[key] = max(tokens, chains.get(key, 0))
            so_far += size
            turns += 1
        total += size
    if not turns:
        return 0.0
    count = len(programs)
    own, common = total / count, 0.0
    if info.scope is HashScope.GLOBAL and count > 1:
        # distinct = common + count * own and total / count = common + own.
        own = max(distinct - total / count, 0.0) / (count - 1)
        common = total / count - own
    part = so_far / turns / (total / count)
    return (common + live * own) * min(part, 1.0)


@dataclass(frozen=True, slots=True)
class Access:
    """One prompt, in the order of its recorded release."""

    at_s: float
    runs: Runs
    base: int
    """Added to ids so that programs do not meet where the scope is the program."""


def accesses(info: TraceInfo, programs: Iterable[Program], *, most_blocks: int) -> list[Access]:
    """
    Return the prompts of *programs* by time, as recorded (service unknown: 0 s).

    Whole programs are taken, in file order, until they have *most_blocks* blocks.
    """
    found: list[Access] = []
    total = 0
    for number, program in enumerate(programs):
        base = 0 if info.scope is HashScope.GLOBAL else (number + 1) << 40
        ends: list[float] = []
        for turn in program.turns:
            start = max((ends[p] for p in turn.parents), default=program.arrival_s) + turn.gap_s
            ends.append(start + (turn.service_s or 0.0))
            found.append(Access(start, turn.hash_runs, base))
            total += sum(length for _, length in turn.hash_runs)
        if total >= most_blocks:
            break
    found.sort(key=lambda access: access.at_s)
    return found


def _ids(access: Access) -> list[int]:
    ids: list[int] = []
    for first, length in access.runs:
        ids.extend(range(access.base + first, access.base + first + length))
    return ids


def lru_hits(order: Sequence[Access], capacity: int) -> float:
    """Return the share of blocks found, head first, by an LRU cache of *capacity* blocks."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for access in order:
        ids = _ids(access)
        total += len(ids)
        missed = False
        for block in ids:
            if not missed and block in cache:
                hit += 1
            else:
                missed = True
        # The tail becomes the oldest of the chain: a head is of use without it, not it without.
        for block in reversed(ids):
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit / total if total else 0.0


def belady_hits(order: Sequence[Access], capacity: int) -> float:
    """Return the share found by Bélády's rule: of all blocks, the one used furthest ahead goes."""
    uses: dict[int, list[int]] = {}
    for index in range(len(order) - 1, -1, -1):
        for block in _ids(order[index]):
            uses.setdefault(block, []).append(index)
    cache: dict[int, float] = {}
    heap: list[tuple[float, int, int]] = []
    hit = total = 0
    for access in order:
        ids = _ids(access)
        total += len(ids)
        missed = False
        for place, block in enumerate(ids):
            if not missed and block in cache:
                hit += 1
            else:
                missed = True
            ahead = uses[block]
            ahead.pop()
            following = float(ahead[-1]) if ahead else math.inf
            cache[block] = following
            heapq.heappush(heap, (-following, -place, block))
        while len(cache) > capacity:
            negative, _, block = heapq.heappop(heap)
            if cache.get(block) == -negative:
                del cache[block]
    return hit / total if total else 0.0

"""The KV blocks of one replica, with the prefix-caching rules of vLLM V1."""

from collections.abc import Callable, Sequence

from scout_server.policy.facts import UNHASHED, UNOWNED, Segment
from scout_server.policy.retention import RetentionOrder

__all__ = ["BlockPool", "EvictionHook"]

EvictionHook = Callable[[float, list[int], list[int | None]], None]
"""Called with the time, the victims in order, and the hash each one had (None: it had none)."""


class BlockPool:
    """
    Reference-counted blocks, found by the chained hash of their content.

    A block whose count is zero is free and stays findable until it is evicted; `order` holds
    exactly the free blocks and chooses victims. Two blocks may have one hash; the older is found.
    """

    __slots__ = ("_cached", "capacity", "evicted", "hash_of", "on_evict", "order", "refs")

    def __init__(
        self, capacity: int, order: RetentionOrder, *, on_evict: EvictionHook | None = None
    ) -> None:
        if capacity < 1:
            msg = f"a pool has at least 1 block, not {capacity}"
            raise ValueError(msg)
        if len(order):
            msg = f"the order of a new pool is empty; this one has {len(order)} blocks"
            raise ValueError(msg)
        self.capacity = capacity
        self.order = order
        self.on_evict = on_evict
        self.refs = [0] * capacity
        self.hash_of: list[int | None] = [None] * capacity
        self.evicted = 0
        """Blocks evicted so far that still had a hash."""
        self._cached: dict[int, int | dict[int, None]] = {}
        for block in range(capacity):
            order.append(block, UNHASHED)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses, cached ones included."""
        return len(self.order)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, in [0, 1]."""
        return 1.0 - len(self.order) / self.capacity

    @property
    def cached_hashes(self) -> int:
        """Number of distinct hashes that can be found."""
        return len(self._cached)

    def find(self, block_hash: int) -> int | None:
        """Return the block that has *block_hash*, or None."""
        entry = self._cached.get(block_hash)
        if entry is None or isinstance(entry, int):
            return entry
        return next(iter(entry))

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix of *hashes*, at most *limit*."""
        found: list[int] = []
        get = self._cached.get
        for block_hash in hashes if len(hashes) <= limit else hashes[:limit]:
            entry = get(block_hash)
            if entry is None:
                break
            found.append(entry if isinstance(entry, int) else next(iter(entry)))
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """Return how many of *blocks* are free: touching them takes that many from the pool."""
        refs = self.refs
        return sum(1 for block in blocks if not refs[block])

    def touch(self, blocks: Sequence[int]) -> None:
        """Use *blocks* once more; free ones leave the order."""
        refs = self.refs
        for block in blocks:
            if not refs[block]:
                self.order.remove(block)
            refs[block] += 1

    def allocate(self, n: int, now: float) -> list[int]:
        """Take *n* blocks, evicting what they held; ValueError if fewer are free."""
        blocks = self.order.pop(n, now=now)
        hash_of, refs = self.hash_of, self.refs
        if self.on_evict is not None:
            self.on_evict(now, blocks, [hash_of[block] for block in blocks])
        cached = self._cached
        for block in blocks:
            refs[block] = 1
            block_hash = hash_of[block]
            if block_hash is not None:
                self.evicted += 1
                if cached[block_hash] == block:  # the usual case, without a call
                    hash_of[block] = None
                    del cached[block_hash]
                else:
                    self._forget(block)
        return blocks

    def insert(self, block: int, block_hash: int) -> None:
        """Make *block*, which is in use and has no hash, findable by *block_hash*."""
        self.hash_of[block] = block_hash
        entry = self._cached.get(block_hash)
        if entry is None:
            self._cached[block_hash] = block
        elif isinstance(entry, int):
            self._cached[block_hash] = {entry: None, block: None}
        else:
            entry[block] = None

    def insert_chain(
        self, blocks: Sequence[int], hashes: Sequence[int], start: int, end: int
    ) -> None:
        """Insert blocks *start* up to *end* of a chain, as `insert` does."""
        cached, hash_of = self._cached, self.hash_of
        for index in range(start, end):
            block_hash = hashes[index]
            if block_hash in cached:
                self.insert(blocks[index], block_hash)
            else:
                block = blocks[index]
                hash_of[block] = block_hash
                cached[block_hash] = block

    def free(self, blocks: Sequence[int], segments: Sequence[Segment]) -> None:
        """
        Give up one use of every block of a chain, head first in *blocks*.

        The tail goes to the order first, so that it is evicted first; blocks without a hash go to
        its front. *segments* names the owners; the last one covers the rest.
        """
        refs, hash_of, order = self.refs, self.hash_of, self.order
        unhashed: list[int] = []
        index = len(blocks) - 1
        at = len(segments) - 1
        while index >= 0:
            while at > 0 and segments[at - 1].end_block > index:
                at -= 1
            group = segments[at].group if at >= 0 else UNOWNED
            stop = segments[at - 1].end_block if at > 0 else 0
            while index >= stop:
                block = blocks[index]
                index -= 1
                refs[block] -= 1
                if refs[block]:
                    continue
                if hash_of[block] is None:
                    unhashed.append(block)
                else:
                    order.append(block, group)
        for block in reversed(unhashed):
            order.prepend(block, UNHASHED)

    def forget(self, blocks: Sequence[int]) -> None:
        """Make *blocks* unfindable; used or free, they stay where they are."""
        for block in blocks:
            if self.hash_of[block] is not None:
                self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self.hash_of[block]
        assert block_hash is not None
        self.hash_of[block] = None
        entry = self._cached[block_hash]
        if isinstance(entry, int):
            del self._cached[block_hash]
        else:
            del entry[block]
            if not entry:
                del self._cached[block_hash]

"""vLLM's queue of free blocks, in the order of the retention policy."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from scout_server.policy import UNHASHED, UNOWNED, RetentionOrder
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.engine import Block, BlockQueue

__all__ = ["DECISION_BUCKETS_S", "QueueCounts", "RetentionQueue"]

DECISION_BUCKETS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
"""Upper bounds of the histogram of seconds per popped block; one more bucket has the rest."""


class QueueCounts:
    """What the queue did so far. Plain integers: read by the same thread."""

    __slots__ = ("decision_buckets", "decision_sum_s", "evicted", "popped", "pops")

    def __init__(self) -> None:
        self.pops = 0
        self.popped = 0
        self.evicted = 0
        """Popped blocks whose content somebody could still have asked for."""
        self.decision_sum_s = 0.0
        self.decision_buckets = [0] * (len(DECISION_BUCKETS_S) + 1)


class RetentionQueue:
    """
    Free blocks in eviction order, with the interface of vLLM's FreeKVCacheBlockQueue.

    vLLM's own queue is kept beside it, operation by operation. It is what the engine gets back when
    something of ours fails, whatever state we are in, and it is the judge of what is free: a policy
    that names a block twice, or one in use, trips the breaker and the operation is done by LRU.
    """

    def __init__(
        self,
        stock: BlockQueue,
        blocks: Sequence[Block],
        order: RetentionOrder,
        breaker: Breaker,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stock = stock
        self._blocks = blocks
        self._order = order
        self._breaker = breaker
        self._clock = clock
        self.counts = QueueCounts()
        self.owners = [UNOWNED] * len(blocks)
        """Group of each block by block id; the scheduler sets it before a block comes here."""
        self._free = [False] * len(blocks)
        for block in stock.get_all_free_blocks():
            self._free[block.block_id] = True
            order.append(block.block_id, self._group(block))

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are free."""
        return self._stock.num_free_blocks

    def popleft(self) -> Block:
        """Take the next block to evict; ValueError when none is free."""
        if self._stock.num_free_blocks == 0 or self._breaker.open:
            return self._stock.popleft()
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Take the next *n* blocks to evict; AssertionError when fewer are free, as in vLLM."""
        if n == 0 or n > self._stock.num_free_blocks or self._breaker.open:
            return self._stock.popleft_n(n)
        started = time.perf_counter()
        try:
            victims = self._order.pop(n, now=self._clock())
            if len(victims) != n or len(set(victims)) != n:
                msg = f"the policy named {victims[:8]} and so on where {n} blocks were asked for"
                raise RuntimeError(msg)
            for block_id in victims:
                if block_id < 0 or not self._free[block_id]:
                    msg = f"the policy named block {block_id}, which is not free"
                    raise RuntimeError(msg)
            taken = [self._blocks[block_id] for block_id in victims]
        except Exception as error:
            self._breaker.trip("pop", error)
            return self._stock.popleft_n(n)
        seconds = time.perf_counter() - started
        for block in taken:
            self._stock.remove(block)
            self._free[block.block_id] = False
            self.owners[block.block_id] = UNOWNED
        self._count(taken, seconds)
        return taken

    def remove(self, block: Block) -> None:
        """Take *block* out because it is used again; RuntimeError when it is not free."""
        self._stock.remove(block)
        if not self._breaker.open:
            try:
                self._free[block.block_id] = False
                self._order.remove(block.block_id)
            except Exception as error:
                self._breaker.trip("remove", error)

    def append(self, block: Block) -> None:
        """Add a block that LRU would evict last."""
        self.append_n([block])

    def append_n(self, blocks: list[Block]) -> None:
        """Add blocks that LRU would evict last, in this order."""
        self._stock.append_n(blocks)
        if not self._breaker.open:
            try:
                for block in blocks:
                    self._free[block.block_id] = True
                    self._order.append(block.block_id, self._group(block))
            except Exception as error:
                self._breaker.trip("append", error)

    def prepend_n(self, blocks: list[Block]) -> None:
        """Add blocks that LRU would evict first, in this order."""
        self._stock.prepend_n(blocks)
        if not self._breaker.open:
            try:
                for block in reversed(blocks):
                    self._free[block.block_id] = True
                    self._order.prepend(block.block_id, self._group(block))
            except Exception as error:
                self._breaker.trip("prepend", error)

    def get_all_free_blocks(self) -> list[Block]:
        """Return the free blocks in eviction order as it stands."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """
        Iterate in eviction order as it stands, behind *cursor* or from the start.

        Nothing follows a cursor that is not free, as in vLLM.
        """
        if self._breaker.open:
            return self._stock.iter_blocks_after(cursor)
        try:
            if cursor is not None and cursor.block_id not in self._order:
                return iter(())
            after = self._order.after(None if cursor is None else cursor.block_id)
            return (self._blocks[block_id] for block_id in after)
        except Exception as error:
            self._breaker.trip("iterate", error)
            return self._stock.iter_blocks_after(cursor)

    def forget(self) -> None:
        """Every block lost its content: nobody owns any, and the order of reuse stays."""
        if self._breaker.open:
            return
        try:
            for block in self._stock.get_all_free_blocks():
                self._order.remove(block.block_id)
                self.owners[block.block_id] = UNOWNED
                self._order.append(block.block_id, UNHASHED)
        except Exception as error:
            self._breaker.trip("forget", error)

    def _group(self, block: Block) -> int:
        return UNHASHED if block.block_hash is None else self.owners[block.block_id]

    def _count(self, taken: list[Block], seconds: float) -> None:
        counts = self.counts
        counts.pops += 1
        counts.popped += len(taken)
        counts.evicted += sum(block.block_hash is not None for block in taken)
        counts.decision_sum_s += seconds
        counts.decision_buckets[bisect_left(DECISION_BUCKETS_S, seconds / len(taken))] += len(taken)

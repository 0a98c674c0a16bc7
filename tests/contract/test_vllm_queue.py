"""The retention queue against vLLM's own queue of free blocks."""

import random

import pytest

from scout_server.policy import PolicyCore, PolicySettings
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.queue import RetentionQueue

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OFF = PolicySettings(hints=False, fingerprints=False)


class Twins:
    """vLLM's queue and ours over two equal sets of blocks, told the same; ids must agree."""

    def __init__(self, blocks: int) -> None:
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

        self.theirs = [KVCacheBlock(i) for i in range(blocks)]
        self.ours = [KVCacheBlock(i) for i in range(blocks)]
        self.stock = FreeKVCacheBlockQueue(self.theirs)
        self.handed_back = 0

        def hand_back() -> None:
            self.handed_back += 1

        self.breaker = Breaker(hand_back)
        self.core = PolicyCore(OFF, capacity_blocks=blocks, block_tokens=16)
        self.queue = RetentionQueue(
            FreeKVCacheBlockQueue(self.ours), self.ours, self.core.order, self.breaker
        )
        self.used: list[int] = []

    def hashes(self, ids: list[int], hashed: bool) -> None:
        for i in ids:
            for block in (self.theirs[i], self.ours[i]):
                block.reset_hash()
                if hashed:
                    block.set_block_hash(b"%d" % i)

    def free_ids(self) -> tuple[list[int], list[int]]:
        return (
            [b.block_id for b in self.stock.get_all_free_blocks()],
            [b.block_id for b in self.queue.get_all_free_blocks()],
        )

    def step(self, rng: random.Random) -> None:
        """One operation, chosen at random, on both."""
        free = self.stock.num_free_blocks
        choice = rng.random()
        if choice < 0.25 and free:
            popped = self.stock.popleft().block_id
            assert self.queue.popleft().block_id == popped
            self.used.append(popped)
        elif choice < 0.5:
            n = rng.randint(0, min(6, free))
            theirs = [b.block_id for b in self.stock.popleft_n(n)]
            assert [b.block_id for b in self.queue.popleft_n(n)] == theirs
            self.used += theirs
        elif choice < 0.6 and free:
            candidate = rng.randrange(len(self.ours))
            if self.ours[candidate].next_free_block is not None:
                self.stock.remove(self.theirs[candidate])
                self.queue.remove(self.ours[candidate])
                self.used.append(candidate)
        elif self.used:
            n = rng.randint(1, min(7, len(self.used)))
            for i in range(n):  # a random n-subset to the end
                j = rng.randrange(len(self.used) - i)
                k = len(self.used) - 1 - i
                self.used[j], self.used[k] = self.used[k], self.used[j]
            ids = self.used[-n:]
            del self.used[-n:]
            theirs, ours = [self.theirs[i] for i in ids], [self.ours[i] for i in ids]
            if choice < 0.7:
                self.hashes(ids, hashed=False)
                self.stock.prepend_n(theirs)
                self.queue.prepend_n(ours)
            elif choice < 0.75:
                self.hashes(ids[:1], hashed=True)
                self.stock.append(theirs[0])
                self.queue.append(ours[0])
                self.used += ids[1:]
            else:
                self.hashes(ids, hashed=True)
                self.stock.append_n(theirs)
                self.queue.append_n(ours)
        assert self.queue.num_free_blocks == self.stock.num_free_blocks


@pytest.mark.timeout(300)
def test_identity_off_equals_vllm_queue_over_a_million_operations() -> None:
    """With identity off, every one of 10^6 random operations gives what vLLM's own queue gives."""
    for seed, (blocks, operations) in enumerate(((7, 100_000), (64, 200_000), (1000, 700_000))):
        rng = random.Random(seed)
        twins = Twins(blocks)
        for operation in range(operations):
            twins.step(rng)
            if operation % 5_000 == 0:
                theirs, ours = twins.free_ids()
                assert ours == theirs
                cursor = rng.randrange(blocks)
                after = twins.queue.iter_blocks_after(twins.ours[cursor])
                expected = twins.stock.iter_blocks_after(twins.theirs[cursor])
                assert [b.block_id for b in after] == [b.block_id for b in expected]
        assert not twins.breaker.open
        assert twins.queue.counts.popped > operations / 10


def test_caller_errors_are_vllms_own() -> None:
    """Popping from an empty queue and removing a used block fail as in vLLM and trip nothing."""
    twins = Twins(3)
    assert [b.block_id for b in twins.queue.popleft_n(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="No free blocks"):
        twins.queue.popleft()
    with pytest.raises(AssertionError):
        twins.queue.popleft_n(1)
    with pytest.raises(RuntimeError, match="remove"):
        twins.queue.remove(twins.ours[1])
    assert twins.queue.popleft_n(0) == []
    assert not twins.breaker.open


def test_a_used_cursor_has_nothing_behind_it() -> None:
    """Iterating behind a block that is not free yields nothing, as in vLLM."""
    twins = Twins(4)
    block = twins.queue.popleft()
    assert list(twins.queue.iter_blocks_after(block)) == []
    assert [b.block_id for b in twins.queue.iter_blocks_after(None)] == [1, 2, 3]
    assert [b.block_id for b in twins.queue.iter_blocks_after(twins.ours[2])] == [3]


def test_owners_decide_in_scout_mode() -> None:
    """In scout mode the group with the lowest score goes first, blocks without a hash before it."""
    twins = Twins(6)
    taken = twins.queue.popleft_n(6)
    twins.hashes([0, 1, 2, 3], hashed=True)
    for block_id, group in ((0, 10), (1, 10), (2, 20), (3, 20)):
        twins.queue.owners[block_id] = group
    twins.queue.append_n(taken[:4])
    twins.queue.prepend_n(taken[4:])
    twins.core.order.scout = True
    twins.core.order.rescore({10: 0.9, 20: 0.1})

    assert [b.block_id for b in twins.queue.popleft_n(5)] == [4, 5, 2, 3, 0]


def test_forgetting_keeps_the_order_of_reuse() -> None:
    """After the engine dropped its cache, all blocks are equal and the order is still the LRU's."""
    twins = Twins(5)
    taken = twins.queue.popleft_n(4)
    twins.hashes([0, 1, 2, 3], hashed=True)
    for block in taken:
        twins.queue.owners[block.block_id] = 10
    twins.queue.append_n(taken)
    for block in twins.ours:
        block.reset_hash()
    twins.queue.forget()
    twins.core.order.scout = True
    twins.core.order.rescore({10: 5.0})

    assert [b.block_id for b in twins.queue.popleft_n(5)] == [4, 0, 1, 2, 3]
    assert not twins.breaker.open


@pytest.mark.parametrize(
    "victims", [[1, 1], [0, 9], [2], [0, 1, 2], ["x", 1], None, [3, 0]], ids=str
)
def test_a_wrong_victim_trips_the_breaker_and_lru_answers(victims: object) -> None:
    """Whatever a broken policy names, the engine gets free blocks, in LRU order."""
    twins = Twins(4)
    used = twins.queue.popleft_n(1)  # block 0 is in use
    twins.core.order.pop = lambda n, *, now: victims  # type: ignore[assignment,method-assign]

    assert [b.block_id for b in twins.queue.popleft_n(2)] == [1, 2]
    assert twins.breaker.open
    assert twins.handed_back == 1
    twins.queue.append_n(used)
    assert [b.block_id for b in twins.queue.popleft_n(2)] == [3, 0]
    assert twins.queue.num_free_blocks == 0


@pytest.mark.parametrize("method", ["pop", "append", "prepend", "remove", "after", "__contains__"])
@pytest.mark.parametrize("seed", range(5))
def test_a_fault_at_any_moment_leaves_lru(method: str, seed: int) -> None:
    """A policy that raises at a random moment never changes what the engine gets from then on."""
    rng = random.Random(seed)
    twins = Twins(40)
    calls = rng.randint(1, 60)
    honest = type(twins.core.order)

    class Faulty(honest):  # type: ignore[misc,valid-type]
        """The real order, until it breaks."""

    def fail(self: object, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise RuntimeError("planted")
        return getattr(honest, method)(self, *args, **kwargs)

    setattr(Faulty, method, fail)
    twins.core.order.__class__ = Faulty
    for _ in range(3_000):
        twins.step(rng)
        cursor = rng.randrange(40)
        after = twins.queue.iter_blocks_after(twins.ours[cursor])
        assert [b.block_id for b in after] == [
            b.block_id for b in twins.stock.iter_blocks_after(twins.theirs[cursor])
        ]
    assert twins.breaker.open
    assert twins.breaker.faults == 1
    assert twins.handed_back == 1

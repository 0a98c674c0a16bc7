"""The block pool under any sequence of operations, against a model too simple to be wrong."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_server.policy import UNOWNED, RetentionOrder, Segment
from scout_server.replica import BlockPool

_CAPACITY = 12


class _Pool(RuleBasedStateMachine):
    """Chains are paths in a small tree: a block's hash is the path to it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[list[int], list[int | None]]] = []
        self.pool = BlockPool(
            _CAPACITY,
            RetentionOrder(_CAPACITY),
            on_evict=lambda now, blocks, hashes: self.log.append((blocks, hashes)),
        )
        self.queue = list(range(_CAPACITY))  # free blocks, first victim first
        self.cached: dict[int, list[int]] = {}  # hash -> blocks, oldest first
        self.hash_of: dict[int, int] = {}
        self.chains: list[list[int]] = []  # blocks of each user
        self.paths: list[int] = []

    def _evict(self, block: int) -> None:
        block_hash = self.hash_of.pop(block, None)
        if block_hash is not None:
            self.cached[block_hash].remove(block)
            if not self.cached[block_hash]:
                del self.cached[block_hash]

    @rule(path=st.lists(st.integers(1, 2), max_size=5), unhashed=st.integers(0, 2))
    def start(self, path, unhashed):
        """A request arrives: what is cached is used, the rest is taken and hashed."""
        hashes = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        hits = []
        for block_hash in hashes:
            if block_hash not in self.cached:
                break
            hits.append(self.cached[block_hash][0])
        assert self.pool.lookup(hashes, len(hashes)) == hits
        need = len(hashes) - len(hits) + unhashed
        used = {block for chain in self.chains for block in chain}
        idle = [block for block in hits if block not in used]
        assert self.pool.idle(hits) == len(idle)
        if need > len(self.queue) - len(idle):
            return
        self.pool.touch(hits)
        for block in idle:
            self.queue.remove(block)
        blocks = self.pool.allocate(need, 0.0)
        expected, self.queue = self.queue[:need], self.queue[need:]
        assert blocks == expected
        if need:
            assert self.log[-1] == (expected, [self.hash_of.get(block) for block in expected])
        for block in blocks:
            self._evict(block)
        chain = hits + blocks
        for block, block_hash in list(zip(chain, hashes, strict=False))[len(hits) :]:
            self.pool.insert(block, block_hash)
            self.hash_of[block] = block_hash
            self.cached.setdefault(block_hash, []).append(block)
        self.chains.append(chain)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def end(self, data):
        """A request ends: the tail goes first, blocks without a hash before all others."""
        chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        cut = data.draw(st.integers(0, len(chain)))
        self.pool.free(chain, [Segment(cut, 7), Segment(len(chain), UNOWNED)])
        used = {block for other in self.chains for block in other}
        free = [block for block in reversed(chain) if block not in used]
        front = [block for block in free if block not in self.hash_of]
        self.queue = front + self.queue + [block for block in free if block in self.hash_of]

    @rule(block=st.integers(0, _CAPACITY - 1))
    def forget(self, block):
        """A block is made unfindable; nothing else changes."""
        self.pool.forget([block])
        self._evict(block)

    @invariant()
    def counts_are_uses(self):
        """Each block is counted as often as chains use it; the order has the unused ones."""
        uses = Counter(block for chain in self.chains for block in chain)
        assert self.pool.refs == [uses[block] for block in range(_CAPACITY)]
        assert list(self.pool.order) == self.queue
        assert len(self.queue) + len(uses) == _CAPACITY

    @invariant()
    def findable_is_cached(self):
        """A hash is found exactly while a block has it, and the oldest such block is found."""
        assert self.pool.cached_hashes == len(self.cached)
        for block_hash, blocks in self.cached.items():
            assert self.pool.find(block_hash) == blocks[0]
        assert self.pool.hash_of == [self.hash_of.get(block) for block in range(_CAPACITY)]


TestPool = _Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

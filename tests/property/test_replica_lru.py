"""With identity off, eviction is plain LRU, block for block."""

import random
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import Hints
from scout_server.embedded.engine import Engine
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy import UNOWNED, Assignment, PolicySettings, Segment
from scout_server.replica import BatchSettings, Replica, Request


class _PlainOrder:
    """The engine's queue, too simple to be wrong."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self):
        return len(self.blocks)

    def __iter__(self):
        return iter(list(self.blocks))

    def append(self, block, group):
        self.blocks[block] = None

    def prepend(self, block, group):
        self.blocks[block] = None
        self.blocks.move_to_end(block, last=False)

    def remove(self, block):
        del self.blocks[block]

    def pop(self, n, *, now):
        return [self.blocks.popitem(last=False)[0] for _ in range(n)]


class _PlainCore:
    """A core that knows nothing."""

    def __init__(self) -> None:
        self.order = _PlainOrder()

    def arrive(self, facts, *, now):
        return Assignment(agent=None, session=None, from_hint=False)

    def segments(self, request_id, block_hashes):
        return [Segment(len(block_hashes), UNOWNED)]

    def finish(self, facts, *, now):
        pass

    def tick(self, *, now):
        pass


def _drive(replica: Replica, log: list[object], seed: int) -> None:
    rng = random.Random(seed)
    now = 0.0
    for number in range(60):
        agent = rng.randrange(4)
        hashes = [hash((agent, index)) for index in range(3)]
        own = [hash((number, index)) for index in range(rng.randrange(8))]
        while replica.next_event_time() <= now:
            replica.step(replica.next_event_time())
        replica.submit(
            Request(
                str(number),
                prompt_tokens=48 + rng.randrange(1, 60),
                output_tokens=rng.randrange(1, 60),
                hashes=hashes + own,
                hints=Hints(session=f"s{rng.randrange(5)}", agent=f"a{agent}"),
            ),
            now,
        )
        now += rng.choice([0.0, 0.03, 0.4])
    while (result := replica.advance(1e9)) is not None:
        log += [
            (r.request_id, r.cached_tokens, r.preemptions, r.finished_at) for r in result.finished
        ]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(12, 40))
def test_the_lru_arm_equals_a_plain_lru_replica(seed, blocks):
    """
    Hinted traffic on `policy="lru"` gives the victims, hits and times of a plain LRU queue.
    """
    embedded = EmbeddedSettings(policy="lru", kv_blocks=blocks, max_num_seqs=4)
    logs: tuple[list[object], list[object]] = ([], [])

    def watch(log: list[object]):
        return lambda now, victims, hashes: log.append((now, victims, hashes))

    arm = Engine(embedded, PolicySettings()).replica
    arm.pool.on_evict = watch(logs[0])
    plain = Replica(
        BatchSettings(block_tokens=16, max_num_seqs=4),
        embedded.latency(),
        kv_blocks=blocks,
        core=_PlainCore(),
        on_evict=watch(logs[1]),
        runs=False,
    )
    for replica, log in zip((arm, plain), logs, strict=True):
        _drive(replica, log, seed)
    # The plain pool starts in the same order; from then on everything is equal.
    assert logs[0] == logs[1]
    assert arm.counters == plain.counters

"""The retention bench: its rules are the pool's, and its policies keep their promises."""

import pytest

from scout_server.bench.baselines import BASELINES
from scout_server.bench.oracles import Belady
from scout_server.bench.ours import Ours
from scout_server.bench.replay import replay
from scout_server.bench.workloads import Request, Workload, markov, short_skewed
from scout_server.policy import UNHASHED, RetentionOrder, Segment
from scout_server.replica.pool import BlockPool

SMALL = markov(seed=3, agents=6, sessions=12, concurrency=4, turns=(3, 8), anchor=(3, 8))
CAPACITY = 80


def hits(name, workload=SMALL, capacity=CAPACITY, working=0, **more):
    make = {**BASELINES, "belady": Belady, "scout": Ours}[name]
    return replay(
        workload.requests, capacity, make(workload, capacity, working, **more), working=working
    )


def test_the_replay_of_lru_hits_what_the_replica_pool_hits():
    """The same requests, one at a time, hit the same blocks in the bench and in a replica."""
    order = RetentionOrder(CAPACITY)
    pool = BlockPool(CAPACITY, order)
    found_hits = []
    for request in SMALL.requests:
        chain = request.prompt + request.output
        found = pool.lookup(request.prompt, len(request.prompt))
        found_hits.append(len(found))
        pool.touch(found)
        new = pool.allocate(len(chain) - len(found), request.time)
        for block, name in zip(new, chain[len(found) :], strict=True):
            pool.insert(block, name)
        pool.free(found + new, [Segment(len(chain), 7)])
    assert list(hits("lru").hits) == found_hits


def test_without_identity_our_policy_is_lru_request_by_request():
    """Hints and fingerprints off: every single request has LRU's hits."""
    assert hits("scout", hints="off").hits == hits("lru").hits
    assert hits("scout", hints="off", working=40).hits == hits("lru", working=40).hits


@pytest.mark.parametrize("name", [*BASELINES, "scout", "belady"])
def test_a_replay_is_deterministic(name):
    """Two replays of one workload in one process are equal."""
    assert hits(name) == hits(name)


@pytest.mark.parametrize("name", [*BASELINES, "scout"])
@pytest.mark.parametrize("working", [0, 60])
def test_nobody_beats_the_clairvoyant(name, working):
    """No policy has more hits than the one that knows the future."""
    best = hits("belady", working=working).rate
    assert hits(name, working=working).rate <= best + 0.005


def test_our_policy_closes_most_of_the_gap_where_agents_recur():
    """With identity alone, in a cache of all anchors' size, half of LRU's gap is closed."""
    workload = markov(seed=1, sessions=40)
    capacity = sum(workload.anchors)
    working = workload.largest
    low, ours, high = (
        hits(name, workload, capacity, working).rate for name in ("lru", "scout", "belady")
    )
    assert (ours - low) / (high - low) > 0.5


@pytest.mark.parametrize("hints", ["wrong", "lying"])
def test_hostile_hints_cost_at_most_a_point(hints):
    """Hints that are wrong by 100 times, or lies, never cost more than a point against LRU."""
    workload = markov(seed=1, sessions=40)
    capacity = sum(workload.anchors)
    low = hits("lru", workload, capacity, workload.largest).rate
    ours = hits("scout", workload, capacity, workload.largest, hints=hints).rate
    assert ours >= low - 0.01


@pytest.mark.parametrize("blocks", [110, 150, 200])
def test_short_and_skewed_runs_are_not_worse_than_lru(blocks):
    """A cold start with little to learn, in a cache that nearly fits, costs nothing."""
    workload = short_skewed()
    low = hits("lru", workload, blocks, workload.largest).rate
    assert hits("scout", workload, blocks, workload.largest).rate >= low


def test_every_block_is_somewhere():
    """In a replay no block is lost: what is free plus what is spare is the whole pool."""
    policy = Ours(SMALL, CAPACITY, 40)
    replay(SMALL.requests, CAPACITY, policy, working=40)
    assert len(policy.order) == CAPACITY
    assert sum(policy.order.group_sizes().values()) == CAPACITY
    assert policy.order.group_sizes().get(UNHASHED, 0) == 0


def test_of_two_blocks_with_one_content_the_later_outlives_the_earlier():
    """Two answers with the same block: when the first one's is evicted, the second's is found."""

    def request(time, prompt, output):
        return Request(time, 1, 0, 0, prompt, output)

    requests = [
        request(0.0, [1, 2], [3]),
        request(1.0, [1, 2], [3]),
        request(2.0, [9], []),  # takes the first block of content 3, used longest ago
        request(3.0, [1, 2, 3], []),
    ]
    workload = Workload("twins", requests, [0])
    found = replay(requests, 4, BASELINES["lru"](workload, 4, 0))
    assert list(found.hits) == [0, 2, 0, 3]

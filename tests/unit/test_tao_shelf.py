"""What a node still holds of sessions that do not run, and how fast it computes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_server.policy.pace import Pace
from scout_server.policy.runtime import PolicySettings
from scout_server.policy.shelf import Shelf
from scout_server.replica.batch import BatchSettings
from scout_server.replica.latency import LinearLatency
from scout_server.replica.replica import Replica
from scout_server.replica.request import Request

BLOCK = 16
BLOCKS = 64
LATENCY = LinearLatency(
    step_s_fixed=0.01,
    prefill_s_per_token=0.0,
    decode_s_per_sequence=0.0,
    decode_s_per_kv_token=0.0,
)


def name(number: int) -> tuple[str, str]:
    return ("", str(number))


def test_the_latest_used_stays_longest() -> None:
    """Of three sessions that fill a node over, the first has lost its end, the last nothing."""
    shelf = Shelf()
    for number in range(3):
        shelf.put(name(number), 400)
    assert [shelf.room(name(n), capacity=1000, used=0) for n in range(3)] == [200, 600, 1000]
    assert [shelf.room(name(n), capacity=1000, used=300) for n in range(3)] == [0, 300, 700]


def test_who_has_nothing_left_is_forgotten() -> None:
    """What was pushed out does not come back when room is freed, and takes no memory."""
    shelf = Shelf()
    shelf.put(name(0), 400)
    assert shelf.room(name(0), capacity=1000, used=1000) == 0
    assert shelf.room(name(0), capacity=1000, used=0) == 0


def test_who_is_used_again_is_the_last_to_go() -> None:
    """A session that runs again, and ends, goes behind those that were used meanwhile."""
    shelf = Shelf()
    for number in range(3):
        shelf.put(name(number), 400)
    shelf.take(name(0))
    assert shelf.room(name(1), capacity=1000, used=400) == 200
    shelf.put(name(0), 500)
    assert [shelf.room(name(n), capacity=1000, used=0) for n in range(3)] == [1000, 100, 500]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, BLOCKS // 2 - 1)), min_size=1, max_size=30)
)
def test_the_bound_is_what_an_engine_that_evicts_the_oldest_holds(
    turns: list[tuple[int, int]],
) -> None:
    """After any turns, one at a time, a replica finds as many blocks of a session as is said."""
    replica = Replica(
        BatchSettings(block_tokens=BLOCK, max_num_seqs=1),
        LATENCY,
        kv_blocks=BLOCKS,
        policy=PolicySettings(hints=False, fingerprints=False),
    )
    shelf, sizes = Shelf(), dict[int, int]()
    now = 0.0
    for turn, (session, blocks) in enumerate(turns):
        sizes[session] = blocks
        hashes = [session * 1000 + i for i in range(1, blocks + 1)]
        shelf.take(name(session))
        replica.submit(
            Request(f"t{turn}", prompt_tokens=blocks * BLOCK, output_tokens=1, hashes=hashes), now
        )
        while replica.unfinished:
            now = replica.next_event_time()
            replica.step(now)
        shelf.put(name(session), blocks * BLOCK)
    for session, blocks in sizes.items():
        hashes = [session * 1000 + i for i in range(1, blocks + 1)]
        held = len(replica.pool.lookup(hashes, blocks)) * BLOCK
        said = min(blocks * BLOCK, shelf.room(name(session), capacity=BLOCKS * BLOCK, used=0))
        assert held <= said or session in _shrunk(turns)


def _shrunk(turns: list[tuple[int, int]]) -> set[int]:
    """Return the sessions whose prompt once got shorter: an agent's never does."""
    longest, found = dict[int, int](), set[int]()
    for session, blocks in turns:
        if blocks < longest.get(session, 0):
            found.add(session)
        longest[session] = max(blocks, longest.get(session, 0))
    return found


def test_the_time_of_a_token_is_that_of_the_node_not_of_the_turn() -> None:
    """Two turns of 1,000 tokens that run together for 2 s make 1 ms a token."""
    pace = Pace()
    pace.runs(0.0)
    pace.runs(0.0)
    pace.ended(1000, now=2.0, idle=False)
    assert pace.spare(now=3.0) is None
    pace.ended(1000, now=2.0, idle=True)
    assert 990 <= (pace.spare(now=3.0) or 0) <= 1010
    pace.runs(4.0)
    assert pace.spare(now=5.0) is None


def test_nothing_is_said_of_a_node_of_which_nothing_is_known() -> None:
    """A node that never computed, or whose only turn was broken off, has no price for idling."""
    pace = Pace()
    assert pace.spare(now=1.0) is None
    pace.runs(1.0)
    pace.stopped()
    assert pace.spare(now=9.0) is None

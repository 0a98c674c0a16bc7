"""Which chunk leaves a tier first, without vLLM."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_sdk import Hints
from scout_server.policy import Finish, FinishFacts, PolicyCore, PolicySettings, RequestFacts
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.tier import MAX_RELEASED, Guide, TierOrder

KEYS = [f"k{i}" for i in range(8)]
GROUPS = st.integers(0, 3)


class AgainstLookingAtAll(RuleBasedStateMachine):
    """Every choice is what sorting all evictable chunks gives."""

    def __init__(self):
        super().__init__()
        self.scores = {}
        self.version = 0
        self.order = TierOrder(lambda group: self.scores.get(group, 0.0), lambda: self.version)
        self.chunks = {}
        self.last = {}

    def _seen(self, key):
        """A group's last use is the latest of its chunks while it has evictable ones."""
        group, rank, evictable = self.chunks[key]
        if evictable:
            self.last[group] = max(self.last.get(group, 0), rank[0])

    def _settle(self):
        alive = {group for group, _, evictable in self.chunks.values() if evictable}
        for group in list(self.last):
            if group not in alive:
                del self.last[group]

    @rule(key=st.sampled_from(KEYS), group=GROUPS, position=st.integers(1, 5))
    def put(self, key, group, position):
        use = self.order.use()
        self.order.put(key, group=group, use=use, position=position)
        old = self.chunks.get(key)
        evictable = old[2] if old else False
        if old and old[0] != group:
            self.chunks[key] = (old[0], old[1], False)
            self._settle()
        self.chunks[key] = (group, (use, -position), evictable)
        self._seen(key)

    @rule(data=st.data())
    @precondition(lambda self: self.chunks)
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.chunks)))
        self.order.release(key)
        group, rank, _ = self.chunks[key]
        self.chunks[key] = (group, rank, True)
        self._seen(key)

    @rule(data=st.data())
    @precondition(lambda self: self.chunks)
    def pin(self, data):
        key = data.draw(st.sampled_from(sorted(self.chunks)))
        self.order.pin(key)
        group, rank, _ = self.chunks[key]
        self.chunks[key] = (group, rank, False)
        self._settle()

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key):
        self.order.remove(key)
        self.chunks.pop(key, None)
        self._settle()

    @rule(group=GROUPS, score=st.sampled_from([0.0, 0.5, 1.0]))
    def renew(self, group, score):
        self.scores[group] = score
        self.version += 1

    @rule(group=GROUPS)
    def rise(self, group):
        self.scores[group] = self.scores.get(group, 0.0) + 0.25

    @rule()
    def clear(self):
        self.order.clear()
        self.chunks.clear()
        self.last.clear()

    @rule(n=st.integers(1, 4), protected=st.sets(st.sampled_from(KEYS), max_size=3))
    def choose(self, n, protected):
        ranked = sorted(
            (self.scores.get(group, 0.0), self.last[group], group, rank, key)
            for key, (group, rank, evictable) in self.chunks.items()
            if evictable
        )
        want = [entry[-1] for entry in ranked if entry[-1] not in protected][:n]
        found = self.order.choose(n, protected)
        assert found == (want if len(want) == n else None)
        assert self.order.choose(n, protected) == found, "a choice changes nothing"

    @invariant()
    def same_keys(self):
        assert len(self.order) == len(self.chunks)
        assert all(key in self.order for key in self.chunks)


TestAgainstLookingAtAll = AgainstLookingAtAll.TestCase
TestAgainstLookingAtAll.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _filled(groups):
    scores = {}
    order = TierOrder(lambda group: scores.get(group, 0.0), lambda: 0)
    for group in range(groups):
        order.put((group, 0), group=group, use=order.use(), position=1)
        order.release((group, 0))
    return order, scores


def test_inside_one_use_the_tail_goes_before_the_head():
    """
    Three chunks of one chain, stored in two batches of one use, leave from the tail.
    """
    order = TierOrder(lambda group: 0.0, lambda: 0)
    use = order.use()
    for key, position in (("head", 16), ("middle", 32), ("tail", 48)):
        order.put(key, group=1, use=use, position=position)
        order.release(key)
    assert order.choose(3, set()) == ["tail", "middle", "head"]


def test_a_score_that_fell_is_noticed_after_evictions_of_an_eighth_of_the_groups():
    """
    Without a renewal, 800 groups and one whose score fell: it goes within the next 108 victims.
    """
    order, scores = _filled(800)
    scores.update(dict.fromkeys(range(800), 1.0))
    first = order.choose(1, set())
    assert first == [(0, 0)]
    order.remove((0, 0))
    scores[700] = 0.0
    for _ in range(108):
        (victim,) = order.choose(1, set())
        order.remove(victim)
        if victim == (700, 0):
            break
    assert victim == (700, 0)


def test_what_was_pinned_and_released_again_and_again_stands_once():
    """
    A chunk's entries in the heaps are bounded by a multiple of the chunks.
    """
    order, _ = _filled(4)
    for _ in range(1000):
        for group in range(4):
            order.pin((group, 0))
            order.release((group, 0))
    assert order.choose(4, set()) == [(group, 0) for group in range(4)]
    assert sum(len(owner.heap) for owner in order._groups.values()) < 100
    assert len(order._ranking) < 100


def _core():
    return PolicyCore(PolicySettings(), capacity_blocks=64, block_tokens=16)


def test_owners_are_known_while_a_request_runs_and_after_its_end():
    """
    The anchor's blocks and the session's have different owners, before the end and after it.
    """
    core = _core()
    guide = Guide(core, Breaker(lambda: None))
    for turn in range(3):
        hashes = tuple(f"anchor{i}" for i in range(4)) + tuple(f"{turn}/{i}" for i in range(2))
        core.arrive(
            RequestFacts(
                request_id=f"r{turn}",
                hints=Hints(session=f"s{turn}", agent="coder"),
                block_hashes=hashes,
                prompt_tokens=100,
            ),
            now=float(turn),
        )
    running = guide.owners("r2", 96)
    anchor, own = guide.owner(running, 64), guide.owner(running, 65)
    assert anchor != own
    segments = core.segments("r2", hashes)
    guide.released("r2", segments)
    core.finish(FinishFacts(request_id="r2", finish=Finish.STOP, cached_tokens=64), now=3.0)

    ended = guide.owners("r2", 16)
    assert [guide.owner(ended, 64), guide.owner(ended, 96)] == [anchor, own]
    assert guide.owner(guide.owners("nobody", 32), 32) == 0


def test_nothing_is_remembered_for_a_tier_that_is_not_there_and_little_for_one_that_is():
    """
    Without a tier no owner is kept; with one, those of the last thousand requests.
    """
    core = _core()
    guide = Guide(core, Breaker(lambda: None))
    segments = core.segments("r", range(4))
    guide.released("r", segments)
    assert not guide._released
    guide.owners("other", 16)
    for number in range(2 * MAX_RELEASED):
        guide.released(f"r{number}", segments)
    assert len(guide._released) == MAX_RELEASED

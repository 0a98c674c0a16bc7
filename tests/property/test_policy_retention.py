"""The retention order against references too simple to be wrong."""

import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_server.policy import UNHASHED, RetentionOrder

CAPACITY = 24
GROUPS = st.sampled_from([UNHASHED, 0, 1, 2, 3, 4])


class Reference:
    """One list in the engine's order; scout mode sorts it by (score, age of the group's place)."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, int]] = []
        self.scores: dict[int, float] = {}
        self.place: dict[int, int] = {}
        self.clock = 0

    def touch(self, group: int) -> None:
        """Note that *group* got its first block, or another score."""
        self.clock += 1
        self.place[group] = self.clock

    def add(self, block: int, group: int, *, front: bool) -> None:
        if all(owner != group for _, owner in self.queue):
            self.touch(group)
        if front:
            self.queue.insert(0, (block, group))
        else:
            self.queue.append((block, group))

    def score(self, group: int) -> float:
        return float("-inf") if group == UNHASHED else self.scores.get(group, 0.0)

    def ordered(self, *, scout: bool) -> list[int]:
        if not scout:
            return [block for block, _ in self.queue]
        return [
            block
            for block, group in sorted(
                self.queue, key=lambda item: (self.score(item[1]), self.place[item[1]])
            )
        ]

    def take(self, block: int) -> None:
        self.queue = [item for item in self.queue if item[0] != block]


class OrderMachine(RuleBasedStateMachine):
    """Random operations on the real order and the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.order = RetentionOrder(CAPACITY)
        self.reference = Reference()

    def used(self) -> list[int]:
        return [block for block in range(CAPACITY) if block not in self.order]

    @rule(data=st.data(), group=GROUPS, front=st.booleans())
    @precondition(lambda self: len(self.order) < CAPACITY)
    def add(self, data: st.DataObject, group: int, front: bool) -> None:
        block = data.draw(st.sampled_from(self.used()))
        (self.order.prepend if front else self.order.append)(block, group)
        self.reference.add(block, group, front=front)

    @rule(data=st.data())
    @precondition(lambda self: len(self.order) > 0)
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.order.lru())))
        self.order.remove(block)
        self.reference.take(block)

    @rule(data=st.data())
    @precondition(lambda self: len(self.order) > 0)
    def pop(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.order)))
        expected = self.reference.ordered(scout=self.order.scout)[:n]
        assert self.order.pop(n, now=0.0) == expected
        for block in expected:
            self.reference.take(block)

    @rule(group=GROUPS, score=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def score(self, group: int, score: float) -> None:
        if score != self.reference.scores.get(group, 0.0) and any(
            owner == group for _, owner in self.reference.queue
        ):
            self.reference.touch(group)
        self.reference.scores[group] = score
        self.order.set_score(group, score)

    @rule(scores=st.dictionaries(GROUPS, st.sampled_from([0.0, 0.25, 0.5, 1.0])))
    def rescore(self, scores: dict[int, float]) -> None:
        self.reference.scores = dict(scores)
        self.order.rescore(scores)

    @rule()
    def switch(self) -> None:
        self.order.scout = not self.order.scout

    @invariant()
    def same_order(self) -> None:
        expected = self.reference.ordered(scout=self.order.scout)
        assert list(self.order) == expected
        assert list(self.order.after(None)) == expected
        assert list(self.order.lru()) == self.reference.ordered(scout=False)
        assert len(self.order) == len(expected)
        for place, block in enumerate(expected):
            assert block in self.order
            assert list(self.order.after(block)) == expected[place + 1 :]

    @invariant()
    def bounded(self) -> None:
        assert len(self.order._heap) <= 64 + 4 * 6 + 6


OrderMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOrder = OrderMachine.TestCase


def test_a_block_that_is_not_free_cannot_be_removed():
    """Removing a used or unknown block is a KeyError and changes nothing."""
    order = RetentionOrder(4)
    order.append(1, 7)
    for block in (0, 3, 4, -1):
        with pytest.raises(KeyError):
            order.remove(block)
    assert list(order) == [1]


def test_a_free_block_cannot_be_added_again():
    """Adding a free block a second time is a ValueError and changes nothing."""
    order = RetentionOrder(4)
    order.append(1, 7)
    with pytest.raises(ValueError, match="already free"):
        order.append(1, 8)
    with pytest.raises(ValueError, match="already free"):
        order.prepend(1, 8)
    assert list(order) == [1]


def test_more_blocks_than_are_free_cannot_be_popped():
    """Asking for too many victims is a ValueError and takes none."""
    order = RetentionOrder(4)
    order.append(1, 7)
    with pytest.raises(ValueError, match="cannot evict 2"):
        order.pop(2, now=0.0)
    assert list(order) == [1]


def test_groups_that_lose_their_last_block_leave_nothing_to_the_garbage_collector():
    """However often groups come and go, what is left of them is freed without a collection."""
    order = RetentionOrder(8)
    order.scout = True

    def turn() -> None:
        for group in (1, 2):
            order.extend([4 * group - 4 + place for place in range(4)], group)
        order.discard_all(range(4))
        order.pop(4, now=0.0)

    turn()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            turn()
        assert gc.collect() == 0
    finally:
        gc.enable()

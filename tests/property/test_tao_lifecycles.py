"""No fault in a session's life makes the ledger lose track of who runs."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_sdk import Hints, SessionEvent, ToolEvent, ToolState
from scout_server.policy.admission import AdmissionSettings
from scout_server.policy.books import LedgerSettings
from scout_server.policy.engine import TaoEngine, TaoSettings, Turn, make_plan

NODES = ("a", "b", "c")
CAPACITY = 16384


def engine() -> TaoEngine:
    tao = TaoEngine(
        TaoSettings(
            ledger=LedgerSettings(lease_s=30.0, session_s=120.0, max_sessions=64),
            admission=AdmissionSettings(max_hold_s=20.0),
        )
    )
    for node in NODES:
        tao.set_node(node, capacity=CAPACITY, slots=8)
    return tao


class Lifecycles(RuleBasedStateMachine):
    """Requests come, wait, run, fail, vanish and repeat themselves; nodes come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.tao = engine()
        self.now = 0.0
        self.held: set[str] = set()
        self.running: dict[str, str] = {}
        self.lost: set[str] = set()
        self.count = 0

    def pick(self, keys: set[str] | dict[str, str], index: int) -> str:
        ordered = sorted(keys)
        return ordered[index % len(ordered)]

    @rule(
        session=st.integers(0, 7),
        tokens=st.integers(1, 20000),
        final=st.booleans(),
        shared=st.booleans(),
    )
    def submit(self, session: int, tokens: int, final: bool, shared: bool) -> None:
        self.count += 1
        key = f"r{self.count}"
        turn = Turn(
            key=key,
            session=f"s{session}",
            tokens=tokens,
            hints=Hints(session=f"s{session}", final=final),
            prefix="p" if shared else None,
            prefix_tokens=500 if shared else 0,
        )
        assert self.tao.submit(turn, now=self.now)
        placement = self.tao.resume(key, now=self.now)
        if placement is None:
            self.held.add(key)
        else:
            self.running[key] = placement.node

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = self.tao.expire(now=self.now)
        assert set(late) <= self.lost | set(self.running)
        self.lost -= set(late)
        for key in late:
            self.running.pop(key, None)

    @rule()
    def step(self) -> None:
        for placement in self.tao.step(now=self.now).placements:
            self.held.remove(placement.key)
            self.running[placement.key] = placement.node

    @rule(index=st.integers(0, 99), node=st.sampled_from(NODES))
    def stale_plan(self, index: int, node: str) -> None:
        """A plan is made, the world moves on, and only then the plan is applied."""
        snapshot = self.tao.snapshot(now=self.now)
        if snapshot is None:
            return
        plan = make_plan(snapshot)
        if self.held:
            self.leave_queue(index)
        self.die(node)
        applied = self.tao.apply(plan, now=self.now)
        assert all(p.node != node for p in applied.placements)
        for placement in applied.placements:
            self.held.remove(placement.key)
            self.running[placement.key] = placement.node
        self.tao.set_node(node, capacity=CAPACITY, slots=8)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), cached=st.none() | st.integers(0, 9000), final=st.booleans())
    def finish(self, index: int, cached: int | None, final: bool) -> None:
        key = self.pick(self.running, index)
        del self.running[key]
        for _ in range(2):  # the second one is a repeated message
            self.tao.finish(
                key,
                prompt_tokens=9000,
                output_tokens=10,
                cached_tokens=cached,
                final=final,
                now=self.now,
            )

    @precondition(lambda self: self.running and len(self.lost) < 2)
    @rule(index=st.integers(0, 99))
    def vanish(self, index: int) -> None:
        """A request ends and nobody says so; only its lease can end the booking."""
        key = self.pick(self.running, index)
        del self.running[key]
        self.lost.add(key)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        key = self.pick(self.running, index)
        del self.running[key]
        assert self.tao.cancel(key, now=self.now)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 99))
    def leave_queue(self, index: int) -> None:
        key = self.pick(self.held, index)
        self.held.remove(key)
        assert self.tao.cancel(key, now=self.now)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def retry(self, index: int) -> None:
        """A running request is submitted again under its own key."""
        key = self.pick(self.running, index)
        node = self.running.pop(key)
        session = self.tao.ledger.bookings[key].session[1]
        turn = Turn(key=key, session=session, tokens=700, avoid=frozenset({node}))
        assert self.tao.submit(turn, now=self.now)
        self.held.add(key)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 99))
    def duplicate(self, index: int) -> None:
        """The same waiting request is submitted twice."""
        key = self.pick(self.held, index)
        turn = self.tao.waiting[key].turn
        assert self.tao.submit(turn, now=self.now)

    @rule(session=st.integers(0, 9), final=st.booleans(), state=st.sampled_from(ToolState))
    def event(self, session: int, final: bool, state: ToolState) -> None:
        tool = ToolEvent(name="t", state=state, call_id="c")
        self.tao.event(SessionEvent(session=f"s{session}", tool=tool, final=final), now=self.now)

    @rule(node=st.sampled_from(NODES), forget=st.booleans())
    def die(self, node: str, forget: bool = False) -> None:
        gone = set(self.tao.lose_node(node, forget=forget))
        expected = {k for k, n in self.running.items() if n == node}
        assert expected <= gone <= expected | self.lost
        self.lost -= gone
        for key in expected:
            del self.running[key]

    @rule(node=st.sampled_from(NODES), draining=st.booleans())
    def drain(self, node: str, draining: bool) -> None:
        self.tao.drain_node(node, draining=draining)

    @rule(node=st.sampled_from(NODES))
    def come_back(self, node: str) -> None:
        self.tao.set_node(node, capacity=CAPACITY, slots=8)

    @invariant()
    def booked_equals_running(self) -> None:
        booked = set(self.tao.ledger.bookings)
        assert booked == set(self.running) | self.lost
        assert abs(len(booked) - len(self.running)) <= 2
        assert set(self.tao.waiting) == self.held

    @invariant()
    def sessions_know_their_requests(self) -> None:
        sessions = self.tao.ledger.sessions.values()
        assert {k for s in sessions for k in s.waiting} == self.held
        assert {k for s in sessions for k in s.running} == set(self.tao.ledger.bookings)
        assert set(self.tao.reserved) <= self.held

    @invariant()
    def nobody_is_overbooked(self) -> None:
        for node in self.tao.ledger.nodes.values():
            tokens, requests = self.tao.ledger.used(node.name)
            assert requests <= node.slots
            assert tokens <= node.capacity or requests == 1

    def teardown(self) -> None:
        for key in self.held | set(self.running):
            self.tao.cancel(key, now=self.now)
        self.tao.expire(now=self.now + 31)
        self.tao.expire(now=self.now + 500)
        assert not self.tao.ledger.bookings
        assert not self.tao.waiting
        assert not self.tao.ledger.sessions


TestLifecycles = Lifecycles.TestCase
TestLifecycles.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def live(lifecycles: int, seed: int) -> None:
    """Run random lifecycles with faults in virtual time."""
    rng = random.Random(seed)
    machine = Lifecycles()
    while machine.count < lifecycles:
        roll = rng.random()
        index = rng.randrange(100)
        if len(machine.held) > 40:
            roll = 0.3 + roll / 2
        if roll < 0.3:
            machine.submit(rng.randrange(64), rng.randint(1, 9000), rng.random() < 0.2, roll < 0.1)
        elif roll < 0.5:
            machine.step()
        elif machine.running and roll < 0.8:
            machine.finish(index, rng.choice([None, 0, 5000]), rng.random() < 0.1)
        elif machine.running and roll < 0.83:
            machine.abort(index)
        elif machine.running and roll < 0.86:
            machine.retry(index)
        elif machine.held and roll < 0.88:
            machine.leave_queue(index)
        elif machine.held and roll < 0.89:
            machine.duplicate(index)
        elif machine.running and len(machine.lost) < 2 and roll < 0.90:
            machine.vanish(index)
        elif roll < 0.905:
            machine.die(rng.choice(NODES))
        elif roll < 0.92:
            machine.come_back(rng.choice(NODES))
            machine.drain(rng.choice(NODES), False)
        elif roll < 0.93:
            machine.event(rng.randrange(70), rng.random() < 0.3, rng.choice(list(ToolState)))
        else:
            machine.wait(rng.random() * 2)
        machine.booked_equals_running()
        machine.nobody_is_overbooked()
    machine.sessions_know_their_requests()
    machine.teardown()


def test_two_thousand_lifecycles_leak_nothing() -> None:
    """Over 2,000 requests with faults booked equals running within two, and zero at the end."""
    live(2000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_hundred_thousand_lifecycles_leak_nothing() -> None:
    """Over 10^5 requests with faults booked equals running within two, and zero at the end."""
    live(100_000, seed=2)

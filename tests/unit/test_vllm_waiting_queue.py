"""The queue of waiting requests that looks at programs, without vLLM."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_server.policy.waiting import ORDERS
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.waiting import ProgramQueue, Programs

OTHERS = sorted(set(ORDERS) - {"fcfs"})


class Status(Enum):
    WAITING = 1
    PREEMPTED = 2


@dataclass(eq=False)
class Asked:
    request_id: str
    num_prompt_tokens: int
    arrival_time: float
    status: Status = field(default=Status.WAITING)


class Stock(deque):
    """First come, first served, as in vLLM."""

    add_request = deque.append
    pop_request = deque.popleft
    prepend_request = deque.appendleft
    prepend_requests = deque.extendleft
    remove_request = deque.remove

    def peek_request(self):
        return self[0]

    def remove_requests(self, requests):
        gone = set(requests)
        kept = [request for request in self if request not in gone]
        self.clear()
        self.extend(kept)


class Place:
    """A queue over a clock that the test moves."""

    def __init__(self, order, max_wait_s=10.0):
        self.now = 0.0
        self.programs = Programs(64)
        self.breaker = Breaker(lambda: None)
        self.queue = ProgramQueue(
            order, self.programs, self.breaker, Stock, max_wait_s=max_wait_s, clock=lambda: self.now
        )
        self.serial = 0

    def ask(self, session=None, tokens=10):
        self.serial += 1
        request = Asked(f"r{self.serial}", tokens, self.now)
        self.programs.arrived(request.request_id, "", session, tokens, self.now)
        self.queue.add_request(request)
        return request

    def serve(self, computed=10):
        assert self.queue.peek_request() is not None
        request = self.queue.pop_request()
        self.programs.ended(request.request_id, computed)
        return request


def test_sessions_that_come_back_go_first_until_a_new_one_has_waited_the_bound():
    """
    Ready-first: the returning session overtakes the new one, but not once that waited 10 s.
    """
    place = Place("ready-first")
    place.ask("back")
    place.serve()
    new = place.ask("new")
    place.now = 5.0
    back = place.ask("back")
    assert place.queue.peek_request() is back
    place.now = 9.9
    assert list(place.queue) == [back, new]
    assert place.queue.peek_request() is back
    place.now = 10.0
    assert place.serve() is new
    assert place.serve() is back


def test_attained_service_prefers_the_session_that_got_least():
    """
    A session for which 4,000 tokens were computed lets one with 100 go first.
    """
    place = Place("attained-service")
    for session, computed in (("much", 4000), ("little", 100)):
        place.ask(session)
        place.serve(computed)
    much, little = place.ask("much"), place.ask("little")
    assert [place.serve(), place.serve()] == [little, much]


def test_program_fcfs_goes_by_the_first_request_of_the_session():
    """
    The older session's third request goes before the younger session's first.
    """
    place = Place("program-fcfs")
    place.ask("old")
    place.serve()
    place.now = 1.0
    young = place.ask("young")
    place.now = 2.0
    old = place.ask("old")
    alone = place.ask()
    assert [place.serve() for _ in range(3)] == [old, young, alone]


def test_a_preempted_request_goes_first_and_a_skipped_one_keeps_its_place():
    """
    vLLM puts both back with the same call; only the preempted one goes before all others.
    """
    place = Place("shortest-first")
    short, middle, long = place.ask(tokens=1), place.ask(tokens=5), place.ask(tokens=9)
    for expected in (short, middle):
        assert place.queue.peek_request() is expected
        assert place.queue.pop_request() is expected
    place.queue.prepend_requests([middle, short])
    assert list(place.queue) == [short, middle, long]
    assert place.queue.pop_request() is short
    short.status = Status.PREEMPTED
    tiny = place.ask(tokens=0)
    place.queue.prepend_request(short)
    assert list(place.queue) == [short, tiny, middle, long]


def test_what_was_shown_is_what_is_taken_out_even_if_time_or_the_breaker_came_between():
    """
    Between peek and pop vLLM prepares the request, so another one must not come out.
    """
    place = Place("shortest-first")
    long = place.ask(tokens=9)
    place.now = 1.0
    short = place.ask(tokens=1)
    assert place.queue.peek_request() is short
    place.now = 10.0
    assert place.queue.pop_request() is short
    again = place.ask(tokens=2)
    place.now = 5.0
    assert place.queue.peek_request() is again
    place.breaker.trip("elsewhere", RuntimeError("fault"))
    assert place.queue.pop_request() is again
    assert place.queue.pop_request() is long
    assert not place.queue


@pytest.mark.parametrize("order", OTHERS)
@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 2), st.sampled_from([*"abcd", None]), st.floats(0.1, 3), st.integers(1, 99)
        ),
        min_size=2,
        max_size=30,
    ),
    bound=st.floats(0.5, 8),
)
@settings(max_examples=40, deadline=None)
def test_nobody_waits_longer_than_fcfs_and_the_bound(order, arrivals, bound):
    """
    One server that is never idle while somebody waits: each request starts at most the bound, and
    the one service in progress when its time came, later than first come, first served.
    """
    times, now = [], 0.0
    for pause, _, _, _ in arrivals:
        now += pause
        times.append(now)
    services = [service for _, _, service, _ in arrivals]
    fcfs, free = [], 0.0
    for at, service in zip(times, services, strict=True):
        fcfs.append(max(at, free))
        free = fcfs[-1] + service

    place = Place(order, max_wait_s=bound)
    started, free, coming = {}, 0.0, 0
    while len(started) < len(arrivals):
        place.now = max(free, times[coming]) if not place.queue else free
        while coming < len(arrivals) and times[coming] <= place.now:
            later, place.now = place.now, times[coming]
            place.ask(arrivals[coming][1], arrivals[coming][3])
            place.now = later
            coming += 1
        request = place.serve(7)
        number = int(request.request_id[1:]) - 1
        started[number] = place.now
        free = place.now + services[number]
    for number, start in started.items():
        assert start <= fcfs[number] + bound + max(services) + 1e-9


class NobodyIsLost(RuleBasedStateMachine):
    """Whatever is done, and whenever the breaker opens, everybody who waits is in the queue."""

    def __init__(self):
        super().__init__()
        self.place = Place("attained-service")
        self.waiting = {}
        self.running = {}
        self.shown = None

    @property
    def queue(self):
        return self.place.queue

    @rule(session=st.sampled_from(["a", "b", None]), tokens=st.integers(1, 50))
    def ask(self, session, tokens):
        request = self.place.ask(session, tokens)
        self.waiting[request.request_id] = request

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds):
        self.place.now += seconds

    @rule()
    @precondition(lambda self: self.waiting)
    def peek(self):
        self.shown = self.queue.peek_request()
        assert self.waiting[self.shown.request_id] is self.shown
        aged = [r for r in self.waiting.values() if self.place.now - r.arrival_time >= 10.0]
        if not self.place.breaker.open and self.shown.status is Status.WAITING and aged:
            assert self.shown.arrival_time <= min(r.arrival_time for r in aged) + 1e-9

    @rule()
    @precondition(lambda self: self.waiting)
    def pop(self):
        request = self.queue.pop_request()
        if self.shown is not None and self.shown.request_id in self.waiting:
            assert request is self.shown
        self.shown = None
        del self.waiting[request.request_id]
        self.running[request.request_id] = request

    @rule(data=st.data(), preempted=st.booleans())
    @precondition(lambda self: self.running)
    def put_back(self, data, preempted):
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        request.status = Status.PREEMPTED if preempted else request.status
        self.shown = None
        if preempted:
            self.queue.prepend_request(request)
            assert self.queue.peek_request() is request
        else:
            self.queue.prepend_requests([request])
        self.waiting[request.request_id] = request

    @rule(data=st.data(), single=st.booleans())
    @precondition(lambda self: self.waiting)
    def abort(self, data, single):
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        request = self.waiting.pop(name)
        if single:
            self.queue.remove_request(request)
        else:
            self.queue.remove_requests([request, *self.running.values()])
        self.place.programs.ended(name, 0)

    @rule(how=st.sampled_from(["elsewhere", "inside"]))
    def fault(self, how):
        if how == "elsewhere":
            self.place.breaker.trip("elsewhere", RuntimeError("planted"))
        else:
            self.queue._aged._live = None  # every use of our order fails from now on

    @invariant()
    def everybody_waits_here(self):
        assert len(self.queue) == len(self.waiting) == len(list(self.queue))
        assert {r.request_id for r in self.queue} == set(self.waiting)
        assert bool(self.queue) == bool(self.waiting)


TestNobodyIsLost = NobodyIsLost.TestCase
TestNobodyIsLost.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_after_a_fault_vllms_queue_has_the_preempted_first_and_the_rest_by_arrival():
    """
    What is handed back is vLLM's own queue, in vLLM's own order.
    """
    place = Place("shortest-first")
    first, second, third = place.ask(tokens=9), place.ask(tokens=5), place.ask(tokens=1)
    for at, request in enumerate((first, second, third)):
        request.arrival_time = float(at)
    assert place.queue.pop_request() is third
    third.status = Status.PREEMPTED
    place.queue.prepend_request(third)
    place.queue._aged.peek = None
    assert place.queue.peek_request() is third
    assert place.breaker.reason.startswith("waiting peek")
    stock = place.queue.handed_back()
    assert isinstance(stock, Stock)
    assert list(stock) == [third, first, second]


def test_sessions_are_remembered_up_to_the_limit():
    """
    A session that was pushed out counts as new when it comes again; nothing grows.
    """
    programs = Programs(2)
    for number, session in enumerate(["a", "b", "c", "a"]):
        programs.arrived(f"r{number}", "", session, 1, float(number))
        programs.ended(f"r{number}", 5)
    programs.arrived("last", "", "a", 1, 9.0)
    assert programs.view("last").program_arrival == 3.0
    assert programs.view("r0") is None
    assert len(programs._sessions) == 2
    assert list(programs._of) == ["last"]


def test_a_request_that_is_not_here_cannot_be_removed_alone():
    """
    As in vLLM: ValueError for one, nothing for several.
    """
    place = Place("shortest-first")
    stranger = Asked("stranger", 1, 0.0)
    with pytest.raises(ValueError, match="does not wait"):
        place.queue.remove_request(stranger)
    place.queue.remove_requests([stranger])
    with pytest.raises(IndexError):
        place.queue.peek_request()
    with pytest.raises(IndexError):
        place.queue.pop_request()

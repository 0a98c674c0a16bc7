"""The waiting queue serves by its order, and nobody waits for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import ConfigError
from scout_server.policy.waiting import ORDERS, AgedQueue, WaitingView, order_named

arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 5000), st.integers(0, 99), st.booleans()),
    min_size=1,
    max_size=40,
)


def _views(rows):
    now, views = 0.0, []
    for pause, prompt, attained, returning in rows:
        now += pause
        views.append(
            WaitingView(
                arrival=now,
                program_arrival=now - attained,
                prompt_tokens=prompt,
                attained_tokens=attained * 100,
                returning=returning,
            )
        )
    return views


def _reference(waiting, order, max_wait_s, now):
    """Look at everybody: the oldest if it waited too long, else the smallest key."""
    oldest = min(waiting, key=lambda i: i)
    if now - waiting[oldest].arrival >= max_wait_s:
        return oldest
    return min(waiting, key=lambda i: (order(waiting[i]), i))


@pytest.mark.parametrize("name", sorted(ORDERS))
@given(rows=arrivals, serve=st.lists(st.booleans(), max_size=40), max_wait_s=st.floats(0.5, 20))
@settings(max_examples=40)
def test_the_queue_agrees_with_looking_at_everybody(name, rows, serve, max_wait_s):
    """
    Every peek is what an exhaustive search over the waiting requests gives.
    """
    order = order_named(name)
    queue: AgedQueue[int] = AgedQueue(order, max_wait_s=max_wait_s)
    waiting: dict[int, WaitingView] = {}
    for i, view in enumerate(_views(rows)):
        queue.push(i, view)
        waiting[i] = view
        if i < len(serve) and serve[i]:
            want = _reference(waiting, order, max_wait_s, view.arrival)
            assert queue.peek(now=view.arrival) == want
            queue.remove(want)
            del waiting[want]
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
    assert (queue.peek(now=0.0) is None) == (not waiting)


@pytest.mark.parametrize("name", sorted(ORDERS))
@given(rows=arrivals)
@settings(max_examples=40)
def test_nobody_is_overtaken_after_the_bound(name, rows):
    """
    Once a request has waited the bound, only requests that came before it are served before it.
    """
    queue: AgedQueue[int] = AgedQueue(order_named(name), max_wait_s=5.0)
    views = _views(rows)
    served = []
    for i, view in enumerate(views):
        queue.push(i, view)
    now = views[-1].arrival
    while (key := queue.peek(now=now)) is not None:
        late = [i for i in queue if now - views[i].arrival >= 5.0]
        assert not late or key == min(late)
        queue.remove(key)
        served.append(key)
        now += 0.1
    assert sorted(served) == list(range(len(views)))


def test_a_preempted_request_goes_first():
    """
    As in the engine, the request that was preempted last is served first.
    """
    queue: AgedQueue[str] = AgedQueue(order_named("fcfs"), max_wait_s=5.0)
    queue.push("new", WaitingView(arrival=0.0, program_arrival=0.0, prompt_tokens=1))
    queue.push_back("one")
    queue.push_back("two")

    assert list(queue) == ["two", "one", "new"]
    assert queue.peek(now=100.0) == "two"


def test_returning_programs_go_before_new_ones():
    """
    Ready-first serves a session that comes back from a tool before an older new one.
    """
    queue: AgedQueue[str] = AgedQueue(order_named("ready-first"), max_wait_s=60.0)
    queue.push("new", WaitingView(arrival=0.0, program_arrival=0.0, prompt_tokens=1))
    back = WaitingView(arrival=1.0, program_arrival=-9.0, prompt_tokens=1, returning=True)
    queue.push("back", back)

    assert queue.peek(now=1.0) == "back"
    assert queue.peek(now=60.0) == "new"


def test_wrong_names_bounds_and_duplicates_are_refused():
    """
    The message names what is allowed.
    """
    with pytest.raises(ConfigError, match="known: attained-service, fcfs"):
        order_named("lifo")
    with pytest.raises(ConfigError, match="above 0"):
        AgedQueue(order_named("fcfs"), max_wait_s=0.0)
    queue: AgedQueue[str] = AgedQueue(order_named("fcfs"), max_wait_s=1.0)
    queue.push_back("a")
    with pytest.raises(ValueError, match="waits already"):
        queue.push("a", WaitingView(arrival=0.0, program_arrival=0.0, prompt_tokens=1))
    with pytest.raises(KeyError):
        queue.remove("b")

"""The waiting queue that looks at programs, in vLLM's real scheduler."""

import random
from typing import Any

import pytest

from scout_sdk import ConfigError, Hints, _wire

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OFF = {"hints": False, "fingerprints": False}


def scheduler(
    lab: Any, order: str, *, blocks: int = 60, policy: dict[str, Any] | None = None
) -> Any:
    """Return ours with *order* of waiting requests."""
    from scout_server.vllm import ScoutScheduler

    additional = {"vllm": {"waiting_order": order}, "policy": policy or {}}
    return lab.scheduler(ScoutScheduler, blocks=blocks, additional=additional)


def ask(lab: Any, ours: Any, name: str, tokens: list[int], *, session: str | None = None) -> None:
    """Let a request arrive."""
    hints = Hints(session=session, agent="a") if session else None
    xargs = dict(_wire.to_xargs(hints)) if hints else None
    ours.add_request(lab.request(ours, name, tokens, max_tokens=2, xargs=xargs))


def started(plan: dict[str, Any]) -> list[str]:
    """Return who started in a step, in order."""
    return [name for name, _, _ in plan["new"]]


def test_every_method_of_vllms_queue_is_ours() -> None:
    """RequestQueue's abstract methods, with the same parameters."""
    import inspect

    from vllm.v1.core.sched.request_queue import RequestQueue

    from scout_server.vllm.waiting import ProgramQueue

    assert len(RequestQueue.__abstractmethods__) >= 10
    for name in RequestQueue.__abstractmethods__:
        wanted = list(inspect.signature(getattr(RequestQueue, name)).parameters)
        parameters = inspect.signature(getattr(ProgramQueue, name)).parameters
        assert len(parameters) == len(wanted), name


def test_the_default_leaves_vllms_own_queue(lab: Any) -> None:
    """Without the setting, the queue is the one that vLLM made."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    assert type(scheduler(lab, "fcfs").waiting) is FCFSRequestQueue


def test_a_priority_queue_and_an_unknown_order_stop_the_start(lab: Any) -> None:
    """The message names what is needed, and the orders that exist."""
    lab.config.scheduler_config.policy = "priority"
    try:
        with pytest.raises(ConfigError, match="--scheduling-policy fcfs"):
            scheduler(lab, "ready-first")
    finally:
        lab.config.scheduler_config.policy = "fcfs"
    with pytest.raises(ConfigError, match="attained-service"):
        scheduler(lab, "lifo")


@pytest.mark.parametrize("seed", range(3))
def test_by_programs_that_are_single_requests_it_is_vllms_fcfs(
    lab: Any, runner: Any, seed: int
) -> None:
    """With no session known, program-fcfs plans what vLLM plans, preempted and aborted ones too."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    both = [lab.scheduler(Scheduler, blocks=60), scheduler(lab, "program-fcfs", policy=OFF)]
    drivers = [runner(each) for each in both]
    rng = random.Random(seed)
    preempted = 0
    for number in range(400):
        if rng.random() < 0.35:
            tokens = [rng.randrange(5, 1000) for _ in range(rng.randint(10, 300))]
            generated = rng.choice((1, 30, 150))
            for each in both:
                each.add_request(
                    lab.request(each, f"r{number}", list(tokens), max_tokens=generated)
                )
        if rng.random() < 0.04 and both[0].requests:
            name = rng.choice(sorted(both[0].requests))
            for each in both:
                each.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        plans = [driver.step() for driver in drivers]
        assert plans[0] == plans[1]
        preempted += sum(r.num_preemptions for r in both[0].requests.values())
        assert both[0].get_request_counts() == both[1].get_request_counts()
    assert preempted > 0
    for driver in drivers:
        driver.drain()


def test_a_session_that_comes_back_starts_before_those_that_are_new(lab: Any, runner: Any) -> None:
    """Ready-first, four seats: of six that wait, the two that return start first."""
    ours = scheduler(lab, "ready-first", blocks=200)
    driver = runner(ours)
    for session in ("x", "y"):
        ask(lab, ours, f"first-{session}", list(range(5, 45)), session=session)
    driver.drain()
    for number in range(4):
        ask(lab, ours, f"new{number}", list(range(50 + number, 140)), session=f"n{number}")
    for session in ("x", "y"):
        ask(lab, ours, f"second-{session}", list(range(5, 60)), session=session)
    order: list[str] = []
    while ours.requests:
        order += started(driver.step())
    assert order == ["second-x", "second-y", "new0", "new1", "new2", "new3"]


def test_who_has_waited_the_bound_starts_before_all_that_came_later(lab: Any, runner: Any) -> None:
    """After 30 s a new session goes before a returning one that came after it."""
    ours = scheduler(lab, "ready-first", blocks=200)
    now = [0.0]
    ours.scout.clock = lambda: now[0]
    driver = runner(ours)
    ask(lab, ours, "first", list(range(5, 45)), session="back")
    driver.drain()
    ask(lab, ours, "new", list(range(50, 140)), session="new")
    now[0] = 30.0
    ask(lab, ours, "second", list(range(5, 60)), session="back")
    order: list[str] = []
    while ours.requests:
        order += started(driver.step())
    assert order == ["new", "second"]


@pytest.mark.parametrize("fault", ["order", "elsewhere", "pop"])
def test_a_fault_hands_everybody_back_to_vllms_queue(lab: Any, runner: Any, fault: str) -> None:
    """Ten requests of which some wait: after a fault at any place, all ten are served."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    ours = scheduler(lab, "shortest-first", blocks=80)
    driver = runner(ours)
    served = set()
    for number in range(10):
        ask(lab, ours, f"r{number}", list(range(5, 145 - number)), session=f"s{number}")
    served.update(started(driver.step()))
    if fault == "order":
        ours.waiting._aged.peek = None
    elif fault == "elsewhere":
        ours.scout.breaker.trip("test", RuntimeError("planted"))
    else:
        ours.scout.core.order.pop = None  # fails between peek and pop of a waiting request
    while ours.requests:
        served.update(started(driver.step()))
    assert served == {f"r{number}" for number in range(10)}
    assert ours.scout.breaker.open
    assert ours.scout.breaker.faults >= 1
    driver.step()
    assert type(ours.waiting) is FCFSRequestQueue

"""Warm-ups are bets that must pay."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_server.policy.prefetch import (
    AnchorView,
    PrefetchPlanner,
    PrefetchSettings,
    Refusal,
    WarmUp,
)

ON = PrefetchSettings(enabled=True)


def _anchor(agent="a", probability=0.9, tokens=1000, tenant=""):
    return AnchorView(
        tenant=tenant,
        agent=agent,
        missing_tokens=tokens,
        missing_blocks=max(1, tokens // 16),
        probability=probability,
    )


def _plan(planner, anchors, *, idle=True, predictability=0.9, worth=0.0, now=0.0):
    return planner.plan(
        anchors,
        idle=idle,
        predictability=predictability,
        worth_of_blocks=lambda n: worth,
        now=now,
    )


@pytest.mark.parametrize(
    ("settings", "arguments", "why"),
    [
        (PrefetchSettings(), {}, Refusal.DISABLED),
        (ON, {"idle": False}, Refusal.BUSY),
        (ON, {"predictability": 0.1}, Refusal.UNPREDICTABLE),
        (ON, {"anchors": [_anchor(tokens=10)]}, Refusal.NOTHING_COLD),
        (ON, {"anchors": [], "predictability": 0.1}, Refusal.NOTHING_COLD),
        (ON, {"anchors": [_anchor(probability=0.2)]}, Refusal.IMPROBABLE),
        (ON, {"worth": 0.95}, Refusal.POOL_WORTH_MORE),
    ],
)
def test_no_warm_up_without_every_reason_for_one(settings, arguments, why):
    """
    Each condition of issue 3 refuses by itself, and says why.
    """
    planner = PrefetchPlanner(settings)

    assert _plan(planner, arguments.pop("anchors", [_anchor()]), **arguments) is why
    assert planner.counters.started == 0


def test_the_most_valuable_anchor_is_warmed_first():
    """
    Value is probability times missing tokens.
    """
    planner = PrefetchPlanner(ON)
    anchors = [_anchor("a", 0.9, 100), _anchor("b", 0.6, 1000), _anchor("c", 0.5, 1000)]

    assert _plan(planner, anchors) == WarmUp(tenant="", agent="b", tokens=1000)


def test_one_warm_up_at_a_time():
    """
    While one runs nothing else starts; a cancelled one may be tried again.
    """
    planner = PrefetchPlanner(ON)
    first = _plan(planner, [_anchor()])

    assert _plan(planner, [_anchor("b")]) is Refusal.BUSY
    assert planner.cancel() == first
    assert planner.counters.cancelled == 1
    assert isinstance(_plan(planner, [_anchor()]), WarmUp)


def test_a_used_bet_and_a_lost_one_are_counted():
    """
    An anchor asked for in time was used; one not asked for within the horizon was wasted.
    """
    planner = PrefetchPlanner(ON)
    for agent in ("a", "b"):
        _plan(planner, [_anchor(agent)])
        planner.done(now=0.0)

    assert planner.asked("", "a", now=29.0)
    assert not planner.asked("", "a", now=29.5)
    assert not planner.asked("", "b", now=30.0)
    assert (planner.counters.used, planner.counters.wasted) == (1, 1)


def test_losing_bets_stops_the_betting():
    """
    When nobody uses warm-ups, the confidence needed passes any candidate; winning lowers it again.
    """
    planner = PrefetchPlanner(PrefetchSettings(enabled=True, per_tenant_per_min=6000))
    now = 0.0
    while isinstance(_plan(planner, [_anchor(probability=0.8)], now=now), WarmUp):
        planner.done(now=now)
        now += 31.0
        assert planner.counters.started < 20
    lost = planner.confidence

    _plan(planner, [_anchor(probability=0.99)], now=now)
    planner.done(now=now)
    planner.asked("", "a", now=now)

    assert planner.counters.wasted == planner.counters.started - 1 > 5
    assert ON.min_probability < planner.confidence < lost


def test_a_tenant_over_budget_does_not_stop_another():
    """
    Warm-ups are limited per tenant.
    """
    planner = PrefetchPlanner(PrefetchSettings(enabled=True, per_tenant_per_min=6))
    assert isinstance(_plan(planner, [_anchor(tenant="x")]), WarmUp)
    planner.done(now=0.0)

    assert _plan(planner, [_anchor("b", tenant="x")]) is Refusal.OVER_BUDGET
    assert isinstance(_plan(planner, [_anchor("b", tenant="y")]), WarmUp)


def test_an_anchor_evicted_before_its_use_was_wasted():
    """
    A warm-up whose anchor is gone again when it is asked for served nobody.
    """
    planner = PrefetchPlanner(ON)
    _plan(planner, [_anchor()])
    planner.done(now=0.0)

    assert not planner.asked("", "a", now=1.0, cached=False)
    assert (planner.counters.used, planner.counters.wasted) == (0, 1)
    assert planner.confidence > ON.min_probability


def test_worth_is_compared_in_the_pools_own_units():
    """
    Where an anchor's worth is known, it and not the probability must exceed what is evicted.
    """
    poor = replace(_anchor(probability=0.99), worth=0.1)
    rich = replace(_anchor("b", probability=0.5), worth=3.0)

    assert _plan(PrefetchPlanner(ON), [poor], worth=0.2) is Refusal.POOL_WORTH_MORE
    assert isinstance(_plan(PrefetchPlanner(ON), [rich], worth=2.9), WarmUp)


def test_refusals_are_counted_by_reason():
    """
    What was not warmed up, and why, can be read later.
    """
    planner = PrefetchPlanner(ON)
    _plan(planner, [], now=0.0)
    _plan(planner, [], now=1.0)
    _plan(planner, [_anchor()], idle=False, now=2.0)

    assert planner.refused == {Refusal.NOTHING_COLD: 2, Refusal.BUSY: 1}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["plan", "done", "cancel", "asked", "wait"]),
            st.integers(0, 3),
            st.floats(0, 20),
        ),
        max_size=60,
    )
)
def test_every_warm_up_ends_exactly_one_way(steps):
    """
    Started = used + wasted + cancelled + still running + still open, whatever happens.
    """
    planner = PrefetchPlanner(PrefetchSettings(enabled=True, per_tenant_per_min=6000))
    now = 0.0
    for what, agent, pause in steps:
        now += pause
        if what == "plan":
            _plan(planner, [_anchor(agent)], now=now)
        elif what == "done":
            planner.done(now=now)
        elif what == "cancel":
            planner.cancel()
        elif what == "asked":
            planner.asked("", agent, now=now)
        count = planner.counters
        ended = count.used + count.wasted + count.cancelled
        assert count.started == ended + len(planner._bets) + (planner._running is not None)
        assert ON.min_probability <= planner.confidence <= PrefetchPlanner.CEILING

"""What the policy core foresees of the next requests."""

import pytest

from scout_sdk import Hints
from scout_server.policy import Finish, FinishFacts, PolicyCore, PolicySettings, RequestFacts
from scout_server.policy.warmth import Warmth

ROUND = ("plan", "code", "test")


def _core(sessions=8, turns=6, *, gap=2.0, tenant=""):
    """A core that saw sessions go round three agents; every anchor is ten blocks long."""
    core = PolicyCore(PolicySettings(), capacity_blocks=100, block_tokens=16)
    now = 0.0
    for session in range(sessions):
        for turn in range(turns):
            now = _ask(core, session, turn, now, tenant=tenant, final=turn == turns - 1) + gap
    return core, now


def _ask(core, session, turn, now, *, tenant="", final=False, agent=None):
    name = agent or ROUND[turn % 3]
    request_id = f"{session}/{turn}"
    core.arrive(
        RequestFacts(
            request_id=request_id,
            hints=Hints(session=f"s{session}", agent=name, turn=turn + 1, final=final),
            block_hashes=[*((name, n) for n in range(10)), (session, turn)],
            prompt_tokens=180,
            tenant=tenant,
        ),
        now=now,
    )
    core.finish(FinishFacts(request_id=request_id, finish=Finish.STOP), now=now + 0.2)
    return now + 0.2


def test_the_agent_that_follows_is_the_likeliest():
    """
    A session in its gap will most probably ask for the agent that followed in other sessions.
    """
    core, now = _core()
    now = _ask(core, 99, 0, now)

    found = Warmth(core, horizon_s=30.0).candidates(now=now + 0.5)
    best = max(found, key=lambda each: each.probability)

    assert best.agent.name == "code"
    assert best.probability > 0.7
    assert best.worth > 0.0
    assert len(best.agent.anchor) == 10
    assert len(found) <= 2


def test_what_is_foreseen_does_not_depend_on_having_been_asked_before():
    """
    One that was asked all along foresees what one that is asked for the first time foresees.
    """
    core, now = _core()
    warmth = Warmth(core, horizon_s=30.0)
    for session in range(50, 60):
        now = _ask(core, session, 0, now) + 1.0
        asked = {each.agent.name: each.probability for each in warmth.candidates(now=now)}
    fresh = Warmth(core, horizon_s=30.0).candidates(now=now)

    assert {each.agent.name: each.probability for each in fresh} == pytest.approx(asked, abs=0.02)


def test_ended_sessions_ask_for_nothing():
    """
    Where every session said that it is over, nothing is foreseen.
    """
    core, now = _core()

    found = Warmth(core, horizon_s=30.0).candidates(now=now)

    assert max((each.probability for each in found), default=0.0) < 0.35


def test_a_horizon_shorter_than_the_gap_foresees_little():
    """
    What comes after the horizon does not count.
    """
    core, now = _core(gap=40.0)
    now = _ask(core, 99, 0, now)

    near = Warmth(core, horizon_s=5.0).candidates(now=now)
    far = Warmth(core, horizon_s=120.0).candidates(now=now)

    assert max(each.probability for each in near) < 0.2
    assert max(each.probability for each in far) > 0.7


def test_tenants_are_foreseen_apart():
    """
    A candidate belongs to the tenant whose session may ask for it; others learn nothing of it.
    """
    core, now = _core(tenant="x")
    now = _ask(core, 99, 0, now, tenant="y", agent="plan")
    now = _ask(core, 98, 0, now, tenant="x")

    found = Warmth(core, horizon_s=30.0).candidates(now=now)

    assert {each.tenant for each in found if each.probability > 0.35} == {"x"}


@pytest.mark.parametrize("settings", [PolicySettings(hints=False, fingerprints=False)])
def test_without_identity_nothing_is_foreseen(settings):
    """
    With hints and fingerprints off there are no candidates.
    """
    core = PolicyCore(settings, capacity_blocks=100, block_tokens=16)
    _ask(core, 1, 0, 0.0)

    assert Warmth(core, horizon_s=30.0).candidates(now=1.0) == []

"""What the core remembers over a restart, and what it shows of itself."""

import json

import pytest

from scout_sdk import Hints
from scout_server.policy import Finish, FinishFacts, PolicyCore, PolicySettings, RequestFacts


def core_with_history():
    core = PolicyCore(PolicySettings(), capacity_blocks=50, block_tokens=16)
    now = 0.0
    for session in range(12):
        for turn, agent in enumerate(("plan", "code", "review")):
            now += 1.0
            name = f"{session}-{turn}"
            core.arrive(
                RequestFacts(
                    request_id=name,
                    hints=Hints(session=f"s{session}", agent=agent, final=turn == 2),
                    block_hashes=[(agent, i) for i in range(4)],
                    prompt_tokens=64,
                ),
                now=now,
            )
            core.segments(name, [(agent, i) for i in range(4)])
            core.finish(
                FinishFacts(request_id=name, finish=Finish.STOP, cached_tokens=0), now=now + 0.2
            )
    return core, now


def test_a_snapshot_is_plain_data_and_comes_back_equal():
    """A snapshot passes through JSON and restores what was learnt."""
    core, _ = core_with_history()
    state = core.snapshot()
    copy = PolicyCore(PolicySettings(), capacity_blocks=50, block_tokens=16)
    copy.restore(state)
    assert copy.snapshot() == state
    through = PolicyCore(PolicySettings(), capacity_blocks=50, block_tokens=16)
    through.restore(json.loads(json.dumps(state)))
    assert through.snapshot() == state
    assert copy.predictability == core.predictability


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("tenants"),
        lambda state: state.update(version=99),
        lambda state: state["tenants"][""].pop("gaps"),
        lambda state: state["tenants"][""]["transitions"].update(count=[1.0]),
        lambda state: state["tenants"][""]["transitions"].update(symbols=3),
        lambda state: state["tenants"][""]["agents"].append(["x", 1, 0, 1.0, 1.0]),
        lambda state: state["tenants"][""].update(agents=7),
    ],
)
def test_a_damaged_snapshot_changes_nothing(damage):
    """Restoring a damaged snapshot is a ValueError and leaves the core as it was."""
    core, _ = core_with_history()
    state = json.loads(json.dumps(core.snapshot()))
    damage(state)
    fresh = PolicyCore(PolicySettings(), capacity_blocks=50, block_tokens=16)
    before = fresh.snapshot()
    with pytest.raises(ValueError, match=r"snapshot|version"):
        fresh.restore(state)
    assert fresh.snapshot() == before


def test_the_state_names_agents_and_counts_sessions():
    """The readout has every agent, sessions by phase, and the counters."""
    core, now = core_with_history()
    state = core.state(now=now)
    assert {agent.name for agent in state.agents} == {"plan", "code", "review"}
    assert all(agent.uses == 12 for agent in state.agents)
    assert state.sessions_ended == 12
    assert state.sessions_running == state.sessions_gap == 0
    assert state.requests == state.requests_hinted == 36
    assert state.mode in ("lru", "scout")
    assert state.predictability > 0.5
    assert state.regretted_blocks > 0


def test_the_state_of_a_core_without_identity_is_off():
    """With hints and fingerprints off the mode is `off`."""
    core = PolicyCore(
        PolicySettings(hints=False, fingerprints=False), capacity_blocks=5, block_tokens=16
    )
    assert core.state(now=0.0).mode == "off"

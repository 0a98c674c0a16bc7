"""Decisions that were logged come out again: the policy is a function of what it is told."""

import json

import pytest

from scout_sdk import ConfigError
from scout_server.policy import PolicyCore, PolicySettings
from scout_server.sim.decisions import load_log, record, replay
from scout_server.sim.scenario import scenario_of
from scout_server.sim.simulate import prepare

BUSY = {
    "workload": {"programs": 40, "rate_per_s": 3.0, "turns": 6, "agents": 4, "branches": 0.1},
    "hardware": {"kv_blocks": 900},
    "cell": {"timeline": 0},
}


def logged(policy):
    prepared = prepare(scenario_of({**BUSY, "residency": {"policy": policy}}))
    log = record(prepared.replicas[0].core)
    prepared.cell.run()
    return log


@pytest.mark.parametrize("policy", ["scout", "lru"])
def test_a_replayed_log_takes_the_same_victims(tmp_path, policy):
    """Every victim of a run, some thousands, is the same when the log is read from a file."""
    path = tmp_path / "log.jsonl"
    logged(policy).write(path)

    found = replay(load_log(path))

    assert found.victims > 2000
    assert found.share == 1.0, found.first_difference


def test_another_policy_is_told_apart():
    """A core that works otherwise does not pass: the comparison compares."""
    log = logged("scout")
    lru = PolicyCore(
        PolicySettings(hints=False, fingerprints=False),
        capacity_blocks=log.capacity_blocks,
        block_tokens=log.block_tokens,
    )
    found = replay(log, lru)
    assert found.share < 1.0
    assert "recorded" in found.first_difference


def test_a_broken_log_is_named(tmp_path):
    """File and line are in the error; an unknown entry names the known."""
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n", "utf-8")
    with pytest.raises(ConfigError, match=r"log\.jsonl:1"):
        load_log(path)
    log = logged("lru")
    log.entries[:] = [{"op": "guess"}]
    log.write(path)
    assert json.loads(path.read_text("utf-8").splitlines()[0])["scout_decisions"] == 1
    with pytest.raises(ConfigError, match="arrive"):
        replay(load_log(path))

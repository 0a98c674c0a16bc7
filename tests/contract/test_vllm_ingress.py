"""vLLM's real scheduler learns from requests and responses what the embedded engine learns."""

import json
from typing import Any

import pytest

from scout_sdk import Hints, _wire
from scout_server.embedded.engine import Engine
from scout_server.embedded.script import Reply
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy import Finish
from scout_server.vllm.seal import sealed

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

KEY = b"k" * 32
TOOLS = (("bash", 5.0), ("look", None))


def scheduler_of(lab: Any, **additional: Any) -> Any:
    from scout_server.vllm import ScoutScheduler
    from scout_server.vllm.utility import answer

    scheduler = lab.scheduler(ScoutScheduler, blocks=200, additional=additional)
    assert json.loads(answer(scheduler, "key", KEY.hex())) == {"heard": 1}
    return scheduler


def learnt(core: Any) -> dict[tuple[str, str], tuple[str, float | None]]:
    """Return kind and promised seconds of the gap of every session."""
    return {
        (tenant.name, session.key): (
            session.kind,
            None
            if session.promise is None
            else round(session.promise.back - session.promise.said, 6),
        )
        for tenant in core._tenants.values()
        for session in tenant.sessions
    }


@pytest.mark.parametrize("hints", [None, Hints(session="s", agent="a")])
def test_both_engines_learn_the_same_of_a_tool_call(lab: Any, runner: Any, hints: Any) -> None:
    """Told after the end, through the utility, vLLM's core knows what the embedded one knows."""
    from scout_server.vllm.utility import answer

    prompt = list(range(5, 105))
    scheduler = scheduler_of(lab)
    xargs = {**(_wire.to_xargs(hints) if hints else {}), **sealed(KEY, "t")}
    scheduler.add_request(lab.request(scheduler, "r", prompt, xargs=xargs))
    runner(scheduler).drain()
    ending = {"call": xargs["scout_call"], "finish": "tool_calls", "tools": TOOLS}
    stranger = {**ending, "call": "of another rank"}
    said = answer(scheduler, "endings", json.dumps([stranger, ending]))

    now = 0.0
    engine = Engine(EmbeddedSettings(), clock=lambda: now)
    reply = Reply(tokens=(1, 2, 3, 4), finish=Finish.TOOL_CALLS)
    engine.submit(prompt, reply, hints=hints, tenant="t", tools=TOOLS)
    now = 60.0
    engine.pump()

    assert json.loads(said) == {"heard": 2}
    assert scheduler.scout.endings == {"used": 1}
    assert learnt(scheduler.scout.core) == learnt(engine.replica.core) != {}
    assert next(iter(learnt(engine.replica.core).values())) == ("tool_calls:bash+look", 5.0)


def test_a_forged_tenant_learns_apart(lab: Any, runner: Any) -> None:
    """What a client writes into its xargs puts it into no tenant that an API server named."""
    scheduler = scheduler_of(lab)
    real = sealed(KEY, "victim")
    for number, xargs in enumerate([real, {**real, "scout_seal": "0"}, {"scout_tenant": "victim"}]):
        hints = _wire.to_xargs(Hints(session="s", agent="a"))
        request = lab.request(scheduler, f"r{number}", list(range(5, 60)), xargs={**hints, **xargs})
        scheduler.add_request(request)
        runner(scheduler).drain()
    core = scheduler.scout.core

    assert sorted(learnt(core)) == [("unsealed:victim", "s"), ("victim", "s")]
    assert core.tenant("victim").sessions.get("s").turns == 1
    assert core.tenant("unsealed:victim").sessions.get("s").turns == 2


def test_what_was_learnt_survives_a_restart(lab: Any, runner: Any, tmp_path: Any) -> None:
    """Written at shutdown, read at the next start; a damaged file costs what was learnt."""
    kept = {"snapshot": {"state_file": str(tmp_path / "state.json")}}
    first = scheduler_of(lab, **kept)
    for number, agent in enumerate(("planner", "coder")):
        xargs = _wire.to_xargs(Hints(session="s", agent=agent))
        first.add_request(lab.request(first, f"r{number}", list(range(5, 60)), xargs=xargs))
        runner(first).drain()
    learnt_first = json.loads(json.dumps(first.scout.core.snapshot()))
    first.shutdown()

    second = scheduler_of(lab, **kept)
    assert json.loads(json.dumps(second.scout.core.snapshot())) == learnt_first
    second.scout.breaker.trip("test", RuntimeError("planted"))
    second.shutdown()
    (tmp_path / "state.json").write_text("{")
    third = scheduler_of(lab, **kept)

    assert (tmp_path / "state.json.damaged").exists()
    assert third.scout.core.snapshot()["tenants"] == {}


def test_a_second_rank_keeps_a_file_of_its_own(lab: Any, tmp_path: Any) -> None:
    """Data-parallel ranks write beside each other."""
    lab.config.parallel_config.data_parallel_index = 1
    try:
        file = str(tmp_path / "state.json")
        scheduler_of(lab, snapshot={"state_file": file}).shutdown()
    finally:
        lab.config.parallel_config.data_parallel_index = 0

    assert [entry.name for entry in tmp_path.iterdir()] == ["state-rank1.json"]

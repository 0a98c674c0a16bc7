"""vLLM's real scheduler writes what it serves as a trace."""

import random

import pytest

from scout_sdk import Hints, SessionEvent
from scout_sdk._xargs import to_xargs
from scout_server.sim.traces import TraceReader

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_a_scheduler_writes_what_it_serves(lab, runner, tmp_path):
    """
    Turns, sessions, tools, reuse and hits that vLLM's own scheduler had are in the trace, whether
    requests were preempted meanwhile or not.
    """
    from scout_server.vllm import ScoutScheduler

    file = tmp_path / "t.jsonl"
    scheduler = lab.scheduler(ScoutScheduler, blocks=24, additional={"record": {"file": str(file)}})
    bridge = scheduler.scout
    run = runner(scheduler)
    rng = random.Random(7)
    prompts = {f"s{n}": [rng.randrange(5, 1000) for _ in range(100)] for n in range(3)}
    preempted = 0
    for turn in range(3):
        for session, tokens in prompts.items():
            extra = to_xargs(Hints(session=session, agent="a"))
            name = f"{session}-{turn}"
            request = lab.request(scheduler, name, list(tokens), max_tokens=60, xargs=extra)
            scheduler.add_request(request)
            tokens += [rng.randrange(5, 1000) for _ in range(8)]
        run.drain()
        preempted += bridge.finishes["preempted"]
    cached = bridge.tokens["cached"]
    for session in prompts:
        bridge.event(SessionEvent(session=session, final=True))
    scheduler.shutdown()

    reader = TraceReader(file)
    programs = list(reader)
    turns = [turn for program in programs for turn in program.turns]
    assert (16, 0) == (reader.info.block_tokens, sum(p.aborted for p in programs))
    assert [[100, 108, 116]] * 3 == [[t.input_tokens for t in p.turns] for p in programs]
    assert {60} == {turn.output_tokens for turn in turns}
    assert {"a"} == {turn.agent for turn in turns}
    assert cached == sum(turn.hit_tokens or 0 for turn in turns)
    assert preempted > 0
    heads = [[t.hash_runs[0] for t in p.turns] for p in programs]
    assert [[(6 * n, 6)] * 2 for n in range(3)] == [head[:2] for head in heads]


def test_a_file_that_cannot_be_written(lab, tmp_path):
    """
    A trace that cannot be written stops the scheduler's start.
    """
    from scout_sdk import ConfigError
    from scout_server.vllm import ScoutScheduler

    (tmp_path / "file").write_text("")
    record = {"record": {"file": str(tmp_path / "file" / "t.jsonl")}}
    with pytest.raises(ConfigError, match="cannot record"):
        lab.scheduler(ScoutScheduler, blocks=24, additional=record)

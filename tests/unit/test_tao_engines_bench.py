"""Parts of `scout bench tao-engines` that need no engine."""

import itertools
import json
from pathlib import Path

import pytest

from scout_sdk import ConfigError, Hints
from scout_server.bench.taoengines import tao_engines
from scout_server.bench.taoload import Arm, Program, make_programs, mean_size
from scout_server.bench.vllmrouter import named, peer_arguments
from scout_server.demo.measure import Counters


def test_programs_of_one_size_seed_differ_only_in_their_texts() -> None:
    """Arms get equal work: the same lengths, gaps and anchors, and no token of another arm."""
    ours, theirs = (
        make_programs(4, steps=6, tokens=1600, vocabulary=8192, sizes=1, texts=texts)
        for texts in ("tao", "sticky")
    )
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine.steps, other.steps, strict=True):
            assert (a.agent, len(a.prompt), a.gap_s, a.final) == (
                b.agent, len(b.prompt), b.gap_s, b.final,
            )  # fmt: skip
            assert a.prompt[:100] == b.prompt[:100]
            assert a.prompt[100:] != b.prompt[100:]
        assert [s.final for s in mine.steps] == [False] * 5 + [True]


def test_the_prompts_of_an_agent_grow() -> None:
    """Each prompt of an agent begins with that agent's prompt before, as in a real program."""
    (program,) = make_programs(1, steps=8, tokens=1600, vocabulary=8192, sizes=3, texts="x")
    for agent in ("planner", "coder"):
        prompts = [s.prompt for s in program.steps if s.agent == agent]
        assert len(prompts) == 4
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
            assert len(after) > len(before)
    ends = [s.prompt for s in program.steps[-2:]]
    assert 1600 * 0.6 < sum(map(len, ends)) < 1600 * 1.5


def test_a_row_has_the_rates_of_its_counters() -> None:
    """An arm's hit rate is what the nodes found of what they looked up."""
    arm = Arm(jct_s=[1.0, 3.0], ttft_s=[0.5], counters=Counters(1000.0, 250.0))
    row = arm.row()
    assert (row["hit rate"], row["mean JCT s"], row["sessions"]) == (0.25, 2.0, 2)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    """A folder that has no model is refused before any server starts."""
    with pytest.raises(ConfigError, match="--model DIR"):
        tao_engines(model=tmp_path)


def test_the_size_of_a_session_is_what_both_agents_hold() -> None:
    """Load counts every agent's latest prompt, averaged over a session's turns, not its end."""
    programs = make_programs(8, steps=8, tokens=1600, vocabulary=8192, sizes=3, texts="x")
    first = [p.steps[0] for p in programs]
    ends = [len(p.steps[-1].prompt) + len(p.steps[-2].prompt) for p in programs]
    size = mean_size(programs)
    assert sum(len(s.prompt) for s in first) / 8 < size < sum(ends) / 8
    once = [Program(steps=p.steps[:1]) for p in programs]
    assert mean_size(once) == sum(len(s.prompt) for s in first) / 8


def test_the_router_is_told_the_room_of_a_node_and_how_fast_it_is() -> None:
    """Program scheduling gets its capacity and every coefficient; the cache-aware arm none."""
    arguments = peer_arguments("vllm-router programs", 19_200)
    config = json.loads(arguments[arguments.index("--program-scheduling-config-json") + 1])
    assert config["token_capacity_per_dp_rank"] == 19_200
    costs = {**config["prefill_cost_model"], **config["decode_throughput_model"]}
    assert len(costs) == 7
    assert all(value > 0 for value in costs.values())
    assert peer_arguments("vllm-router cache-aware", 19_200) == ["--policy", "cache_aware"]


def test_the_router_is_told_whose_turn_it_is_in_the_body() -> None:
    """Each agent of a session is a program of its own; vLLM takes the context as a text."""
    said = named(Hints(session="s", agent="coder", turn=3, final=True))
    (text,) = said["vllm_xargs"].values()  # type: ignore[attr-defined]
    context = json.loads(text)
    assert (context["program_id"], context["session_id"]) == ("s:coder", "s")
    assert context["expected_resume"] is False

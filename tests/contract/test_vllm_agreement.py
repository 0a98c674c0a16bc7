"""The retention bench and vLLM's own block pool give the same hits for the same requests."""

import json
from pathlib import Path

import pytest

from scout_sdk import ConfigError
from scout_server.bench.agreement import agree
from scout_server.bench.recorded import recorded
from scout_server.bench.workloads import markov, short_skewed

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "examples.jsonl"
WORKLOADS = {
    "recorded": (lambda: recorded(TRACE), 380),
    "markov": (lambda: markov(seed=2, sessions=15), 90),
    "short": (short_skewed, 110),
}


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORKLOADS)
def test_lru_hits_the_same_blocks_request_by_request(name):
    """With vLLM's own queue every request has the hits that the bench's LRU gives it."""
    make, blocks = WORKLOADS[name]
    found = agree(make(), blocks, "lru")

    assert found.bench == found.engine
    assert 0.1 < sum(found.bench) / found.queried < 0.95


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORKLOADS)
def test_scout_hits_as_much_within_half_a_point(name):
    """With our queue in vLLM's pool the hit rate is the bench's within 0.5 points."""
    make, blocks = WORKLOADS[name]
    found = agree(make(), blocks, "scout")

    assert found.points <= 0.5
    assert sum(found.engine) > sum(agree(make(), blocks, "lru").engine)


def test_a_trace_becomes_requests_with_the_blocks_of_its_outputs(tmp_path):
    """An output's blocks are what the agent's next prompt goes on with, or nobody's."""
    turns = [
        {"in": 32, "out": 20, "agent": "a", "hash_runs": [[0, 2]], "service_s": 1.0},
        {"in": 90, "out": 40, "agent": "a", "hash_runs": [[0, 6]], "gap_s": 2.0, "parents": [0]},
    ]
    head = {"scout_trace": 1, "source": "t", "block_tokens": 16, "scope": "global"}
    path = tmp_path / "t.jsonl"
    program = {"program": "p", "arrival_s": 0.5, "turns": turns}
    path.write_text("\n".join(json.dumps(line) for line in (head, program)) + "\n")
    one, two = recorded(path).requests

    assert (one.prompt, one.output) == ([1, 2], [3])
    assert two.prompt == [1, 2, 3, 4, 5]
    assert len(two.output) == 2
    assert not {*two.output} & {*two.prompt}
    assert (one.time, one.back, two.time, two.back) == (0.5, 3.5, 3.5, None)


def test_a_trace_whose_ids_mean_nothing_across_programs_is_refused(tmp_path):
    """Block ids that are local to a program are an error that says so."""
    head = {"scout_trace": 1, "source": "t", "block_tokens": 16, "scope": "program"}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(head) + "\n")

    with pytest.raises(ConfigError, match="needed: 'global'"):
        recorded(path)

"""What holds for every trace, workload and pool."""

import dataclasses
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scout_server.sim.prompts import PromptHasher
from scout_server.sim.residency import RESIDENCY
from scout_server.sim.routing import ROUTERS
from scout_server.sim.scenario import scenario_of
from scout_server.sim.scheduling import SCHEDULERS
from scout_server.sim.simulate import prepare, record_of
from scout_server.sim.tools import fit_tool
from scout_server.sim.traces import HashScope, Program, TraceInfo, TraceReader, Turn, write_trace
from scout_server.sim.traces.records import runs_length, runs_of, runs_prefix
from scout_server.sim.traces.reuse import Access, belady_hits, lru_hits

IDS = st.lists(st.integers(0, 30), max_size=30)


@st.composite
def programs(draw, number=0):
    turns = []
    for index in range(draw(st.integers(1, 6))):
        tokens = draw(st.integers(1, 400))
        blocks = draw(st.integers(0, -(-tokens // 16)))
        runs = runs_of(draw(st.lists(st.integers(0, 99), min_size=blocks, max_size=blocks)))
        parents = draw(st.sets(st.integers(0, index - 1))) if index else set()
        turns.append(
            Turn(
                agent=draw(st.sampled_from([None, "a", "b"])),
                session=draw(st.sampled_from(["", "s"])),
                input_tokens=tokens,
                output_tokens=draw(st.integers(0, 50)),
                hash_runs=runs,
                parents=tuple(sorted(parents)),
                gap_s=draw(st.integers(0, 5000)) / 1000,
                gap_censored=draw(st.booleans()),
                tool=draw(st.sampled_from([None, "x", "human"])),
                calls_tool=draw(st.sampled_from([None, True, False])),
            )
        )
    return Program(
        program=f"p{number}",
        arrival_s=draw(st.integers(0, 3000)) / 1000,
        turns=tuple(turns),
        aborted=draw(st.booleans()),
    )


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_trace_survives_a_file(tmp_path, data):
    """What is written is read back equal."""
    made = [data.draw(programs(number)) for number in range(data.draw(st.integers(0, 3)))]
    path = tmp_path / "t.jsonl"
    info = TraceInfo(source="s", block_tokens=16, scope=HashScope.GLOBAL)
    write_trace(path, info, made)
    assert list(TraceReader(path)) == made


@given(IDS, IDS)
def test_runs_are_lists(one, two):
    """Length and common prefix of run-length forms are those of the lists."""
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    assert runs_length(runs_of(one)) == len(one)
    assert runs_prefix(runs_of(one), runs_of(two)) == same


@given(st.lists(IDS.filter(bool), min_size=1, max_size=20), st.integers(1, 40))
@settings(max_examples=60)
def test_no_order_finds_more_with_less(prompts, capacity):
    """LRU with more blocks finds no less, and a cache without pressure finds what Bélády finds."""
    order = [Access(float(i), runs_of(dict.fromkeys(ids)), 0) for i, ids in enumerate(prompts)]
    assert lru_hits(order, 1000) == belady_hits(order, 1000)
    assert lru_hits(order, 1000) >= lru_hits(order, capacity)


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=200), st.floats(0.0, 1.0))
@settings(max_examples=60)
def test_fitted_quantiles_are_ordered_and_positive(values, share):
    """A fit of anything has quantiles that are positive and never fall."""
    fit = fit_tool(values)
    low, high = fit.quantile(min(share, 0.5)), fit.quantile(max(share, 0.5))
    assert 0.0 < low <= high


@given(
    st.lists(programs(), min_size=1, max_size=6),
    st.sampled_from(RESIDENCY),
    st.sampled_from(sorted(ROUTERS)),
    st.sampled_from(SCHEDULERS),
    st.sampled_from(["none", "tao"]),
    st.integers(30, 120),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_program_ends_and_every_block_comes_back(
    made, policy, router, scheduler, admission, blocks, tiers
):
    """Whatever policies meet: all programs end or are given up, and no block is lost."""
    renamed = [dataclasses.replace(p, program=f"p{i}") for i, p in enumerate(made)]
    scenario = scenario_of(
        {
            "hardware": {"kv_blocks": blocks},
            "cell": {"replicas": 2, "scheduler": scheduler, "admission": admission, "timeline": 2},
            "router": {"policy": router},
            "residency": {"policy": policy},
            "tiers": {"dram_gb": 0.5 if tiers else 0.0},
        }
    )
    info = TraceInfo(source="s", block_tokens=16, scope=HashScope.PROGRAM)
    records = []
    for _ in range(2):
        prepared = prepare(scenario, (info, sorted(renamed, key=lambda p: p.arrival_s)))
        prepared.cell.run()
        record = record_of(prepared)
        assert record.programs + record.rejected == len(renamed)
        assert record.hit_tokens <= record.prompt_tokens
        for replica in prepared.replicas:
            assert replica.unfinished == 0
            assert replica.pool.free_blocks == replica.pool.capacity
        records.append(record)
    assert records[0].to_json() == records[1].to_json()
    assert json.loads(records[0].to_json())["turns"] == records[0].turns


@given(programs(), st.sampled_from([1, 2, 4, 8, 16]))
@settings(max_examples=40)
def test_hashes_cover_the_full_blocks_only(program, block):
    """Hashes never exceed the full blocks of prompt and reply; two programs never share any."""
    hasher = PromptHasher(TraceInfo(source="s", block_tokens=16), block)
    seen = set()
    for index, turn in enumerate(program.turns):
        one = hasher.hashes(1, turn, None, index)
        two = hasher.hashes(2, turn, None, index)
        assert len(one) <= (turn.input_tokens + turn.output_tokens) // block
        assert not set(one) & set(two)
        own = {each for each in one if each < 0}
        assert not own & seen
        seen |= own

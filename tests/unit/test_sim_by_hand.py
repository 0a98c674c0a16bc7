"""Runs small enough to be computed on paper, and decisions that may know the past only."""

import dataclasses

import pytest

from scout_server.policy import PolicySettings
from scout_server.replica import BatchSettings, LinearLatency, Replica
from scout_server.sim.cell import Cell
from scout_server.sim.prompts import PromptHasher
from scout_server.sim.residency import RESIDENCY, ResidencySettings, make_core
from scout_server.sim.routing import ROUTERS, MoveCosts, RouterSettings, make_router
from scout_server.sim.scenario import scenario_of
from scout_server.sim.simulate import prepare, record_of
from scout_server.sim.tiers import Tiers, TierSettings
from scout_server.sim.tools import ReplayTools
from scout_server.sim.traces import HashScope, Program, TraceInfo, Turn
from scout_server.sim.traces.reuse import working_set
from scout_server.sim.workload import WorkloadSettings, generate, synthetic_info

INFO = TraceInfo(source="test", block_tokens=16, scope=HashScope.GLOBAL)
FIXED, PER_TOKEN, PER_SEQUENCE, PER_KV = 0.01, 1e-5, 1e-4, 1e-8
LATENCY = LinearLatency(
    step_s_fixed=FIXED,
    prefill_s_per_token=PER_TOKEN,
    decode_s_per_sequence=PER_SEQUENCE,
    decode_s_per_kv_token=PER_KV,
)


def prefill(tokens):
    return FIXED + tokens * PER_TOKEN


def decode(prompt, output):
    """Seconds of the steps after the first token, alone on the replica."""
    return sum(FIXED + PER_SEQUENCE + PER_KV * (prompt + 1 + i) for i in range(output - 1))


def turn(first=0, blocks=4, output=8, **values):
    return Turn(
        input_tokens=16 * blocks, output_tokens=output, hash_runs=((first, blocks),), **values
    )


def run(programs, *, blocks=1000):
    core = make_core(
        ResidencySettings(policy="lru"), PolicySettings(), capacity_blocks=blocks,
        block_tokens=16, prefill_s_per_token=PER_TOKEN,
    )  # fmt: skip
    replica = Replica(BatchSettings(max_batched_tokens=2048), LATENCY, kv_blocks=blocks, core=core)
    costs = MoveCosts(
        block_tokens=16, prefill_s_per_token=PER_TOKEN, kv_bytes_per_token=1.0, link_bytes_per_s=1.0
    )
    cell = Cell(
        [Program(program=f"p{i}", arrival_s=at, turns=turns) for i, (at, turns) in
         enumerate(programs)],
        [replica],
        hasher=PromptHasher(INFO, 16),
        router=make_router(RouterSettings(), costs, 1),
        tools=ReplayTools(),
    )  # fmt: skip
    cell.run()
    assert replica.pool.free_blocks == replica.pool.capacity
    return cell.stats, replica


def test_one_turn_takes_its_prefill_and_its_decode_steps():
    """JCT is the sum of the latency model's terms, TTFT the first of them."""
    stats, _ = run([(0.0, (turn(blocks=4, output=8),))])
    assert stats.jct.mean == pytest.approx(prefill(64) + decode(64, 8))
    assert stats.ttft.mean == pytest.approx(prefill(64))


def test_a_long_prompt_takes_its_chunks():
    """5,008 tokens in steps of 2,048 are three steps."""
    stats, _ = run([(0.0, (turn(blocks=313, output=1),))])
    assert stats.jct.mean == pytest.approx(3 * FIXED + 5008 * PER_TOKEN)


def test_a_shared_prefix_is_computed_once():
    """The second program computes what is its own; of a whole prompt, all but the last block."""
    other = Turn(input_tokens=200, output_tokens=1, hash_runs=((0, 10), (500, 3)))
    stats, replica = run([(0.0, (turn(blocks=10, output=1),)), (5.0, (other,))])
    assert replica.counters.hit_tokens == 160
    assert stats.jct.total == pytest.approx(prefill(160) + prefill(40))
    _, replica = run([(0.0, (turn(blocks=10, output=1),)), (5.0, (turn(blocks=10, output=1),))])
    assert replica.counters.hit_tokens == 144


def test_gaps_and_joins_add_up():
    """A chain of gap and turn; then the join waits for the slower branch and its own gap."""
    turns = (
        turn(0, 4, 1),
        turn(100, 4, 1, parents=(0,), gap_s=1.0, session="a"),
        turn(200, 8, 1, parents=(0,), gap_s=3.0, session="b"),
        turn(300, 4, 1, parents=(1, 2), gap_s=0.5),
    )
    stats, _ = run([(2.0, turns)])
    assert stats.jct.mean == pytest.approx(prefill(64) + 3.0 + prefill(128) + 0.5 + prefill(64))
    assert stats.tool_s == 4.5


def test_a_preempted_request_computes_again_what_is_gone():
    """Two requests outgrow 12 blocks: one waits, is computed again, and all tokens come out."""
    stats, replica = run([(0.0, (turn(0, 4, 60),)), (0.0, (turn(100, 4, 60),))], blocks=12)
    assert replica.counters.preemptions == 1
    assert replica.counters.recomputed_tokens > 0
    assert replica.counters.generated_tokens == 120
    assert stats.turns == 2


def test_a_context_comes_back_over_the_link_in_its_time():
    """Blocks that DRAM holds arrive after latency and bytes over bandwidth, then one step."""
    scenario = scenario_of(
        {
            "hardware": {"kv_blocks": 130, "gpu": "H100", "latency": "roofline"},
            "engine": {"max_batched_tokens": 8192},
            "residency": {"policy": "lru"},
            "tiers": {"dram_gb": 8.0, "dram_device": "dram-pcie5"},
        }
    )
    one = turn(0, 100, 1)
    programs = [
        Program(program="a", arrival_s=0.0, turns=(one, turn(0, 101, 1, parents=(0,), gap_s=20.0))),
        Program(program="b", arrival_s=5.0, turns=(turn(1000, 129, 1),)),
    ]
    found = {}
    prepared = prepare(scenario, (INFO, programs))
    prepared.cell._on_finish = lambda sent, request, now: found.update(
        {(sent.view.program, sent.index): (sent.released_at, request)}
    )
    prepared.cell.run()
    released, request = found["a", 1]
    fetched = record_of(prepared).fetched_tokens // 16
    assert fetched == 99  # the head of the chain goes last: b left it in HBM
    size = fetched * 16 * 131_072
    assert request.first_scheduled_at - released == pytest.approx(20e-6 + size / 50e9)
    assert request.cached_tokens == 1600


def test_a_block_that_is_still_being_written_cannot_be_read_yet():
    """A transfer back ends no sooner than the one that brought the block there."""
    tiers = Tiers(
        TierSettings(dram_gb=1.0, dram_device="dram-pcie5"), replicas=1, block_bytes=5e7,
        block_tokens=16, prefill_s_per_token=1.0, link_bytes_per_s=1e9,
    )  # fmt: skip
    tiers.attach([Replica(BatchSettings(), LATENCY, kv_blocks=10)])
    tiers.evicted(0, 0.0, [1, 2, 3, 4])
    written = 4 * 5e7 / 50e9 + 20e-6
    moving = tiers.fetch(0, [1], 0.0)
    assert moving is not None
    assert moving.ready_at == pytest.approx(written)
    later = tiers.fetch(0, [2], 1.0)
    assert later is not None
    assert later.ready_at == pytest.approx(1.0 + 5e7 / 50e9 + 20e-6)


def _futures(programs, seconds):
    """Return two futures with one past: from *seconds* on, everything that can differ does."""
    for changed in (False, True):
        future = []
        for program in programs:
            at = program.arrival_s
            turns = []
            for t in program.turns:
                at += t.gap_s
                if changed and at > seconds:
                    turns.append(
                        dataclasses.replace(
                            t,
                            agent=f"{t.agent}, another",
                            input_tokens=t.input_tokens + 160,
                            hash_runs=((1 << 30, -(-t.input_tokens // 16)),),
                            output_tokens=t.output_tokens * 3,
                            gap_s=t.gap_s * 7 + 1,
                        )
                    )
                else:
                    turns.append(t)
            future.append(dataclasses.replace(program, turns=tuple(turns), aborted=changed))
        yield future


@pytest.mark.parametrize("policy", [p for p in RESIDENCY if not p.startswith("oracle")])
@pytest.mark.parametrize(
    ("router", "admission"),
    [(router, "none") for router in sorted(ROUTERS)] + [("affinity", "tao")],
)
def test_no_decision_knows_who_speaks_next_or_what_it_will_say(policy, router, admission):
    """Evictions and placements are equal until prompts, agents, gaps and lengths part."""
    settings = WorkloadSettings(programs=10, rate_per_s=2.0, turns=6, agents=3, anchor_tokens=1500)
    programs = list(generate(settings, 5))
    part = 7.0
    logs = []
    for future in _futures(programs, part):
        scenario = scenario_of(
            {
                "residency": {"policy": policy},
                "router": {"policy": router},
                "cell": {"replicas": 2, "admission": admission, "timeline": 0},
                "hardware": {"kv_blocks": 400},
            }
        )
        prepared = prepare(scenario, (synthetic_info(settings, 5), future))
        log = []
        for index, replica in enumerate(prepared.replicas):
            replica.pool.on_evict = lambda now, blocks, hashes, index=index, log=log: (
                log.append((now, index, tuple(blocks))) if now <= part else None
            )
        inner = prepared.cell._place

        def place(run, index, hashes, view, route, released, now, inner=inner, log=log):
            if now <= part:
                log.append((now, run.program.program, index, route))
            inner(run, index, hashes, view, route, released, now)

        prepared.cell._place = place
        prepared.cell.run()
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 20


def test_a_working_set_has_every_agent_of_a_program_and_shared_blocks_once():
    """Three agents of 100 blocks take turns: a program holds all three, the prefix is common."""
    turns = tuple(
        Turn(
            agent=f"a{i % 3}",
            input_tokens=1600,
            output_tokens=1,
            hash_runs=((0, 40), (1000 * (i % 3) + 100, 60)),
        )
        for i in range(300)
    )

    def shifted(n):
        return tuple(
            dataclasses.replace(t, hash_runs=(t.hash_runs[0], (t.hash_runs[1][0] + 10_000 * n, 60)))
            for t in turns
        )

    programs = [Program(program=f"p{n}", arrival_s=0.0, turns=shifted(n)) for n in range(5)]
    private = dataclasses.replace(INFO, scope=HashScope.PROGRAM)
    assert working_set(private, programs[:1], 4) == pytest.approx(4 * 220 * 16, rel=0.01)
    assert working_set(INFO, programs, 4) == pytest.approx((40 + 4 * 180) * 16, rel=0.01)
    bare = [
        dataclasses.replace(p, turns=tuple(dataclasses.replace(t, hash_runs=()) for t in p.turns))
        for p in programs
    ]
    assert working_set(private, bare, 4) == pytest.approx(4 * 3 * 1601, rel=0.01)


@pytest.mark.parametrize("admission", ["none", "tao"])
def test_a_turn_that_fits_nowhere_does_not_hold_up_the_others(admission):
    """Its program is given up; turns behind it, held or not, run to their end."""
    programs = [
        Program(
            program=f"p{i}", arrival_s=0.1 * i,
            turns=(turn(1000 * i, 10, 30), turn(1000 * i, 12, 30, parents=(0,), gap_s=1.0)),
        )
        for i in range(4)
    ]  # fmt: skip
    branches = (
        turn(90_000, 4, 8),
        turn(91_000, 150, 16, session="a", parents=(0,)),
        turn(92_000, 4, 8, session="b", parents=(0,)),
    )
    programs.append(Program(program="big", arrival_s=0.5, turns=branches))
    programs.append(Program(program="late", arrival_s=9.0, turns=(turn(80_000, 60, 30),)))
    scenario = scenario_of({"hardware": {"kv_blocks": 100}, "cell": {"admission": admission}})
    prepared = prepare(scenario, (INFO, programs))
    prepared.cell.run()
    record = record_of(prepared)
    assert (record.programs, record.rejected) == (5, 1)
    assert record.makespan_s < 30.0

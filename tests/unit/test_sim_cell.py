"""The event loop: who is released when, and what a policy may know."""

import dataclasses
import math

import pytest

from scout_sdk import ConfigError
from scout_server.replica import BatchSettings, LinearLatency, Replica
from scout_server.sim.cell import ArrivalSettings, Cell
from scout_server.sim.programs import ProgramRun, ProgramState
from scout_server.sim.prompts import PromptHasher
from scout_server.sim.residency import RESIDENCY
from scout_server.sim.routing import ROUTERS, MoveCosts, Route, RouterSettings, make_router
from scout_server.sim.scenario import Scenario, scenario_of
from scout_server.sim.scheduling import SCHEDULERS
from scout_server.sim.simulate import prepare, record_of, simulate
from scout_server.sim.tiers import Channel
from scout_server.sim.tools import ReplayTools
from scout_server.sim.traces import HashScope, Program, TraceInfo, Turn
from scout_server.sim.workload import WorkloadSettings, generate, synthetic_info

INFO = TraceInfo(source="test", block_tokens=16, scope=HashScope.GLOBAL)
LATENCY = LinearLatency(
    step_s_fixed=0.01,
    prefill_s_per_token=1e-5,
    decode_s_per_sequence=1e-4,
    decode_s_per_kv_token=1e-8,
)
COSTS = MoveCosts(
    block_tokens=16, prefill_s_per_token=1e-5, kv_bytes_per_token=1e5, link_bytes_per_s=1e11
)


def turn(first=0, blocks=4, output=8, **values):
    return Turn(
        input_tokens=16 * blocks, output_tokens=output, hash_runs=((first, blocks),), **values
    )


def cell_of(programs, *, blocks=1000, replicas=1, **values):
    """Return a cell, its replicas and the list of (turn, release, end) that it fills."""
    made = [
        Replica(BatchSettings(max_batched_tokens=2048), LATENCY, kv_blocks=blocks)
        for _ in range(replicas)
    ]
    finished = []
    cell = Cell(
        programs,
        made,
        hasher=PromptHasher(INFO, 16),
        router=values.pop("router", make_router(RouterSettings(), COSTS, 1)),
        tools=ReplayTools(),
        on_finish=lambda sent, request, now: finished.append(
            (sent.view.program, sent.index, sent.released_at, now)
        ),
        **values,
    )
    return cell, made, finished


def small(**changes):
    values = {
        "workload": {"programs": 25, "rate_per_s": 2.0, "turns": 5, "agents": 3, "branches": 0.2},
        "hardware": {"kv_blocks": 1500},
        "cell": {"timeline": 0},
    }
    for place, value in changes.items():
        section, _, name = place.partition("__")
        values.setdefault(section, {})[name] = value
    return scenario_of(values)


def test_a_turn_is_released_after_its_parent_and_its_gap():
    """Turn t+1 starts exactly its gap after turn t has ended, in simulated time."""
    program = Program(
        program="p",
        arrival_s=1.0,
        turns=(turn(), turn(blocks=6, parents=(0,), gap_s=2.5, tool="x")),
    )
    cell, _, finished = cell_of([program])
    cell.run()

    (_, _, first_release, first_end), (_, _, second_release, _) = finished
    assert first_release == 1.0
    assert second_release == first_end + 2.5
    assert cell.stats.programs == 1


def test_a_join_waits_for_the_slowest_branch():
    """Parallel branches run together; the turn that joins them follows the last."""
    program = Program(
        program="p",
        arrival_s=0.0,
        turns=(
            turn(),
            turn(first=100, session="a", parents=(0,), gap_s=0.1),
            turn(first=200, session="b", parents=(0,), gap_s=9.0),
            turn(blocks=5, parents=(1, 2), gap_s=1.0),
        ),
    )
    cell, _, finished = cell_of([program])
    cell.run()

    ends = {index: end for _, index, _, end in finished}
    releases = {index: release for _, index, release, _ in finished}
    assert [index for _, index, _, _ in finished] == [0, 1, 2, 3]
    assert releases[3] == max(ends[1], ends[2]) + 1.0
    assert ends[1] < releases[2]


def test_program_states_follow_the_work():
    """ready, tool, done: the state is derived, and a finished program is done."""
    run = ProgramRun(Program(program="p", arrival_s=0.0, turns=(turn(),)), 0, 0.0)
    assert run.state is ProgramState.READY
    run.begin_gap()
    assert run.state is ProgramState.TOOL
    run.end_gap()
    run.paused += 1
    assert run.state is ProgramState.PAUSED
    run.stopped = True
    assert run.state is ProgramState.ABORTED


def test_an_aborted_program_counts_but_has_no_completion_time():
    """JCT is that of whole programs."""
    programs = [
        Program(program="a", arrival_s=0.0, turns=(turn(),), aborted=True),
        Program(program="b", arrival_s=0.0, turns=(turn(),)),
    ]
    cell, _, _ = cell_of(programs)
    cell.run()
    assert (cell.stats.programs, cell.stats.aborted, cell.stats.jct.count) == (2, 1, 1)


def test_a_closed_loop_keeps_so_many_programs_under_way():
    """With concurrency 3, the fourth program arrives when the first of three has ended."""
    programs = [
        Program(program=f"p{i}", arrival_s=0.0, turns=(turn(first=100 * i),)) for i in range(9)
    ]
    cell, _, _ = cell_of(programs, arrivals=ArrivalSettings(concurrency=3))
    cell.run()
    assert cell.most_live == 3
    assert cell.stats.programs == 9


def test_a_turn_that_can_never_fit_ends_its_program_only():
    """The program is given up and counted; the others finish."""
    programs = [
        Program(program="big", arrival_s=0.0, turns=(turn(blocks=500), turn(parents=(0,)))),
        Program(program="small", arrival_s=0.0, turns=(turn(first=900),)),
    ]
    cell, _, _ = cell_of(programs, blocks=100)
    cell.run()
    assert cell.rejected == 1
    assert cell.stats.programs == 1


def test_a_second_turn_finds_the_first_one_s_blocks():
    """Prompt and reply of turn 1 are a prefix of turn 2 and are found."""
    program = Program(
        program="p",
        arrival_s=0.0,
        turns=(turn(blocks=4, output=32), turn(blocks=8, parents=(0,))),
    )
    cell, (replica,), _ = cell_of([program])
    cell.run()
    # 4 prompt blocks and the reply's blocks but the one whose last token was never computed.
    assert replica.counters.hit_tokens == 16 * 5


@pytest.mark.parametrize("policy", RESIDENCY)
def test_equal_seeds_give_equal_bytes(policy):
    """Two runs in one process are equal, byte for byte, under every residency policy."""
    scenario = small(residency__policy=policy)
    assert simulate(scenario).to_json() == simulate(scenario).to_json()


def test_another_seed_is_another_run():
    """The seed reaches the workload."""
    one = simulate(small())
    two = simulate(dataclasses.replace(small(), seed=2))
    assert one.makespan_s != two.makespan_s


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_router_finishes_every_program(router):
    """All programs end under every router, over three replicas."""
    record = simulate(small(cell__replicas=3, router__policy=router))
    assert record.programs == 25
    assert record.turns > 100


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_finishes_every_program(scheduler):
    """All programs end under every order, in a pool so small that requests are preempted."""
    record = simulate(small(cell__scheduler=scheduler, hardware__kv_blocks=700))
    assert record.programs == 25


def test_affinity_keeps_sessions_together():
    """No session moves while its home is within its limits; round robin moves most."""
    at_home = simulate(small(cell__replicas=3, router__policy="affinity"))
    around = simulate(small(cell__replicas=3, router__policy="round-robin"))
    assert at_home.moves == 0
    assert around.moves > 50
    assert at_home.hit_rate > around.hit_rate


def _cut(programs, seconds):
    """Return two futures of one past: after *seconds*, gaps and outputs differ."""
    for changed in (False, True):
        future = []
        for program in programs:
            at = program.arrival_s
            turns = []
            for t in program.turns:
                at += t.gap_s
                late = at > seconds and changed
                turns.append(
                    dataclasses.replace(
                        t,
                        output_tokens=t.output_tokens * 3 if late else t.output_tokens,
                        gap_s=t.gap_s * 7 + 1 if late else t.gap_s,
                    )
                )
            future.append(dataclasses.replace(program, turns=tuple(turns)))
        yield future


@pytest.mark.parametrize("policy", [p for p in RESIDENCY if not p.startswith("oracle")])
@pytest.mark.parametrize("scheduler", ["fcfs", "attained-service", "shortest-first"])
def test_two_futures_with_one_past_get_equal_decisions(policy, scheduler):
    """Until the futures part, every eviction and every placement is the same."""
    settings = WorkloadSettings(programs=20, rate_per_s=2.0, turns=6, agents=3)
    programs = list(generate(settings, 5))
    part = 8.0
    logs = []
    for future in _cut(programs, part):
        scenario = small(
            residency__policy=policy, cell__scheduler=scheduler, cell__replicas=2,
            hardware__kv_blocks=700,
        )  # fmt: skip
        prepared = prepare(scenario, (synthetic_info(settings, 5), future))
        log = []

        def note(index, log=log):
            def on_evict(now, blocks, hashes):
                if now <= part:
                    log.append((now, index, tuple(blocks), tuple(hashes)))

            return on_evict

        for index, replica in enumerate(prepared.replicas):
            replica.pool.on_evict = note(index)
        prepared.cell.run()
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10


def test_the_oracle_is_named_and_beats_lru():
    """Knowing the next uses finds more than LRU in a pool under pressure."""
    found = {
        policy: simulate(
            small(
                residency__policy=policy, hardware__kv_blocks=3000, workload__programs=60,
                workload__branches=0.0, workload__agents=6,
            )
        ).hit_rate
        for policy in ("lru", "oracle-next-use")
    }  # fmt: skip
    assert found["oracle-next-use"] > found["lru"]


def test_tokens_are_conserved():
    """Hit tokens never exceed prompt tokens, and all generated tokens were asked for."""
    prepared = prepare(small())
    prepared.cell.run()
    record = record_of(prepared)
    settings = Scenario().workload
    assert settings.agents == 8
    wanted = sum(max(t.output_tokens, 1) for p in generate(small().workload, 1) for t in p.turns)
    assert record.generated_tokens == wanted
    assert 0 <= record.hit_tokens <= record.prompt_tokens
    for replica in prepared.replicas:
        assert replica.pool.free_blocks == replica.pool.capacity


def test_transfers_queue_on_their_channel():
    """Two transfers take twice the time of one; the latency does not hold the channel."""
    channel = Channel(1e9, 0.001)
    assert channel.send(5e8, 0.0) == pytest.approx(0.501)
    assert channel.send(5e8, 0.0) == pytest.approx(1.001)
    assert channel.finish_at(1e9, 5.0) == pytest.approx(6.001)


def test_a_tier_brings_blocks_back():
    """With DRAM behind a small HBM pool, more is found and some of it was fetched."""
    changes = {
        "hardware__kv_blocks": 900, "workload__rate_per_s": 0.5, "residency__policy": "lru",
    }  # fmt: skip
    without = simulate(small(**changes))
    with_dram = simulate(small(tiers__dram_gb=64.0, **changes))
    assert with_dram.fetched_tokens > 0
    assert with_dram.stored_tokens > 0
    assert with_dram.hit_rate > without.hit_rate
    slow = simulate(small(tiers__cxl_gb=64.0, tiers__cxl_bandwidth_gbps=0.01, **changes))
    assert slow.fetched_tokens < with_dram.fetched_tokens


class _Views:
    def __init__(self, index, waiting, outstanding, cached, used=0.5):
        self.index, self.waiting, self.running = index, waiting, 1
        self.outstanding_tokens, self.used_fraction, self._cached = outstanding, used, cached

    def cached_blocks(self, hashes):
        return self._cached


def _view(tokens):
    from scout_server.sim.views import TurnView

    return TurnView(
        program="p", session="p", agent="a", turn=2, prompt_tokens=tokens,
        prompt_hashes=range(tokens // 16), program_arrival=0.0, attained_tokens=0, tool=None,
    )  # fmt: skip


def test_affinity_does_the_cheapest_of_three():
    """Over the limit: stay when short, migrate a long context, compute a short one again."""
    router = make_router(RouterSettings(queue_limit=2), COSTS, 1)
    busy = _Views(0, 9, 2_000_000, 1000)
    idle = _Views(1, 0, 0, 0)
    assert router.route(_view(16_100), 0, [_Views(0, 1, 9, 1000), idle]) == Route(replica=0)
    moved = router.route(_view(16_100), 0, [busy, idle])
    assert (moved.replica, moved.migrate_from) == (1, 0)
    slow = make_router(
        RouterSettings(queue_limit=2), dataclasses.replace(COSTS, link_bytes_per_s=1e6), 1
    )
    assert slow.route(_view(16_100), 0, [busy, idle]) == Route(replica=1)
    assert slow.route(_view(16_100), 0, [_Views(0, 3, 100, 1000), idle]) == Route(replica=0)


def test_everything_wrong_is_said_at_once():
    """All errors of a scenario are listed, with the known names."""
    with pytest.raises(ConfigError) as caught:
        scenario_of({"cell": {"replicas": 0}, "workload": {"programs": "many"}, "nonsense": 1})
    text = str(caught.value)
    assert "3 error(s)" in text
    assert "cell.replicas" in text
    assert "workload.programs" in text
    assert "nonsense: unknown setting; known: name, seed" in text

    with pytest.raises(ConfigError) as caught:
        scenario_of({"hardware": {"gpu": "H1"}, "router": {"policy": "x"}})
    assert "2 error(s)" in str(caught.value)
    assert "round-robin" in str(caught.value)


def test_a_block_size_that_does_not_divide_is_refused():
    """The message has the allowed sizes."""
    with pytest.raises(ConfigError, match="1, 2, 4, 8, 16"):
        PromptHasher(INFO, 12)


def test_summaries_are_finite():
    """A record of a run has no infinity anywhere."""
    record = simulate(small())
    for summary in (record.jct_s, record.ttft_s, record.turn_s, record.tpot_s, record.queue_s):
        assert all(math.isfinite(v) for v in dataclasses.astuple(summary))

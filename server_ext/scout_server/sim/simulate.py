"""From a scenario to its record."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.replica import EvictionHook, Replica, Request
from scout_server.replica.latency import LatencyModel, StepBatch
from scout_server.sim.cell import Cell
from scout_server.sim.gate import Gate
from scout_server.sim.hardware import front_of, latency_of
from scout_server.sim.hardware.specs import PoolSize, find_gpu, find_model, pool_blocks
from scout_server.sim.oracle import Future
from scout_server.sim.prompts import PromptHasher
from scout_server.sim.record import CellRecord
from scout_server.sim.residency import DiscardCore, make_core
from scout_server.sim.routing import MoveCosts, make_router
from scout_server.sim.scenario import Scenario, plain
from scout_server.sim.scheduling import ScheduledTurn, make_queue
from scout_server.sim.sending import Sent
from scout_server.sim.tiers import TierAdmission, Tiers
from scout_server.sim.tools import FittedTools, ReplayTools, ToolSource, load_tools
from scout_server.sim.traces import Program, SkipCount, TraceInfo, TraceReader, by_arrival
from scout_server.sim.workload import generate, synthetic_info

__all__ = [
    "Prepared",
    "pool_of",
    "prefill_s_per_token",
    "prepare",
    "programs_of",
    "reader_of",
    "record_of",
    "simulate",
]


@dataclass(slots=True)
class Prepared:
    """A cell ready to run, and what its record needs afterwards."""

    scenario: Scenario
    cell: Cell
    replicas: list[Replica]
    tiers: Tiers | None
    pool: PoolSize
    skips: SkipCount
    """Lines of the trace that were left out."""


def reader_of(scenario: Scenario) -> TraceReader | None:
    """Return the reader of the scenario's trace; None without one, ConfigError without a file."""
    if not scenario.trace.path:
        return None
    path = Path(scenario.trace.path)
    if not path.is_file():
        msg = f"trace.path: there is no file {path}"
        raise ConfigError(msg)
    return TraceReader(path, skip_bad=scenario.trace.skip_bad)


def programs_of(
    scenario: Scenario, reader: TraceReader | None = None
) -> tuple[TraceInfo, Iterable[Program]]:
    """
    Return the header and the programs, by arrival, of the scenario's trace or workload.

    *reader*: of its trace, so that the caller learns what it left out.
    """
    reader = reader or reader_of(scenario)
    if reader is None:
        info = synthetic_info(scenario.workload, scenario.seed)
        return info, generate(scenario.workload, scenario.seed)
    programs: Iterable[Program] = by_arrival(reader)
    if scenario.trace.programs:
        programs = itertools.islice(programs, scenario.trace.programs)
    return reader.info, programs


def pool_of(scenario: Scenario) -> PoolSize:
    """Return the KV blocks of one replica; ConfigError, with the arithmetic, when none fit."""
    hardware = scenario.hardware
    return pool_blocks(
        find_model(hardware.model),
        find_gpu(hardware.gpu),
        tensor_parallel=hardware.tensor_parallel,
        memory_fraction=hardware.memory_fraction,
        block_tokens=scenario.engine.block_tokens,
        blocks=hardware.kv_blocks,
    )


def prefill_s_per_token(latency: LatencyModel, chunk: int = 2048) -> float:
    """Return the seconds per token of a long prefill."""
    return latency.step_s(StepBatch(((chunk, 0),), ())) / chunk


def _tools(scenario: Scenario) -> ToolSource:
    if scenario.tools.fitted:
        return FittedTools(load_tools(Path(scenario.tools.fitted)), scenario.seed)
    return ReplayTools(scenario.tools.scale)


def _turn_of(request: Request) -> ScheduledTurn:
    sent = request.payload
    assert isinstance(sent, Sent)
    return sent


def prepare(
    scenario: Scenario,
    source: tuple[TraceInfo, Iterable[Program]] | None = None,
    *,
    after: Prepared | None = None,
    idle_s: float = 0.0,
) -> Prepared:
    """
    Build the cell of *scenario*; *source* replaces its trace or workload.

    With *after*, a cell that has run, the replicas of that one go on, *idle_s* later, with all that
    they hold and have learnt. Nothing but the load may differ; ConfigError with tiers.
    """
    reader = reader_of(scenario) if source is None else None
    info, programs = programs_of(scenario, reader) if source is None else source
    hardware = scenario.hardware
    model = find_model(hardware.model)
    pool = pool_of(scenario)
    latency = latency_of(
        kind=hardware.latency,
        model=model,
        gpu=find_gpu(hardware.gpu),
        tensor_parallel=hardware.tensor_parallel,
        tables=hardware.tables,
        profile=hardware.profile,
    )
    per_token = prefill_s_per_token(latency)
    bt = scenario.engine.block_tokens
    future = Future() if scenario.residency.policy.startswith("oracle") else None
    count = scenario.cell.replicas
    tiers: Tiers | None = None
    needs_link = count > 1 and scenario.router.policy == "affinity"
    if scenario.tiers.dram_gb or scenario.tiers.cxl_gb or needs_link:
        tiers = Tiers(
            scenario.tiers,
            replicas=count,
            block_bytes=model.kv_bytes_per_token * bt,
            block_tokens=bt,
            prefill_s_per_token=per_token,
            link_bytes_per_s=scenario.cell.link_gbps * 1e9,
            devices=hardware.tensor_parallel,
        )
    replicas: list[Replica] = [] if after is None else after.replicas
    if after is not None and tiers is not None:
        msg = "replicas with tiers cannot go on with another load"
        raise ConfigError(msg)
    for replica in replicas:
        replica.retime(latency)
    for index in range(len(replicas), count):
        core = make_core(
            scenario.residency,
            scenario.policy,
            capacity_blocks=pool.blocks,
            block_tokens=bt,
            prefill_s_per_token=per_token,
            future=future,
        )
        on_evict = None
        if tiers is not None and (scenario.tiers.dram_gb or scenario.tiers.cxl_gb):
            on_evict = _store(tiers, index)
        replicas.append(
            Replica(
                scenario.engine,
                latency,
                kv_blocks=pool.blocks,
                core=core,
                admission=TierAdmission(tiers, index) if tiers is not None else None,
                queue=make_queue(scenario.cell.scheduler, _turn_of),
                on_evict=on_evict,
            )
        )
        if isinstance(core, DiscardCore):
            core.pool = replicas[-1].pool
    if tiers is not None:
        tiers.attach(replicas)
    costs = MoveCosts(
        block_tokens=bt,
        prefill_s_per_token=per_token,
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_bytes_per_s=scenario.cell.link_gbps * 1e9,
    )
    gate = None
    if scenario.cell.admission == "tao":
        gate = Gate(
            scenario.tao,
            replicas=count,
            capacity_tokens=pool.blocks * bt,
            slots=scenario.engine.max_num_seqs,
        )
    cell = Cell(
        programs,
        replicas,
        hasher=PromptHasher(info, bt),
        router=make_router(scenario.router, costs, scenario.seed),
        tools=_tools(scenario),
        arrivals=scenario.arrivals,
        hints=scenario.hints,
        tiers=tiers,
        future=future,
        gate=gate,
        front=front_of(
            kind=hardware.latency,
            model=model,
            gpu=find_gpu(hardware.gpu),
            profile=hardware.profile,
        ),
        start_s=0.0 if after is None else after.cell.now + idle_s,
        first_number=0 if after is None else after.cell.number,
        timeline=scenario.cell.timeline,
        sample_s=1.0 if scenario.cell.timeline else 0.0,
    )
    return Prepared(
        scenario=scenario,
        cell=cell,
        replicas=replicas,
        tiers=tiers,
        pool=pool,
        skips=reader.skips if reader is not None else SkipCount(),
    )


def _store(tiers: Tiers, index: int) -> EvictionHook:
    def on_evict(now: float, blocks: list[int], hashes: list[int | None]) -> None:
        tiers.evicted(index, now, hashes)

    return on_evict


def record_of(prepared: Prepared) -> CellRecord:
    """Return the record of a cell that has run."""
    stats, scenario = prepared.cell.stats, prepared.scenario
    counters = [replica.counters for replica in prepared.replicas]
    bt = scenario.engine.block_tokens
    makespan = prepared.cell.now
    queried = sum(c.queried_tokens for c in counters)
    hit = sum(c.hit_tokens for c in counters)
    generated = sum(c.generated_tokens for c in counters)
    tiers = prepared.tiers
    return CellRecord(
        label=scenario.name,
        settings=plain(scenario),
        programs=stats.programs,
        turns=stats.turns,
        aborted=stats.aborted,
        rejected=prepared.cell.rejected,
        kv_blocks=prepared.pool.blocks,
        makespan_s=makespan,
        jct_s=stats.jct.summary(),
        ttft_s=stats.ttft.summary(),
        turn_s=stats.turn.summary(),
        tpot_s=stats.tpot.summary(),
        queue_s=stats.queue.summary(),
        prompt_tokens=queried,
        hit_tokens=hit,
        hit_rate=hit / queried if queried else 0.0,
        generated_tokens=generated,
        tokens_per_s=generated / makespan if makespan else 0.0,
        turns_per_s=stats.turns / makespan if makespan else 0.0,
        preemptions=sum(c.preemptions for c in counters),
        recomputed_tokens=sum(c.recomputed_tokens for c in counters),
        evicted_blocks=sum(replica.pool.evicted for replica in prepared.replicas),
        steps=sum(c.steps for c in counters),
        busy_fraction=sum(c.busy_s for c in counters) / max(makespan * len(counters), 1e-9),
        moves=stats.moves,
        migrated_tokens=stats.migrated_tokens,
        fetched_tokens=tiers.fetched_blocks * bt if tiers else 0,
        stored_tokens=tiers.stored_blocks * bt if tiers else 0,
        tier_wait_s=tiers.wait_s if tiers else 0.0,
        tool_s=stats.tool_s,
        events=stats.events,
        most_live=prepared.cell.most_live,
        skipped_lines=prepared.skips.skipped,
        skip_reasons=list(prepared.skips.reasons),
        jct_points=stats.jct.points(),
        occupancy=stats.occupancy,
        spans=stats.spans,
    )


def simulate(
    scenario: Scenario, source: tuple[TraceInfo, Iterable[Program]] | None = None
) -> CellRecord:
    """Run *scenario* and return its record; equal scenarios give equal records."""
    prepared = prepare(scenario, source)
    prepared.cell.run()
    return record_of(prepared)

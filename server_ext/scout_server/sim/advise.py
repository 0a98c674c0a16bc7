"""Would Scout help on this trace, on this hardware, and if not, why not."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.sim.preflight import require_possible
from scout_server.sim.record import CellRecord
from scout_server.sim.scenario import Scenario, scenario_of
from scout_server.sim.simulate import pool_of, simulate
from scout_server.sim.traces import HashSource, Program, SkipCount, TraceReader, by_arrival
from scout_server.sim.traces.inspection import Inspection, inspect
from scout_server.sim.traces.reuse import working_set

__all__ = ["POLICIES", "Advice", "advise"]

POLICIES = ("lru", "static-ttl", "adaptive-ttl", "scout", "oracle-next-use")
"""Stock, the two kinds of time to live, Scout, and the oracle as the line of what is possible."""

_WORTH_JCT = 0.02
_WORTH_TURN = 0.03
"""Of the time in turns alone: a person's gaps drown it in a program's completion time."""
_WORTH_HITS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was simulated and what follows from it."""

    worth_it: bool
    verdict: str
    reasons: tuple[str, ...]
    records: tuple[CellRecord, ...]
    inspection: Inspection
    pool_tokens: int
    pressure: float
    """Contexts of the most programs under way at once over the KV tokens of all replicas."""
    programs: int
    skips: SkipCount
    """Broken lines that were left out."""


def _scenario(
    path: Path, block: int, policy: str, options: dict[str, object], programs: int
) -> Scenario:
    hardware = {k: options[k] for k in ("gpu", "model", "tensor_parallel", "kv_blocks")}
    return scenario_of(
        {
            "name": policy,
            "hardware": hardware,
            "engine": {"block_tokens": block, "max_batched_tokens": 8192},
            "cell": {"replicas": options["replicas"], "timeline": 0},
            "residency": {"policy": policy},
            "arrivals": {"concurrency": options["concurrency"], "speedup": options["speedup"]},
            "trace": {"path": str(path), "programs": programs},
        }
    )


def advise(
    path: Path,
    *,
    gpu: str,
    model: str,
    tensor_parallel: int = 1,
    replicas: int = 1,
    concurrency: int = 0,
    speedup: float = 1.0,
    kv_blocks: int = 0,
    programs: int = 100,
    skip_bad: bool = False,
) -> Advice:
    """
    Simulate stock, TTL, Scout and the oracle on the first *programs* programs of a trace.

    The engine's block is the trace's, at most 64 tokens: finer blocks cost time and say the same.
    """
    reader = TraceReader(path, skip_bad=skip_bad)
    kept: list[Program] = list(itertools.islice(by_arrival(reader), programs or None))
    if not kept:
        msg = f"{path.name}: there is no program to simulate"
        raise ConfigError(msg)
    block = next(b for b in (64, 32, 16, 8, 4, 2, 1) if reader.info.block_tokens % b == 0)
    options: dict[str, object] = {
        "gpu": gpu, "model": model, "tensor_parallel": tensor_parallel, "kv_blocks": kv_blocks,
        "replicas": replicas, "concurrency": concurrency, "speedup": speedup,
    }  # fmt: skip
    first = _scenario(path, block, "lru", options, programs)
    require_possible([first])
    pool_tokens = pool_of(first).blocks * block
    found = inspect(reader.info, kept, sizes=0)
    records = tuple(
        simulate(_scenario(path, block, policy, options, programs), (reader.info, kept))
        for policy in POLICIES
    )
    held = working_set(reader.info, kept, records[0].most_live)
    pressure = held / max(pool_tokens * replicas, 1)
    by_name = {record.label: record for record in records}
    stock, scout, best = by_name["lru"], by_name["scout"], by_name["oracle-next-use"]
    jct = 1 - scout.jct_s.mean / stock.jct_s.mean if stock.jct_s.mean else 0.0
    hits = scout.hit_rate - stock.hit_rate
    turns = 1 - scout.turn_s.mean / stock.turn_s.mean if stock.turn_s.mean else 0.0
    worth = jct >= _WORTH_JCT or turns >= _WORTH_TURN or (hits >= _WORTH_HITS and turns > 0)
    verdict = (
        f"{'yes' if worth else 'no'}: programs end {_sooner(jct)}, turns {_sooner(turns)} than"
        " stock,"
        f" hit rate {stock.hit_rate:.3f} -> {scout.hit_rate:.3f},"
        f" first token {stock.ttft_s.mean:.3f} s -> {scout.ttft_s.mean:.3f} s"
    )
    return Advice(
        worth_it=worth,
        verdict=verdict,
        reasons=tuple(_reasons(found, records, stock, best, pressure, pool_tokens, replicas)),
        records=records,
        inspection=found,
        pool_tokens=pool_tokens,
        pressure=pressure,
        programs=len(kept),
        skips=reader.skips,
    )


def _sooner(share: float) -> str:
    return f"{abs(share) * 100:.1f} % {'sooner' if share >= 0 else 'later'}"


def _reasons(
    found: Inspection,
    records: Sequence[CellRecord],
    stock: CellRecord,
    best: CellRecord,
    pressure: float,
    pool_tokens: int,
    replicas: int,
) -> list[str]:
    reasons = []
    if stock.rejected:
        reasons.append(
            f"{stock.rejected} programs could not run at all: a turn needs more than the"
            f" {pool_tokens:,} KV tokens of a replica"
        )
    if pressure < 0.75:
        reasons.append(
            f"pressure is too low: programs under way hold about {pressure:.2f} of the"
            f" {pool_tokens * replicas:,} KV tokens, so that little worth keeping is evicted"
        )
    if best.hit_rate - stock.hit_rate < 0.02:
        reasons.append(
            f"stock finds {stock.hit_rate:.3f} of the prompts, an oracle {best.hit_rate:.3f}:"
            " there is hardly anything to win"
        )
    # How long LRU keeps a block: the pool over the tokens that are newly stored a second.
    stored = (stock.prompt_tokens - stock.hit_tokens + stock.generated_tokens) / max(
        stock.makespan_s, 1e-9
    )
    turnover = pool_tokens * replicas / max(stored, 1e-9)
    if found.gap_s.count and found.gap_s.p90 < 0.2 * turnover:
        reasons.append(
            f"gaps are too short: nine in ten end within {found.gap_s.p90:.1f} s, while stock keeps"
            f" a block for about {turnover:.0f} s anyway"
        )
    if len(found.agents) <= 1:
        reasons.append("one agent: there is no other agent whose next call could be foreseen")
    if stock.preemptions > stock.turns // 20:
        reasons.append(
            f"requests that run fill the memory by themselves ({stock.preemptions} preemptions):"
            " admit fewer programs at once (TAO) or add replicas first"
        )
    alive = stock.jct_s.count * stock.jct_s.mean
    waited = 1 - stock.turn_s.count * stock.turn_s.mean / alive if alive else 0.0
    if waited > 0.8:
        reasons.append(
            f"{100 * waited:.0f} % of a program's time are gaps, tools and people, which no cache"
            " makes shorter"
        )
    gain = 1 - best.jct_s.mean / stock.jct_s.mean if stock.jct_s.mean else 0.0
    reasons.append(
        f"even the oracle, which knows the future, ends programs only {gain * 100:.1f} % sooner"
        if gain < 0.02
        else f"an oracle that knows the future would end programs {gain * 100:.1f} % sooner"
    )
    if found.info.hashes is HashSource.ASSUMED:
        reasons.append(
            "this trace has no measured hashes: reuse is assumed by its converter, so take the"
            " figures as a direction"
        )
    return reasons

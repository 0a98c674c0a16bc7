"""`scout bench sim`: the speed of the simulator; that its cost is linear and its memory bounded."""

import gc
import resource
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from scout_server.report import Target, command_line, emit
from scout_server.sim.consoles import wide_console
from scout_server.sim.scenario import scenario_of
from scout_server.sim.simulate import prepare, record_of, simulate

__all__ = ["sim"]

_TURNS_PER_PROGRAM = 10


def _document(programs: int, policy: str, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "hardware": {"kv_blocks": 8000},
        "cell": {"replicas": 4, "timeline": 0},
        "residency": {"policy": policy},
        "router": {"policy": "affinity"},
        "workload": {
            "programs": programs,
            "rate_per_s": 2.0,
            "turns": _TURNS_PER_PROGRAM,
            "observation_tokens": 150,
            "output_tokens": 100,
            "anchor_tokens": 400,
            "tools": [{"tool": "shell", "median_s": 2.0, "sigma": 1.0}],
        },
    }


def _live_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _runs(sizes: list[int], policy: str, seed: int) -> Iterator[dict[str, object]]:
    for turns in sizes:
        before = _live_objects()
        prepared = prepare(scenario_of(_document(turns // _TURNS_PER_PROGRAM, policy, seed)))
        begin, cpu = time.perf_counter(), time.process_time()
        prepared.cell.run()
        seconds = time.perf_counter() - begin
        cpu_s = time.process_time() - cpu
        record = record_of(prepared)
        yield {
            "turns": record.turns,
            "policy": policy,
            "seconds": seconds,
            "steps": record.steps,
            "steps/s": record.steps / seconds,
            "steps per CPU s": record.steps / cpu_s,
            "turns/s": record.turns / seconds,
            "CPU us/turn": cpu_s / record.turns * 1e6,
            "live programs, most": record.most_live,
            "objects kept": _live_objects() - before,
            "peak RSS MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "hit rate": record.hit_rate,
        }
        del prepared, record


def sim(
    largest: Annotated[
        int, typer.Option(min=1000, help="Most turns; sizes fall by tens from there, three in all.")
    ] = 1_000_000,
    policy: Annotated[str, typer.Option(help="Residency policy of the long runs.")] = "lru",
    seed: int = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Simulate 10^4, 10^5 and 10^6 turns in a cell of four replicas (H100, Llama-3.1-8B).

    Steps are engine steps of all replicas together. A decode step in which nothing can be decided
    costs next to nothing, so that steps a second depend on the load; turns a second do less.
    """
    sizes = [s for s in (largest // 100, largest // 10, largest) if s >= 100]
    rows = list(_runs(sizes, policy, seed))
    if policy != "scout":
        rows += list(_runs([sizes[0]], "scout", seed))
    again = scenario_of(_document(30, policy, seed))
    equal = simulate(again).to_json() == simulate(again).to_json()
    long = [row for row in rows if row["policy"] == policy]
    cost = [float(str(row["CPU us/turn"])) for row in long]
    objects = [float(str(row["objects kept"])) for row in long]
    steps = float(str(long[-1]["steps/s"]))
    results: dict[str, object] = {
        "runs": rows,
        "byte-identical runs": equal,
        "CPU time of a turn, largest over smallest run": cost[-1] / cost[0],
        "objects kept, largest over smallest run": objects[-1] / max(objects[0], 1.0),
    }
    targets = [
        Target.at_least("engine steps a second", steps, 50_000),
        Target.at_least("turns simulated in one run", float(str(long[-1]["turns"])), 0.95e6),
        Target.at_most("CPU time of a turn, largest over smallest run", cost[-1] / cost[0], 1.3),
        Target.at_most("objects kept, largest over smallest", objects[-1] / objects[0], 1.5),
        Target.equal("byte-identical runs", float(equal), 1.0),
    ]
    emit(wide_console(), command_line(), seed, results, targets, json_output)

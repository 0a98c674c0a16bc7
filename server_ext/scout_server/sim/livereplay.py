"""The measured cells in the simulator: same programs, same gaps, same history of the server."""

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scout_server.sim.hardware.fitted import Profile, load_profile, plain
from scout_server.sim.live import trace_of
from scout_server.sim.livecells import LiveCell, ServerKind, programs_of_cell, reference_on
from scout_server.sim.livevalidate import CellFigures, Measured, median_of
from scout_server.sim.scenario import scenario_of
from scout_server.sim.simulate import Prepared, prepare
from scout_server.sim.traces.records import Program

__all__ = ["LiveLoad", "gaps_made", "simulate_cell", "simulate_measured", "simulate_runs"]


def scenario_values(cell: LiveCell, profile: Path | str) -> dict[str, object]:
    """Return the scenario that says what *cell* is; step times come from the file *profile*."""
    return {
        "name": cell.name,
        "hardware": {
            "gpu": "CPU",
            "model": "smollm2-135m",
            "latency": "calibrated",
            "profile": str(profile),
            # vLLM keeps one block for itself
            "kv_blocks": cell.server.blocks - 1,
        },
        "engine": {
            "block_tokens": cell.server.block_tokens,
            "max_num_seqs": cell.server.max_seqs,
            "max_batched_tokens": cell.server.batched_tokens,
        },
        "cell": {"timeline": 0},
        "residency": {"policy": cell.server.eviction},
        "router": {"policy": "round-robin"},
        "arrivals": {"concurrency": cell.concurrency},
    }


Gaps = Mapping[tuple[int, int], float]
"""Seconds before a turn, by (program, turn)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLoad:
    """One run to simulate."""

    cell: LiveCell
    repetition: int
    idle_s: float = 0.0
    """Seconds since the end of the run before on this server."""
    gaps: Gaps = field(default_factory=dict)
    """Gaps that were made; those not named are as planned."""
    pace: float = 1.0
    """How much longer than in the profile everything took just then."""


def gaps_made(measured: Measured) -> Gaps:
    """
    Return the gaps that the client of a run really made: it shares its cores, and is late at times.

    Before a program's first turn: since the end of the program whose place it took.
    """
    last = {(program, turn): at for program, turn, _, _, at, _, _ in measured.requests}
    ended: dict[int, float] = {}
    for (program, _), at in last.items():
        ended[program] = max(ended.get(program, 0.0), at)
    free = sorted(ended.values())
    starts = sorted((sent, program) for program, turn, sent, *_ in measured.requests if turn == 0)
    at_once = sum(sent < free[0] for sent, _ in starts)
    found: dict[tuple[int, int], float] = {}
    for number, (sent, program) in enumerate(starts):
        since = 0.0 if number < at_once else free[number - at_once]
        found[program, 0] = max(sent - since, 0.0)
    for program, turn, sent, *_ in measured.requests:
        if turn:
            found[program, turn] = max(sent - last[program, turn - 1], 0.0)
    return found


def _with_gaps(programs: Sequence[Program], gaps: Gaps) -> list[Program]:
    return [
        replace(
            program,
            turns=tuple(
                replace(turn, gap_s=gaps.get((number, index), turn.gap_s))
                for index, turn in enumerate(program.turns)
            ),
        )
        for number, program in enumerate(programs)
    ]


def simulate_runs(runs: Sequence[LiveLoad], profile: Profile) -> list[CellFigures]:
    """
    Return what the simulator says of *runs* of one server, one after the other.

    What the server holds and has learnt when a run begins is of all those before, as on the engine.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _simulate_runs(runs, profile, Path(folder) / "profile.json")


def _simulate_runs(runs: Sequence[LiveLoad], profile: Profile, paced: Path) -> list[CellFigures]:
    found = []
    before: Prepared | None = None
    hits = queried = preemptions = generated = 0
    for number, load in enumerate(runs):
        cell = load.cell
        paced.write_text(json.dumps(plain(profile.paced(load.pace))), "utf-8")
        info, programs = trace_of(
            programs_of_cell(cell, load.repetition), cell.server.block_tokens, first_id=number << 24
        )
        prepared = prepare(
            scenario_of(scenario_values(cell, paced)),
            (info, _with_gaps(programs, load.gaps)),
            after=before,
            idle_s=load.idle_s,
        )
        prepared.cell.run()
        counters, stats = prepared.replicas[0].counters, prepared.cell.stats
        tokens = counters.generated_tokens - generated
        found.append(
            CellFigures(
                jct_s=stats.jct.mean,
                tokens_per_s=tokens / (prepared.cell.now - prepared.cell.start_s),
                hit_rate=(counters.hit_tokens - hits) / (counters.queried_tokens - queried),
                ttft_s=stats.ttft.mean,
                queue_s=stats.queue.mean,
                turn_s=stats.turn.mean,
                preemptions=counters.preemptions - preemptions,
            )
        )
        hits, queried = counters.hit_tokens, counters.queried_tokens
        preemptions, generated = counters.preemptions, counters.generated_tokens
        before = prepared
    return found


def simulate_cell(cell: LiveCell, profile: Path) -> CellFigures:
    """Return what the simulator says of *cell* on a server that has just started."""
    return simulate_runs([LiveLoad(cell=cell, repetition=1)], load_profile(profile))[0]


def simulate_measured(
    cells: Sequence[LiveCell],
    measured: Sequence[Measured],
    profile_of: Callable[[ServerKind], Path],
) -> dict[str, CellFigures]:
    """Return the median of the simulated repetitions of every cell, server by server."""
    by_name = {cell.name: cell for cell in cells}
    by_name |= {each.name: each for each in map(reference_on, {c.server for c in cells})}
    servers: dict[tuple[str, float], list[Measured]] = {}
    for m in measured:
        if m.cell in by_name:
            servers.setdefault((by_name[m.cell].server.name, m.server_at), []).append(m)
    found: dict[str, list[CellFigures]] = {}
    for each in servers.values():
        server = by_name[each[0].cell].server
        profile = profile_of(server)
        usual = simulate_cell(reference_on(server), profile).turn_s
        loads = []
        end = each[0].begun_s
        for number, m in enumerate(each):
            loads.append(
                LiveLoad(
                    cell=by_name[m.cell],
                    repetition=m.repetition,
                    idle_s=max(m.begun_s - end, 0.0),
                    gaps=gaps_made(m),
                    pace=_pace(each, number, reference_on(server).name, usual),
                )
            )
            end = m.begun_s + m.wall_s
        for load, one in zip(loads, simulate_runs(loads, load_profile(profile)), strict=True):
            found.setdefault(load.cell.name, []).append(one)
    return {name: median_of(each) for name, each in found.items()}


def _pace(runs: Sequence[Measured], number: int, reference: str, usual_s: float) -> float:
    """
    Return how much slower than *usual_s* the reference runs next to one run were.

    A server's first run does not count: it is slow, for nothing is warm yet.
    """
    beside = [m for m in runs[max(number - 1, 1) : number + 2] if m.cell == reference]
    if not beside:
        return 1.0
    return statistics.fmean(m.figures.turn_s for m in beside) / usual_s

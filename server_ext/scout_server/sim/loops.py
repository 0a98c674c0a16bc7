"""Closed loops on a server: what programs take from one another that single steps do not show."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx
import numpy as np
from numpy.typing import NDArray

from scout_server.sim.hardware.fitted import Profile
from scout_server.sim.live import run_programs
from scout_server.sim.livecells import LiveCell, ServerKind, cells_on, programs_of_cell
from scout_server.sim.livereplay import LiveLoad, gaps_made, simulate_runs
from scout_server.sim.livevalidate import CellFigures, Measured, measured_of

__all__ = ["Loop", "fit_loops", "loop_cells", "measure_loops", "run_cell"]

_FIRST = 4e-3
"""Seconds: the size of the first steps of the search."""
_TRIALS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One run of a closed loop."""

    cell: LiveCell
    measured: Measured


def loop_cells(kind: ServerKind, concurrency: Sequence[int]) -> list[LiveCell]:
    """Return the loops for a server: programs that no validation sees, and short gaps."""
    return cells_on(kind, [(n, "short") for n in concurrency], series="calibrate")


async def run_cell(
    root: str,
    model: str,
    cell: LiveCell,
    repetition: int,
    *,
    server_at: float,
    since: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Measured:
    """Run *cell* once on the server at *root*; *since* is the monotonic time of its start."""
    begun = time.monotonic() - since
    run = await run_programs(
        root,
        model,
        programs_of_cell(cell, repetition),
        concurrency=cell.concurrency,
        events=cell.server.eviction == "scout",
        transport=transport,
    )
    return measured_of(cell, repetition, run, server_at=server_at, begun_s=begun)


async def measure_loops(
    root: str,
    kind: ServerKind,
    concurrency: Sequence[int],
    seconds: float,
    say: Callable[[str], None],
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[Loop]:
    """Run the loops on the server at *root*, of that *kind*, again until *seconds* are over."""
    server_at, since = time.time(), time.monotonic()
    found: list[Loop] = []
    for repetition in itertools.count(1):
        if found and time.monotonic() - since >= seconds:
            break
        for cell in loop_cells(kind, concurrency):
            say(f"{cell.name} {repetition}")
            measured = await run_cell(
                root,
                kind.model,
                cell,
                repetition,
                server_at=server_at,
                since=since,
                transport=transport,
            )
            found.append(Loop(cell=cell, measured=measured))
    return found


def fit_loops(profile: Profile, loops: Sequence[Loop]) -> Profile:
    """
    Return *profile* with what *loops* tell, so that they take as long when they are simulated.

    They tell what a prompt takes from requests that decode, how much longer it is on its way then,
    and the pace: by what factor steps in a row take longer than single ones. `error` says how far
    loops are off afterwards: "loops". Without any, the profile stays as it is.
    """
    from scipy.optimize import minimize

    if not loops:
        return profile

    def model(x: Sequence[float]) -> Profile:
        beside, busy, pace = (float(v) for v in x)
        return replace(
            profile,
            latency=replace(profile.latency.paced(1.0 + pace), prefill_s_beside=beside * _FIRST),
            front=replace(profile.front, busy_s=busy * _FIRST),
        )

    loads = [
        LiveLoad(cell=loop.cell, repetition=loop.measured.repetition, gaps=gaps_made(loop.measured))
        for loop in loops
    ]

    def residuals(x: Sequence[float]) -> list[float]:
        guess = model(x)
        found: list[float] = []
        for loop, load in zip(loops, loads, strict=True):
            found += _apart(simulate_runs([load], guess)[0], loop.measured.figures)
        return found

    def cost(x: NDArray[np.float64]) -> float:
        return float(sum(r * r for r in residuals([float(v) for v in x])))

    start = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.05]])
    found = minimize(
        cost,
        start[0],
        method="Nelder-Mead",
        bounds=[(0.0, 10.0), (0.0, 10.0), (-0.3, 0.3)],
        options={"maxfev": _TRIALS, "initial_simplex": start, "xatol": 1e-3, "fatol": 1e-7},
    )
    best = [float(v) for v in found.x]
    off = statistics.fmean(abs(r) for r in residuals(best))
    fitted = model(best)
    return replace(fitted, error={**profile.error, "loops": round(off, 4)})


def _apart(simulated: CellFigures, measured: CellFigures) -> tuple[float, float]:
    return (
        simulated.jct_s / measured.jct_s - 1.0,
        simulated.tokens_per_s / measured.tokens_per_s - 1.0,
    )

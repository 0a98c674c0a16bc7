"""From probes of a running server to a latency profile."""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from numpy.typing import NDArray

from scout_sdk._errors import ConfigError
from scout_server.sim.hardware.fitted import FittedLatency, FrontLatency, Profile
from scout_server.sim.livekind import server_at
from scout_server.sim.loops import fit_loops, measure_loops
from scout_server.sim.probes import Calibration, FrontProbe, Probe, Probes, probe_server

__all__ = ["calibrate", "fit_front", "fit_probes", "fit_steps"]

# Coefficients in the order in which they are fitted, with a scale that makes them alike.
_SCALE = {
    "weights_s": 1e-2,
    "dense_s_per_token": 1e-4,
    "step_s_fixed": 1e-3,
    "prefill_s_per_request": 1e-3,
    "large_s_per_token": 1e-5,
    "pair_s": 1e-8,
    "sequence_s": 1e-4,
    "kv_token_s": 1e-7,
}
_LARGE = 256  # steps with fewer tokens are never large
_KNEES = (1.0, 2.0, 6.0)


def calibrate(
    url: str,
    settings: Calibration | None = None,
    *,
    gpu: str = "this machine",
    hints: bool = False,
    shape: str = "smollm2",
    transport: httpx.AsyncBaseTransport | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Profile, Probes]:
    """
    Measure the server at *url*; return its profile and what was measured.

    The server should serve nobody else meanwhile. With *hints*, requests say who they are, as those
    of agents do. *shape* names the sizes of the programs of its closed loops. ConfigError when it
    cannot be asked.
    """
    asked = settings or Calibration()

    async def measure() -> Probes:
        probes = await probe_server(url, asked, hints=hints, transport=transport, progress=progress)
        if probes.inside and asked.loops:
            async with httpx.AsyncClient(base_url=url, transport=transport) as client:
                kind = await server_at(client, shape=shape, batched_tokens=2048)
            probes.loops = await measure_loops(
                url, kind, asked.loops, asked.loops_s, progress, transport=transport
            )
        return probes

    probes = asyncio.run(measure())
    return fit_probes(probes, gpu=gpu, source=f"measured at {url}"), probes


def fit_probes(probes: Probes, *, gpu: str, source: str) -> Profile:
    """Return the profile of *probes*; ConfigError when there is too little to fit."""
    latency, error = fit_steps(probes.steps)
    note = "step times as the server counts them"
    if not probes.inside:
        note = "times include the server's HTTP front end, since it does not count its own"
    profile = Profile(
        gpu=gpu,
        model=probes.model,
        latency=latency,
        source=source,
        error=error,
        note=note,
        front=fit_front(probes.front) if probes.inside else FrontLatency(),
    )
    return fit_loops(profile, probes.loops)


def fit_front(probes: Sequence[FrontProbe]) -> FrontLatency:
    """
    Return what passes outside the engine: a line over prompt tokens through the medians.

    Only the sum of both ways is measured; the reply is given a third of the fixed part.
    """
    lengths = sorted({p.prompt_tokens for p in probes})
    if not lengths:
        return FrontLatency()
    medians = [
        statistics.median(p.seconds for p in probes if p.prompt_tokens == n) for n in lengths
    ]
    slope, fixed = (
        (0.0, medians[0])
        if len(lengths) < 2
        else (float(v) for v in np.polyfit(lengths, medians, 1))
    )
    fixed, slope = max(fixed, 0.0), max(slope, 0.0)
    return FrontLatency(
        request_s_fixed=fixed * 2 / 3,
        request_s_per_token=slope,
        reply_s=fixed / 3,
    )


def fit_steps(probes: Sequence[Probe]) -> tuple[FittedLatency, dict[str, float]]:
    """
    Fit the coefficients of `FittedLatency`, none negative, to relative errors of step times.

    Returns also the mean absolute relative error of prompts alone and of decoding, and how far
    repeats of one probe were apart. ConfigError when there is too little to fit.
    """
    from scipy.optimize import least_squares

    prompts = [p for p in probes if p.prefill and not p.sequences]
    decodes = [p for p in probes if not p.prefill]
    if len({p.prefill for p in prompts}) < 3 or len({p.sequences for p in decodes}) < 2:
        msg = "too little was measured: 3 prompt lengths and 2 concurrencies are needed"
        raise ConfigError(msg)
    names = list(_SCALE)

    # where steps are large is tried: between the lengths that were measured, and nowhere
    lengths = sorted({_tokens(p) for p in prompts})
    borders = [(a + b) / 2 for a, b in itertools.pairwise(lengths) if a >= _LARGE] + [0.0]

    def model(x: Sequence[float], large: float) -> FittedLatency:
        values = {n: float(v) * _SCALE[n] for n, v in zip(names, x[:-1], strict=True)}
        return _latency(values, float(x[-1]), large)

    best: tuple[float, FittedLatency] | None = None
    for large in borders:

        def residuals(x: NDArray[np.float64], large: float = large) -> list[float]:
            latency = model([float(v) for v in x], large)
            return [_predicted(latency, p) / p.seconds - 1.0 for p in probes]

        for knee in _KNEES:
            found = least_squares(
                residuals,
                np.array([*np.ones(len(names)), knee]),
                bounds=([0.0] * len(names) + [1.0], [np.inf] * len(names) + [16.0]),
                loss="soft_l1",
                f_scale=0.05,
                max_nfev=200,
            )
            if best is None or found.cost < 0.98 * best[0]:
                best = (float(found.cost), model([float(v) for v in found.x], large))
    assert best is not None
    latency = best[1]
    error = {
        name: round(
            statistics.fmean(abs(_predicted(latency, p) / p.seconds - 1.0) for p in part), 4
        )
        for name, part in (("prefill", prompts), ("decode", decodes))
    }
    error["repeats"] = round(statistics.fmean(p.spread for p in probes), 4)
    return latency, error


def _latency(values: dict[str, float], knee: float, large: float) -> FittedLatency:
    if not large:
        values["large_s_per_token"] = 0.0
    return FittedLatency(knee=knee, dense_s_fixed=0.0, large_tokens=large, **values)


def _tokens(probe: Probe) -> int:
    return probe.sequences + sum(new for new, _ in probe.prefill)


def _predicted(latency: FittedLatency, probe: Probe) -> float:
    return latency.mixed_s(probe.prefill, probe.sequences, round(probe.context_tokens))

"""From probes of a running server to a latency profile."""

import asyncio
import statistics
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from numpy.typing import NDArray

from scout_sdk._errors import ConfigError
from scout_server.sim.hardware.fitted import FittedLatency, FrontLatency, Profile
from scout_server.sim.probes import Calibration, FrontProbe, Probe, Probes, probe_server

__all__ = ["calibrate", "fit_front", "fit_probes", "fit_steps"]

# Coefficients in the order in which they are fitted, with a scale that makes them alike.
_SCALE = {
    "weights_s": 1e-2,
    "dense_s_per_token": 1e-4,
    "step_s_fixed": 1e-3,
    "prefill_s_per_request": 1e-3,
    "pair_s": 1e-8,
    "sequence_s": 1e-4,
    "kv_token_s": 1e-7,
}
_KNEES = (1.0, 2.0, 4.0, 12.0)


def calibrate(
    url: str,
    settings: Calibration | None = None,
    *,
    gpu: str = "this machine",
    transport: httpx.AsyncBaseTransport | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Profile, Probes]:
    """
    Measure the server at *url*; return its profile and what was measured.

    The server should serve nobody else meanwhile. ConfigError when it cannot be asked.
    """
    probes = asyncio.run(probe_server(url, settings, transport=transport, progress=progress))
    return fit_probes(probes, gpu=gpu, source=f"measured at {url}"), probes


def fit_probes(probes: Probes, *, gpu: str, source: str) -> Profile:
    """Return the profile of *probes*; ConfigError when there is too little to fit."""
    latency, error = fit_steps(probes.steps)
    note = "step times as the server counts them"
    if not probes.inside:
        note = "times include the server's HTTP front end, since it does not count its own"
    return Profile(
        gpu=gpu,
        model=probes.model,
        latency=latency,
        source=source,
        error=error,
        note=note,
        front=fit_front(probes.front) if probes.inside else FrontLatency(),
    )


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
    fixed = max(fixed, 0.0)
    return FrontLatency(
        request_s_fixed=fixed * 2 / 3,
        request_s_per_token=max(slope, 0.0),
        reply_s=fixed / 3,
    )


def fit_steps(probes: Sequence[Probe]) -> tuple[FittedLatency, dict[str, float]]:
    """
    Fit the coefficients of `FittedLatency`, none negative, to relative errors of step times.

    Returns also the mean absolute relative error of prompts alone, of decoding, and of both in one
    step, and how far repeats of one probe were apart. ConfigError when there is too little to fit.
    """
    from scipy.optimize import least_squares

    prompts = [p for p in probes if p.prefill and not p.sequences]
    decodes = [p for p in probes if not p.prefill]
    if len({p.prefill for p in prompts}) < 3 or len({p.sequences for p in decodes}) < 2:
        msg = "too little was measured: 3 prompt lengths and 2 concurrencies are needed"
        raise ConfigError(msg)
    names = list(_SCALE)
    scale = list(_SCALE.values())

    def model(values: Sequence[float], knee: float) -> FittedLatency:
        return _latency(dict(zip(names, values, strict=True)), knee)

    def residuals(x: NDArray[np.float64]) -> list[float]:
        latency = model([float(v) * s for v, s in zip(x[:-1], scale, strict=True)], float(x[-1]))
        return [_predicted(latency, p) / p.seconds - 1.0 for p in probes]

    best = None
    for knee in _KNEES:
        start = np.array([*np.ones(len(names)), knee])
        found = least_squares(
            residuals,
            start,
            bounds=([0.0] * len(names) + [1.0], [np.inf] * len(names) + [16.0]),
            loss="soft_l1",
            f_scale=0.05,
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    fitted = [float(v) * s for v, s in zip(best.x[:-1], scale, strict=True)]
    latency = model(fitted, float(best.x[-1]))
    mixed = [p for p in probes if p.prefill and p.sequences]
    error = {
        name: round(
            statistics.fmean(abs(_predicted(latency, p) / p.seconds - 1.0) for p in part), 4
        )
        for name, part in (("prefill", prompts), ("decode", decodes), ("mixed", mixed))
        if part
    }
    error["repeats"] = round(statistics.fmean(p.spread for p in probes), 4)
    return latency, error


def _latency(values: dict[str, float], knee: float) -> FittedLatency:
    return FittedLatency(knee=knee, dense_s_fixed=0.0, **values)


def _predicted(latency: FittedLatency, probe: Probe) -> float:
    return latency.mixed_s(probe.prefill, probe.sequences, round(probe.context_tokens))

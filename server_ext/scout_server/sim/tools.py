"""How long tools take: from the trace, or from a distribution fitted per tool."""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import pydantic

from scout_sdk._errors import ConfigError
from scout_server.sim.traces.records import Program, Turn

__all__ = [
    "FittedTools",
    "ReplayTools",
    "ToolFit",
    "ToolSource",
    "durations_by_tool",
    "fit_tool",
    "fit_tools",
    "load_tools",
    "save_tools",
]

_NORMAL = NormalDist()
_UNKNOWN = "unknown"


class ToolSource(Protocol):
    """Answers: how long does the gap before this turn really last?"""

    def gap_s(self, program: Program, index: int) -> float:
        """Return the seconds before turn *index* of *program*; the same at every call."""


class ReplayTools:
    """The durations that the trace recorded, times *scale*."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def gap_s(self, program: Program, index: int) -> float:
        """Return the recorded gap."""
        return program.turns[index].gap_s * self._scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFit:
    """
    One tool's durations: a lognormal body, a Pareto tail, a timeout cap.

    Means say little where the tail index is near 1; compare quantiles.
    """

    samples: int
    censored: int
    log_median: float
    """Logarithm of the body's median, seconds."""
    log_sigma: float
    tail_from_s: float
    """Where the tail begins; infinite: there is none."""
    tail_share: float
    """Share of the durations beyond it."""
    tail_index: float
    """Pareto index: the smaller, the heavier; 1 or less has no mean."""
    cap_s: float
    """Timeout: nothing takes longer; infinite: none was seen."""

    def quantile(self, share: float) -> float:
        """Return the duration, seconds, that *share* of the calls do not exceed."""
        body = 1.0 - self.tail_share
        if share > body and self.tail_share > 0.0:
            left = max((1.0 - share) / self.tail_share, 1e-12)
            return float(min(self.tail_from_s * left ** (-1.0 / self.tail_index), self.cap_s))
        if self.log_sigma == 0.0:
            return min(math.exp(self.log_median), self.cap_s)
        below = 1.0
        if self.tail_share > 0.0:
            below = _NORMAL.cdf((math.log(self.tail_from_s) - self.log_median) / self.log_sigma)
        p = min(max(share / body * below, 1e-12), 1.0 - 1e-12)
        return min(math.exp(self.log_median + self.log_sigma * _NORMAL.inv_cdf(p)), self.cap_s)


def _censored_lognormal(values: Sequence[float], cut: Sequence[bool]) -> tuple[float, float]:
    """Return (mean, deviation) of the logarithm by EM; values marked in *cut* are lower bounds."""
    logs = [math.log(max(value, 1e-6)) for value in values]
    mean = math.fsum(logs) / len(logs)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / len(logs))
    if not any(cut) or sigma == 0.0:
        return mean, sigma
    for _ in range(50):
        first, second = [], []
        for x, bound in zip(logs, cut, strict=True):
            if not bound:
                first.append(x)
                second.append(x * x)
                continue
            z = (x - mean) / sigma
            survive = max(1.0 - _NORMAL.cdf(z), 1e-12)
            hazard = _NORMAL.pdf(z) / survive
            first.append(mean + sigma * hazard)
            second.append(mean**2 + sigma**2 + sigma * hazard * (x + mean))
        old = mean
        mean = math.fsum(first) / len(first)
        sigma = math.sqrt(max(math.fsum(second) / len(second) - mean**2, 1e-12))
        if abs(mean - old) < 1e-6:
            break
    return mean, sigma


def fit_tool(
    values: Sequence[float], censored: Sequence[bool] | None = None, *, tail_share: float = 0.05
) -> ToolFit:
    """
    Fit one tool's durations; *censored* marks those that are lower bounds.

    The body is fitted to all values up to the tail, robustly: by its quartiles where nothing below
    the tail is cut off, by censored maximum likelihood otherwise. The tail index is Hill's.
    """
    if not values:
        msg = "cannot fit a tool without durations"
        raise ConfigError(msg)
    cut = list(censored) if censored is not None else [False] * len(values)
    pairs = sorted(zip((max(v, 1e-6) for v in values), cut, strict=True))
    ordered = [value for value, _ in pairs]
    flags = [flag for _, flag in pairs]
    count = len(ordered)
    cap = _cap(ordered, flags)
    tail_count = int(count * tail_share)
    if tail_count < 5 or ordered[-1] <= ordered[0]:
        mean, sigma = _censored_lognormal(ordered, flags)
        return ToolFit(
            samples=count, censored=sum(flags), log_median=mean, log_sigma=sigma,
            tail_from_s=math.inf, tail_share=0.0, tail_index=math.inf, cap_s=cap,
        )  # fmt: skip
    start = ordered[count - tail_count - 1]
    above = [(v, f or v >= cap) for v, f in pairs[count - tail_count :]]
    excess = math.fsum(math.log(v / start) for v, _ in above)
    ended = sum(1 for _, f in above if not f)
    index = max(ended, 1) / excess if excess > 0 else math.inf
    body, marks = ordered[: count - tail_count], flags[: count - tail_count]
    if any(marks):
        mean, sigma = _censored_lognormal(body, marks)
    else:
        mean, sigma = _truncated_by_quartiles(body, tail_count / count)
    if math.isinf(index):
        tail_count = 0
    return ToolFit(
        samples=count, censored=sum(flags), log_median=mean, log_sigma=sigma,
        tail_from_s=start if tail_count else math.inf, tail_share=tail_count / count,
        tail_index=min(index, 50.0), cap_s=cap,
    )  # fmt: skip


def _truncated_by_quartiles(body: Sequence[float], tail: float) -> tuple[float, float]:
    """Return the lognormal whose part below the tail has the median and p90 of *body*."""
    low, high = 0.5 * (1 - tail), 0.9 * (1 - tail)
    at_low = math.log(body[int(0.5 * (len(body) - 1))])
    at_high = math.log(body[int(0.9 * (len(body) - 1))])
    z_low, z_high = _NORMAL.inv_cdf(low), _NORMAL.inv_cdf(high)
    sigma = max((at_high - at_low) / (z_high - z_low), 0.0)
    return at_low - sigma * z_low, sigma


def _cap(ordered: Sequence[float], flags: Sequence[bool]) -> float:
    """Return the timeout that the largest values stick to, or infinity."""
    most = ordered[-1]
    sticking = [i for i, value in enumerate(ordered) if value >= 0.995 * most]
    if any(flags[i] for i in sticking) or len(sticking) >= max(4, len(ordered) // 200):
        return most
    return math.inf


def fit_tools(programs: Iterable[Program], *, least_samples: int = 8) -> dict[str, ToolFit]:
    """Fit every tool that occurs often enough; the rest and the unnamed are one, `unknown`."""
    values: dict[str, list[float]] = {}
    cuts: dict[str, list[bool]] = {}
    for program in programs:
        for turn in program.turns:
            if not turn.parents:
                continue
            name = turn.tool or _UNKNOWN
            values.setdefault(name, []).append(turn.gap_s)
            cuts.setdefault(name, []).append(turn.gap_censored)
    for name in [n for n, v in values.items() if len(v) < least_samples and n != _UNKNOWN]:
        values.setdefault(_UNKNOWN, []).extend(values.pop(name))
        cuts.setdefault(_UNKNOWN, []).extend(cuts.pop(name))
    return {name: fit_tool(values[name], cuts[name]) for name in sorted(values) if values[name]}


def durations_by_tool(
    programs: Iterable[Program], fits: Mapping[str, ToolFit]
) -> dict[str, list[float]]:
    """Return the durations that each of *fits* stands for."""
    found: dict[str, list[float]] = {name: [] for name in fits}
    for program in programs:
        for turn in program.turns:
            if turn.parents:
                name = turn.tool if turn.tool in found else _UNKNOWN
                found.setdefault(name or _UNKNOWN, []).append(turn.gap_s)
    return found


class FittedTools:
    """Durations drawn from fitted distributions: one draw per (seed, program, turn)."""

    def __init__(self, fits: Mapping[str, ToolFit], seed: int) -> None:
        if not fits:
            msg = "fitted tools need at least one tool"
            raise ConfigError(msg)
        self._fits = fits
        self._seed = seed
        self._default = fits.get(_UNKNOWN) or fits[min(fits)]

    def _fit(self, turn: Turn) -> ToolFit:
        return self._fits.get(turn.tool or _UNKNOWN, self._default)

    def gap_s(self, program: Program, index: int) -> float:
        """Return a draw that depends on nothing but seed, program and turn."""
        turn = program.turns[index]
        if not turn.parents:
            return turn.gap_s
        rng = random.Random(f"{self._seed} {program.program} {index}")
        return self._fit(turn).quantile(rng.random())


def save_tools(path: Path, fits: Mapping[str, ToolFit]) -> None:
    """Write *fits* as JSON; infinity is written as null."""
    plain = {
        name: {k: None if v == math.inf else v for k, v in asdict(fit).items()}
        for name, fit in sorted(fits.items())
    }
    path.write_text(json.dumps({"scout_tools": 1, "tools": plain}, indent=1) + "\n", "utf-8")


def load_tools(path: Path) -> dict[str, ToolFit]:
    """Read what `save_tools` wrote; ConfigError names file and tool."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tools = raw["tools"]
        if not isinstance(tools, dict) or not tools:
            msg = f"{path.name}: tools: must name at least one tool"
            raise ConfigError(msg)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror or error}"
        raise ConfigError(msg) from error
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{path.name}: not a file of fitted tools: {error!r}"
        raise ConfigError(msg) from error
    adapter = pydantic.TypeAdapter(ToolFit)
    fits = {}
    for name, values in tools.items():
        try:
            plain = {k: math.inf if v is None else v for k, v in values.items()}
            fits[name] = adapter.validate_python(plain)
        except (pydantic.ValidationError, AttributeError) as error:
            msg = f"{path.name}: tool {name!r}: {error}"
            raise ConfigError(msg) from error
    return fits

"""How long a session stays away: learnt distributions, per class of gap, and hints' errors."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scout_server.policy.lengths import lift_of

__all__ = ["EDGES", "GapModel", "HintTrust", "normal_cdf"]

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LOW, _HIGH, _BINS = 0.01, 1e5, 96
_STEP = math.log(_HIGH / _LOW) / _BINS
EDGES = _LOW * np.exp(_STEP * np.arange(_BINS + 1))
"""Bounds of the bins of every gap distribution, in seconds."""
_ERROR_RANGE, _ERROR_STEP = 6.0, 0.1  # of ln(real / promised)
_ERRORS = round(2 * _ERROR_RANGE / _ERROR_STEP)
_ERROR_EDGES = np.linspace(-_ERROR_RANGE, _ERROR_RANGE, _ERRORS + 1)
_ERF_STEP = 0.01
_ERF = np.array([0.5 * (1 + math.erf(x * _ERF_STEP / math.sqrt(2))) for x in range(-800, 801)])


def normal_cdf(z: Array) -> Array:
    """Return the standard normal distribution function of *z*, to about 1e-5."""
    at = np.clip(z / _ERF_STEP + 800.0, 0.0, 1600.0)
    low = np.minimum(at.astype(np.int64), 1599)
    part = at - low
    return np.asarray(_ERF[low] * (1 - part) + _ERF[low + 1] * part)


def _bin(seconds: float) -> int:
    if seconds <= _LOW:
        return 0
    place = int(math.log(seconds / _LOW) / _STEP)
    return place if place < _BINS else _BINS - 1


_FADE = 0.5 ** (1 / 2000.0)  # of a gap's weight with every later one


class _Class:
    """A fading histogram; what fades is kept as it is, and what is new weighs more."""

    __slots__ = ("_ends", "_hist", "_sum", "_weight", "cdf", "dirty")

    def __init__(self) -> None:
        self._hist = [0.0] * _BINS
        self._sum = 0.0
        self._ends = 0.0
        self._weight = 1.0
        self.cdf: Array | None = None
        self.dirty = 0

    @property
    def count(self) -> float:
        """How many gaps it has, faded."""
        return self._sum / self._weight

    @property
    def ended(self) -> float:
        """How many sessions ended instead, faded."""
        return self._ends / self._weight

    def end(self, change: float) -> None:
        """Learn one end (1), or that it was none (-1)."""
        self._ends = max(0.0, self._ends + change * self._weight)

    @property
    def hist(self) -> Array:
        """Return how many gaps it has in each bin, faded."""
        return np.asarray(np.array(self._hist) / self._weight)

    def add(self, place: int, *, spread: bool = True) -> None:
        """Learn one gap; *spread*: half of it is in the bins beside."""
        hist = self._hist
        weight = self._weight = self._weight / _FADE
        self._sum += weight
        if spread:
            hist[place] += 0.5 * weight
            hist[place - 1 if place else 0] += 0.25 * weight
            hist[place + 1 if place < _BINS - 1 else place] += 0.25 * weight
        else:
            hist[place] += weight
        self.dirty += 1
        if weight > 1e9:
            self._hist = [each / weight for each in hist]
            self._sum /= weight
            self._ends /= weight
            self._weight = 1.0

    @classmethod
    def restored(cls, value: object) -> "_Class":
        """Return the class that a snapshot holds; ValueError when it is damaged."""
        if not isinstance(value, list) or len(value) not in (2, 3) or len(value[1]) != _BINS:
            raise ValueError("a gap histogram is damaged")
        entry = cls()
        count, hist = float(value[0]), np.array(value[1], dtype=np.float64)
        entry._sum, entry._hist = count, hist.tolist()
        entry._ends = float(value[2]) if len(value) > 2 else 0.0
        entry.dirty = 1 << 20
        if not (np.isfinite(hist).all() and (hist >= 0).all() and min(count, entry._ends) >= 0):
            raise ValueError("a gap histogram is damaged")
        return entry


class GapModel:
    """
    Answers: how likely does a session come back within t, having been away for e?

    A histogram over log-spaced bins per class of gap (why the last request ended, which tool),
    shrunk towards that of all gaps, which is shrunk towards a lognormal fitted to it. Old gaps
    fade. What never returned is not in here: that is the session's end, see Transitions.
    """

    CLASS_PRIOR = 8.0
    GLOBAL_PRIOR = 12.0

    def __init__(self, *, max_classes: int = 256) -> None:
        self._max = max_classes
        self._classes: OrderedDict[str, _Class] = OrderedDict()
        self._all = _Class()
        self._cycles = _Class()
        self._mean, self._square = 1.0, 1.0 + 1.5**2  # of ln gap, from a few pseudo-gaps
        self._weight = 3.0
        self._pmf: Array | None = None
        self.version = 0

    def observe(self, kind: str, seconds: float) -> None:
        """Learn one gap of class *kind*."""
        place = _bin(seconds)
        entry = self._classes.get(kind)
        if entry is None:
            entry = self._classes[kind] = _Class()
            if len(self._classes) > self._max:
                self._classes.popitem(last=False)
        else:
            self._classes.move_to_end(kind)
        entry.add(place)
        self._all.add(place)
        log = math.log(min(max(seconds, _LOW), _HIGH))
        weight = self._weight = self._weight * _FADE + 1.0
        rate = 1.0 / weight
        self._mean += rate * (log - self._mean)
        self._square += rate * (log * log - self._square)
        self.version += 1

    def observe_end(self, kind: str, change: float = 1.0) -> None:
        """Learn that a session ended in a gap of class *kind*; -1: that it proved not to be one."""
        self._all.end(change)
        entry = self._classes.get(kind)
        if entry is not None:
            entry.end(change)

    def end_lift(self, kind: str) -> float:
        """Return by how much the odds of a session's end differ in a gap of class *kind*."""
        entry, every = self._classes.get(kind), self._all
        if entry is None or every.ended <= 0.0:
            return 1.0
        usual = every.ended / (every.ended + every.count)
        return float(lift_of(entry.ended, entry.count, usual, self.CLASS_PRIOR)[1])

    @property
    def log_mean(self) -> float:
        """Mean of ln gap."""
        return self._mean

    @property
    def log_deviation(self) -> float:
        """Standard deviation of ln gap."""
        return math.sqrt(max(self._square - self._mean**2, 0.01))

    def patience(self, deviations: float = 2.6) -> float:
        """Return the silence in seconds after which a session is taken for ended."""
        return math.exp(min(self._mean + deviations * self.log_deviation, 20.0))

    def _global(self) -> Array:
        if self._pmf is None or self._all.dirty > 16:
            z = (np.log(EDGES) - self._mean) / self.log_deviation
            cdf = normal_cdf(z)
            cdf[0], cdf[-1] = 0.0, 1.0
            prior = np.diff(cdf)
            self._pmf = (self._all.hist + self.GLOBAL_PRIOR * prior) / (
                self._all.count + self.GLOBAL_PRIOR
            )
            self._all.dirty = 0
        return self._pmf

    def cdf(self, kind: str) -> Array:
        """Return the distribution function of class *kind* at the bin edges."""
        entry = self._classes.get(kind)
        pmf = self._global()
        if entry is None:
            if self._all.cdf is None or self._all.dirty == 0:
                self._all.cdf = np.concatenate(([0.0], np.cumsum(pmf)))
            return self._all.cdf
        if entry.cdf is None or entry.dirty > 0.05 * entry.count:
            mixed = (entry.hist + self.CLASS_PRIOR * pmf) / (entry.count + self.CLASS_PRIOR)
            entry.cdf = np.concatenate(([0.0], np.cumsum(mixed)))
            entry.dirty = 0
        return entry.cdf

    def observe_cycle(self, seconds: float) -> None:
        """Learn one time between two arrivals of a session."""
        self._cycles.add(_bin(seconds), spread=False)

    def cycle(self) -> Array:
        """Return the distribution function of the time between two arrivals of a session."""
        entry = self._cycles
        if entry.cdf is None or entry.dirty > 0.05 * entry.count:
            prior = self._global()
            mixed = (entry.hist + self.CLASS_PRIOR * prior) / (entry.count + self.CLASS_PRIOR)
            entry.cdf = np.concatenate(([0.0], np.cumsum(mixed)))
            entry.dirty = 0
        return entry.cdf

    def density(self, kind: str, seconds: float) -> float:
        """Return the density of ln gap at *seconds* for class *kind*."""
        cdf = self.cdf(kind)
        at = _bin(seconds)
        low, high = max(0, at - 1), min(_BINS, at + 2)
        return float(cdf[high] - cdf[low]) / ((high - low) * _STEP)

    @staticmethod
    def at(cdfs: Array, which: Sequence[int] | Ints, seconds: Array) -> Array:
        """Return F(seconds) (S×n), each row by that of the stacked *cdfs* whose number it has."""
        place = np.log(np.maximum(seconds, _LOW) / _LOW) / _STEP  # 0 or more
        low = np.minimum(place.astype(np.int64), _BINS - 1)
        part = np.minimum(place - low, 1.0)
        low += np.asarray(which, dtype=np.int64)[:, None] * cdfs.shape[1]
        left, right = cdfs.take(low), cdfs.take(low + 1)
        return np.asarray(left + (right - left) * part)

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data."""
        return {
            "mean": self._mean,
            "square": self._square,
            "weight": self._weight,
            "cycles": [self._cycles.count, self._cycles.hist.tolist()],
            "all": [self._all.count, self._all.hist.tolist(), self._all.ended],
            "classes": {
                kind: [entry.count, entry.hist.tolist(), entry.ended]
                for kind, entry in self._classes.items()
            },
        }

    def restore(self, state: dict[str, object]) -> None:
        """Take over *state*; ValueError when it is damaged."""
        fresh = GapModel(max_classes=self._max)
        fresh._mean = float(str(state["mean"]))
        fresh._square = float(str(state["square"]))
        fresh._weight = float(str(state["weight"]))
        classes = state["classes"]
        if not isinstance(classes, dict):
            raise ValueError("field 'classes' of the snapshot is damaged")
        fresh._all = _Class.restored(state["all"])
        fresh._cycles = _Class.restored(state["cycles"])
        for kind, value in classes.items():
            fresh._classes[str(kind)] = _Class.restored(value)
        if not np.isfinite([fresh._mean, fresh._square, fresh._weight]).all():
            raise ValueError("the gap model of the snapshot is not finite")
        self.__dict__.update(fresh.__dict__)
        self.version += 1


class HintTrust:
    """
    Answers: what is one client's promise of a return time worth?

    Two experts compete on every gap that came with a hint: the hint, with the distribution of the
    client's own past errors (a histogram of ln real / promised, shrunk to a lognormal), and the
    learnt gaps. Weights follow their likelihoods (Bayes, with forgetting), so a client that is
    wrong, randomly or on purpose, is soon ignored.
    """

    FORGET = 0.97
    PRIOR = 4.0
    SHRINK = 12.0

    __slots__ = ("_cdf", "_count", "_odds", "_seen", "bias", "final_kept", "final_said", "variance")

    def __init__(self) -> None:
        self._odds = 1.5  # log odds for the hint
        self._count = self.PRIOR
        self._seen: Array = np.zeros(_ERRORS)
        self._cdf: Array | None = None
        self.bias = 0.0
        self.variance = 0.6**2
        self.final_said = 0.0
        self.final_kept = 0.0

    @property
    def weight(self) -> float:
        """Weight of the hint against the learnt gaps, in [0, 1]."""
        return 1.0 / (1.0 + math.exp(-min(max(self._odds, -30.0), 30.0)))

    @property
    def deviation(self) -> float:
        """Spread of ln(real / promised)."""
        return math.sqrt(self.variance)

    @property
    def cdf(self) -> Array:
        """Distribution function of ln(real / promised) at the edges of the error bins."""
        if self._cdf is None:
            prior = normal_cdf((_ERROR_EDGES - self.bias) / self.deviation)
            prior[0], prior[-1] = 0.0, 1.0
            seen = np.concatenate(([0.0], np.cumsum(self._seen)))
            self._cdf = (seen + self.SHRINK * prior) / (seen[-1] + self.SHRINK)
        return self._cdf

    @staticmethod
    def error_at(cdfs: Array, errors: Array) -> Array:
        """Return row-wise F(error) for stacked distribution functions (S×edges, S×n)."""
        place = (errors + _ERROR_RANGE) / _ERROR_STEP
        low = np.clip(place.astype(np.int64), 0, _ERRORS - 1)
        part = np.clip(place - low, 0.0, 1.0)
        left = np.take_along_axis(cdfs, low, axis=1)
        right = np.take_along_axis(cdfs, low + 1, axis=1)
        return np.asarray(left + (right - left) * part)

    def learn(self, promised: float, real: float, own_density: float) -> None:
        """Learn from a hint of *promised* seconds that turned out *real*."""
        promised, real = max(promised, 0.05), max(real, 0.05)
        error = math.log(real / promised)
        place = min(max(int((error + _ERROR_RANGE) / _ERROR_STEP), 0), _ERRORS - 1)
        cdf = self.cdf
        low, high = max(0, place - 1), min(_ERRORS, place + 2)
        density = float(cdf[high] - cdf[low]) / ((high - low) * _ERROR_STEP)
        gain = math.log(max(density, 1e-4) / max(own_density, 1e-4))
        self._odds = min(max(self.FORGET * self._odds + gain, -12.0), 12.0)
        self._count = min(self._count + 1.0, 60.0)
        rate = 1.0 / self._count
        delta = error - self.bias
        self.bias += rate * delta
        spread = delta * (error - self.bias)
        self.variance = max(0.01, self.variance + rate * (spread - self.variance))
        self._seen *= 0.995
        self._seen[place] += 0.5
        self._seen[max(0, place - 1)] += 0.25
        self._seen[min(_ERRORS - 1, place + 1)] += 0.25
        self._cdf = None

    @property
    def final(self) -> float:
        """Probability that a session ends when the client says so."""
        return (self.final_kept + 8.0) / (self.final_said + 8.4)

    def snapshot(self) -> list[float]:
        """Return the state as plain data."""
        return [
            self._odds,
            self._count,
            self.bias,
            self.variance,
            self.final_said,
            self.final_kept,
        ]

    def restore(self, values: object) -> None:
        """Take over *values*; ValueError when they are damaged."""
        if not isinstance(values, list) or len(values) != 6:
            raise ValueError("the record of hints is damaged")
        numbers = [float(value) for value in values]
        if not all(math.isfinite(number) for number in numbers) or numbers[3] <= 0:
            raise ValueError("the record of hints is damaged")
        self._odds, self._count, self.bias, self.variance = numbers[:4]
        self.final_said, self.final_kept = numbers[4:]

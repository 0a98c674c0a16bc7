"""How long sessions are: the chance that one ends, by the number of its requests so far."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["SessionLengths", "lift_of"]

Array = npt.NDArray[np.float64]

_EACH = 16  # turns that have a bin of their own; later bins are an eighth of their turn wide
_TURNS = 256  # turns told apart
_MAX_ODDS = 100.0
_MEMORY = 20_000.0  # turns remembered before all of them count half


def _bins() -> list[int]:
    """Return the bin of every turn."""
    bins = list(range(_EACH + 1))
    start = _EACH + 1
    while start < _TURNS:
        width = max(1, start // 8)
        bins += [bins[-1] + 1] * width
        start += width
    return bins[:_TURNS]


_BIN = _bins()


def lift_of(
    ended: Array | float, returned: Array | float, usual: float, prior: float
) -> tuple[Array, Array]:
    """
    Return how likely ends are by counts, and by how much their odds differ from the usual.

    Shrunk towards *usual* as by *prior* more sessions; odds differ by 100 times at most.
    """
    chance = np.asarray((ended + prior * usual) / (ended + returned + prior))
    odds = chance * (1.0 - usual) / np.maximum(usual * (1.0 - chance), 1e-9)
    return chance, np.clip(odds, 1.0 / _MAX_ODDS, _MAX_ODDS)


class SessionLengths:
    """
    Answers: how much likelier than usual is it that a session ends after its n-th request?

    Counts of returns and ends per number of requests made, shrunk to their common ratio. Only what
    the number of requests says beyond that ratio is used: see `lift` and `ratios`.
    """

    PRIOR = 8.0

    def __init__(self) -> None:
        size = _BIN[-1] + 1
        self._returns = [0.0] * size
        self._ends = [0.0] * size
        self._total = 0.0
        self._learnt = 0
        self._tables: tuple[int, Array, Array] | None = None

    def returned(self, turns: int) -> None:
        """Learn that a session came back after *turns* requests."""
        self._returns[self._place(turns)] += 1.0
        self._total += 1.0
        self._learnt += 1
        if self._total > _MEMORY:
            self._returns = [0.5 * each for each in self._returns]
            self._ends = [0.5 * each for each in self._ends]
            self._total *= 0.5

    def ended(self, turns: int, change: float = 1.0) -> None:
        """Learn that a session ended after *turns* requests; -1: that it proved not to have."""
        at = self._place(turns)
        self._ends[at] = max(0.0, self._ends[at] + change)
        self._learnt += 1

    def lift(self, turns: npt.NDArray[np.int64]) -> Array:
        """Return by how much the odds of an end after *turns* requests differ from the usual."""
        return np.asarray(self._tabled(1)[0][np.clip(turns, 0, _TURNS - 1)])

    def ratios(self, turns: npt.NDArray[np.int64], steps: int) -> Array:
        """
        Return how much likelier than usual it is to get through the k requests after the next.

        [session, k], k from 0 to *steps* - 1; 1 everywhere when sessions end at a constant rate.
        """
        return np.asarray(self._tabled(steps)[1][np.clip(turns, 0, _TURNS - 1), :steps])

    def _tabled(self, steps: int) -> tuple[Array, Array]:
        tables = self._tables
        if tables is not None:
            made, lifts, ratios = tables
            if ratios.shape[1] >= steps and self._learnt - made <= 8 + made // 20:
                return lifts, ratios
            steps = max(steps, ratios.shape[1])
        ends, returns = np.array(self._ends), np.array(self._returns)
        usual = (ends.sum() + 0.5) / (ends.sum() + returns.sum() + 10.0)
        hazards, lifts = lift_of(ends, returns, float(usual), self.PRIOR)
        lifts = lifts[_BIN]
        stays = np.log1p(-np.minimum(hazards, 0.99))[_BIN] - np.log1p(-usual)
        padded = np.concatenate([stays, np.full(steps, stays[-1])])
        through = np.concatenate(([0.0], np.cumsum(padded)))
        after = np.arange(_TURNS)[:, None] + 1
        ratios = np.exp(through[after + np.arange(steps)[None, :]] - through[after])
        self._tables = (self._learnt, lifts, ratios)
        return lifts, ratios

    @staticmethod
    def _place(turns: int) -> int:
        return _BIN[min(max(turns, 0), _TURNS - 1)]

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data."""
        return {"returns": list(self._returns), "ends": list(self._ends)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over *state*; ValueError when it is damaged."""
        returns, ends = state.get("returns"), state.get("ends")
        if not (isinstance(returns, list) and isinstance(ends, list)):
            raise ValueError("the lengths of sessions are damaged")
        both = np.array([returns, ends], dtype=np.float64)
        if both.shape != (2, len(self._ends)) or not np.isfinite(both).all() or (both < 0).any():
            raise ValueError("the lengths of sessions are damaged")
        self._returns, self._ends = both[0].tolist(), both[1].tolist()
        self._total = float(both[0].sum())
        self._tables = None

"""Expected use: the probability that blocks are asked for before the cache turns over."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scout_server.policy.gaps import GapModel, HintTrust
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.transitions import END, Transitions

__all__ = ["SPAN", "Outlook"]

Array = npt.NDArray[np.float64]

_BINS = 96
SPAN = 6.0
"""An outlook looks this many turnover times ahead."""
_POINTS = np.array([1, 2, 4, 8, 16, 32, 64, 96])  # bins at whose ends use is judged
_STEPS = 12
_NEGLIGIBLE = 0.01
_PIECE = 1 << 17


def _product(one: Array, two: Array) -> Array:
    """
    Return the matrix product, in pieces too small for a BLAS to share among threads.

    Waking threads costs more than the product, and far more on a machine that is busy.
    """
    rows = max(1, _PIECE // max(1, two.size))
    if rows >= len(one):
        return np.asarray(one @ two)
    return np.concatenate([one[at : at + rows] @ two for at in range(0, len(one), rows)])


class Outlook:
    """
    Answers: with what probability does each session use each agent within *horizon* seconds?

    A session's first return follows the learnt gaps of its class, given how long it has been away
    and what its client promised; later ones follow the time between arrivals. Where it returns to
    follows the transition learner, order 2 for the first step. One outlook is good for a moment;
    make a new one when time has passed or much was learnt.
    """

    def __init__(
        self,
        transitions: Transitions,
        gaps: GapModel,
        *,
        horizon: float,
        starts_per_s: float,
        unnoticed: float = 0.0,
    ) -> None:
        # ends not yet counted, because nobody tells an ended session from a silent one at once
        ends = transitions.seen(END)
        self._ends = (ends + 0.5 + unnoticed) / (ends + 0.5)
        self._transitions = transitions
        self._gaps = gaps
        self.horizon = horizon
        self._width = SPAN * horizon / _BINS
        self._grid: Array = np.asarray(self._width * np.arange(1, _BINS + 1), dtype=np.float64)
        cycle = gaps.at(gaps.cycle()[None, :], self._grid[None, :])[0]
        self._later = self._sums(np.diff(cycle, prepend=0.0))
        matrix = transitions.matrix()
        self._matrix: Array = matrix[1:, 1:]
        self.size = len(self._matrix)
        """Symbols above this one are new since then."""
        start = matrix[END, 1:]
        start = np.asarray(start / max(float(start.sum()), 1e-9))
        uses: Array = np.zeros((len(start), len(_POINTS)))
        inside = starts_per_s * self._width * np.cumsum(self._later, axis=1)[:, _POINTS - 1]
        for k in range(_STEPS):
            if inside[k, -1] < 1e-4:
                break
            uses = uses + start[:, None] * inside[k]
            start = np.asarray(start @ self._matrix)
        self.newcomers: Array = uses
        """Expected uses of each agent by sessions yet to come: [symbol - 1, point]."""
        self._times = self._width * _POINTS
        self._steps = np.diff(self._times, prepend=0.0)
        self._fold = self._folding()
        self.living: Array = np.zeros(0)
        """Probability that each session of the last question comes back at all."""

    def _sums(self, pmf: Array) -> Array:
        """Return C[k, j]: probability that k gaps fit into j + 1 bins less half a bin."""
        out = np.ones((_STEPS, _BINS))
        term = pmf
        for k in range(1, _STEPS):
            total = np.cumsum(term)
            out[k] = total - 0.5 * term
            if total[-1] < _NEGLIGIBLE:
                out[k + 1 :] = 0.0
                break
            term = np.asarray(np.convolve(term, pmf)[:_BINS], dtype=np.float64)
        return out

    def alive(self, sessions: Sequence[Session], trust: Sequence[HintTrust], now: float) -> Array:
        """Return the probability that each session comes back within the grid; cheap."""
        end = np.array([float(self._row(session)[END]) for session in sessions])
        end = np.minimum(end * self._ends, 0.98)
        return np.asarray(self._returns(sessions, trust, end, now).sum(1))

    def _row(self, session: Session) -> Array:
        row = self._transitions.row(
            session.before, session.agent, session.certain, earlier=session.earlier
        )
        n = self.size + 1
        if len(row) < n:  # as old as that
            row = np.concatenate((row, np.zeros(n - len(row))))
        return row[:n]

    def uses(self, sessions: Sequence[Session], trust: Sequence[HintTrust], now: float) -> Array:
        """Return q[s, symbol - 1, point]: probability that session s uses the agent by then."""
        first = np.stack([self._row(session) for session in sessions])
        end, step = np.minimum(first[:, END] * self._ends, 0.98), first[:, 1:]
        step = step / np.maximum(1.0 - first[:, END], 1e-9)[:, None]
        returns = self._returns(sessions, trust, end, now)
        reach = _product(returns, self._fold.reshape(_BINS, -1))
        reach = reach.reshape(len(sessions), _STEPS, len(_POINTS))
        unused = np.ones((*step.shape, len(_POINTS)))
        for k in range(_STEPS):
            if reach[:, k, -1].max(initial=0.0) < _NEGLIGIBLE:
                break
            unused *= 1.0 - np.minimum(step[:, :, None] * reach[:, None, k, :], 0.999999)
            step = _product(step, self._matrix)
        return np.asarray(1.0 - unused)

    def _folding(self) -> Array:
        """Return W[b, k, point]: chance of the (k+1)-th use by then, given a return in bin b."""
        fold = np.zeros((_BINS, _STEPS, len(_POINTS)))
        for at, point in enumerate(_POINTS.tolist()):
            fold[:point, :, at] = self._later[:, :point][:, ::-1].T
        return fold

    def density(self, q: Array) -> Array:
        """
        Return the hit density of blocks that are used by each point with chance *q*.

        It is the chance of a hit over the time for which the blocks are kept for it (least hit
        density, NSDI'18): for a known time of the next use its reciprocal, the optimal order.
        """
        before = np.concatenate((np.zeros((*q.shape[:-1], 1)), q[..., :-1]), axis=-1)
        kept = ((1.0 - 0.5 * (q + before)) * self._steps).sum(axis=-1)
        return np.asarray(q[..., -1] / np.maximum(kept, 1e-9))

    def _returns(
        self, sessions: Sequence[Session], trust: Sequence[HintTrust], end: Array, now: float
    ) -> Array:
        """Return the probability of each session's first return in each bin of the horizon."""
        gaps = self._gaps
        cdfs = np.stack(
            [gaps.cdf(s.kind) if s.phase == Phase.GAP else gaps.cycle() for s in sessions]
        )
        away = np.array([max(0.0, now - session.since) for session in sessions])
        times = np.concatenate(([0.0], self._grid))[None, :] + away[:, None]
        own = self._gaps.at(cdfs, times)
        survived = np.maximum(1.0 - own[:, 0], 1e-9)
        inside = np.diff(own, axis=1)
        promised = [i for i, session in enumerate(sessions) if session.promise is not None]
        if promised:
            self._promises(sessions, trust, promised, cdfs, inside, survived, away, now)
        ended = end.copy()
        for i, session in enumerate(sessions):
            if session.ended_said:
                ended[i] = max(ended[i], trust[i].final)
            elif session.promise is not None:
                ended[i] *= 1.0 - trust[i].weight
        alive = (1.0 - ended) * survived
        alive = alive / (alive + ended)
        self.living = np.asarray(alive)
        return np.asarray(inside / survived[:, None] * alive[:, None])

    def _promises(
        self,
        sessions: Sequence[Session],
        trust: Sequence[HintTrust],
        which: Sequence[int],
        cdfs: Array,
        inside: Array,
        survived: Array,
        away: Array,
        now: float,
    ) -> None:
        """Mix what clients promised into the learnt returns; changes *inside* and *survived*."""
        rows = np.array(which)
        said, back, weight = (np.empty(len(rows)) for _ in range(3))
        for at, i in enumerate(which):
            promise = sessions[i].promise
            assert promise is not None
            said[at], back[at] = promise.said, promise.back
            weight[at] = trust[i].weight
        center = np.log(np.maximum(back - said, 0.05))
        since = np.maximum(now - said, 0.0)
        times = np.concatenate(([0.0], self._grid))[None, :] + since[:, None]
        errors = np.log(np.maximum(times, 1e-3)) - center[:, None]
        told = HintTrust.error_at(np.stack([trust[i].cdf for i in which]), errors)
        started = np.maximum(away[rows] - since, 0.0)
        before = np.maximum(1.0 - self._gaps.at(cdfs[rows], started[:, None])[:, 0], 1e-9)
        mix = weight[:, None] * np.diff(told, axis=1)
        mix += ((1.0 - weight) / before)[:, None] * inside[rows]
        left = weight * (1.0 - told[:, 0]) + (1.0 - weight) * survived[rows] / before
        inside[rows] = mix
        survived[rows] = np.maximum(left, 1e-9)

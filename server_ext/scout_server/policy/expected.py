"""Expected use: the probability that blocks are asked for before the cache turns over."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scout_server.policy.gaps import GapModel, HintTrust, normal_cdf
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.transitions import END, Transitions

__all__ = ["Outlook"]

Array = npt.NDArray[np.float64]

_BINS = 24
_STEPS = 12
_NEGLIGIBLE = 0.01


class Outlook:
    """
    Answers: with what probability does each session use each agent within *horizon* seconds?

    A session's first return follows the learnt gaps of its class, given how long it has been away
    and what its client promised; later ones follow the time between arrivals. Where it returns to
    follows the transition learner, order 2 for the first step. One outlook is good for a moment;
    make a new one when time has passed or much was learnt.
    """

    def __init__(
        self, transitions: Transitions, gaps: GapModel, *, horizon: float, starts_per_s: float
    ) -> None:
        self._transitions = transitions
        self._gaps = gaps
        self.horizon = horizon
        self._width = horizon / _BINS
        self._grid: Array = np.asarray(self._width * np.arange(1, _BINS + 1), dtype=np.float64)
        cycle = gaps.at(gaps.cycle()[None, :], self._grid[None, :])[0]
        self._later = self._sums(np.diff(cycle, prepend=0.0))
        matrix = transitions.matrix()
        self._matrix = matrix[1:, 1:]
        self._rows: dict[tuple[int, int, tuple[int, ...]], Array] = {}
        start = matrix[END, 1:]
        start = np.asarray(start / max(float(start.sum()), 1e-9))
        uses: Array = np.zeros_like(start)
        for k in range(_STEPS):
            inside = float(self._later[k].sum()) * self._width
            if inside * starts_per_s < 1e-4:
                break
            uses = uses + starts_per_s * inside * start
            start = np.asarray(start @ self._matrix)
        self.newcomers: Array = uses
        """Expected uses of each agent by sessions yet to come (index: symbol - 1)."""

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
            term = np.convolve(term, pmf)[:_BINS]
        return out

    def _row(self, session: Session) -> Array:
        key = (session.before, session.agent, session.certain)
        row = self._rows.get(key)
        if row is None:
            row = self._transitions.row(*key)[: len(self._matrix) + 1]  # agents new since then
            self._rows[key] = row
        return row

    def uses(self, sessions: Sequence[Session], trust: Sequence[HintTrust], now: float) -> Array:
        """Return q[s, symbol - 1]: probability that session s uses the agent in time."""
        first = np.stack([self._row(session) for session in sessions])
        end, step = first[:, END], first[:, 1:]
        step = step / np.maximum(1.0 - end, 1e-9)[:, None]
        returns = self._returns(sessions, trust, end, now)
        # probability that the (k+1)-th use happens in time
        reach = returns @ self._later[:, ::-1].T
        unused = np.ones_like(step)
        for k in range(_STEPS):
            if reach[:, k].max(initial=0.0) < _NEGLIGIBLE:
                break
            unused *= 1.0 - np.minimum(step * reach[:, k : k + 1], 0.999999)
            step = step @ self._matrix
        return np.asarray(1.0 - unused)

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
        said, back, weight, bias, spread = (np.empty(len(rows)) for _ in range(5))
        for at, i in enumerate(which):
            promise = sessions[i].promise
            assert promise is not None
            said[at], back[at] = promise.said, promise.back
            weight[at], bias[at] = trust[i].weight, trust[i].bias
            spread[at] = trust[i].deviation
        center = np.log(np.maximum(back - said, 0.05)) + bias
        since = np.maximum(now - said, 0.0)
        times = np.concatenate(([0.0], self._grid))[None, :] + since[:, None]
        told = normal_cdf((np.log(np.maximum(times, 1e-3)) - center[:, None]) / spread[:, None])
        started = np.maximum(away[rows] - since, 0.0)
        before = np.maximum(1.0 - self._gaps.at(cdfs[rows], started[:, None])[:, 0], 1e-9)
        mix = weight[:, None] * np.diff(told, axis=1)
        mix += ((1.0 - weight) / before)[:, None] * inside[rows]
        left = weight * (1.0 - told[:, 0]) + (1.0 - weight) * survived[rows] / before
        inside[rows] = mix
        survived[rows] = np.maximum(left, 1e-9)

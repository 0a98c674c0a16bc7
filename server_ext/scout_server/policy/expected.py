"""Expected use: the probability that blocks are asked for before the cache turns over."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scout_server.policy.gaps import GapModel, HintTrust
from scout_server.policy.lengths import SessionLengths
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.transitions import END, Transitions

__all__ = ["SPAN", "Cycles", "Outlook"]

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SPAN = 6.0
"""An outlook looks this many turnover times ahead."""
_BINS = 96  # of SPAN; sums of gaps are computed on them
_POINTS = np.array([1, 2, 4, 8, 16, 32, 64, 96])  # bins at whose ends use is judged
_EDGES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96])  # of first returns
_STEPS = 10
_NEGLIGIBLE = 0.01
_PIECE = 1 << 17
_ACTIVE = 64  # agents, the most recent ones, whose successors are followed
_TOLERANCE = 0.1  # by which horizon and gaps may have changed before sums are computed anew


def _product(one: Array, two: Array) -> Array:
    """
    Return the matrix product, in pieces too small for a BLAS to share among threads.

    Waking threads costs more than the product, and far more on a machine that is busy.
    """
    rows = max(1, _PIECE // max(1, two.size))
    if rows >= len(one):
        return np.asarray(one @ two)
    found = np.empty((len(one), two.shape[1]))
    for at in range(0, len(one), rows):
        np.matmul(one[at : at + rows], two, out=found[at : at + rows])
    return found


def _either(first: Array, later: Array) -> Array:
    """Return the chance of a *first* use or, as rare events, *later* ones; changes both."""
    np.minimum(first, 0.999999, out=first)
    np.negative(later, out=later)
    np.exp(later, out=later)
    np.subtract(1.0, first, out=first)
    first *= later
    return np.subtract(1.0, first, out=first)


class Cycles:
    """How many times a session comes by within some time, from the learnt times between visits."""

    def __init__(self, gaps: GapModel, horizon: float) -> None:
        self.horizon = horizon
        self._version = gaps.version
        self.width = SPAN * horizon / _BINS
        grid: Array = np.asarray(self.width * np.arange(1, _BINS + 1), dtype=np.float64)
        cycle = gaps.at(gaps.cycle()[None, :], [0], grid[None, :])[0]
        sums = self._sums(np.diff(cycle, prepend=0.0))
        points = _POINTS.astype(np.float64)
        middles = 0.5 * (_EDGES[1:] + _EDGES[:-1])
        left = points[None, :] - middles[:, None]
        whole = _EDGES[1:, None] <= points[None, :]
        at = np.concatenate(([0.0], np.arange(_BINS) + 0.5))
        fold = np.zeros((len(middles), _STEPS, len(points)))
        fold[:, 0] = whole
        for k in range(1, _STEPS):
            reached = np.interp(left, at, np.concatenate(([0.0], sums[k])))
            fold[:, k] = np.where(whole, reached, 0.0)
        self.fold = fold.reshape(len(middles), -1)
        """Chance of the (k+1)-th use by each point, given a return in a bin: [bin, k and point]."""
        self.inside: Array = self.width * np.cumsum(sums, axis=1)[:, _POINTS - 1]
        """Expected (k+1)-th uses by each point, of sessions that start at a rate of 1."""

    def fits(self, gaps: GapModel, horizon: float) -> bool:
        """Whether these sums are still good enough."""
        drift = gaps.version - self._version
        if not 0 <= drift <= max(2.0, _TOLERANCE * gaps.version):
            return False
        return abs(math.log(horizon / self.horizon)) <= _TOLERANCE

    @staticmethod
    def _sums(pmf: Array) -> Array:
        """Return C[k, j]: probability that k gaps fit into j + 1 bins less half a bin."""
        out = np.ones((_STEPS, _BINS))
        term = pmf
        for k in range(1, _STEPS):
            total = np.cumsum(term)
            out[k] = total - 0.5 * term
            if total[-1] < _NEGLIGIBLE:
                out[k:] = 0.0
                break
            term = np.asarray(np.convolve(term, pmf)[:_BINS], dtype=np.float64)
        return out


class Outlook:
    """
    Answers: with what probability does each session use each agent within *horizon* seconds?

    A session's first return follows the learnt gaps of its class, given how long it has been away
    and what its client promised; later ones follow the time between arrivals. Where it returns to
    follows the transition learner, order 3 for the first step, order 1 after it. One outlook is
    good for a moment; make a new one when time has passed or much was learnt. *symbols* are the
    agents to follow, the most important first: a bounded number of them.
    """

    def __init__(
        self,
        transitions: Transitions,
        gaps: GapModel,
        lengths: SessionLengths | None = None,
        *,
        horizon: float,
        starts_per_s: float,
        unnoticed: float = 0.0,
        symbols: Sequence[int] | None = None,
        cycles: Cycles | None = None,
    ) -> None:
        # ends not yet counted, because nobody tells an ended session from a silent one at once
        ends = transitions.seen(END)
        self._ends = (ends + 0.5 + unnoticed) / (ends + 0.5)
        self._transitions = transitions
        self._gaps = gaps
        self._lengths = SessionLengths() if lengths is None else lengths
        if cycles is None or not cycles.fits(gaps, horizon):
            cycles = Cycles(gaps, horizon)
        self.cycles = cycles
        self.horizon = cycles.horizon
        self._edges = cycles.width * _EDGES
        size = transitions.used
        chosen = range(1, size + 1) if symbols is None else [s for s in symbols if s <= size]
        self._ids: Ints = np.array(sorted(chosen[:_ACTIVE]), dtype=np.int64)
        self.place: Ints = np.full(size + 1, -1, dtype=np.int64)
        """Column of each symbol, -1 for those that are not followed."""
        self.place[self._ids] = np.arange(len(self._ids))
        matrix = transitions.matrix()
        self._leave: Array = np.minimum(matrix[:, END] * self._ends, 0.98)
        followed = matrix[self._ids][:, self._ids]
        start = matrix[END, 1:]
        start = (start / max(float(start.sum()), 1e-9))[self._ids - 1]
        first = self._lengths.ratios(np.zeros(1, dtype=np.int64), _STEPS)[0]
        coming = starts_per_s * cycles.inside * first[:, None]
        self._new: Array = start[:, None, None] * coming[None]
        powers = [followed]
        for _ in range(_STEPS - 2):
            powers.append(_product(powers[-1], followed))
        self._powers: Array = np.stack(powers, axis=-1)  # [from, to, k]: k + 1 steps
        self._turned: Array = np.ascontiguousarray(followed.T)
        self._steps = np.diff(cycles.width * _POINTS, prepend=0.0)
        self.living: Array = np.zeros(0)
        """Probability that each session of the last question comes back at all."""
        self._reach: Array = np.zeros((0, _STEPS, len(_POINTS)))
        self._step: Array = np.zeros((0, len(self._ids)))
        self._from: Ints = np.zeros(0, dtype=np.int64)

    def alive(self, sessions: Sequence[Session], trust: Sequence[HintTrust], now: float) -> Array:
        """Return the probability that each session comes back within the outlook's time."""
        rows = self._rows(sessions)
        turns = np.array([session.turns for session in sessions])
        end = self._ending(sessions, rows, turns)
        return np.asarray(self._returns(sessions, trust, end, now).sum(1))

    def _ending(self, sessions: Sequence[Session], rows: Array, turns: Ints) -> Array:
        """Return the probability that each session's last request was its last ever."""
        end = np.minimum(rows[:, END] * self._ends, 0.98)
        lifts: dict[str, float] = {}
        for session in sessions:
            if session.kind not in lifts:
                lifts[session.kind] = self._gaps.end_lift(session.kind)
        lift = np.array([lifts[s.kind] if s.phase == Phase.GAP else 1.0 for s in sessions])
        lift = lift * self._lengths.lift(turns)
        odds = lift * end / (1.0 - end)
        return np.asarray(odds / (1.0 + odds))

    def _rows(self, sessions: Sequence[Session]) -> Array:
        rows = self._transitions.rows([(s.earlier, s.before, s.agent) for s in sessions])
        for at, session in enumerate(sessions):
            if session.certain:
                row = self._transitions.row(
                    session.before, session.agent, session.certain, earlier=session.earlier
                )
                rows[at, : len(row)] = row[: rows.shape[1]]
        return rows

    def ask(self, sessions: Sequence[Session], trust: Sequence[HintTrust], now: float) -> None:
        """Work out when and where *sessions* go; `anchors` and `chains` answer for them then."""
        rows = self._rows(sessions)
        turns = np.array([session.turns for session in sessions])
        end = self._ending(sessions, rows, turns)
        step = rows[:, self._ids] / np.maximum(1.0 - rows[:, END], 1e-9)[:, None]
        returns = self._returns(sessions, trust, end, now)
        reach = _product(returns, self.cycles.fold)
        through = self._lengths.ratios(turns, _STEPS)
        self._reach = reach.reshape(len(sessions), _STEPS, len(_POINTS)) * through[:, :, None]
        self._step = step
        self._from = self.place[[session.agent for session in sessions]]

    def leave(self, symbols: Sequence[int], kinds: Sequence[str]) -> Array:
        """
        Return the hit density at each agent for sessions that have just gone from others.

        Row and column are places of symbols; *kinds* are the classes of the gaps.
        """
        tables: dict[str, int] = {}
        which = [tables.setdefault(kind, len(tables)) for kind in kinds]
        cdfs = np.stack([self._gaps.cdf(kind) for kind in tables])
        times = np.broadcast_to(self._edges, (len(symbols), len(_EDGES)))
        returns = np.diff(self._gaps.at(cdfs, which, times), axis=1)
        returns *= (1.0 - self._leave[list(symbols)])[:, None]
        reach = _product(returns, self.cycles.fold).reshape(len(symbols), _STEPS, -1)
        powers = self._powers[self.place[list(symbols)]]
        step = powers[:, :, 0] / np.maximum(powers[:, :, 0].sum(1), 1e-9)[:, None]
        later = np.matmul(powers[:, :, 1:], reach[:, 1:-1])
        return self.density(_either(step[:, :, None] * reach[:, :1], later))

    def anchors(self) -> Array:
        """
        Return the chance that anybody uses each agent by each point: [place, point].

        That a session's next step goes there counts exactly but for the series of its logarithm,
        the steps after it, and sessions yet to come, as rare events.
        """
        reach, step = self._reach, self._step
        uses = self._new
        if len(step):
            uses = uses + _product(step.T, reach.reshape(len(step), -1)).reshape(uses.shape)
        later = uses[:, -1]
        for k in range(_STEPS - 2, -1, -1):
            later = self._turned @ later
            if k:
                later += uses[:, k]
        direct = uses[:, 0]
        chance, place = reach[:, 0], step
        for power, weight in ((2, 1 / 2), (3, 1 / 3), (4, 1 / 4), (8, 1.9)):
            chance, place = (
                (chance * reach[:, 0], place * step)
                if power < 8
                else (chance * chance, place * place)
            )
            direct = direct + weight * _product(place.T, chance)
        return np.asarray(1.0 - np.exp(-(direct + later)))

    def others(self, symbols: Sequence[int]) -> Array:
        """Return the hit density of agents that are not followed, from how common they are."""
        seen = sum(self._transitions.seen(symbol) for symbol in self._ids.tolist())
        share = np.array([self._transitions.seen(symbol) for symbol in symbols]) / max(seen, 1.0)
        visits = self._reach.sum((0, 1)) + self._new.sum((0, 1))
        return self.density(1.0 - np.exp(-share[:, None] * visits))

    def chains(self, who: Ints, where: Ints) -> Array:
        """
        Return the hit density of blocks that only session number *who* uses at agent *where*.

        *where* are places, in pairs with *who*.
        """
        reach = self._reach.take(who, axis=0)
        come_from = self._from[who]
        pairs = come_from * len(self._ids) + where
        ahead = self._powers.reshape(-1, _STEPS - 1).take(pairs, axis=0, mode="wrap")[:, 1:]
        ahead[come_from < 0] = 0.0
        later = np.matmul(ahead[:, None, :], reach[:, 1:-1])[:, 0]
        return self.density(_either(self._step[who, where][:, None] * reach[:, 0], later))

    def density(self, q: Array) -> Array:
        """
        Return the hit density of blocks that are used by each point with chance *q*.

        It is the chance of a hit over the time for which the blocks are kept for it (least hit
        density, NSDI'18), until the point where that is highest: they need not be kept for longer
        (Gittins' index of a stopping problem). For a known time of the next use it is the
        reciprocal of that time, the optimal order.
        """
        # a row a point: sums and maxima over points then run along all blocks at once
        used = np.ascontiguousarray(q.reshape(-1, q.shape[-1]).T)
        missed = 1.0 - used
        kept = 1.0 + missed
        np.add(missed[:-1], missed[1:], out=kept[1:])
        kept *= 0.5
        kept *= self._steps[:, None]
        for at in range(1, len(kept)):
            kept[at] += kept[at - 1]
        np.maximum(kept, 1e-9, out=kept)
        return np.asarray(np.divide(used, kept, out=kept).max(axis=0).reshape(q.shape[:-1]))

    def _returns(
        self, sessions: Sequence[Session], trust: Sequence[HintTrust], end: Array, now: float
    ) -> Array:
        """Return the probability of each session's first return in each bin of the outlook."""
        gaps = self._gaps
        tables: dict[str | None, int] = {}
        which = [
            tables.setdefault(s.kind if s.phase == Phase.GAP else None, len(tables))
            for s in sessions
        ]
        cdfs = np.stack(
            [gaps.cycle() if k is None else gaps.cdf(k) for k in tables] or [np.zeros(1)]
        )
        away = np.maximum(0.0, now - np.array([session.since for session in sessions]))
        own = gaps.at(cdfs, which, self._edges[None, :] + away[:, None])
        survived = np.maximum(1.0 - own[:, 0], 1e-9)
        inside = np.diff(own, axis=1)
        ended = end
        promised = [i for i, session in enumerate(sessions) if session.promise is not None]
        said = [i for i, session in enumerate(sessions) if session.ended_said]
        if promised:
            theirs = cdfs[[which[i] for i in promised]]
            self._promises(sessions, trust, promised, theirs, inside, survived, away, now)
        if promised or said:
            ended = end.copy()
            for i in promised:
                ended[i] *= 1.0 - trust[i].weight
            for i in said:
                ended[i] = max(end[i], trust[i].final)
        alive = (1.0 - ended) * survived
        alive = alive / (alive + ended)
        self.living = np.asarray(alive)
        return np.asarray(inside * (alive / survived)[:, None])

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
        times = self._edges[None, :] + since[:, None]
        errors = np.log(np.maximum(times, 1e-3)) - center[:, None]
        told = HintTrust.error_at(np.stack([trust[i].cdf for i in which]), errors)
        started = np.maximum(away[rows] - since, 0.0)
        over = self._gaps.at(cdfs, range(len(rows)), started[:, None])[:, 0]
        before = np.maximum(1.0 - over, 1e-9)
        mix = weight[:, None] * np.diff(told, axis=1)
        mix += ((1.0 - weight) / before)[:, None] * inside[rows]
        left = weight * (1.0 - told[:, 0]) + (1.0 - weight) * survived[rows] / before
        inside[rows] = mix
        survived[rows] = np.maximum(left, 1e-9)

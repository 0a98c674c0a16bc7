"""Which agent follows which: an online Markov chain of order 3 that backs off to 2, 1 and 0."""

import math
from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from scout_server.policy.contexts import Contexts
from scout_server.policy.surprise import Surprise

__all__ = ["END", "Transitions"]

END = 0
"""Symbol of a session's end (as a successor) and of its start (as a context)."""

_EMPTY = 0xFFFF
_CERTAIN = 4.0  # pseudo-counts of an edge that the graph says is certain
_NEW = 0.3  # pseudo-count of a symbol that was never seen, in order 0
_ESCAPE = 1.0  # pseudo-counts of the shorter context
_ESCAPE_KINDS = 0.25  # and per kind of successor seen: the more, the less is known
_FADE = 0.99  # of an order's merit, per observation
_STALE = 32  # observations after which every row is computed anew

Row = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Transitions:
    """
    Answers: which agent does a session use next? (CacheSage, arXiv 2605.27744, sections on P_ij;
    back-off after PPM-C, Moffat 1990.)

    Symbols are small integers from 1; 0 is the session's end. Counts are kept per context in a
    fixed number of slots, the rarest successor of a context is forgotten first, so that the state
    never grows: it is one table of order-1 contexts (one per symbol) and a table of longer
    contexts that are recycled least recently used first.
    """

    def __init__(
        self,
        symbols: int,
        *,
        successors: int = 8,
        contexts: int | None = None,
        forgetting: float = 1.0,
    ) -> None:
        self.symbols = symbols
        self.width = successors
        self.forgetting = forgetting
        """Factor on a context's counts at each of its observations; 1 remembers for ever."""
        self._pairs = 4 * symbols if contexts is None else contexts
        rows = symbols + 1 + self._pairs
        self._next = array("H", [_EMPTY]) * (rows * successors)
        self._count = array("f", [0.0]) * (rows * successors)
        self._total = array("f", [0.0]) * rows
        self._zero = array("f", [0.0]) * (symbols + 1)
        self._contexts = Contexts(symbols, self._pairs)
        self._seen = 0.0  # sum of _zero
        self._known = 0  # symbols in _zero
        self._rows: dict[int, dict[tuple[int, tuple[int, ...], int], Row]] = {}
        self.version = 0
        """Changes whenever a prediction may have."""
        self._merit = [0.0, 0.0, 0.0]  # faded log likelihood of orders 1 to 3
        self.used = 0
        """The highest symbol seen so far; rows and matrices stop there."""
        self._surprise = Surprise()

    # ---- learning --------------------------------------------------------------------------

    def observe(
        self, before: int, now: int, then: int, *, earlier: int = 0, weight: float = 1.0
    ) -> float:
        """
        Learn that *then* followed *now*, which had followed *before*, which had followed *earlier*.

        Returns the log loss (nats) of what was predicted.
        *now* is END for a session's first request, *then* is END when it ended.
        """
        used, seen = self.used, self._zero[then]
        if then > used or now > used or before > used:
            used = self.used = max(before, now, then)
        one, two, three = self._weights()
        p = (seen + _NEW) / (self._seen + _NEW * (used + 1))
        first = second = third = self._learn(now, then, p, weight)
        if now != END:
            row = self._context_row(0, before, now)
            second = third = self._learn(row, then, first, weight)
            if before != END:
                row = self._context_row(earlier + 1, before, now)
                third = self._learn(row, then, second, weight)
        loss = -math.log(max(one * first + two * second + three * third, 1e-12))
        merit, log = self._merit, math.log
        merit[0] = _FADE * merit[0] + log(first if first > 1e-6 else 1e-6)
        merit[1] = _FADE * merit[1] + log(second if second > 1e-6 else 1e-6)
        merit[2] = _FADE * merit[2] + log(third if third > 1e-6 else 1e-6)
        if self._known > 1:
            self._surprise.learn(loss / math.log(self._known), new=seen <= 0.0)
        if seen <= 0.0:
            self._known += 1
        self._zero[then] = seen + weight
        self._seen += weight
        self._changed(now)
        return loss

    def _changed(self, now: int) -> None:
        self.version += 1
        if self.version % _STALE == 0:
            self._rows.clear()
        else:
            self._rows.pop(now, None)

    def _learn(self, row: int, then: int, shorter: float, weight: float) -> float:
        """Count *then* in *row*; return what its probability was, given the *shorter* context's."""
        width, nxt, count, totals = self.width, self._next, self._count, self._total
        start = row * width
        here = nxt[start : start + width].tolist()
        total = totals[row]
        place = start + here.index(then) if then in here else -1
        p = shorter
        if total > 0.0:
            escape = _ESCAPE + _ESCAPE_KINDS * (width - here.count(_EMPTY))
            p = ((count[place] if place >= 0 else 0.0) + escape * p) / (total + escape)
        if self.forgetting < 1.0:
            for at in range(start, start + width):
                count[at] *= self.forgetting
            totals[row] = total * self.forgetting
            total = totals[row]  # rounded to a single
        totals[row] = total + weight
        if place >= 0:
            count[place] += weight
            return p
        if _EMPTY in here:
            place = start + here.index(_EMPTY)
        else:
            counts = count[start : start + width]
            place = start + counts.index(min(counts))
        nxt[place] = then
        count[place] = weight
        return p

    def retract(self, now: int, then: int) -> None:
        """Take back one observation in order 1, such as an end that proved not to be one."""
        for at in range(now * self.width, (now + 1) * self.width):
            if self._next[at] == then and self._count[at] >= 1.0:
                self._count[at] -= 1.0
                self._total[now] -= 1.0
                self._zero[then] = max(0.0, self._zero[then] - 1.0)
                self._recount()
                self._changed(now)
                return

    def forget(self, symbol: int) -> None:
        """Drop everything about *symbol*, so that it can stand for another agent."""
        self._clear(symbol)
        self._zero[symbol] = 0.0
        self._recount()
        nxt = np.frombuffer(self._next, dtype=np.uint16).reshape(-1, self.width)
        count = np.frombuffer(self._count, dtype=np.float32).reshape(-1, self.width)
        total = np.frombuffer(self._total, dtype=np.float32)
        mine = nxt == symbol
        total[:] = np.maximum(total - np.where(mine, count, 0.0).sum(1), 0.0)
        count[mine] = 0.0
        nxt[mine] = _EMPTY
        for slot in self._contexts.forget(symbol):
            self._clear(self.symbols + 1 + slot)
        self._rows.clear()
        self.version += 1

    def _recount(self) -> None:
        self._seen = sum(self._zero)
        self._known = sum(1 for count in self._zero if count > 0)

    def _clear(self, row: int) -> None:
        for at in range(row * self.width, (row + 1) * self.width):
            self._next[at] = _EMPTY
            self._count[at] = 0.0
        self._total[row] = 0.0

    def _context_row(self, deep: int, before: int, now: int) -> int:
        slot, new = self._contexts.use(deep, before, now)
        row = self.symbols + 1 + slot
        if new:
            self._clear(row)
        return row

    # ---- reading ---------------------------------------------------------------------------

    @property
    def predictability(self) -> float:
        """R in [0, 1]: 1 less the recent log loss over a uniform guess's; a surprise lowers it."""
        return self._surprise.predictability

    @property
    def regular(self) -> float:
        """R over some time, in [0, 1], where successors were known; 1 with less than two agents."""
        few = self._known < 2 or (self._known < 3 and self._zero[END] > 0.0)
        return 1.0 if few else self._surprise.regular

    def seen(self, symbol: int) -> float:
        """Return how often *symbol* followed anything."""
        return self._zero[symbol]

    def _known_rows(self, earlier: int, before: int, now: int) -> tuple[int, ...]:
        """Return the rows of the contexts that are known, from order 1 up; -1 for an unknown."""
        if now == END:
            return (now,)
        pair = self._contexts.find(0, before, now)
        pair = self.symbols + 1 + pair if pair >= 0 else -1
        if before == END:
            return now, pair
        deep = self._contexts.find(earlier + 1, before, now)
        return now, pair, self.symbols + 1 + deep if deep >= 0 else -1

    def _weights(self) -> tuple[float, float, float]:
        """Return how much to believe each order, 1 to 3: by how well it predicted lately."""
        one, two, three = self._merit
        best = max(one, two, three)
        one, two, three = math.exp(one - best), math.exp(two - best), math.exp(three - best)
        total = one + two + three
        return one / total, two / total, three / total

    def probability(self, before: int, now: int, then: int, earlier: int = 0) -> float:
        """Return the probability that *then* comes next."""
        found = self._probabilities(then, self._known_rows(earlier, before, now))
        return sum(w * p for w, p in zip(self._weights(), found, strict=True))

    def _probabilities(self, then: int, rows: Sequence[int]) -> list[float]:
        """Return the probability of *then* with contexts of at most 1, 2 and 3 symbols."""
        width, nxt, count, totals = self.width, self._next, self._count, self._total
        p = (self._zero[then] + _NEW) / (self._seen + _NEW * (self.used + 1))
        found = []
        for row in rows:
            if row >= 0 and totals[row] > 0.0:
                start = row * width
                here = nxt[start : start + width]
                seen = count[start + here.index(then)] if then in here else 0.0
                escape = _ESCAPE + _ESCAPE_KINDS * (width - here.count(_EMPTY))
                p = (seen + escape * p) / (totals[row] + escape)
            found.append(p)
        while len(found) < 3:
            found.append(p)
        return found

    def row(self, before: int, now: int, certain: Sequence[int] = (), *, earlier: int = 0) -> Row:
        """
        Return the distribution of what comes next, END first, length used + 1.

        *certain* are the only successors that the caller's graph allows here; they are a strong
        prior, not a law. The row may be a few observations of other contexts old.
        """
        known = self._rows.setdefault(now, {})
        key = (before, tuple(certain), earlier)
        row = known.get(key)
        if row is None:
            row = known[key] = self._row(before, now, certain, earlier)
        return row

    def rows(self, contexts: Sequence[tuple[int, int, int]]) -> Row:
        """Return `row` of many contexts (earlier, before, now) at once, one below the other."""
        size = self.used + 1
        zero = np.asarray(self._zero[:size], dtype=np.float64)
        p = (zero + _NEW) / (zero.sum() + _NEW * size)
        symbols = np.fromiter(chain.from_iterable(contexts), np.int64, 3 * len(contexts))
        earlier, before, now = symbols.reshape(-1, 3).T
        slots = self._contexts.find_all(
            np.concatenate([np.zeros_like(earlier), earlier + 1]),
            np.concatenate([before, before]),
            np.concatenate([now, now]),
        )
        pair, deep = slots.reshape(2, -1)
        longer = now != END
        known = np.stack([now >= END, longer & (pair >= 0), longer & (deep >= 0) & (before != END)])
        rows = np.stack([now, self.symbols + 1 + pair, self.symbols + 1 + deep])
        nxt = np.frombuffer(self._next, dtype=np.uint16).reshape(-1, self.width)[rows]
        count = np.frombuffer(self._count, dtype=np.float32).reshape(-1, self.width)[rows]
        total = np.where(known, np.frombuffer(self._total, dtype=np.float32)[rows], 0.0)
        escape = np.where(known, _ESCAPE + _ESCAPE_KINDS * (nxt != _EMPTY).sum(2), 1.0)
        seen = known[:, :, None] & (nxt < size)
        found = np.zeros((len(now), size))
        for order, weight in enumerate(self._weights()):
            p = escape[order, :, None] * p
            at = np.flatnonzero(seen[order])
            place = at // self.width * size + nxt[order].reshape(-1)[at]
            p.reshape(-1)[place] += count[order].reshape(-1)[at]
            p /= (total[order] + escape[order])[:, None]
            found += weight * p
        return found

    def _row(self, before: int, now: int, certain: Sequence[int], earlier: int) -> Row:
        zero = np.asarray(self._zero[: self.used + 1], dtype=np.float64)
        p = (zero + _NEW) / (zero.sum() + _NEW * len(zero))
        p = self._up(p, self._known_rows(earlier, before, now))
        if certain:
            prior = np.zeros_like(p)
            known = [symbol for symbol in certain if symbol < len(p)]
            prior[known] = p[known] + 1e-6
            prior /= max(float(prior.sum()), 1e-9)
            n = float(self._total[now])
            p = (n * 0.25 * p + _CERTAIN * prior) / (n * 0.25 + _CERTAIN)
        return p

    def _up(self, p: Row, rows: Sequence[int]) -> Row:
        width = self.width
        found = []
        for row in rows:
            if row >= 0:
                counts = np.zeros_like(p)
                kinds = 0
                for at in range(row * width, (row + 1) * width):
                    if self._next[at] != _EMPTY:
                        kinds += 1
                        counts[self._next[at]] = self._count[at]
                escape = _ESCAPE + _ESCAPE_KINDS * kinds
                p = (counts + escape * p) / (self._total[row] + escape)
            found.append(p)
        while len(found) < 3:
            found.append(p)
        one, two, three = self._weights()
        return np.asarray(one * found[0] + two * found[1] + three * found[2])

    def matrix(self) -> Row:
        """Return the order-1 matrix, (used + 1)²; row END is a session's first agent."""
        size = self.used + 1
        zero = np.asarray(self._zero[:size], dtype=np.float64)
        p0 = (zero + _NEW * (zero > 0)) / max(
            float(zero.sum()) + _NEW * int((zero > 0).sum()), 1e-9
        )
        nxt = np.frombuffer(self._next, dtype=np.uint16)[: size * self.width].reshape(size, -1)
        count = np.frombuffer(self._count, dtype=np.float32)[: size * self.width].reshape(size, -1)
        counts = np.zeros((size, size))
        rows, columns = np.nonzero(count > 0)
        counts[rows, nxt[rows, columns]] = count[rows, columns]
        escape = _ESCAPE + _ESCAPE_KINDS * (count > 0).sum(1)
        total = np.frombuffer(self._total, dtype=np.float32)[:size]
        return np.asarray((counts + escape[:, None] * p0) / (total + escape)[:, None])

    def top(self, before: int, now: int, n: int, *, earlier: int = 0) -> list[int]:
        """Return the *n* most probable successors that were seen, best first."""
        p = self.row(before, now, earlier=earlier)
        order = sorted(range(len(p)), key=lambda symbol: (-p[symbol], symbol))
        return [symbol for symbol in order if self._zero[symbol] > 0][:n]

    # ---- persistence -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data."""
        return {
            "symbols": self.symbols,
            "width": self.width,
            "pairs": self._pairs,
            "next": self._next.tolist(),
            "count": self._count.tolist(),
            "total": self._total.tolist(),
            "zero": self._zero.tolist(),
            **self._contexts.snapshot(),
            "loss": self._surprise.loss,
            "merit": list(self._merit),
        }

    def restore(self, state: dict[str, object]) -> None:
        """Take over *state* of an equally sized learner; ValueError for any other."""
        if (state.get("symbols"), state.get("width"), state.get("pairs")) != (
            self.symbols,
            self.width,
            self._pairs,
        ):
            raise ValueError("the snapshot is of a learner of another size")
        for name in ("next", "count", "total", "zero"):
            mine: array[int] | array[float] = getattr(self, f"_{name}")
            values = state[name]
            if not isinstance(values, list) or len(values) != len(mine):
                raise ValueError(f"field {name!r} of the snapshot is damaged")
            setattr(self, f"_{name}", array(mine.typecode, values))
        self.used = max((s for s, count in enumerate(self._zero) if count > 0), default=0)
        context, stamp = state["context"], state["stamp"]
        if not (isinstance(context, list) and isinstance(stamp, list)):
            raise ValueError("the contexts of the snapshot are damaged")
        self._contexts.restore(context, stamp, int(str(state["clock"])))
        self._surprise = Surprise(float(str(state["loss"])))
        merit = state["merit"]
        if not isinstance(merit, list) or len(merit) != 3:
            raise ValueError("field 'merit' of the snapshot is damaged")
        self._merit = [float(each) for each in merit]
        self._recount()
        self._rows.clear()
        self.version += 1

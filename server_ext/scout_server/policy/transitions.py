"""Which agent follows which: an online Markov chain of order 3 that backs off to 2, 1 and 0."""

import math
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

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
_FAST, _SLOW = 0.25, 0.06  # how fast predictability falls, and how fast it rises

Row = npt.NDArray[np.float64]


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
        self._context = array("I", [0]) * self._pairs  # packed (before, now), 0 is unused
        self._stamp = array("I", [0]) * self._pairs
        self._buckets = 1
        while self._buckets < 2 * self._pairs:
            self._buckets *= 2
        self._slots = array("H", [_EMPTY]) * self._buckets
        self._clock = 0
        self._rows: dict[tuple[int, int, tuple[int, ...], int], Row] = {}
        self.version = 0
        """Changes whenever a prediction may have."""
        self._merit = [0.0, 0.0, 0.0]  # faded log likelihood of orders 1 to 3
        self.used = 0
        """The highest symbol seen so far; rows and matrices stop there."""
        self._loss = 1.0  # moving average of log loss over that of a uniform guess

    # ---- learning --------------------------------------------------------------------------

    def observe(
        self, before: int, now: int, then: int, *, earlier: int = 0, weight: float = 1.0
    ) -> float:
        """
        Learn that *then* followed *now*, which had followed *before*, which had followed *earlier*.

        Returns the log loss (nats) of what was predicted.
        *now* is END for a session's first request, *then* is END when it ended.
        """
        self.used = max(self.used, before, now, then)
        found = self._probabilities(before, now, then, earlier)
        weights = self._weights()
        probability = sum(w * p for w, p in zip(weights, found, strict=True))
        loss = -math.log(max(probability, 1e-12))
        for order, p in enumerate(found):
            self._merit[order] = _FADE * self._merit[order] + math.log(max(p, 1e-6))
        self._surprise(loss)
        self._add(now, then, weight)
        if now != END:
            self._add(self._context_row(0, before, now), then, weight)
            if before != END:
                self._add(self._context_row(earlier + 1, before, now), then, weight)
        self._zero[then] += weight
        self._changed(now)
        return loss

    def _changed(self, now: int) -> None:
        self.version += 1
        if self.version % _STALE == 0:
            self._rows.clear()
        else:
            for key in [key for key in self._rows if key[1] == now]:
                del self._rows[key]

    def _surprise(self, loss: float) -> None:
        known = sum(1 for count in self._zero[: self.used + 1] if count > 0)
        if known < 2:
            return
        relative = min(loss / math.log(known), 2.0)
        rate = _FAST if relative > self._loss else _SLOW
        self._loss += rate * (relative - self._loss)

    def _add(self, row: int, then: int, weight: float) -> None:
        width = self.width
        start = row * width
        nxt, count = self._next, self._count
        if self.forgetting < 1.0:
            for at in range(start, start + width):
                count[at] *= self.forgetting
            self._total[row] *= self.forgetting
        self._total[row] += weight
        least, place = math.inf, start
        for at in range(start, start + width):
            if nxt[at] == then:
                count[at] += weight
                return
            if nxt[at] == _EMPTY:
                nxt[at] = then
                count[at] = weight
                return
            if count[at] < least:
                least, place = count[at], at
        nxt[place] = then
        count[place] = weight

    def retract(self, now: int, then: int) -> None:
        """Take back one observation in order 1, such as an end that proved not to be one."""
        for at in range(now * self.width, (now + 1) * self.width):
            if self._next[at] == then and self._count[at] >= 1.0:
                self._count[at] -= 1.0
                self._total[now] -= 1.0
                self._zero[then] = max(0.0, self._zero[then] - 1.0)
                self._changed(now)
                return

    def forget(self, symbol: int) -> None:
        """Drop everything about *symbol*, so that it can stand for another agent."""
        self._clear(symbol)
        self._zero[symbol] = 0.0
        for row in range(len(self._total)):
            for at in range(row * self.width, (row + 1) * self.width):
                if self._next[at] == symbol:
                    self._total[row] = max(0.0, self._total[row] - self._count[at])
                    self._count[at] = 0.0
        for slot in range(self._pairs):
            packed = self._context[slot]
            if packed and symbol in self._unpack(packed):
                self._clear(self.symbols + 1 + slot)
        self._rows.clear()
        self.version += 1

    def _clear(self, row: int) -> None:
        for at in range(row * self.width, (row + 1) * self.width):
            self._next[at] = _EMPTY
            self._count[at] = 0.0
        self._total[row] = 0.0

    # ---- longer contexts: open addressing over recycled rows ------------------------------

    def _pack(self, deep: int, before: int, now: int) -> int:
        """Number a context; *deep* is 0 for order 2, else 1 + the symbol before *before*."""
        size = self.symbols + 2
        return (deep * size + before) * size + now + 1

    def _unpack(self, packed: int) -> tuple[int, int, int]:
        size = self.symbols + 2
        rest, now = divmod(packed - 1, size)
        deep, before = divmod(rest, size)
        return deep - 1, before, now

    def _find(self, packed: int) -> int:
        mask = self._buckets - 1
        at = (packed * 2654435761) & mask
        while True:
            slot = self._slots[at]
            if slot == _EMPTY:
                return -1
            if self._context[slot] == packed:
                return slot
            at = (at + 1) & mask

    def _context_row(self, deep: int, before: int, now: int) -> int:
        packed = self._pack(deep, before, now)
        slot = self._find(packed)
        self._clock += 1
        if slot < 0:
            slot = min(range(self._pairs), key=self._stamp.__getitem__)
            self._clear(self.symbols + 1 + slot)
            self._context[slot] = packed
            self._rebuild()
        self._stamp[slot] = self._clock
        return self.symbols + 1 + slot

    def _rebuild(self) -> None:
        mask = self._buckets - 1
        self._slots = array("H", [_EMPTY]) * self._buckets
        for slot, packed in enumerate(self._context):
            if packed:
                at = (packed * 2654435761) & mask
                while self._slots[at] != _EMPTY:
                    at = (at + 1) & mask
                self._slots[at] = slot

    # ---- reading ---------------------------------------------------------------------------

    @property
    def predictability(self) -> float:
        """R in [0, 1]: 1 less the recent log loss over a uniform guess's; a surprise lowers it."""
        return min(1.0, max(0.0, 1.0 - self._loss))

    def seen(self, symbol: int) -> float:
        """Return how often *symbol* followed anything."""
        return self._zero[symbol]

    def _orders(self, earlier: int, before: int, now: int) -> Iterator[tuple[int, int]]:
        """Yield (row, order) of the contexts that are known, from order 1 up."""
        yield now, 1
        if now == END:
            return
        slot = self._find(self._pack(0, before, now))
        if slot >= 0:
            yield self.symbols + 1 + slot, 2
        if before != END:
            slot = self._find(self._pack(earlier + 1, before, now))
            if slot >= 0:
                yield self.symbols + 1 + slot, 3

    def _weights(self) -> list[float]:
        """Return how much to believe each order, 1 to 3: by how well it predicted lately."""
        best = max(self._merit)
        raw = [math.exp(merit - best) for merit in self._merit]
        total = sum(raw)
        return [each / total for each in raw]

    def probability(self, before: int, now: int, then: int, earlier: int = 0) -> float:
        """Return the probability that *then* comes next."""
        found = self._probabilities(before, now, then, earlier)
        return sum(w * p for w, p in zip(self._weights(), found, strict=True))

    def _probabilities(self, before: int, now: int, then: int, earlier: int) -> list[float]:
        """Return the probability of *then* with contexts of at most 1, 2 and 3 symbols."""
        total = sum(self._zero)
        p = (self._zero[then] + _NEW) / (total + _NEW * (self.used + 1))
        found = [p, p, p]
        for row, order in self._orders(earlier, before, now):
            seen, kinds = 0.0, 0
            for at in range(row * self.width, (row + 1) * self.width):
                if self._count[at] > 0:
                    kinds += 1
                    if self._next[at] == then:
                        seen = self._count[at]
            escape = _ESCAPE + _ESCAPE_KINDS * kinds
            p = (seen + escape * p) / (self._total[row] + escape)
            found[order - 1 :] = [p] * (4 - order)
        return found

    def row(self, before: int, now: int, certain: Sequence[int] = (), *, earlier: int = 0) -> Row:
        """
        Return the distribution of what comes next, END first, length used + 1.

        *certain* are the only successors that the caller's graph allows here; they are a strong
        prior, not a law. The row may be a few observations of other contexts old.
        """
        key = (before, now, tuple(certain), earlier)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._row(before, now, certain, earlier)
        return row

    def _row(self, before: int, now: int, certain: Sequence[int], earlier: int) -> Row:
        zero = np.asarray(self._zero[: self.used + 1], dtype=np.float64)
        p = (zero + _NEW) / (zero.sum() + _NEW * len(zero))
        p = self._up(p, self._orders(earlier, before, now))
        if certain:
            prior = np.zeros_like(p)
            known = [symbol for symbol in certain if symbol < len(p)]
            prior[known] = p[known] + 1e-6
            prior /= max(float(prior.sum()), 1e-9)
            n = float(self._total[now])
            p = (n * 0.25 * p + _CERTAIN * prior) / (n * 0.25 + _CERTAIN)
        return p

    def _up(self, p: Row, orders: Iterator[tuple[int, int]]) -> Row:
        found = [p, p, p]
        for row, order in orders:
            counts = np.zeros_like(p)
            kinds = 0
            for at in range(row * self.width, (row + 1) * self.width):
                if self._count[at] > 0:
                    kinds += 1
                    counts[self._next[at]] += self._count[at]
            escape = _ESCAPE + _ESCAPE_KINDS * kinds
            p = (counts + escape * p) / (self._total[row] + escape)
            found[order - 1 :] = [p] * (4 - order)
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
            "context": self._context.tolist(),
            "stamp": self._stamp.tolist(),
            "clock": self._clock,
            "loss": self._loss,
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
        for name in ("next", "count", "total", "zero", "context", "stamp"):
            mine: array[int] | array[float] = getattr(self, f"_{name}")
            values = state[name]
            if not isinstance(values, list) or len(values) != len(mine):
                raise ValueError(f"field {name!r} of the snapshot is damaged")
            setattr(self, f"_{name}", array(mine.typecode, values))
        self.used = max((s for s, count in enumerate(self._zero) if count > 0), default=0)
        self._clock = int(str(state["clock"]))
        self._loss = float(str(state["loss"]))
        merit = state["merit"]
        if not isinstance(merit, list) or len(merit) != 3:
            raise ValueError("field 'merit' of the snapshot is damaged")
        self._merit = [float(each) for each in merit]
        self._rebuild()
        self._rows.clear()
        self.version += 1

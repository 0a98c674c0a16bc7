"""Contexts of two and three symbols, numbered; the one not used for long is forgotten first."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Contexts"]

Ints = npt.NDArray[np.int64]

_EMPTY = 0xFFFF
_SCATTER = 2654435761  # Knuth's multiplier


class Contexts:
    """
    Gives each context a slot in [0, limit): an open-addressed table over recycled slots.

    A context is (deep, before, now): *deep* is 0 for the two symbols *before*, *now*, else 1 + the
    symbol before them. Symbols are at most *symbols*. All state is in arrays of fixed size.
    """

    def __init__(self, symbols: int, limit: int) -> None:
        self.limit = limit
        self._base = symbols + 2
        self._context = array("I", [0]) * limit  # packed, 0 is unused
        self._stamp = array("I", [0]) * limit
        self._buckets = 1
        while self._buckets < 2 * limit:
            self._buckets *= 2
        self._slots = array("H", [_EMPTY]) * self._buckets
        self._clock = 0
        self._hand = 0  # where to look for a slot to recycle

    def find(self, deep: int, before: int, now: int) -> int:
        """Return the slot of a context, -1 if it has none."""
        return self._find(self._pack(deep, before, now))

    def use(self, deep: int, before: int, now: int) -> tuple[int, bool]:
        """Return the slot of a context, and whether it is new there."""
        packed = (deep * self._base + before) * self._base + now + 1
        slot = self._find(packed)
        self._clock += 1
        new = slot < 0
        if new:
            slot = self._recycle()
            self._context[slot] = packed
            self._insert(slot)
        self._stamp[slot] = self._clock
        return slot, new

    def find_all(self, deep: Ints | int, before: Ints, now: Ints) -> Ints:
        """Return the slots of many contexts at once, -1 for those that have none."""
        mask = self._buckets - 1
        packed = (deep * self._base + before) * self._base + now + 1
        slots = np.frombuffer(self._slots, dtype=np.uint16)
        context = np.frombuffer(self._context, dtype=np.uint32)
        at = (packed * _SCATTER) & mask
        found = np.full(len(packed), -1, dtype=np.int64)
        open_ = np.arange(len(packed))
        while len(open_):
            slot = slots[at[open_]].astype(np.int64)
            open_, slot = open_[slot != _EMPTY], slot[slot != _EMPTY]
            same = context[slot] == packed[open_]
            found[open_[same]] = slot[same]
            open_ = open_[~same]
            at[open_] = (at[open_] + 1) & mask
        return found

    def forget(self, symbol: int) -> Iterator[int]:
        """Drop every context that has *symbol* in it; yield their slots."""
        for slot, packed in enumerate(self._context):
            if packed and symbol in self._symbols(packed):
                self._delete(slot)
                self._context[slot] = 0
                yield slot

    def _pack(self, deep: int, before: int, now: int) -> int:
        return (deep * self._base + before) * self._base + now + 1

    def _symbols(self, packed: int) -> tuple[int, int, int]:
        rest, now = divmod(packed - 1, self._base)
        deep, before = divmod(rest, self._base)
        return deep - 1, before, now

    def _find(self, packed: int) -> int:
        mask, slots, context = self._buckets - 1, self._slots, self._context
        at = (packed * _SCATTER) & mask
        while True:
            slot = slots[at]
            if slot == _EMPTY:
                return -1
            if context[slot] == packed:
                return slot
            at = (at + 1) & mask

    def _recycle(self) -> int:
        """Return a slot that is free or was not used for long: the next such one in a circle."""
        stamps, limit = self._stamp, self._clock - self.limit // 2
        for _ in range(self.limit):
            slot = self._hand
            self._hand = (slot + 1) % self.limit
            if stamps[slot] < limit or not self._context[slot]:
                break
        if self._context[slot]:
            self._delete(slot)
        return slot

    def _place_of(self, packed: int) -> int:
        return (packed * _SCATTER) & (self._buckets - 1)

    def _insert(self, slot: int) -> None:
        mask, slots = self._buckets - 1, self._slots
        at = self._place_of(self._context[slot])
        while slots[at] != _EMPTY:
            at = (at + 1) & mask
        slots[at] = slot

    def _delete(self, slot: int) -> None:
        """Take *slot* out of the table and close the hole (Knuth 6.4, algorithm R)."""
        mask, slots, context = self._buckets - 1, self._slots, self._context
        hole = self._place_of(context[slot])
        while slots[hole] != slot:
            hole = (hole + 1) & mask
        at = hole
        while True:
            at = (at + 1) & mask
            if slots[at] == _EMPTY:
                break
            home = self._place_of(context[slots[at]])
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = slots[at]
                hole = at
        slots[hole] = _EMPTY

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data."""
        return {
            "context": self._context.tolist(),
            "stamp": self._stamp.tolist(),
            "clock": self._clock,
        }

    def restore(self, context: Sequence[int], stamp: Sequence[int], clock: int) -> None:
        """Take over a snapshot; ValueError when it is of another size."""
        if len(context) != self.limit or len(stamp) != self.limit:
            raise ValueError("the contexts of the snapshot are damaged")
        self._context, self._stamp = array("I", context), array("I", stamp)
        self._clock = clock
        self._slots = array("H", [_EMPTY]) * self._buckets
        for slot, packed in enumerate(self._context):
            if packed:
                self._insert(slot)

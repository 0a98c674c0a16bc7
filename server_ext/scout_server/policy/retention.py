"""In which order free blocks are evicted."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

__all__ = ["RetentionOrder"]


class RetentionOrder:
    """
    The free blocks of one pool in eviction order. Keys are block ids in [0, capacity).

    It has the engine's own queue semantics (append = reuse last, prepend = reuse first) and, where
    the policy knows better, another order of eviction. Everything in it can be evicted. In LRU mode
    the order is exactly that of the engine's queue.
    """

    def __init__(self, capacity: int) -> None:
        self._lru: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return len(self._lru)

    def __contains__(self, block: int) -> bool:
        """Whether *block* is free."""
        return block in self._lru

    def append(self, block: int, group: int) -> None:
        """Add *block*, owned by *group*, at the end: reused last."""
        self._lru[block] = group

    def prepend(self, block: int, group: int) -> None:
        """Add *block*, owned by *group*, at the front: reused first."""
        self._lru[block] = group
        self._lru.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """Take *block* out because it is used again; KeyError when it is not free."""
        del self._lru[block]

    def pop(self, n: int, *, now: float) -> list[int]:
        """Take out and return *n* victims, first one first; ValueError if fewer are free."""
        if n > len(self._lru):
            msg = f"cannot evict {n} blocks: {len(self._lru)} are free"
            raise ValueError(msg)
        return [self._lru.popitem(last=False)[0] for _ in range(n)]

    def __iter__(self) -> Iterator[int]:
        """Iterate in the order of eviction as it stands."""
        return iter(list(self._lru))

    def lru(self) -> Iterator[int]:
        """Iterate in the engine's own order (for handing the queue back)."""
        return iter(list(self._lru))

    def extend(self, blocks: Iterable[int], group: int) -> None:
        """Append every block of *blocks* in turn."""
        for block in blocks:
            self.append(block, group)

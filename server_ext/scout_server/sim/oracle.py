"""What is still to come, for oracles only: policies that read the future are named so."""

import math
from collections.abc import Callable

__all__ = ["Future"]


class Future:
    """When each chain is used next, told by the cell, which has drawn the gaps."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._again: dict[str, int] = {}
        self._listeners: list[Callable[[str, str | None, float], None]] = []

    def listen(self, listener: Callable[[str, str | None, float], None]) -> None:
        """Call *listener* with a chain, its agent and its next use; infinity: never."""
        self._listeners.append(listener)

    def tell(self, chain: str, agent: str | None, at: float) -> None:
        """Say that *chain* is used next *at*."""
        if at == math.inf:
            self._next.pop(chain, None)
        else:
            self._next[chain] = at
        for listener in self._listeners:
            listener(chain, agent, at)

    def next_use(self, chain: str) -> float:
        """Return when *chain* is used next; infinity: never."""
        return self._next.get(chain, math.inf)

    def tell_again(self, request_id: str, blocks: int) -> None:
        """Say that the first *blocks* blocks of a request's chain are asked for again."""
        self._again[request_id] = blocks

    def take_again(self, request_id: str) -> int:
        """Return and forget what `tell_again` said; 0 when it said nothing."""
        return self._again.pop(request_id, 0)

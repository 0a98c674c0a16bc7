"""What is still to come, for oracles only: policies that read the future are named so."""

import math
from collections.abc import Callable

__all__ = ["Future"]


class Future:
    """The next release of every session, told by the cell as it draws the gaps."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._listeners: list[Callable[[str, float], None]] = []

    def listen(self, listener: Callable[[str, float], None]) -> None:
        """Call *listener* with a session and the time of its next release; infinity: never."""
        self._listeners.append(listener)

    def tell(self, session: str, at: float) -> None:
        """Say that the session's next turn is released *at*."""
        self._next[session] = at
        for listener in self._listeners:
            listener(session, at)

    def forget(self, session: str) -> None:
        """Say that the session has no further turn."""
        self._next.pop(session, None)
        for listener in self._listeners:
            listener(session, math.inf)

    def next_release(self, session: str) -> float:
        """Return when the session's next turn is released; infinity: never."""
        return self._next.get(session, math.inf)

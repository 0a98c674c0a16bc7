"""The one switch that takes our code out of the engine when it fails."""

import logging
from collections.abc import Callable

__all__ = ["Breaker"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply


class Breaker:
    """
    Closed while our code works; the first exception opens it until the server restarts.

    When it opens it logs once and calls *hand_back*, which must leave the engine with its own queue
    and must not raise. Later faults, of code that was already running, are counted only.
    """

    def __init__(
        self,
        hand_back: Callable[[], None],
        *,
        what: str = "the engine goes on with its own LRU queue",
    ) -> None:
        self._hand_back = hand_back
        self._what = what
        self.open = False
        self.faults = 0
        self.reason: str | None = None
        """What opened it: the place and the exception; None while closed."""

    def trip(self, place: str, error: Exception) -> None:
        """Open the breaker because *error* came out of our code at *place*."""
        self.faults += 1
        if self.open:
            return
        self.open = True
        self.reason = f"{place}: {type(error).__name__}: {error}"[:200]
        self._hand_back()
        _log.error(
            "scout: fault in %s; %s until it is restarted",
            place,
            self._what,
            exc_info=error,
        )

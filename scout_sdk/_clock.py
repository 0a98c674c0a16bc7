"""A clock that tests move."""

import threading

__all__ = ["FakeClock"]


class FakeClock:
    """
    A monotonic clock that stands still until it is moved.

    Called, it returns the time, so that it goes where `time.monotonic` goes.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move the clock on by *seconds*, which are not negative; return the new time."""
        if not seconds >= 0.0:
            raise ValueError(f"a clock goes forward, not by {seconds!r} seconds")
        with self._lock:
            self._now += seconds
            return self._now

    def sleep(self, seconds: float) -> None:
        """Move the clock on at once, where `time.sleep` would wait."""
        self.advance(seconds)

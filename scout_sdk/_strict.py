"""Strict mode: whether a fault of ours in a user's process is raised instead of logged."""

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["enabled", "strict"]

_depth = 0
_lock = threading.Lock()


def enabled() -> bool:
    """Return whether strict mode is on; it is process-wide, for tests only."""
    return _depth > 0


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Raise our own faults inside the block, in every thread; blocks may nest."""
    global _depth
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1

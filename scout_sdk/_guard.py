"""The one decorator that keeps a fault of ours out of a user's run."""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from scout_sdk._strict import enabled as is_strict

__all__ = ["guarded", "warn_once"]

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger("scout_sdk")
_MAX_SEEN = 256
_seen: set[tuple[str, str]] = set()


def _first(where: str, what: str) -> bool:
    key = (where, what)
    if key in _seen or len(_seen) >= _MAX_SEEN:
        return False
    _seen.add(key)
    return True


def warn_once(where: str, message: str) -> None:
    """Log *message* as a warning, once a process for each *where*."""
    if _first(where, ""):
        _logger.warning("scout: %s", message)


def guarded(callback: Callable[P, R]) -> Callable[P, R | None]:
    """
    Return *callback* such that an exception in it is logged once and becomes None.

    Strict mode (scout_sdk.testing) raises it instead. KeyboardInterrupt and other
    non-`Exception`s pass.
    """

    @functools.wraps(callback)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            if is_strict():
                raise
            if _first(callback.__qualname__, type(error).__name__):
                _logger.exception("scout: %s failed; the run goes on", callback.__qualname__)
            return None

    return inner

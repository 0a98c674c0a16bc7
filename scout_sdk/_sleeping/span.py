"""How long something takes, as far as its text says: a lower and an upper bound."""

import enum
import math
import re
from dataclasses import dataclass

__all__ = [
    "NOTHING",
    "UNKNOWN",
    "Budget",
    "Span",
    "Status",
    "Unreadable",
    "either",
    "parallel",
    "seconds_of",
]

_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Status(enum.Enum):
    """Whether a command succeeds."""

    YES = "yes"
    NO = "no"
    LIKELY = "likely"
    """Nobody knows; taken to."""
    EITHER = "either"
    """Nobody knows, and it asks a question: both are as likely."""


class Unreadable(Exception):  # noqa: N818 - never leaves the package
    """A text that the readers do not understand, or one that is too much work."""


@dataclass(frozen=True, slots=True)
class Span:
    """
    Seconds that a command takes: at least *low*, at most *high*.

    *said*: a sleep or a deadline stands in the text; without one there is nothing to say.
    """

    low: float
    high: float
    said: bool = False

    def then(self, other: "Span") -> "Span":
        """Return this followed by *other*."""
        return Span(self.low + other.low, self.high + other.high, self.said or other.said)

    def within(self, limit_s: float, grace_s: float = 0.0) -> "Span":
        """Return this, ended after *limit_s* seconds, or *grace_s* later if it resists."""
        return Span(min(self.low, limit_s), min(self.high, limit_s + grace_s), True)


NOTHING = Span(0.0, 0.0)
UNKNOWN = Span(0.0, math.inf)


def parallel(*spans: Span) -> Span:
    """Return the time until the last of *spans*, all started now, has ended."""
    return Span(
        max((span.low for span in spans), default=0.0),
        max((span.high for span in spans), default=0.0),
        any(span.said for span in spans),
    )


def either(*spans: Span) -> Span:
    """Return what is known where one of *spans* happens, and nobody knows which."""
    return Span(
        min(span.low for span in spans),
        max(span.high for span in spans),
        any(span.said for span in spans),
    )


def seconds_of(text: str | None) -> float | None:
    """Return the seconds of a coreutils duration such as `1.5m`; `infinity` is infinite."""
    if not text:
        return None
    if text.lower() in ("inf", "infinity"):
        return math.inf
    unit = text[-1] if text[-1] in _UNITS else ""
    number = text[: len(text) - len(unit)]
    if not _NUMBER.fullmatch(number):
        return None
    return float(number) * _UNITS[unit]


class Budget:
    """Bounds the work of one question: steps in all, and how deep they nest."""

    def __init__(self, steps: int = 2000, depth: int = 24) -> None:
        self._steps = steps
        self._depth = depth

    def step(self) -> None:
        """Count one step. Raises Unreadable when there were too many."""
        self._steps -= 1
        if self._steps < 0:
            raise Unreadable("too much work")

    def __enter__(self) -> None:
        """Go one level deeper. Raises Unreadable when it is too deep."""
        if self._depth <= 0:
            raise Unreadable("nested too deeply")
        self._depth -= 1

    def __exit__(self, *exc: object) -> None:
        self._depth += 1

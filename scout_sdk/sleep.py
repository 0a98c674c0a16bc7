"""
How long a shell, Python or PowerShell command is going to take, as far as it says itself.

Nothing is executed: the text is parsed. `sleep 5 && make` takes at least five seconds,
`timeout 30 make` at most thirty. Sequences add up, pipelines and jobs that are waited for
take as long as their longest part, loops with a constant count multiply. Commands are
taken to succeed. Where the text says nothing, there is no answer.
"""

import enum
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scout_sdk._hints import Evidence
from scout_sdk._sleeping.commands import shell_span
from scout_sdk._sleeping.powershell import powershell_span
from scout_sdk._sleeping.python import has_call, python_span
from scout_sdk._sleeping.span import Budget, Span

__all__ = ["Bound", "Expectation", "expected_seconds", "expected_seconds_of_call"]

_MAX_CHARS = 8_192
_MAX_ARGUMENTS = 64
_SPEAKS = re.compile(r"sleep|timeout|wait_for|max-time|-m\s*\d|-t\s*\d|fail_after|move_on", re.I)
_POWERSHELL = re.compile(r"(?<![\w\"'-])start-sleep\b", re.I)
_CODE = (
    "command",
    "cmd",
    "code",
    "script",
    "commands",
    "input",
    "bash",
    "shell",
    "python",
    "source",
)
_PAUSE_TOOL = re.compile(r"(?:^|[_.\-/ ])(?:sleep|wait|pause|delay|timer)(?:$|[_.\-/ ])", re.I)
_PAUSES = {
    "seconds": 1.0,
    "secs": 1.0,
    "sec": 1.0,
    "duration": 1.0,
    "duration_s": 1.0,
    "duration_seconds": 1.0,
    "delay": 1.0,
    "delay_s": 1.0,
    "wait_seconds": 1.0,
    "sleep_seconds": 1.0,
    "time": 1.0,
    "minutes": 60.0,
    "milliseconds": 0.001,
    "ms": 0.001,
    "duration_ms": 0.001,
    "delay_ms": 0.001,
}
_LIMITS = {
    "timeout": 1.0,
    "timeout_s": 1.0,
    "timeout_sec": 1.0,
    "timeout_secs": 1.0,
    "timeout_seconds": 1.0,
    "max_seconds": 1.0,
    "timeout_ms": 0.001,
    "timeout_milliseconds": 0.001,
}
_LIKELY_MS = 1000.0


class Bound(enum.Enum):
    """What the expected seconds of a command are to its real ones."""

    EXACT = "exact"
    """Nothing else in it takes time."""
    AT_LEAST = "at_least"
    """Other work, of unknown length, comes on top."""
    AT_MOST = "at_most"
    """A deadline ends it; it may well end sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a command says about its own duration."""

    seconds: float
    """The expected duration: what is slept, or the deadline where there is one."""
    bound: Bound
    at_least_s: float
    """It takes no less, if all its commands succeed."""
    at_most_s: float | None
    """It takes no more; None: nobody knows."""

    @property
    def evidence(self) -> Evidence:
        """What a tool event says about where the seconds come from."""
        return Evidence.DEADLINE if self.bound is Bound.AT_MOST else Evidence.SLEEP


def expected_seconds(command: str) -> Expectation | None:
    """
    Return what *command* says about its duration, or None where it says nothing.

    Never executes, never raises; gives up on what is too long or nested too deeply.
    """
    try:
        if len(command) > _MAX_CHARS or not _SPEAKS.search(command):
            return None
        return _expectation(_span(command))
    except Exception:  # Unreadable, or no text
        return None


@functools.lru_cache(maxsize=64)
def _span(command: str) -> Span:
    budget = Budget()
    if has_call(command):
        return python_span(command, budget, shell_span)
    if _POWERSHELL.search(command) and not re.search(r"(?:pwsh|powershell)", command, re.I):
        return powershell_span(command, budget)
    return shell_span(command, budget)


def _expectation(span: Span) -> Expectation | None:
    if not span.said or math.isnan(span.low) or math.isnan(span.high):
        return None
    if math.isinf(span.high):
        if span.low <= 0.0 or math.isinf(span.low):
            return None
        return Expectation(
            seconds=span.low, bound=Bound.AT_LEAST, at_least_s=span.low, at_most_s=None
        )
    bound = Bound.EXACT if span.low == span.high else Bound.AT_MOST
    return Expectation(seconds=span.high, bound=bound, at_least_s=span.low, at_most_s=span.high)


def expected_seconds_of_call(
    name: str, arguments: Mapping[str, object] | str | None
) -> Expectation | None:
    """
    Return what a tool call says about its duration, or None.

    *arguments* as a mapping, as its JSON, or as a bare command. Looked at: arguments that
    hold code (command, cmd, code, script, ...); seconds and the like of a tool that is
    named for waiting (sleep, wait, pause, delay); a timeout, which bounds the rest.
    Never executes, never raises.
    """
    try:
        given = _arguments(arguments)
        span = next(_code_spans(given), None)
        if span is None and _PAUSE_TOOL.search(name):
            seconds = _first(given, _PAUSES)
            span = None if seconds is None else Span(seconds, seconds, True)
        limit = _first(given, _LIMITS)
        if limit is not None and limit > 0.0:
            span = (Span(0.0, math.inf) if span is None else span).within(limit)
        return None if span is None else _expectation(span)
    except Exception:  # arguments of a strange kind
        return None


def _arguments(arguments: Mapping[str, object] | str | None) -> Mapping[str, object]:
    if isinstance(arguments, str):
        if len(arguments) > 4 * _MAX_CHARS:
            return {}
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = arguments
        return parsed if isinstance(parsed, dict) else {"command": arguments}
    return arguments or {}


def _code_spans(given: Mapping[str, object]) -> Iterator[Span]:
    """Yield the time of each argument that holds code."""
    for key in _CODE:
        value = given.get(key)
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            if key == "commands":
                value = "\n".join(map(str, value[:_MAX_ARGUMENTS]))
            else:
                words = map(str, value[:_MAX_ARGUMENTS])
                value = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
        if isinstance(value, str) and expected_seconds(value) is not None:
            yield _span(value)


def _first(given: Mapping[str, object], units: Mapping[str, float]) -> float | None:
    """Return the first of the arguments named in *units*, in seconds."""
    for key, unit in units.items():
        value = given.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        seconds = float(value) * unit
        if 0.0 <= seconds < math.inf:
            # Tools whose `timeout` is in milliseconds are common; none waits for 17 minutes.
            return seconds / 1000.0 if key == "timeout" and seconds >= _LIKELY_MS else seconds
    return None

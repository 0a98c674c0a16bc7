"""The SCOUT_* environment variables, read when asked and never at import."""

import functools
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from scout_sdk._errors import ConfigError

__all__ = ["Environment", "announce", "read_environment"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says; a value that cannot be read counts as not set."""

    base_url: str | None = None
    """SCOUT_BASE_URL: the server that takes hints, such as `http://localhost:8000/v1`."""
    enabled: bool = True
    """SCOUT_SDK_ENABLED: 0, false, no or off sends nothing at all."""
    session: str | None = None
    """SCOUT_SESSION_ID: session of calls that belong to no other."""
    api_key: str | None = None
    """SCOUT_API_KEY: bearer token of the side channel."""
    timeout_s: float = 1.0
    """SCOUT_TIMEOUT: seconds that one message of the side channel may take."""
    debug: bool = False
    """SCOUT_DEBUG: 1, true, yes or on logs what is sent and why not."""
    problems: tuple[str, ...] = ()
    """One line for each value that could not be read: it names the allowed ones."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Return the settings in *environ*, by default this process's; never raises."""
    given = os.environ if environ is None else environ
    problems: list[str] = []
    return Environment(
        base_url=_server(given, "SCOUT_BASE_URL", problems),
        enabled=_flag(given, "SCOUT_SDK_ENABLED", True, problems),
        session=_text(given, "SCOUT_SESSION_ID"),
        api_key=_text(given, "SCOUT_API_KEY"),
        timeout_s=_seconds(given, "SCOUT_TIMEOUT", 1.0, problems),
        debug=_flag(given, "SCOUT_DEBUG", False, problems),
        problems=tuple(problems),
    )


_announced: set[str] = set()
_lock = threading.Lock()


def announce(environment: Environment) -> None:
    """
    Log what is wrong in *environment*, each problem once; with SCOUT_DEBUG log everything.

    Everything goes to standard error, unless the program has set up its own logging.
    """
    logger = logging.getLogger("scout_sdk")
    with _lock:
        fresh = [problem for problem in environment.problems if problem not in _announced]
        _announced.update(fresh[:64])
        if environment.debug and logger.getEffectiveLevel() > logging.DEBUG:
            logger.setLevel(logging.DEBUG)
            if not logger.hasHandlers():
                logger.addHandler(logging.StreamHandler())
    for problem in fresh:
        logger.warning("scout: %s", problem)


def _text(given: Mapping[str, str], name: str) -> str | None:
    return given.get(name, "").strip() or None


def _server(given: Mapping[str, str], name: str, problems: list[str]) -> str | None:
    value = _text(given, name)
    problem = None if value is None else _wrong_server(value)
    if problem is None:
        return value
    problems.append(f"{name}: {problem}")
    return None


@functools.lru_cache(maxsize=16)
def _wrong_server(base_url: str) -> str | None:
    """Return what is wrong with *base_url*, or None."""
    from scout_sdk._capabilities import Endpoint  # only for those who name a server

    try:
        Endpoint.parse(base_url)
    except ConfigError as error:
        return str(error)
    return None


def _flag(given: Mapping[str, str], name: str, default: bool, problems: list[str]) -> bool:
    value = given.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    if value:
        problems.append(f"{name}={value!r}: not one of {', '.join(sorted(_TRUE | _FALSE))}")
    return default


def _seconds(given: Mapping[str, str], name: str, default: float, problems: list[str]) -> float:
    value = given.get(name, "").strip()
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if 0.0 < seconds <= 60.0:
        return seconds
    problems.append(f"{name}={value!r}: not a number of seconds above 0 and up to 60")
    return default

"""
Bounds of the protocol, and the pure functions that make a value fit them.

Both ends apply the same functions, so an identity that was too long is the same short
identity whether the client or the server shortened it. Nothing here raises or does
unbounded work. The rules are written down in docs/protocol.md.
"""

import functools
import hashlib
import math
from decimal import Decimal
from types import MappingProxyType

from scout_sdk._hints import Evidence, SessionEvent, ToolEvent, ToolState

__all__ = [
    "MAX_AGENT",
    "MAX_ANCHOR",
    "MAX_CALL_ID",
    "MAX_EVENTS",
    "MAX_EVENTS_BYTES",
    "MAX_HEADERS_BYTES",
    "MAX_HEADER_LINES",
    "MAX_NEXT",
    "MAX_NEXT_BYTES",
    "MAX_OUTCOMES",
    "MAX_PATH",
    "MAX_SECONDS",
    "MAX_SESSION",
    "MAX_TOOLS",
    "MAX_TOOL_NAME",
    "MAX_TURN",
    "STATED",
    "clean_event",
    "clean_seconds",
    "clean_text",
    "clean_tool",
    "clean_turn",
    "cost",
]

MAX_HEADERS_BYTES = 4096
"""Octets of all our header lines together, each counted as name + value + 4."""
MAX_HEADER_LINES = 1024
"""Header lines of a request that a decoder looks at."""
MAX_SESSION = 128
"""Cost of a session or parent."""
MAX_AGENT = 128
"""Cost of an agent, also within the list of next agents."""
MAX_PATH = 256
"""Cost of a path."""
MAX_ANCHOR = 64
"""Cost of an anchor fingerprint."""
MAX_TOOL_NAME = 64
"""Cost of a tool's name."""
MAX_CALL_ID = 64
"""Cost of a tool call's id."""
MAX_TURN = 1_000_000_000
"""Highest turn number."""
MAX_TOOLS = 16
"""Tool events of one request; the newest are kept."""
MAX_NEXT = 16
"""Next agents of one request; the first are kept."""
MAX_NEXT_BYTES = 1024
"""Octets of the value of the header that lists the next agents."""
MAX_SECONDS = 31_536_000.0
"""Longest duration: a year."""
MAX_EVENTS = 256
"""Events of one message of the side channel."""
MAX_EVENTS_BYTES = 524_288
"""Octets of one message of the side channel."""
STATED = MappingProxyType(
    {
        "headers_bytes": MAX_HEADERS_BYTES,
        "events": MAX_EVENTS,
        "events_bytes": MAX_EVENTS_BYTES,
    }
)
"""Bounds of the protocol that a server names among its own, under `limits` of its capabilities."""
MAX_OUTCOMES = 32
"""Members of an outcome header."""

_MAX_HASHED = 65_536
_MAX_REMEMBERED = 512
_SUFFIX = 17
_CHEAP = bytes(octet for octet in range(0x20, 0x7F) if octet not in b'"%\\')


def cost(text: str) -> int:
    """Return how many octets *text* may take inside the quotes of a structured field."""
    octets = text.encode("utf-8", "replace")
    return len(octets) + 2 * len(octets.translate(None, _CHEAP))


def clean_text(value: object, limit: int) -> tuple[str | None, bool]:
    """
    Return *value* as a text of at most *limit* cost, and whether it was changed.

    Anything but a non-empty string gives None. A text that is too long becomes its
    longest prefix of cost limit - 17, a tilde, and the first 16 hexadecimal digits of the
    SHA-256 of its UTF-8: distinct texts stay distinct.
    """
    if not isinstance(value, str) or not value:
        return None, value is not None and value != ""
    text = value if type(value) is str else str.__str__(value)
    if len(text) * 3 <= limit and text.isascii():
        return text, False
    return (_fit_known if len(text) <= _MAX_REMEMBERED else _fit)(text, limit)


def _fit(text: str, limit: int) -> tuple[str, bool]:
    changed = False
    if len(text) > _MAX_HASHED:
        text, changed = text[:_MAX_HASHED], True
    try:
        octets = text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        octets, changed = text.encode(), True
    if len(octets) <= limit and cost(text) <= limit:
        return text, changed
    room, end = limit - _SUFFIX, 0
    for end, char in enumerate(text):  # noqa: B007 - the loop always breaks
        room -= 1 if char.isalnum() and char.isascii() else cost(char)
        if room < 0:
            break
    return f"{text[:end]}~{hashlib.sha256(octets).hexdigest()[:16]}", True


_fit_known = functools.lru_cache(maxsize=1024)(_fit)


def clean_seconds(value: object) -> tuple[float | None, bool]:
    """Return *value* as seconds in [0, MAX_SECONDS], to the millisecond, and if it was bad."""
    if value is None:
        return None, False
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None, True
    try:
        seconds = float(value)
    except (OverflowError, ValueError):
        return None, True
    if not math.isfinite(seconds) or seconds < 0.0:
        return None, True
    if seconds > MAX_SECONDS:
        return MAX_SECONDS, True
    return round(seconds, 3) + 0.0, False


def clean_turn(value: object) -> int | None:
    """Return *value* if it is a turn number, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return int(value) if 1 <= value <= MAX_TURN else None


def clean_tool(
    name: object,
    state: object,
    call_id: object,
    elapsed_s: object,
    remaining_s: object,
    evidence: object,
) -> tuple[ToolEvent | None, bool]:
    """
    Return the tool event that these values make, and whether anything was changed.

    None: the name or the state is unusable. Contradictions lose the weaker statement: a
    call that ended has no time remaining, and evidence without a time is evidence of
    nothing. *state* and *evidence* are members or their values.
    """
    clean_name, changed = clean_text(name, MAX_TOOL_NAME)
    known_state = _STATES.get(state) if isinstance(state, str | ToolState) else None
    if clean_name is None or known_state is None:
        return None, True
    clean_id, bad = clean_text(call_id, MAX_CALL_ID)
    changed |= bad
    elapsed, bad = clean_seconds(elapsed_s)
    changed |= bad
    remaining, bad = clean_seconds(remaining_s)
    changed |= bad
    if remaining is not None and known_state in _OVER:
        remaining, changed = None, True
    known_evidence = None
    if evidence is not None:
        if remaining is not None and isinstance(evidence, str | Evidence):
            known_evidence = _EVIDENCE.get(evidence)
        changed |= known_evidence is None
    event = ToolEvent(
        name=clean_name,
        state=known_state,
        call_id=clean_id,
        elapsed_s=elapsed,
        remaining_s=remaining,
        evidence=known_evidence,
    )
    return event, changed


def clean_event(event: SessionEvent) -> SessionEvent | None:
    """Return *event* within all bounds, or None if nothing of it is usable."""
    session, _ = clean_text(event.session, MAX_SESSION)
    if session is None:
        return None
    agent, _ = clean_text(event.agent, MAX_AGENT)
    tool = None
    if isinstance(event.tool, ToolEvent):
        given = event.tool
        tool, _ = clean_tool(
            given.name,
            given.state,
            given.call_id,
            given.elapsed_s,
            given.remaining_s,
            given.evidence,
        )
    if tool is None and event.tool is not None and event.final is not True:
        return None
    age_s, _ = clean_seconds(event.age_s)
    return SessionEvent(
        session=session, agent=agent, tool=tool, final=event.final is True, age_s=age_s or 0.0
    )


_STATES: dict[str | ToolState, ToolState] = {
    key: member for member in ToolState for key in (member, member.value)
}
_OVER = frozenset({ToolState.ENDED, ToolState.FAILED})
_EVIDENCE: dict[str | Evidence, Evidence] = {
    key: member for member in Evidence for key in (member, member.value)
}

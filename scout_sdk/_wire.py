"""
The wire: hints as request headers, vLLM's extra arguments, side-channel JSON, outcomes.

The front of the protocol, and the only place with header names; docs/protocol.md
describes it for other languages, and tests/vectors holds its examples. Encoders never
raise and never emit an invalid header; decoders never raise, trust nothing and do bounded
work. Header values are structured fields (RFC 9651).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from scout_sdk._channel import aged, decode_events, encode_events
from scout_sdk._fields import (
    TEXT_LIMITS,
    VERSION,
    clean_agents,
    clean_tools,
    drop_contradictions,
    hints_of,
    known_version,
    members_of,
    quoted,
    sf,
    text_of,
    tool_item,
    tools_from,
)
from scout_sdk._hints import HintOutcome, Hints
from scout_sdk._limits import (
    MAX_HEADER_LINES,
    MAX_HEADERS_BYTES,
    MAX_NEXT_BYTES,
    MAX_OUTCOMES,
    MAX_SESSION,
    clean_text,
    clean_turn,
)
from scout_sdk._xargs import from_xargs, to_xargs

__all__ = [
    "CAPABILITIES_PATH",
    "CREDENTIAL_HEADERS",
    "EVENTS_PATH",
    "OUTCOME_HEADER",
    "PREFIX",
    "SESSION_ID_HEADER",
    "VERSION",
    "Decoded",
    "aged",
    "credentials_in",
    "decode",
    "decode_events",
    "decode_outcome",
    "encode",
    "encode_events",
    "encode_outcome",
    "from_xargs",
    "to_xargs",
]

PREFIX = "x-scout-"
"""What the names of all our headers start with."""
SESSION_ID_HEADER = "x-session-id"
"""vLLM's own session header; sent beside ours, read where ours is missing."""
OUTCOME_HEADER = "x-scout-outcome"
"""Response header that says what became of each hint."""
EVENTS_PATH = "/v1/scout/events"
"""Where the side channel posts."""
CAPABILITIES_PATH = "/v1/scout/capabilities"
"""Where a server says what it takes."""

CREDENTIAL_HEADERS = ("authorization", "api-key", "x-api-key")
"""Who speaks; the first that is there names the tenant. Events carry what their requests do."""

_FIELDS = ("version", *TEXT_LIMITS, "turn", "tools", "next", "final")
_NAMES = {PREFIX + field: field for field in _FIELDS} | {SESSION_ID_HEADER: "session-id"}
_OUTCOME_KEY = re.compile(r"[a-z*][a-z0-9_.*-]{0,63}")
_OUTCOMES = {outcome.value: outcome for outcome in HintOutcome}
_NOTHING: Mapping[str, HintOutcome] = MappingProxyType({})


def credentials_in(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the header, its name in lower case, that a server knows the caller by."""
    for name in CREDENTIAL_HEADERS:
        value = headers.get(name)
        if value:
            return name, value
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a decoder made of a request's headers."""

    hints: Hints | None
    """None: the request says nothing usable."""
    outcomes: Mapping[str, HintOutcome]
    """What became of each field that was sent: version, session, agent, path, anchor,
    turn, parent, tools, next, final."""
    size_bytes: int
    """Octets of our header lines, each counted as name + value + 4."""


# --- request headers ------------------------------------------------------------------


def encode(hints: Hints) -> dict[str, str]:
    """
    Return *hints* as request headers: lower-case names, at most 4,096 octets in all.

    What does not fit is shortened (identities, by a hash), dropped (next agents from the
    end, tool events from the oldest) or left out (values that are no hint at all).
    """
    try:
        return _encode(hints)
    except Exception:  # no Hints value gets here; a foreign object must not break a call
        return {}


def _encode(hints: Hints) -> dict[str, str]:
    headers = {PREFIX + "version": str(VERSION)}
    for field, limit in TEXT_LIMITS.items():
        text, _ = clean_text(getattr(hints, field), limit)
        if text is not None:
            headers[PREFIX + field] = quoted(text)
            if field == "session":
                headers[SESSION_ID_HEADER] = quote(text, safe="!#$&'()*+,/:;<=>?@[]^`{|}")
    turn = clean_turn(hints.turn)
    if turn is not None:
        headers[PREFIX + "turn"] = str(turn)
    if hints.final is True:
        headers[PREFIX + "final"] = "?1"
    room = MAX_HEADERS_BYTES - sum(len(name) + len(value) + 4 for name, value in headers.items())
    name = PREFIX + "next"
    nexts = _fitting(
        [quoted(agent) for agent in clean_agents(hints.next_agents)[0]],
        min(MAX_NEXT_BYTES, room - len(name) - 4),
    )
    if nexts:
        headers[name] = value = ", ".join(nexts)
        room -= len(name) + len(value) + 4
    name = PREFIX + "tools"
    tools = _fitting(
        [tool_item(tool) for tool in reversed(clean_tools(hints.tools)[0])],
        room - len(name) - 4,
    )
    if tools:
        headers[name] = ", ".join(reversed(tools))
    return headers


def _fitting(members: Sequence[str], room: int) -> list[str]:
    """Return the longest head of *members* that fits into *room* octets of a list."""
    kept: list[str] = []
    for member in members:
        room -= len(member) + (2 if kept else 0)
        if room < 0:
            break
        kept.append(member)
    return kept


def decode(
    headers: Iterable[tuple[bytes | str, bytes | str]] | Mapping[str, str] | Mapping[bytes, bytes],
) -> Decoded:
    """
    Return what *headers* say; names in any case, other headers are skipped.

    An unknown version gives no hint at all; a malformed or contradictory field is ignored
    and named in the outcomes, the others count.
    """
    try:
        lines, spilt, size = _collect(headers)
        return _decode(lines, spilt, size)
    except Exception:  # an iterable of something else than header lines
        return Decoded(hints=None, outcomes=_NOTHING, size_bytes=0)


def _collect(headers: Any) -> tuple[dict[str, list[bytes]], set[str], int]:
    """Return our lines by field, the fields that are over the limit, and the size of all."""
    lines: dict[str, list[bytes]] = {}
    spilt: set[str] = set()
    size = kept = 0
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    for count, (raw_name, raw_value) in enumerate(pairs):
        if count >= MAX_HEADER_LINES:
            break
        if len(raw_name) > 32:
            continue
        name = raw_name.decode("latin-1") if isinstance(raw_name, bytes) else raw_name
        field = _NAMES.get(name.lower())
        if field is None:
            continue
        octets = len(name) + len(raw_value) + 4
        size += octets
        if kept + octets > MAX_HEADERS_BYTES:
            spilt.add(field)
            continue
        kept += octets
        value = raw_value if isinstance(raw_value, bytes) else raw_value.encode("utf-8", "replace")
        value = value.strip(b" \t")
        if value:
            lines.setdefault(field, []).append(value)
    return lines, spilt, size


def _decode(lines: dict[str, list[bytes]], spilt: set[str], size: int) -> Decoded:
    outcomes: dict[str, HintOutcome] = {}
    foreign = lines.pop("session-id", None)
    version = lines.pop("version", None)
    if "version" in spilt or (version is not None and not known_version(_item(version))):
        outcomes["version"] = HintOutcome.IGNORED
        outcomes |= dict.fromkeys((field for field in _FIELDS if field in lines), _IGNORED)
        return Decoded(hints=None, outcomes=outcomes, size_bytes=size)
    if version is not None:
        outcomes["version"] = HintOutcome.ACCEPTED
    values: dict[str, object] = {}
    for field in _FIELDS:
        if field in spilt:
            outcomes[field] = HintOutcome.REJECTED
        elif field in lines:
            reader = _LIST_READERS.get(field)
            value, changed = reader(lines[field]) if reader else _read_item(field, lines[field])
            if value is None or value == ():
                outcomes[field] = HintOutcome.REJECTED
            else:
                values[field] = value
                outcomes[field] = HintOutcome.CLIPPED if changed else HintOutcome.ACCEPTED
    if foreign is not None and "session" not in values and len(set(foreign)) == 1:
        text, changed = clean_text(
            unquote_to_bytes(foreign[0]).decode("utf-8", "replace"), MAX_SESSION
        )
        if text is not None:
            values["session"] = text
            outcomes["session"] = HintOutcome.CLIPPED if changed else HintOutcome.ACCEPTED
    drop_contradictions(values, outcomes)
    if not values and set(outcomes) != {"version"}:
        return Decoded(hints=None, outcomes=outcomes, size_bytes=size)
    return Decoded(hints=hints_of(values), outcomes=outcomes, size_bytes=size)


_IGNORED = HintOutcome.IGNORED


def _item(lines: list[bytes]) -> object:
    """Return the bare item that all *lines* agree on, or None."""
    if len(set(lines)) != 1:
        return None
    try:
        value: object = sf().parse(lines[0], tltype="item")[0]
    except Exception:  # the library's own error, and whatever a damaged date may raise
        return None
    return value


def _read_item(field: str, lines: list[bytes]) -> tuple[object, bool]:
    value = _item(lines)
    if field in TEXT_LIMITS:
        return clean_text(text_of(value), TEXT_LIMITS[field])
    if field == "turn":
        return clean_turn(value), False
    return (value if isinstance(value, bool) else None), False


def _read_next(lines: list[bytes]) -> tuple[object, bool]:
    agents, changed = clean_agents([text_of(value) for value, _ in members_of(lines)])
    return tuple(agents), changed


def _read_tools(lines: list[bytes]) -> tuple[object, bool]:
    return tools_from(members_of(lines))


_LIST_READERS = {"next": _read_next, "tools": _read_tools}


# --- the outcome header ---------------------------------------------------------------


def encode_outcome(outcomes: Mapping[str, HintOutcome]) -> str:
    """Return the value of X-Scout-Outcome; empty (send no header) where there is none."""
    members = {
        field: outcome.value for field, outcome in outcomes.items() if _OUTCOME_KEY.fullmatch(field)
    }
    lib = sf()
    kept = {field: lib.Token(members[field]) for field in list(members)[:MAX_OUTCOMES]}
    return str(lib.ser_dictionary(kept)) if kept else ""


def decode_outcome(value: str) -> dict[str, HintOutcome]:
    """Return the outcomes that a server reported; what is malformed or unknown is left out."""
    try:
        octets = value.encode("ascii")
        if len(octets) > MAX_HEADERS_BYTES:
            return {}
        members = sf().parse(octets, tltype="dictionary")
    except Exception:  # as in _item
        return {}
    outcomes: dict[str, HintOutcome] = {}
    for field, (item, _) in members.items():
        outcome = _OUTCOMES.get(str(item)) if isinstance(item, sf().Token) else None
        if outcome is not None and len(outcomes) < MAX_OUTCOMES:
            outcomes[field] = outcome
    return outcomes

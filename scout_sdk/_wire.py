"""
The wire: hints as request headers, vLLM's extra arguments, side-channel JSON, outcomes.

The only place with header names and versions; docs/protocol.md describes them for other
languages, and tests/vectors holds its examples. Encoders never raise and never emit an
invalid header; decoders never raise, trust nothing and do bounded work. Header values are
structured fields (RFC 9651), read and written by the http-sf library, which is imported
on first use so that `import scout_sdk` costs the standard library only.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from scout_sdk._hints import HintOutcome, Hints, SessionEvent, ToolEvent
from scout_sdk._limits import (
    MAX_AGENT,
    MAX_ANCHOR,
    MAX_EVENTS,
    MAX_EVENTS_BYTES,
    MAX_HEADER_LINES,
    MAX_HEADERS_BYTES,
    MAX_NEXT,
    MAX_NEXT_BYTES,
    MAX_OUTCOMES,
    MAX_PATH,
    MAX_SESSION,
    MAX_TOOLS,
    clean_event,
    clean_seconds,
    clean_text,
    clean_tool,
    clean_turn,
)

__all__ = [
    "CAPABILITIES_PATH",
    "EVENTS_PATH",
    "OUTCOME_HEADER",
    "PREFIX",
    "SESSION_ID_HEADER",
    "VERSION",
    "Decoded",
    "decode",
    "decode_events",
    "decode_outcome",
    "encode",
    "encode_events",
    "encode_outcome",
    "from_xargs",
    "to_xargs",
]

VERSION = 1
"""Version of the protocol that this module speaks."""
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

_TEXT_LIMITS = {
    "session": MAX_SESSION,
    "agent": MAX_AGENT,
    "path": MAX_PATH,
    "anchor": MAX_ANCHOR,
    "parent": MAX_SESSION,
}
_FIELDS = ("version", *_TEXT_LIMITS, "turn", "tools", "next", "final")
_NAMES = {PREFIX + field: field for field in _FIELDS} | {SESSION_ID_HEADER: "session-id"}
_XARGS = "scout_"
_MAX_XARG_TOOL = 1024
_OUTCOME_KEY = re.compile(r"[a-z*][a-z0-9_.*-]{0,63}")
_OUTCOMES = {outcome.value: outcome for outcome in HintOutcome}
_NOTHING: Mapping[str, HintOutcome] = MappingProxyType({})


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


@functools.cache
def _sf() -> Any:
    """Return the structured-fields library, untyped where it is untyped."""
    import http_sf

    return http_sf


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
    for field, limit in _TEXT_LIMITS.items():
        text, _ = clean_text(getattr(hints, field), limit)
        if text is not None:
            headers[PREFIX + field] = _quoted(text)
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
        [_quoted(agent) for agent in _clean_agents(hints.next_agents)[0]],
        min(MAX_NEXT_BYTES, room - len(name) - 4),
    )
    if nexts:
        headers[name] = value = ", ".join(nexts)
        room -= len(name) + len(value) + 4
    name = PREFIX + "tools"
    tools = _fitting(
        [_tool_item(tool) for tool in reversed(_clean_tools(hints.tools)[0])],
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


def _quoted(text: str) -> str:
    """Return *text* as a String, or as a Display String where it is not printable ASCII."""
    sf = _sf()
    if text.isascii() and text.isprintable():
        return str(sf.ser_item(text))
    return str(sf.ser_item(sf.DisplayString(text)))


def _tool_item(tool: ToolEvent) -> str:
    """Return *tool*, already clean, as an Item with parameters."""
    parts = [_quoted(tool.name), ";state=", tool.state.value]
    if tool.call_id is not None:
        parts += ";call=", _quoted(tool.call_id)
    if tool.elapsed_s is not None:
        parts += ";elapsed=", _decimal(tool.elapsed_s)
    if tool.remaining_s is not None:
        parts += ";remaining=", _decimal(tool.remaining_s)
        if tool.evidence is not None:
            parts += ";evidence=", tool.evidence.value
    return "".join(parts)


def _decimal(seconds: float) -> str:
    """Return *seconds*, already within bounds, as a Decimal."""
    return str(_sf().ser_item(seconds))


def _clean_agents(agents: object) -> tuple[list[str], bool]:
    """Return the first usable names of *agents*, and whether any was changed or dropped."""
    if not isinstance(agents, Sequence) or isinstance(agents, str | bytes):
        return [], True
    kept: list[str] = []
    changed = len(agents) > MAX_NEXT
    for agent in agents[:MAX_NEXT]:
        text, bad = clean_text(agent, MAX_AGENT)
        changed |= bad or text is None
        if text is not None:
            kept.append(text)
    return kept, changed


def _clean_tools(tools: object) -> tuple[list[ToolEvent], bool]:
    """Return the newest usable events of *tools*, and whether any was changed or dropped."""
    if not isinstance(tools, Sequence):
        return [], True
    kept: list[ToolEvent] = []
    changed = len(tools) > MAX_TOOLS
    for tool in tools[-MAX_TOOLS:]:
        if not isinstance(tool, ToolEvent):
            changed = True
            continue
        event, bad = clean_tool(
            tool.name,
            tool.state,
            tool.call_id,
            tool.elapsed_s,
            tool.remaining_s,
            tool.evidence,
        )
        changed |= bad
        if event is not None:
            kept.append(event)
    return kept, changed


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
    size = 0
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
        size += len(name) + len(raw_value) + 4
        if size > MAX_HEADERS_BYTES:
            spilt.add(field)
            continue
        value = raw_value if isinstance(raw_value, bytes) else raw_value.encode("utf-8", "replace")
        value = value.strip(b" \t")
        if value:
            lines.setdefault(field, []).append(value)
    return lines, spilt, size


def _decode(lines: dict[str, list[bytes]], spilt: set[str], size: int) -> Decoded:
    outcomes: dict[str, HintOutcome] = {}
    foreign = lines.pop("session-id", None)
    version = lines.pop("version", None)
    if "version" in spilt or (version is not None and _item(version) != VERSION):
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
    _drop_contradictions(values, outcomes)
    if not values and set(outcomes) != {"version"}:
        return Decoded(hints=None, outcomes=outcomes, size_bytes=size)
    return Decoded(hints=_hints(values), outcomes=outcomes, size_bytes=size)


_IGNORED = HintOutcome.IGNORED


def _item(lines: list[bytes]) -> object:
    """Return the bare item that all *lines* agree on, or None."""
    if len(set(lines)) != 1:
        return None
    try:
        value: object = _sf().parse(lines[0], tltype="item")[0]
    except Exception:  # the library's own error, and whatever a damaged date may raise
        return None
    return value


def _text_of(value: object) -> object:
    """Return the text of a String, Token or Display String; anything else as it is."""
    sf = _sf()
    return str(value) if isinstance(value, sf.Token | sf.DisplayString) else value


def _read_item(field: str, lines: list[bytes]) -> tuple[object, bool]:
    value = _item(lines)
    if field in _TEXT_LIMITS:
        return clean_text(_text_of(value), _TEXT_LIMITS[field])
    if field == "turn":
        return clean_turn(value), False
    return (value if isinstance(value, bool) else None), False


def _members(lines: list[bytes]) -> list[Any]:
    try:
        return list(_sf().parse(b", ".join(lines), tltype="list"))
    except Exception:  # as in _item
        return []


def _read_next(lines: list[bytes]) -> tuple[object, bool]:
    agents, changed = _clean_agents([_text_of(value) for value, _ in _members(lines)])
    return tuple(agents), changed


def _read_tools(lines: list[bytes]) -> tuple[object, bool]:
    return _tools_from(_members(lines))


def _tools_from(members: Sequence[Any]) -> tuple[tuple[ToolEvent, ...], bool]:
    """Return the newest usable tool events of parsed list *members*."""
    kept: list[ToolEvent] = []
    changed = len(members) > MAX_TOOLS
    for value, given in members[-MAX_TOOLS:]:
        event, bad = clean_tool(
            _text_of(value),
            _text_of(given.get("state")),
            _text_of(given.get("call")),
            given.get("elapsed"),
            given.get("remaining"),
            _text_of(given.get("evidence")),
        )
        changed |= bad
        if event is not None:
            kept.append(event)
    return tuple(kept), changed


_LIST_READERS = {"next": _read_next, "tools": _read_tools}


def _drop_contradictions(values: dict[str, object], outcomes: dict[str, HintOutcome]) -> None:
    """Ignore fields that cannot both be true; nobody knows which of them is."""
    contradictory: list[str] = []
    if "parent" in values and values["parent"] == values.get("session"):
        contradictory.append("parent")
    if values.get("final") is True and "next" in values:
        contradictory += "final", "next"
    for field in contradictory:
        del values[field]
        outcomes[field] = HintOutcome.REJECTED


def _hints(values: Mapping[str, Any]) -> Hints:
    return Hints(
        session=values.get("session"),
        agent=values.get("agent"),
        path=values.get("path"),
        anchor=values.get("anchor"),
        turn=values.get("turn"),
        parent=values.get("parent"),
        tools=values.get("tools", ()),
        next_agents=values.get("next", ()),
        final=values.get("final", False),
    )


# --- vLLM's extra arguments -----------------------------------------------------------


def to_xargs(hints: Hints) -> dict[str, str | int | float | list[str]]:
    """Return *hints* as the scalars and flat lists that vLLM's `vllm_xargs` may hold."""
    xargs: dict[str, str | int | float | list[str]] = {_XARGS + "version": VERSION}
    try:
        for field, limit in _TEXT_LIMITS.items():
            text, _ = clean_text(getattr(hints, field), limit)
            if text is not None:
                xargs[_XARGS + field] = text
        turn = clean_turn(hints.turn)
        if turn is not None:
            xargs[_XARGS + "turn"] = turn
        if hints.final is True:
            xargs[_XARGS + "final"] = 1
        agents = _clean_agents(hints.next_agents)[0]
        if agents:
            xargs[_XARGS + "next"] = agents
        tools = _clean_tools(hints.tools)[0]
        if tools:
            xargs[_XARGS + "tools"] = [_tool_item(tool) for tool in tools]
    except Exception:  # as in encode
        return {_XARGS + "version": VERSION}
    return xargs


def from_xargs(xargs: Mapping[str, object]) -> Hints | None:
    """Return the hints that to_xargs() put into *xargs*, which anyone may have written."""
    try:
        if xargs.get(_XARGS + "version") != VERSION:
            return None
        values: dict[str, object] = {}
        for field, limit in _TEXT_LIMITS.items():
            values[field] = clean_text(xargs.get(_XARGS + field), limit)[0]
        values["turn"] = clean_turn(xargs.get(_XARGS + "turn"))
        values["final"] = xargs.get(_XARGS + "final") in (1, True)
        values["next"] = tuple(_clean_agents(xargs.get(_XARGS + "next"))[0])
        tools = xargs.get(_XARGS + "tools")
        if isinstance(tools, Sequence) and not isinstance(tools, str | bytes):
            members = [
                member
                for item in tools[-MAX_TOOLS:]
                if isinstance(item, str) and len(item) <= _MAX_XARG_TOOL
                for member in _members([item.encode("utf-8", "replace")])[:1]
            ]
            values["tools"] = _tools_from(members)[0]
        values = {field: value for field, value in values.items() if value not in (None, ())}
        _drop_contradictions(values, {})
        return _hints(values)
    except Exception:  # not a mapping of what we expect
        return None


# --- the side channel -----------------------------------------------------------------


def encode_events(events: Sequence[SessionEvent]) -> bytes:
    """Return the body that posts *events*; at most 256, the first are kept."""
    encoded = []
    for given in events[:MAX_EVENTS]:
        try:
            event = clean_event(given)
        except Exception:  # not an event
            event = None
        if event is not None:
            encoded.append(_event_json(event))
    message = {"version": VERSION, "events": encoded}
    return json.dumps(message, separators=(",", ":")).encode()


def _event_json(event: SessionEvent) -> dict[str, object]:
    fields: dict[str, object] = {"session": event.session, "age_s": event.age_s}
    if event.agent is not None:
        fields["agent"] = event.agent
    if event.final:
        fields["final"] = True
    if event.tool is not None:
        tool: dict[str, object] = {"name": event.tool.name, "state": event.tool.state.value}
        if event.tool.call_id is not None:
            tool["call_id"] = event.tool.call_id
        if event.tool.elapsed_s is not None:
            tool["elapsed_s"] = event.tool.elapsed_s
        if event.tool.remaining_s is not None:
            tool["remaining_s"] = event.tool.remaining_s
            if event.tool.evidence is not None:
                tool["evidence"] = event.tool.evidence.value
        fields["tool"] = tool
    return fields


def decode_events(body: bytes) -> tuple[list[SessionEvent], int]:
    """
    Return the events of *body* in its order, and how many were rejected.

    A body that is no message of a known version, or is too long, is one rejection.
    """
    try:
        message = json.loads(body) if len(body) <= MAX_EVENTS_BYTES else None
        if not isinstance(message, dict) or message.get("version") != VERSION:
            return [], 1
        given = message.get("events")
        if not isinstance(given, list):
            return [], 1
    except Exception:  # not JSON, not UTF-8, nested too deeply
        return [], 1
    events = [event for entry in given[:MAX_EVENTS] if (event := _event_from(entry)) is not None]
    return events, len(given) - len(events)


def _event_from(entry: object) -> SessionEvent | None:
    if not isinstance(entry, dict):
        return None
    session, _ = clean_text(entry.get("session"), MAX_SESSION)
    if session is None:
        return None
    final = entry.get("final") is True
    tool = None
    given = entry.get("tool")
    if isinstance(given, dict):
        tool, _ = clean_tool(
            given.get("name"),
            given.get("state"),
            given.get("call_id"),
            given.get("elapsed_s"),
            given.get("remaining_s"),
            given.get("evidence"),
        )
    if tool is None and given is not None and not final:
        return None
    agent, _ = clean_text(entry.get("agent"), MAX_AGENT)
    age_s, _ = clean_seconds(entry.get("age_s"))
    return SessionEvent(session=session, agent=agent, tool=tool, final=final, age_s=age_s or 0.0)


# --- the outcome header ---------------------------------------------------------------


def encode_outcome(outcomes: Mapping[str, HintOutcome]) -> str:
    """Return the value of X-Scout-Outcome; empty (send no header) where there is none."""
    members = {
        field: outcome.value for field, outcome in outcomes.items() if _OUTCOME_KEY.fullmatch(field)
    }
    sf = _sf()
    kept = {field: sf.Token(members[field]) for field in list(members)[:MAX_OUTCOMES]}
    return str(sf.ser_dictionary(kept)) if kept else ""


def decode_outcome(value: str) -> dict[str, HintOutcome]:
    """Return the outcomes that a server reported; what is malformed or unknown is left out."""
    try:
        octets = value.encode("ascii")
        if len(octets) > MAX_HEADERS_BYTES:
            return {}
        members = _sf().parse(octets, tltype="dictionary")
    except Exception:  # as in _item
        return {}
    outcomes: dict[str, HintOutcome] = {}
    for field, (item, _) in members.items():
        outcome = _OUTCOMES.get(str(item)) if isinstance(item, _sf().Token) else None
        if outcome is not None and len(outcomes) < MAX_OUTCOMES:
            outcomes[field] = outcome
    return outcomes

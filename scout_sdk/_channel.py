"""Messages of the side channel: events as JSON, and back. docs/protocol.md describes them."""

import json
from collections.abc import Sequence
from dataclasses import replace

from scout_sdk._fields import VERSION, known_version
from scout_sdk._hints import SessionEvent, ToolEvent, ToolState
from scout_sdk._limits import (
    MAX_AGENT,
    MAX_EVENTS,
    MAX_EVENTS_BYTES,
    MAX_SESSION,
    clean_event,
    clean_seconds,
    clean_text,
    clean_tool,
)

__all__ = ["aged", "decode_events", "encode_events", "later"]

_RUNNING = (ToolState.STARTED, ToolState.PROGRESS)


def later(tool: ToolEvent, passed_s: float) -> ToolEvent:
    """Return *tool* as it is to be said *passed_s* seconds later; an ended call stays as it was."""
    if tool.state not in _RUNNING:
        return tool
    return replace(
        tool,
        elapsed_s=None if tool.elapsed_s is None else tool.elapsed_s + passed_s,
        remaining_s=None if tool.remaining_s is None else max(0.0, tool.remaining_s - passed_s),
    )


def aged(event: SessionEvent, waited_s: float) -> SessionEvent:
    """Return *event* as it is to be said after *waited_s* seconds in a queue."""
    tool = None if event.tool is None else later(event.tool, waited_s)
    return replace(event, tool=tool, age_s=event.age_s + waited_s)


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
        if not isinstance(message, dict) or not known_version(message.get("version")):
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

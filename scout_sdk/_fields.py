"""
Fields of the protocol as structured-field items (RFC 9651), and from them.

Shared by the request headers and vLLM's extra arguments. The http-sf library reads and
writes the items; it is imported on first use so that `import scout_sdk` costs the
standard library only.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from scout_sdk._hints import HintOutcome, Hints, ToolEvent
from scout_sdk._limits import (
    MAX_AGENT,
    MAX_ANCHOR,
    MAX_NEXT,
    MAX_PATH,
    MAX_SESSION,
    MAX_TOOLS,
    clean_text,
    clean_tool,
)

__all__ = [
    "TEXT_LIMITS",
    "VERSION",
    "clean_agents",
    "clean_tools",
    "drop_contradictions",
    "hints_of",
    "known_version",
    "members_of",
    "quoted",
    "sf",
    "text_of",
    "tool_item",
    "tools_from",
]

VERSION = 1
"""Version of the protocol that this package speaks."""
TEXT_LIMITS = {
    "session": MAX_SESSION,
    "agent": MAX_AGENT,
    "path": MAX_PATH,
    "anchor": MAX_ANCHOR,
    "parent": MAX_SESSION,
}
"""The fields that are one text, in the order in which they are sent, with their limits."""


def known_version(value: object) -> bool:
    """Return whether *value* is the version that this package speaks, as an integer."""
    return type(value) is int and value == VERSION


@functools.cache
def sf() -> Any:
    """Return the structured-fields library, untyped where it is untyped."""
    import http_sf

    return http_sf


@functools.lru_cache(maxsize=1024)  # identities recur, and are short once they are clean
def quoted(text: str) -> str:
    """Return *text* as a String, or as a Display String where it is not printable ASCII."""
    lib = sf()
    if text.isascii() and text.isprintable():
        return str(lib.ser_item(text))
    return str(lib.ser_item(lib.DisplayString(text)))


def tool_item(tool: ToolEvent) -> str:
    """Return *tool*, already clean, as an Item with parameters."""
    parts = [quoted(tool.name), ";state=", tool.state.value]
    if tool.call_id is not None:
        parts += ";call=", quoted(tool.call_id)
    if tool.elapsed_s is not None:
        parts += ";elapsed=", _decimal(tool.elapsed_s)
    if tool.remaining_s is not None:
        parts += ";remaining=", _decimal(tool.remaining_s)
        if tool.evidence is not None:
            parts += ";evidence=", tool.evidence.value
    return "".join(parts)


def _decimal(seconds: float) -> str:
    """Return *seconds*, already within bounds, as a Decimal."""
    return str(sf().ser_item(seconds))


def clean_agents(agents: object) -> tuple[list[str], bool]:
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


def clean_tools(tools: object) -> tuple[list[ToolEvent], bool]:
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


def text_of(value: object) -> object:
    """Return the text of a String, Token or Display String; anything else as it is."""
    lib = sf()
    return str(value) if isinstance(value, lib.Token | lib.DisplayString) else value


def members_of(lines: list[bytes]) -> list[Any]:
    """Return the (value, parameters) members of the list that *lines* make; malformed: none."""
    try:
        return list(sf().parse(b", ".join(lines), tltype="list"))
    except Exception:  # the library's own error, and whatever a damaged date may raise
        return []


def tools_from(members: Sequence[Any]) -> tuple[tuple[ToolEvent, ...], bool]:
    """Return the newest usable tool events of parsed list *members*."""
    kept: list[ToolEvent] = []
    changed = len(members) > MAX_TOOLS
    for value, given in members[-MAX_TOOLS:]:
        event, bad = clean_tool(
            text_of(value),
            text_of(given.get("state")),
            text_of(given.get("call")),
            given.get("elapsed"),
            given.get("remaining"),
            text_of(given.get("evidence")),
        )
        changed |= bad
        if event is not None:
            kept.append(event)
    return tuple(kept), changed


def drop_contradictions(values: dict[str, object], outcomes: dict[str, HintOutcome]) -> None:
    """Ignore fields that cannot both be true; nobody knows which of them is."""
    contradictory: list[str] = []
    if "parent" in values and values["parent"] == values.get("session"):
        contradictory.append("parent")
    if values.get("final") is True and "next" in values:
        contradictory += "final", "next"
    for field in contradictory:
        del values[field]
        outcomes[field] = HintOutcome.REJECTED


def hints_of(values: Mapping[str, Any]) -> Hints:
    """Return the hints that clean *values* by field name make."""
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

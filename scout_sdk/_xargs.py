"""Hints as the scalars and flat lists that vLLM's `vllm_xargs` may hold, and back."""

from collections.abc import Mapping, Sequence

from scout_sdk._fields import (
    TEXT_LIMITS,
    VERSION,
    clean_agents,
    clean_tools,
    drop_contradictions,
    hints_of,
    known_version,
    members_of,
    tool_item,
    tools_from,
)
from scout_sdk._hints import Hints
from scout_sdk._limits import MAX_TOOLS, clean_text, clean_turn

__all__ = ["from_xargs", "to_xargs"]

_XARGS = "scout_"
_MAX_XARG_TOOL = 1024


def to_xargs(hints: Hints) -> dict[str, str | int | float | list[str]]:
    """Return *hints* as the scalars and flat lists that vLLM's `vllm_xargs` may hold."""
    xargs: dict[str, str | int | float | list[str]] = {_XARGS + "version": VERSION}
    try:
        for field, limit in TEXT_LIMITS.items():
            text, _ = clean_text(getattr(hints, field), limit)
            if text is not None:
                xargs[_XARGS + field] = text
        turn = clean_turn(hints.turn)
        if turn is not None:
            xargs[_XARGS + "turn"] = turn
        if hints.final is True:
            xargs[_XARGS + "final"] = 1
        agents = clean_agents(hints.next_agents)[0]
        if agents:
            xargs[_XARGS + "next"] = agents
        tools = clean_tools(hints.tools)[0]
        if tools:
            xargs[_XARGS + "tools"] = [tool_item(tool) for tool in tools]
    except Exception:  # no Hints value gets here; a foreign object must not break a call
        return {_XARGS + "version": VERSION}
    return xargs


def from_xargs(xargs: Mapping[str, object]) -> Hints | None:
    """Return the hints that to_xargs() put into *xargs*, which anyone may have written."""
    try:
        if not known_version(xargs.get(_XARGS + "version")):
            return None
        values: dict[str, object] = {}
        for field, limit in TEXT_LIMITS.items():
            values[field] = clean_text(xargs.get(_XARGS + field), limit)[0]
        values["turn"] = clean_turn(xargs.get(_XARGS + "turn"))
        values["final"] = xargs.get(_XARGS + "final") in (1, True)
        values["next"] = tuple(clean_agents(xargs.get(_XARGS + "next"))[0])
        tools = xargs.get(_XARGS + "tools")
        if isinstance(tools, Sequence) and not isinstance(tools, str | bytes):
            members = [
                member
                for item in tools[-MAX_TOOLS:]
                if isinstance(item, str) and len(item) <= _MAX_XARG_TOOL
                for member in members_of([item.encode("utf-8", "replace")])[:1]
            ]
            values["tools"] = tools_from(members)[0]
        values = {field: value for field, value in values.items() if value not in (None, ())}
        drop_contradictions(values, {})
        return hints_of(values)
    except Exception:  # not a mapping of what we expect
        return None

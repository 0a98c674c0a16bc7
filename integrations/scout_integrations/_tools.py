"""Tool events from what frameworks say about tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scout_sdk._hints import ToolEvent, ToolState
from scout_sdk.sleep import expected_seconds_of_call

__all__ = ["Call", "finished", "started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call that a model asked for, and whose it is."""

    session: str
    agent: str
    name: str
    arguments: Mapping[str, Any] | None
    call_id: str


def started(name: str, call_id: str | None, arguments: Mapping[str, Any] | str | None) -> ToolEvent:
    """Return the start of a call, with the time that its *arguments* say it will take."""
    expectation = expected_seconds_of_call(name, arguments)
    return ToolEvent(
        name=name,
        state=ToolState.STARTED,
        call_id=call_id,
        elapsed_s=0.0,
        remaining_s=None if expectation is None else expectation.seconds,
        evidence=None if expectation is None else expectation.evidence,
    )


def finished(name: str, call_id: str | None, elapsed_s: float, *, failed: bool) -> ToolEvent:
    """Return the end of a call that took *elapsed_s* seconds."""
    return ToolEvent(
        name=name,
        state=ToolState.FAILED if failed else ToolState.ENDED,
        call_id=call_id,
        elapsed_s=elapsed_s,
    )

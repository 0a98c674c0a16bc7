"""Converters into Scout's trace format, by the name of their source."""

from collections.abc import Callable, Iterator
from pathlib import Path

from scout_server.sim.traces.convert import (
    claude_code,
    conversations,
    dynamo,
    llmservingsim,
    mooncake,
    otel,
    thunderagent,
)
from scout_server.sim.traces.convert.source import SourceOptions
from scout_server.sim.traces.records import Program, TraceInfo

__all__ = ["CONVERTERS", "Converter", "SourceOptions"]

Converter = Callable[[Path, SourceOptions], tuple[TraceInfo, Iterator[Program]]]
"""Takes a file (or folder) and options; returns the header and the programs, lazily."""

CONVERTERS: dict[str, Converter] = {
    "chatdev": conversations.chatdev,
    "claude_code": claude_code.convert,
    "dynamo": dynamo.convert,
    "llmservingsim": llmservingsim.convert,
    "mooncake": mooncake.convert,
    "otel": otel.convert,
    "thunderagent": thunderagent.convert,
    "who_and_when": conversations.who_and_when,
}

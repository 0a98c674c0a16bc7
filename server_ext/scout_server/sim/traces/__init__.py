"""Traces of agent programs: one documented format, a strict reader, a writer and converters."""

from scout_server.sim.traces.jsonl import (
    SkipCount,
    TraceError,
    TraceReader,
    by_arrival,
    program_line,
    write_trace,
)
from scout_server.sim.traces.records import (
    FORMAT_VERSION,
    HashScope,
    HashSource,
    Program,
    TraceInfo,
    Turn,
)

__all__ = [
    "FORMAT_VERSION",
    "HashScope",
    "HashSource",
    "Program",
    "SkipCount",
    "TraceError",
    "TraceInfo",
    "TraceReader",
    "Turn",
    "by_arrival",
    "program_line",
    "write_trace",
]

"""Agentic workloads of LLMServingSim and AgentServeSim: sessions of dependent requests."""

from collections.abc import Iterator
from pathlib import Path

from scout_server.sim.traces.convert.source import SourceOptions, lines
from scout_server.sim.traces.jsonl import TraceError
from scout_server.sim.traces.records import HashScope, HashSource, Program, Runs, TraceInfo, Turn

__all__ = ["convert"]

_BLOCK = 16


def convert(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the sessions (`sub_requests`) or single requests of *path*, one program each.

    A request's `tool_duration_ns` runs after it. Without token ids, a prompt is assumed to extend
    the one before; with `prefix_reuse_toks`, by that much only.
    """
    info = TraceInfo(
        source="llmservingsim",
        block_tokens=_BLOCK,
        scope=HashScope.PROGRAM,
        hashes=HashSource.ASSUMED,
    )
    return info, _programs(path, options)


def _count(raw: dict[str, object], name: str, file: str, line: int, where: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise TraceError(file, line, f"{where}{name}", f"must be a number >= 0, is {value!r}")
    return int(value)


def _programs(path: Path, options: SourceOptions) -> Iterator[Program]:
    for line, raw in lines(path, options):
        try:
            yield _program(raw, path.name, line)
        except TraceError as error:
            options.bad(error)


def _program(raw: dict[str, object], file: str, line: int) -> Program:
    requests = raw.get("sub_requests")
    if requests is None:
        requests = [raw]
    if not isinstance(requests, list) or not requests:
        raise TraceError(file, line, "sub_requests", "must be a list of at least one request")
    turns: list[Turn] = []
    gap = 0.0
    tool: str | None = None
    base = length = 0
    for index, item in enumerate(requests):
        where = f"sub_requests[{index}]." if requests[0] is not raw else ""
        if not isinstance(item, dict):
            raise TraceError(file, line, where or "line", "must be an object")
        tokens = max(_count(item, "input_toks", file, line, where), 1)
        output = _count(item, "output_toks", file, line, where)
        blocks = -(-tokens // _BLOCK)
        reuse = item.get("prefix_reuse_toks")
        runs: Runs
        if isinstance(reuse, int) and turns:
            kept = min(reuse // _BLOCK, blocks)
            fresh = base + length + 1
            runs = (
                ((base, kept), (fresh, blocks - kept)) if 0 < kept < blocks else ((base, blocks),)
            )
            length = max(length, fresh - base + blocks)
        else:
            if blocks < length:
                base += length + 1
                length = 0
            runs = ((base, blocks),)
            length = max(length, blocks)
        name = item.get("tool_name")
        turns.append(
            Turn(
                agent=str(item["agent"]) if isinstance(item.get("agent"), str) else None,
                input_tokens=tokens,
                output_tokens=output,
                hash_runs=runs,
                parents=(index - 1,) if index else (),
                gap_s=gap,
                tool=tool,
            )
        )
        has_tool = item.get("tool_duration_ns") is not None
        gap = _count(item, "tool_duration_ns", file, line, where) / 1e9 if has_tool else 0.0
        tool = str(name) if isinstance(name, str) else ("tool" if gap else None)
    arrival = raw.get("arrival_time_ns", 0)
    if not isinstance(arrival, int | float) or arrival < 0:
        raise TraceError(file, line, "arrival_time_ns", f"must be a number, is {arrival!r}")
    return Program(
        program=str(raw.get("session_id", f"line-{line}")),
        arrival_s=arrival / 1e9,
        turns=tuple(turns),
    )

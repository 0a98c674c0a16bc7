"""Agentic workloads of LLMServingSim and AgentServeSim: sessions of dependent requests."""

from collections.abc import Iterator
from pathlib import Path

from scout_server.sim.traces.convert.source import BROKEN, SourceOptions, lines
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


def _head(chain: Runs, blocks: int) -> Runs:
    """Return the first *blocks* ids of *chain*, whose last run has no end."""
    head: list[tuple[int, int]] = []
    for at, (first, count) in enumerate(chain):
        take = blocks if at == len(chain) - 1 else min(count, blocks)
        blocks -= take
        if take and head and sum(head[-1]) == first:
            head[-1] = (head[-1][0], head[-1][1] + take)
        elif take:
            head.append((first, take))
    return tuple(head)


def _programs(path: Path, options: SourceOptions) -> Iterator[Program]:
    for line, raw in lines(path, options):
        try:
            yield _program(raw, path.name, line)
        except BROKEN as error:
            options.bad(error, path.name, line)


def _program(raw: dict[str, object], file: str, line: int) -> Program:
    requests = raw.get("sub_requests")
    if requests is None:
        requests = [raw]
    if not isinstance(requests, list) or not requests:
        raise TraceError(file, line, "sub_requests", "must be a list of at least one request")
    turns: list[Turn] = []
    gap = 0.0
    tool: str | None = None
    length = top = 0
    # The chain of the request before: its prompt, then its reply and whatever comes after it.
    chain: Runs = ((0, 1),)
    for index, item in enumerate(requests):
        where = f"sub_requests[{index}]." if requests[0] is not raw else ""
        if not isinstance(item, dict):
            raise TraceError(file, line, where or "line", "must be an object")
        tokens = max(_count(item, "input_toks", file, line, where), 1)
        output = _count(item, "output_toks", file, line, where)
        blocks = -(-tokens // _BLOCK)
        reuse = item.get("prefix_reuse_toks")
        if isinstance(reuse, int) and turns:
            kept = min(max(reuse, 0) // _BLOCK, blocks)
        else:
            kept = blocks if blocks >= length else 0
        runs = _head(chain, kept)
        top = max(top, runs[-1][0] + runs[-1][1]) if runs else top
        if kept < blocks:
            runs = (*runs, (top, blocks - kept))
            top += blocks - kept
        length = blocks
        chain = (*runs, (top, 1))
        top += -(-output // _BLOCK)
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

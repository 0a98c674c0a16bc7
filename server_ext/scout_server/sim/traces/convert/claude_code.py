"""Coding-agent sessions of kv-cache-tester: prefix hashes, gaps, sub-agents."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from scout_sdk._hints import HUMAN
from scout_server.sim.traces.convert.source import BROKEN, SourceOptions, lines
from scout_server.sim.traces.jsonl import TraceError
from scout_server.sim.traces.records import HashScope, HashSource, Program, TraceInfo, Turn

__all__ = ["convert"]

_BLOCK = 64


def convert(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the sessions of *path*, one program each.

    The source has no common clock: programs start evenly, `starts_per_minute`. What a gap is: from
    the end of the answer before to the next request, tool and client together; after a final text
    it is a person.
    """
    info = TraceInfo(
        source="claude_code (kv-cache-tester)",
        block_tokens=_BLOCK,
        scope=HashScope.PROGRAM,
        hashes=HashSource.MEASURED,
        licence="Apache-2.0",
        note="gaps are inter-turn gaps with a floor of about 3.5 s of client and proxy",
    )
    return info, _programs(path, options)


def _programs(path: Path, options: SourceOptions) -> Iterator[Program]:
    number = 0
    for line, raw in lines(path, options):
        try:
            turns = _turns(raw, path.name, line)
        except BROKEN as error:
            options.bad(error, path.name, line)
            continue
        if turns:
            yield Program(
                program=str(raw.get("id", f"line-{line}")),
                arrival_s=options.arrival_s(number),
                turns=tuple(turns),
                workflow="claude-code",
            )
            number += 1


class _Ends:
    """Recorded ends, to turn clock times into gaps after parents, or after the first start."""

    def __init__(self) -> None:
        self.of: list[float] = []
        self.first: float | None = None

    def gap(self, start: float, parents: tuple[int, ...]) -> float:
        if self.first is None:
            self.first = start
        return max(start - max((self.of[p] for p in parents), default=self.first), 0.0)


def _number(raw: dict[str, object], name: str, file: str, line: int, where: str) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise TraceError(file, line, f"{where}.{name}", f"must be a number >= 0, is {value!r}")
    return float(value)


def _turns(raw: dict[str, object], file: str, line: int) -> list[Turn]:
    block = raw.get("block_size", _BLOCK)
    if block != _BLOCK:
        raise TraceError(file, line, "block_size", f"must be {_BLOCK}, is {block!r}")
    requests = raw.get("requests")
    if not isinstance(requests, list):
        raise TraceError(file, line, "requests", "must be a list")
    turns: list[Turn] = []
    ends = _Ends()
    last: int | None = None
    joins: list[tuple[int, float]] = []
    for index, item in enumerate(requests):
        where = f"requests[{index}]"
        if not isinstance(item, dict):
            raise TraceError(file, line, where, "must be an object")
        if item.get("type") == "subagent":
            child = _subagent(item, turns, ends, last, file, line, where)
            if child is not None:
                joins.append((child, ends.of[child]))
            continue
        start = _number(item, "t", file, line, where)
        parents = () if last is None else (last,)
        # The session waits for the sub-agents that ended before it went on.
        joined = tuple(child for child, end in joins if end <= start + 1.0)
        joins = [(child, end) for child, end in joins if end > start + 1.0]
        parents = tuple(sorted({*parents, *joined}))
        last = _add(item, turns, ends, parents, "main", "", start, file, line, where)
    return turns


def _subagent(
    item: dict[str, object],
    turns: list[Turn],
    ends: _Ends,
    parent: int | None,
    file: str,
    line: int,
    where: str,
) -> int | None:
    begin = _number(item, "t", file, line, where)
    requests = item.get("requests")
    if not isinstance(requests, list):
        raise TraceError(file, line, f"{where}.requests", "must be a list")
    last: int | None = parent
    first = True
    session = str(item.get("agent_id", where))
    agent = str(item.get("subagent_type") or "subagent")
    for index, raw in enumerate(requests):
        place = f"{where}.requests[{index}]"
        if not isinstance(raw, dict):
            raise TraceError(file, line, place, "must be an object")
        start = begin + _number(raw, "t", file, line, place)
        parents = () if last is None else (last,)
        last = _add(
            raw, turns, ends, parents, agent, session, start, file, line, place, spawned=first
        )
        first = False
    return None if first else last


def _add(
    item: dict[str, object],
    turns: list[Turn],
    ends: _Ends,
    parents: tuple[int, ...],
    agent: str,
    session: str,
    start: float,
    file: str,
    line: int,
    where: str,
    *,
    spawned: bool = False,
) -> int:
    runs = item.get("hash_runs", [])
    if not isinstance(runs, list) or not all(isinstance(r, list) and len(r) == 2 for r in runs):
        raise TraceError(file, line, f"{where}.hash_runs", "must be a list of [first, count]")
    took = item.get("api_time")
    service = float(took) if isinstance(took, int | float) else None
    kinds = cast(list[str], item.get("input_types") or [])
    tool = None
    if parents and not spawned:
        tool = "tool" if "tool_result" in kinds else HUMAN
    turns.append(
        Turn(
            agent=agent,
            session=session,
            input_tokens=max(int(_number(item, "in", file, line, where)), 1),
            output_tokens=int(_number(item, "out", file, line, where)),
            hash_runs=tuple((int(first), int(count)) for first, count in runs),
            parents=parents,
            gap_s=ends.gap(start, parents),
            tool=tool,
            calls_tool=item.get("stop") == "tool_use",
            service_s=service,
        )
    )
    ends.of.append(start + (service or 0.0))
    return len(turns) - 1

"""Dynamo's agentic Mooncake rows: requests that wait for others, tools, prefix hashes."""

from collections.abc import Iterator
from pathlib import Path

from scout_server.sim.traces.convert.source import BROKEN, SourceOptions, lines
from scout_server.sim.traces.jsonl import MOST_ID, TraceError
from scout_server.sim.traces.records import (
    HashScope,
    HashSource,
    Program,
    TraceInfo,
    Turn,
    runs_of,
)

__all__ = ["convert"]

_BLOCK = 512
_SCOPES = {"global": HashScope.GLOBAL, "local": HashScope.PROGRAM}


def convert(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the rows of *path*, joined to programs: rows that wait for one another, or share a
    session, are one.

    `delay` and `tool_wait_ms` are the gap. A first line with a schema sets the block size; files
    of schema version 2 are not read.
    """
    rows = list(lines(path, options))
    block, scope = _BLOCK, HashScope.GLOBAL
    if rows and "schema" in rows[0][1]:
        header = rows.pop(0)[1]
        if header.get("version") not in (None, 1):
            version = header.get("version")
            raise TraceError(path.name, 1, "version", f"{version} is not supported; known: 1")
        size = header.get("block_size")
        block = size if isinstance(size, int) and size > 0 else block
        scope = _SCOPES.get(str(header.get("hash_id_scope")), scope)
    info = TraceInfo(
        source="dynamo agentic mooncake",
        block_tokens=block,
        scope=scope,
        hashes=HashSource.MEASURED,
    )
    return info, _programs(path.name, rows, block, options)


def _programs(
    file: str, rows: list[tuple[int, dict[str, object]]], block: int, options: SourceOptions
) -> Iterator[Program]:
    good: dict[str, tuple[int, dict[str, object]]] = {}
    # Hashes of 64 bits become numbers in order of first sight; small ids are numbers already.
    numbers: dict[int, int] | None = {} if any(_large(raw) for _, raw in rows) else None
    for line, raw in rows:
        name = raw.get("request_id")
        try:
            if not isinstance(name, str):
                raise TraceError(file, line, "request_id", f"must be text, is {name!r}")
            if name in good:
                raise TraceError(file, line, "request_id", f"{name!r} occurs twice")
            _check(raw, file, line, numbers)
        except BROKEN as error:
            options.bad(error, file, line)
            continue
        good[name] = (line, raw)
    groups = _group(good)
    for members in groups:
        try:
            yield _program(members, good, file, block)
        except BROKEN as error:
            options.bad(error, file, good[members[0]][0])


def _check(
    raw: dict[str, object], file: str, line: int, numbers: dict[int, int] | None = None
) -> None:
    for name in ("input_length", "output_length"):
        value = raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TraceError(file, line, name, f"must be an integer >= 0, is {value!r}")
    ids = raw.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise TraceError(file, line, "hash_ids", "must be a list of integers >= 0")
    if numbers is not None:
        raw["hash_ids"] = [numbers.setdefault(i, len(numbers)) for i in ids]
    waits = raw.get("wait_for") or []
    if not isinstance(waits, list) or not all(isinstance(w, str) for w in waits):
        raise TraceError(file, line, "wait_for", "must be a list of request ids")


def _large(raw: dict[str, object]) -> bool:
    ids = raw.get("hash_ids")
    return isinstance(ids, list) and any(isinstance(i, int) and i >= MOST_ID for i in ids)


def _waits(raw: dict[str, object]) -> list[str]:
    waits = raw.get("wait_for") or []
    return [str(w) for w in waits] if isinstance(waits, list) else []


def _group(good: dict[str, tuple[int, dict[str, object]]]) -> list[list[str]]:
    root = {name: name for name in good}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    session_of: dict[str, str] = {}
    for name, (_, raw) in good.items():
        linked = [w for w in _waits(raw) if w in good]
        session = raw.get("session_id")
        if isinstance(session, str):
            linked.append(session_of.setdefault(session, name))
        for other in linked:
            a, b = find(name), find(other)
            root[max(a, b)] = min(a, b)
    groups: dict[str, list[str]] = {}
    for name in good:
        groups.setdefault(find(name), []).append(name)
    return list(groups.values())


def _program(
    members: list[str],
    good: dict[str, tuple[int, dict[str, object]]],
    file: str,
    block: int,
) -> Program:
    order = _sorted(members, good, file)
    index = {name: i for i, name in enumerate(order)}
    turns: list[Turn] = []
    last_of: dict[str, int] = {}
    main = next((str(good[n][1].get("session_id") or "") for n in order), "")
    stamped = [_ms(good[n][1], "timestamp") for n in order if "timestamp" in good[n][1]]
    start = min(stamped, default=0.0)
    for name in order:
        line, raw = good[name]
        session = str(raw.get("session_id") or "")
        waits = [w for w in _waits(raw) if w in index]
        unknown = [w for w in _waits(raw) if w not in good]
        if unknown:
            raise TraceError(file, line, "wait_for", f"{unknown[0]!r} is no request of this file")
        parents = {index[w] for w in waits}
        gap = (_ms(raw, "delay") + _ms(raw, "tool_wait_ms")) / 1000
        if not waits and session in last_of:
            parents = {last_of[session]}
        elif not waits and "timestamp" in raw:
            gap += (_ms(raw, "timestamp") - start) / 1000
        tokens = int(str(raw.get("input_length") or 1))
        ids = raw.get("hash_ids") or []
        assert isinstance(ids, list)
        turns.append(
            Turn(
                session="" if session == main else session,
                agent=None,
                input_tokens=max(tokens, 1),
                output_tokens=int(str(raw.get("output_length") or 0)),
                hash_runs=runs_of(ids[: -(-max(tokens, 1) // block)]),
                parents=tuple(sorted(parents)),
                gap_s=gap,
                tool=_tool(raw) if parents else None,
            )
        )
        last_of[session] = len(turns) - 1
    return Program(program=main or order[0], arrival_s=start / 1000, turns=tuple(turns))


def _ms(raw: dict[str, object], name: str) -> float:
    value = raw.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _tool(raw: dict[str, object]) -> str | None:
    events = raw.get("tool_events")
    if isinstance(events, list):
        for event in events:
            if isinstance(event, dict) and isinstance(event.get("tool_class"), str):
                return str(event["tool_class"])
    return "tool" if _ms(raw, "tool_wait_ms") else None


def _sorted(
    members: list[str], good: dict[str, tuple[int, dict[str, object]]], file: str
) -> list[str]:
    """Return *members* with those that are waited for first, file order otherwise."""
    left = dict.fromkeys(members)
    done: dict[str, None] = {}
    while left:
        ready = [n for n in left if all(w in done or w not in good for w in _waits(good[n][1]))]
        if not ready:
            line = good[next(iter(left))][0]
            raise TraceError(file, line, "wait_for", "requests wait for one another in a circle")
        for name in ready:
            done[name] = None
            del left[name]
    return list(done)

"""Request traces of Mooncake: arrivals, lengths and global prefix hashes, no programs."""

from collections.abc import Iterator
from pathlib import Path

from scout_server.sim.traces.convert.source import BROKEN, SourceOptions, lines
from scout_server.sim.traces.jsonl import TraceError
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


def convert(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the requests of *path*, each a program of one turn.

    The source does not say which requests belong together; their prefixes show what is shared.
    """
    info = TraceInfo(
        source="mooncake",
        block_tokens=_BLOCK,
        scope=HashScope.GLOBAL,
        hashes=HashSource.MEASURED,
        licence="Apache-2.0",
        note="every request is a program of its own",
    )
    return info, _programs(path, options)


def _programs(path: Path, options: SourceOptions) -> Iterator[Program]:
    for line, raw in lines(path, options):
        try:
            program = _program(raw, path.name, line)
        except BROKEN as error:
            options.bad(error, path.name, line)
            continue
        yield program


def _program(raw: dict[str, object], file: str, line: int) -> Program:
    ids = raw.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise TraceError(file, line, "hash_ids", "must be a list of integers >= 0")
    numbers: list[float] = []
    for name in ("timestamp", "input_length", "output_length"):
        value = raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            raise TraceError(file, line, name, f"must be a number >= 0, is {value!r}")
        numbers.append(value)
    at, tokens, output = numbers
    most = -(-max(int(tokens), 1) // _BLOCK)
    return Program(
        program=f"r{line:06d}",
        arrival_s=at / 1000.0,
        turns=(
            Turn(
                input_tokens=max(int(tokens), 1),
                output_tokens=int(output),
                hash_runs=runs_of(ids[:most]),
            ),
        ),
    )

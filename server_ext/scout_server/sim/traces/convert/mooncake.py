"""Request traces of Mooncake: arrivals, lengths and global prefix hashes, no programs."""

from collections.abc import Iterator
from pathlib import Path

from scout_server.sim.traces.convert.source import SourceOptions, lines
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
        ids = raw.get("hash_ids")
        try:
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise TraceError(path.name, line, "hash_ids", "must be a list of integers")
            numbers = []
            for name in ("timestamp", "input_length", "output_length"):
                value = raw.get(name)
                if not isinstance(value, int | float) or value < 0:
                    raise TraceError(path.name, line, name, f"must be a number, is {value!r}")
                numbers.append(value)
        except TraceError as error:
            options.bad(error)
            continue
        at, tokens, output = numbers
        most = -(-max(int(tokens), 1) // _BLOCK)
        yield Program(
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

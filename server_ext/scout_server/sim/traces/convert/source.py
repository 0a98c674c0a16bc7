"""What all converters share: reading lines with places for errors, and assumed prompts."""

import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scout_server.sim.traces.jsonl import (
    SkipCount,
    TraceError,
    numbered_lines,
    parse_line,
    reread,
)
from scout_server.sim.traces.records import Program, Runs, TraceInfo, Turn, runs_of

__all__ = ["BROKEN", "Said", "SourceOptions", "assumed_program", "checked", "documents", "lines"]

BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a converter meets where an entry is not of the form it expects; TraceError is among them."""

_CHARACTERS_PER_TOKEN = 4.0
_MOST = 10**7
"""Tokens of one message of a log without hashes; every block of it gets an id."""


@dataclass(slots=True)
class SourceOptions:
    """How a source is read."""

    skip_bad: bool = False
    """Leave out broken entries and count them in *skips*."""
    starts_per_minute: float = 1.0
    """Arrivals of programs whose source has no common clock: evenly spaced."""
    skips: SkipCount = field(default_factory=SkipCount)

    def bad(self, error: Exception, file: str, line: int) -> None:
        """Raise what was wrong with the entry of *line*, or count it."""
        if not isinstance(error, TraceError):
            problem = f"is not of the source's form: {type(error).__name__}: {error}"
            error = TraceError(file, line, "entry", problem)
        if not self.skip_bad:
            raise error
        self.skips.add(error)

    def arrival_s(self, number: int) -> float:
        """Return the arrival of the program with *number* where the source has none."""
        return number * 60.0 / self.starts_per_minute


def lines(path: Path, options: SourceOptions) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object) of a JSONL file; anything but objects is bad."""
    for number, line in numbered_lines(path):

        def fail(where: str, problem: str, number: int = number) -> TraceError:
            return TraceError(path.name, number, where, problem)

        try:
            raw = parse_line(line, fail)
            if not isinstance(raw, dict):
                raise fail("line", "is not a JSON object")
        except TraceError as error:
            options.bad(error, path.name, number)
            continue
        yield number, raw


def checked(
    info: TraceInfo, programs: Iterator[Program], file: str, options: SourceOptions
) -> Iterator[Program]:
    """Yield those of *programs* that a reader of the trace would take; the others are bad."""
    seen: set[str] = set()
    for number, program in enumerate(programs, start=1):

        def fail(where: str, problem: str, program: Program = program) -> TraceError:
            return TraceError(file, 0, f"program {program.program!a}: {where}", problem)

        try:
            found = reread(program, info, fail)
            if found.program in seen:
                raise fail("program", "occurs twice")
        except BROKEN as error:
            options.bad(error, file, number)
            continue
        seen.add(found.program)
        yield program


def documents(path: Path, options: SourceOptions) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (name, object) of every .json file in a folder or a tar archive, by name."""
    found: list[tuple[str, bytes]] = []
    if path.is_dir():
        found = [(str(f.relative_to(path)), f.read_bytes()) for f in path.rglob("*.json")]
    else:
        try:
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    data = archive.extractfile(member) if member.isfile() else None
                    if data is not None and member.name.endswith(".json"):
                        found.append((member.name, data.read()))
        except (tarfile.TarError, EOFError, zlib.error) as error:
            problem = f"is neither a folder nor a whole tar archive: {error}"
            raise TraceError(path.name, 0, "path", problem) from error
    for name, content in sorted(found):
        try:
            raw = json.loads(content)
        except (ValueError, RecursionError) as error:
            options.bad(TraceError(name, 1, "file", f"is not JSON: {error}"), name, 1)
            continue
        if not isinstance(raw, dict):
            options.bad(TraceError(name, 1, "file", "is not a JSON object"), name, 1)
            continue
        yield name, raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a log without hashes: who said how much."""

    agent: str
    output_tokens: int
    input_tokens: int | None = None
    """None: the anchor and everything said before."""
    gap_s: float = 0.0
    tool: str | None = None
    service_s: float | None = None
    heard_tokens: int = 0
    """Said before it by others than models: part of the conversation."""

    @staticmethod
    def tokens(characters: int) -> int:
        """Return the tokens that *characters* of text are about."""
        return max(round(characters / _CHARACTERS_PER_TOKEN), 1)


def assumed_program(
    name: str,
    arrival_s: float,
    said: Sequence[Said],
    *,
    first_id: int,
    anchors: dict[str, int],
    anchor_blocks: int,
    block_tokens: int,
    workflow: str,
) -> tuple[Program, int]:
    """
    Return a program of messages, and the next free block id.

    Assumed, since the source has no hashes: every agent has a fixed prefix of *anchor_blocks*,
    the same in all programs (*anchors* has their first ids and is filled), and then sees the whole
    conversation so far, cut to the recorded prompt length where there is one.
    """
    spoken: list[int] = []
    turns: list[Turn] = []
    at = first_id
    for message in said:
        if max(message.heard_tokens, message.input_tokens or 0, message.output_tokens) > _MOST:
            msg = f"more than {_MOST:,} tokens in one message"
            raise ValueError(msg)
        if message.agent not in anchors:
            anchors[message.agent] = len(anchors) * anchor_blocks
        anchor = anchors[message.agent]
        heard = -(-message.heard_tokens // block_tokens)
        spoken.extend(range(at, at + heard))
        at += heard
        have = anchor_blocks + len(spoken)
        want = have
        tokens = have * block_tokens
        if message.input_tokens is not None:
            tokens = message.input_tokens
            want = -(-tokens // block_tokens)
        if want > have:
            spoken.extend(range(at, at + want - have))
            at += want - have
        ids = [*range(anchor, anchor + anchor_blocks), *spoken][:want]
        runs: Runs = runs_of(ids)
        turns.append(
            Turn(
                agent=message.agent,
                input_tokens=tokens,
                output_tokens=message.output_tokens,
                hash_runs=runs,
                parents=(len(turns) - 1,) if turns else (),
                gap_s=message.gap_s if turns else 0.0,
                tool=message.tool if turns else None,
                service_s=message.service_s,
            )
        )
        blocks = max(-(-message.output_tokens // block_tokens), 1)
        spoken.extend(range(at, at + blocks))
        at += blocks
    program = Program(program=name, arrival_s=arrival_s, turns=tuple(turns), workflow=workflow)
    return program, at

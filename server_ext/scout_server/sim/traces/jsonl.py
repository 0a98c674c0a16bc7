"""The trace format on disk: one header line, then one program a line; strict both ways."""

import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, TextIO, cast

from scout_sdk._errors import ScoutError
from scout_sdk._trace import header_line, program_line
from scout_server.sim.traces.records import (
    FORMAT_VERSION,
    HashScope,
    HashSource,
    Program,
    Runs,
    TraceInfo,
    Turn,
)

__all__ = [
    "MOST_ID",
    "SkipCount",
    "TraceError",
    "TraceReader",
    "by_arrival",
    "numbered_lines",
    "parse_line",
    "program_line",
    "reread",
    "write_trace",
]

_MOST_TOKENS = 10**8
_MOST_SECONDS = 1e10
MOST_ID = 2**32
_MOST_BLOCK = 2**20
"""Bounds of what a trace may say: far beyond anything real, near enough that sums stay exact and
no line takes the memory of a machine."""


class TraceError(ScoutError, ValueError):
    """A trace file is malformed; the message names file, line (if one: not 0) and field."""

    def __init__(self, file: str, line: int, where: str, problem: str) -> None:
        place = f"{file}:{line}" if line else file
        super().__init__(f"{place}: {where}: {problem}")
        self.file = file
        self.line = line
        self.field = where
        self.problem = problem


@dataclass(slots=True)
class SkipCount:
    """How many lines a reader left out, and the first few reasons."""

    skipped: int = 0
    reasons: list[str] = field(default_factory=list)
    keep: int = 10

    def add(self, error: TraceError) -> None:
        """Count one bad line."""
        self.skipped += 1
        if len(self.reasons) < self.keep:
            self.reasons.append(str(error))


@contextmanager
def _open_text(
    path: Path, mode: Literal["r", "w"] = "r", *, packed: bool | None = None
) -> Iterator[TextIO]:
    """Open *path* as UTF-8 text; *packed*: (de)compressed, by default if its name ends in .gz."""
    # Bytes that are no UTF-8 come in as lone surrogates, which parse_line finds and names.
    errors = "surrogateescape" if mode == "r" else "strict"
    if path.suffix == ".gz" if packed is None else packed:
        with (
            gzip.open(path, "rb" if mode == "r" else "wb") as raw,
            io.TextIOWrapper(cast(IO[bytes], raw), encoding="utf-8", errors=errors) as text,
        ):
            yield text
    else:
        with path.open(mode, encoding="utf-8", errors=errors) as plain:
            yield cast(TextIO, plain)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) of what is not blank; TraceError where an archive is damaged."""
    number = 0
    with _open_text(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(path.name, number + 1, "file", f"is damaged: {error}") from error


class _Fields:
    """One JSON object while it is checked: every access names the field in its error."""

    def __init__(self, raw: object, where: str, fail: Callable[[str, str], TraceError]) -> None:
        self.where = where
        self._fail = fail
        if not isinstance(raw, dict):
            raise fail(where or "line", f"must be a JSON object, is {type(raw).__name__}")
        self._raw: dict[str, object] = raw
        self._seen: set[str] = set()

    def error(self, name: str, problem: str) -> TraceError:
        return self._fail(f"{self.where}.{name}" if self.where else name, problem)

    def get(self, name: str) -> object:
        self._seen.add(name)
        return self._raw.get(name)

    def text(self, name: str, default: str | None) -> str:
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is required")
            return default
        if not isinstance(value, str):
            raise self.error(name, f"must be text, is {_short(value)}")
        if not _encodes(value):
            raise self.error(name, f"is not valid Unicode: {_short(value)}")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.get(name) is None else self.text(name, None)

    def seconds(self, name: str, default: float | None) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is required")
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise self.error(name, f"must be a finite number, is {_short(value)}")
        if not 0.0 <= value <= _MOST_SECONDS:
            bound = "at least 0" if value < 0.0 else f"at most {_MOST_SECONDS:g} s"
            raise self.error(name, f"must be {bound}, is {_short(value)}")
        return float(value)

    def optional_seconds(self, name: str) -> float | None:
        return None if self.get(name) is None else self.seconds(name, None)

    def integer(
        self, name: str, default: int | None, *, least: int = 0, most: int = _MOST_TOKENS
    ) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is required")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, is {_short(value)}")
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise self.error(name, f"must be {bound}, is {_short(value)}")
        return value

    def flag(self, name: str) -> bool:
        value = self.optional_flag(name)
        return bool(value)

    def optional_flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, is {_short(value)}")
        return value

    def finish(self) -> None:
        unknown = sorted(set(self._raw) - self._seen)
        if unknown:
            name = unknown[0] if _encodes(unknown[0]) else ascii(unknown[0])
            raise self.error(name, f"is unknown; known: {', '.join(sorted(self._seen))}")


def _runs(fields: _Fields, name: str) -> Runs:
    raw = fields.get(name)
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise fields.error(name, "must be a list of [first id, count]")
    runs = []
    for index, item in enumerate(raw):
        match item:
            case [int(first), int(count)] if (
                first >= 0
                and count >= 1
                and first + count <= MOST_ID
                and not isinstance(first, bool)
                and not isinstance(count, bool)
            ):
                runs.append((first, count))
            case _:
                problem = f"must be [first id from 0 to 2^32, count >= 1], is {_short(item)}"
                raise fields.error(f"{name}[{index}]", problem)
    return tuple(runs)


def _turn(raw: object, index: int, fail: Callable[[str, str], TraceError]) -> Turn:
    fields = _Fields(raw, f"turns[{index}]", fail)
    parents = fields.get("parents")
    if parents is None:
        chosen: tuple[int, ...] = (index - 1,) if index else ()
    elif isinstance(parents, list) and all(
        isinstance(p, int) and not isinstance(p, bool) and 0 <= p < index for p in parents
    ):
        chosen = tuple(parents)
        if len(set(chosen)) < len(chosen):
            raise fields.error("parents", f"must differ, is {_short(parents)}")
    else:
        problem = f"must be indices of earlier turns, is {_short(parents)}"
        raise fields.error("parents", problem)
    hit = fields.get("hit_tokens")
    turn = Turn(
        agent=fields.optional_text("agent"),
        session=fields.text("session", ""),
        input_tokens=fields.integer("in", None, least=1),
        output_tokens=fields.integer("out", None),
        hash_runs=_runs(fields, "hash_runs"),
        parents=chosen,
        gap_s=fields.seconds("gap_s", 0.0),
        gap_censored=fields.flag("gap_censored"),
        tool=fields.optional_text("tool"),
        tool_expected_s=fields.optional_seconds("tool_expected_s"),
        calls_tool=fields.optional_flag("calls_tool"),
        service_s=fields.optional_seconds("service_s"),
        hit_tokens=None if hit is None else fields.integer("hit_tokens", None),
    )
    fields.finish()
    return turn


def _program(raw: object, fail: Callable[[str, str], TraceError], info: TraceInfo) -> Program:
    fields = _Fields(raw, "", fail)
    turns = fields.get("turns")
    if not isinstance(turns, list) or not turns:
        raise fields.error("turns", "must be a list of at least one turn")
    program = Program(
        program=fields.text("program", None),
        arrival_s=fields.seconds("arrival_s", 0.0),
        tenant=fields.text("tenant", ""),
        aborted=fields.flag("aborted"),
        workflow=fields.text("workflow", ""),
        turns=tuple(_turn(turn, index, fail) for index, turn in enumerate(turns)),
    )
    fields.finish()
    for index, turn in enumerate(program.turns):
        have = sum(count for _, count in turn.hash_runs)
        most = -(-turn.input_tokens // info.block_tokens)
        if have > most:
            problem = (
                f"{have} blocks of {info.block_tokens} for a prompt of {turn.input_tokens} tokens"
            )
            raise fail(f"turns[{index}].hash_runs", problem)
    return program


def _info(raw: object, fail: Callable[[str, str], TraceError]) -> TraceInfo:
    fields = _Fields(raw, "", fail)
    version = fields.integer("scout_trace", None, least=1)
    if version != FORMAT_VERSION:
        raise fields.error("scout_trace", f"version {version} is unknown; known: {FORMAT_VERSION}")
    scope, hashes = fields.text("scope", "program"), fields.text("hashes", "measured")
    for name, value, kind in (("scope", scope, HashScope), ("hashes", hashes, HashSource)):
        known = [member.value for member in kind]
        if value not in known:
            raise fields.error(name, f"must be one of {', '.join(known)}, is {value!r}")
    info = TraceInfo(
        source=fields.text("source", ""),
        block_tokens=fields.integer("block_tokens", None, least=1, most=_MOST_BLOCK),
        scope=HashScope(scope),
        hashes=HashSource(hashes),
        licence=fields.text("licence", ""),
        note=fields.text("note", ""),
    )
    fields.finish()
    return info


class TraceReader:
    """
    Reads a trace file, one program at a time.

    Iterate as often as wanted. With *skip_bad* a broken program line is left out and counted in
    `skips`; without, it raises TraceError. A broken first line always raises.
    """

    def __init__(self, path: Path, *, skip_bad: bool = False) -> None:
        self.path = path
        self._skip_bad = skip_bad
        self.skips = SkipCount()
        number, first = next(numbered_lines(path), (0, ""))
        fail = self._failer(1)
        if number != 1:
            problem = "line 1 is blank" if number else "the file is empty"
            raise fail("scout_trace", f"{problem}; it must be the header")
        self.info = _info(parse_line(first, fail), fail)

    def _failer(self, line: int) -> Callable[[str, str], TraceError]:
        def fail(where: str, problem: str) -> TraceError:
            return TraceError(self.path.name, line, where, problem)

        return fail

    def __iter__(self) -> Iterator[Program]:
        """Yield the programs in file order."""
        self.skips = SkipCount()
        seen: set[str] = set()
        for number, line in numbered_lines(self.path):
            if number == 1:
                continue
            fail = self._failer(number)
            try:
                program = _program(parse_line(line, fail), fail, self.info)
                if program.program in seen:
                    raise fail("program", f"{program.program!r} occurs twice")
            except TraceError as error:
                if not self._skip_bad:
                    raise
                self.skips.add(error)
                continue
            seen.add(program.program)
            yield program


def by_arrival(reader: TraceReader) -> Iterable[Program]:
    """
    Return the programs of *reader* in order of arrival, after reading all of them once.

    Recorders write a program when it ends, so that a file need not be in this order; only if it is
    not are the programs kept in memory.
    """
    last = 0.0
    for program in reader:
        if program.arrival_s < last:
            return sorted(reader, key=lambda each: each.arrival_s)
        last = program.arrival_s
    return reader


def reread(program: Program, info: TraceInfo, fail: Callable[[str, str], TraceError]) -> Program:
    """Return *program* as its line would be read; raise what *fail* makes of what is wrong."""
    return _program(parse_line(program_line(program), fail), fail, info)


def parse_line(line: str, fail: Callable[[str, str], TraceError]) -> object:
    """Return the JSON value of *line*; what *fail* makes of it when it has none."""
    if not _encodes(line):
        raise fail("line", "is not UTF-8")
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise fail("line", f"is not JSON: {error}") from error
    except RecursionError as error:
        raise fail("line", "is nested too deeply") from error
    return value


def _encodes(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def write_trace(path: Path, info: TraceInfo, programs: Iterable[Program]) -> int:
    """
    Write a trace to *path*; return the number of programs.

    A file that is there is replaced when the new one is whole, and stays if that fails.
    """
    count = 0
    whole = path.is_file() or not path.exists()
    part = path.with_name(f"{path.name}.part") if whole else path
    try:
        with _open_text(part, "w", packed=path.suffix == ".gz") as out:
            out.write(header_line(info) + "\n")
            for program in programs:
                out.write(program_line(program) + "\n")
                count += 1
        if whole:
            part.replace(path)
    finally:
        if whole:
            part.unlink(missing_ok=True)
    return count

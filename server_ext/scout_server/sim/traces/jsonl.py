"""The trace format on disk: one header line, then one program a line; strict both ways."""

import gzip
import io
import json
import math
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

__all__ = ["SkipCount", "TraceError", "TraceReader", "open_text", "program_line", "write_trace"]


class TraceError(ScoutError, ValueError):
    """A trace file is malformed; the message names file, line and field."""

    def __init__(self, file: str, line: int, where: str, problem: str) -> None:
        super().__init__(f"{file}:{line}: {where}: {problem}")
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
def open_text(path: Path, mode: Literal["r", "w"] = "r") -> Iterator[TextIO]:
    """Open *path* as UTF-8 text; a name that ends in .gz is (de)compressed."""
    if path.suffix == ".gz":
        with (
            gzip.open(path, "rb" if mode == "r" else "wb") as packed,
            io.TextIOWrapper(cast(IO[bytes], packed), encoding="utf-8") as text,
        ):
            yield text
    else:
        with path.open(mode, encoding="utf-8") as plain:
            yield cast(TextIO, plain)


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
            raise self.error(name, f"must be text, is {value!r}")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.get(name) is None else self.text(name, None)

    def number(self, name: str, default: float | None, *, least: float = 0.0) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is required")
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.error(name, f"must be a finite number, is {value!r}")
        if value < least:
            raise self.error(name, f"must be at least {least:g}, is {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name, None)

    def integer(self, name: str, default: int | None, *, least: int = 0) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is required")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, is {value!r}")
        if value < least:
            raise self.error(name, f"must be at least {least}, is {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.optional_flag(name)
        return bool(value)

    def optional_flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, is {value!r}")
        return value

    def finish(self) -> None:
        unknown = sorted(set(self._raw) - self._seen)
        if unknown:
            raise self.error(unknown[0], f"is unknown; known: {', '.join(sorted(self._seen))}")


def _runs(fields: _Fields, name: str) -> Runs:
    raw = fields.get(name)
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise fields.error(name, "must be a list of [first id, count]")
    runs = []
    for index, item in enumerate(raw):
        match item:
            case [int(first), int(count)] if first >= 0 and count >= 1:
                runs.append((first, count))
            case _:
                problem = f"must be [first id >= 0, count >= 1], is {item!r}"
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
    else:
        raise fields.error("parents", f"must be indices of earlier turns, is {parents!r}")
    hit = fields.get("hit_tokens")
    turn = Turn(
        agent=fields.optional_text("agent"),
        session=fields.text("session", ""),
        input_tokens=fields.integer("in", None, least=1),
        output_tokens=fields.integer("out", None),
        hash_runs=_runs(fields, "hash_runs"),
        parents=chosen,
        gap_s=fields.number("gap_s", 0.0),
        gap_censored=fields.flag("gap_censored"),
        tool=fields.optional_text("tool"),
        tool_expected_s=fields.optional_number("tool_expected_s"),
        calls_tool=fields.optional_flag("calls_tool"),
        service_s=fields.optional_number("service_s"),
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
        arrival_s=fields.number("arrival_s", 0.0),
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
        block_tokens=fields.integer("block_tokens", None, least=1),
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
        with open_text(path) as lines:
            first = lines.readline()
        fail = self._failer(1)
        if not first.strip():
            raise fail("scout_trace", "the file is empty; its first line must be the header")
        self.info = _info(_parse(first, fail), fail)

    def _failer(self, line: int) -> Callable[[str, str], TraceError]:
        def fail(where: str, problem: str) -> TraceError:
            return TraceError(self.path.name, line, where, problem)

        return fail

    def __iter__(self) -> Iterator[Program]:
        """Yield the programs in file order."""
        self.skips = SkipCount()
        seen: set[str] = set()
        with open_text(self.path) as lines:
            next(lines)
            for number, line in enumerate(lines, start=2):
                if not line.strip():
                    continue
                fail = self._failer(number)
                try:
                    program = _program(_parse(line, fail), fail, self.info)
                    if program.program in seen:
                        raise fail("program", f"{program.program!r} occurs twice")
                except TraceError as error:
                    if not self._skip_bad:
                        raise
                    self.skips.add(error)
                    continue
                seen.add(program.program)
                yield program


def _parse(line: str, fail: Callable[[str, str], TraceError]) -> object:
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise fail("line", f"is not JSON: {error}") from error
    return value


def write_trace(path: Path, info: TraceInfo, programs: Iterable[Program]) -> int:
    """Write a trace to *path*; return the number of programs."""
    count = 0
    with open_text(path, "w") as out:
        out.write(header_line(info) + "\n")
        for program in programs:
            out.write(program_line(program) + "\n")
            count += 1
    return count

"""What all converters share: reading lines with places for errors, and assumed prompts."""

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scout_server.sim.traces.jsonl import SkipCount, TraceError, open_text
from scout_server.sim.traces.records import Program, Runs, Turn, runs_of

__all__ = ["Said", "SourceOptions", "assumed_program", "documents", "lines"]

_CHARACTERS_PER_TOKEN = 4.0


@dataclass(slots=True)
class SourceOptions:
    """How a source is read."""

    skip_bad: bool = False
    """Leave out broken entries and count them in *skips*."""
    starts_per_minute: float = 1.0
    """Arrivals of programs whose source has no common clock: evenly spaced."""
    skips: SkipCount = field(default_factory=SkipCount)

    def bad(self, error: TraceError) -> None:
        """Raise *error*, or count it."""
        if not self.skip_bad:
            raise error
        self.skips.add(error)

    def arrival_s(self, number: int) -> float:
        """Return the arrival of the program with *number* where the source has none."""
        return number * 60.0 / self.starts_per_minute


def lines(path: Path, options: SourceOptions) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object) of a JSONL file; anything but objects is bad."""
    with open_text(path) as text:
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
            except ValueError as error:
                options.bad(TraceError(path.name, number, "line", f"is not JSON: {error}"))
                continue
            if not isinstance(raw, dict):
                options.bad(TraceError(path.name, number, "line", "is not a JSON object"))
                continue
            yield number, raw


def documents(path: Path, options: SourceOptions) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (name, object) of every .json file in a folder or a tar archive, by name."""
    found: list[tuple[str, bytes]] = []
    if path.is_dir():
        found = [(str(f.relative_to(path)), f.read_bytes()) for f in path.rglob("*.json")]
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                data = archive.extractfile(member) if member.isfile() else None
                if data is not None and member.name.endswith(".json"):
                    found.append((member.name, data.read()))
    else:
        raise TraceError(path.name, 0, "path", "is neither a folder nor a tar archive")
    for name, content in sorted(found):
        try:
            raw = json.loads(content)
        except ValueError as error:
            options.bad(TraceError(name, 1, "file", f"is not JSON: {error}"))
            continue
        if not isinstance(raw, dict):
            options.bad(TraceError(name, 1, "file", "is not a JSON object"))
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
        if message.agent not in anchors:
            anchors[message.agent] = len(anchors) * anchor_blocks
        anchor = anchors[message.agent]
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

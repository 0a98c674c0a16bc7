"""
What a trace says of agent programs, and the lines that say it: values, no prompt text.

docs/traces.md describes the format. The servers, the SDK's recorder and the simulator share this.
"""

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "FORMAT_VERSION",
    "HashScope",
    "HashSource",
    "Program",
    "Runs",
    "TraceInfo",
    "Turn",
    "header_line",
    "program_line",
    "runs_of",
]

FORMAT_VERSION = 1
"""Version of the JSONL format that this code reads and writes."""

Runs = tuple[tuple[int, int], ...]
"""Run-length form of a list of block ids: (first id, count), ids of a run are consecutive."""


class HashScope(enum.Enum):
    """Between what equal block ids mean equal content."""

    PROGRAM = "program"
    """Within one program only: nothing is known of sharing between programs."""
    GLOBAL = "global"
    """Over the whole trace."""


class HashSource(enum.Enum):
    """Where the block ids come from."""

    MEASURED = "measured"
    """Hashes of what was really sent."""
    ASSUMED = "assumed"
    """Only counts were recorded; the converter assumed that a prompt extends the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """The first line of a trace: what holds for every program in it."""

    source: str
    """Where it comes from, for people."""
    block_tokens: int
    """Tokens per block id of the hash runs."""
    scope: HashScope = HashScope.PROGRAM
    hashes: HashSource = HashSource.MEASURED
    licence: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """
    One LLM request of a program.

    It is released *gap_s* seconds after the last of its *parents* has finished.
    """

    agent: str | None = None
    """Role in the workflow; None when the source does not name one."""
    session: str = ""
    """Sub-agent's session within the program; empty for the program's own."""
    input_tokens: int
    output_tokens: int
    """May be 0: some turns only cancel or carry a tool call that was not counted."""
    hash_runs: Runs = ()
    """Ids of the prompt's blocks, head first, the last one may be partial."""
    parents: tuple[int, ...] = ()
    """Indices of the turns that must have finished; empty: released with the program."""
    gap_s: float = 0.0
    """Seconds between the last parent's end and this turn: a tool, a person, other work."""
    gap_censored: bool = False
    """True: the gap is a lower bound (the tool was cut off, the pause was capped)."""
    tool: str | None = None
    """What ran in the gap; "human" for a person; None when not known."""
    tool_expected_s: float | None = None
    """What the client announced of the gap when it began; a policy may read this."""
    calls_tool: bool | None = None
    """True: the turn ended by calling a tool; False: with a final text; None: not known."""
    service_s: float | None = None
    """Seconds that the request took where it was recorded; never replayed."""
    hit_tokens: int | None = None
    """Prompt tokens found in the cache where it was recorded; never replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One agent program: turns in an order in which parents come before children."""

    program: str
    arrival_s: float
    """Seconds since the trace began."""
    turns: tuple[Turn, ...]
    tenant: str = ""
    aborted: bool = False
    """True: the recording ended, or the user left, before the program was done."""
    workflow: str = ""
    """Name of the graph it ran, such as `magentic-one`."""

    @property
    def input_tokens(self) -> int:
        """Return the prompt tokens of all turns."""
        return sum(turn.input_tokens for turn in self.turns)

    @property
    def output_tokens(self) -> int:
        """Return the generated tokens of all turns."""
        return sum(turn.output_tokens for turn in self.turns)


def runs_of(ids: Iterable[int]) -> Runs:
    """Return the run-length form of *ids*."""
    runs: list[tuple[int, int]] = []
    start = length = 0
    for block in ids:
        if length and block == start + length:
            length += 1
            continue
        if length:
            runs.append((start, length))
        start, length = block, 1
    if length:
        runs.append((start, length))
    return tuple(runs)


def header_line(info: TraceInfo) -> str:
    """Return the first line of a trace, without the newline."""
    header = {
        "scout_trace": FORMAT_VERSION,
        "source": info.source,
        "block_tokens": info.block_tokens,
        "scope": info.scope.value,
        "hashes": info.hashes.value,
        "licence": info.licence,
        "note": info.note,
    }
    return json.dumps(header, separators=(",", ":"))


def _turn_object(turn: Turn, index: int) -> dict[str, object]:
    raw: dict[str, object] = {"in": turn.input_tokens, "out": turn.output_tokens}
    default_parents = (index - 1,) if index else ()
    optional: tuple[tuple[str, object, object], ...] = (
        ("agent", turn.agent, None),
        ("session", turn.session, ""),
        ("hash_runs", [list(run) for run in turn.hash_runs], []),
        ("parents", list(turn.parents), list(default_parents)),
        ("gap_s", round(turn.gap_s, 6), 0.0),
        ("gap_censored", turn.gap_censored, False),
        ("tool", turn.tool, None),
        ("tool_expected_s", turn.tool_expected_s, None),
        ("calls_tool", turn.calls_tool, None),
        ("service_s", turn.service_s, None),
        ("hit_tokens", turn.hit_tokens, None),
    )
    raw.update({name: value for name, value, default in optional if value != default})
    return raw


def program_line(program: Program) -> str:
    """Return the line of *program*, without the newline; fields at their default are left out."""
    raw: dict[str, object] = {
        "program": program.program,
        "arrival_s": round(program.arrival_s, 6),
    }
    if program.tenant:
        raw["tenant"] = program.tenant
    if program.workflow:
        raw["workflow"] = program.workflow
    if program.aborted:
        raw["aborted"] = True
    raw["turns"] = [_turn_object(turn, index) for index, turn in enumerate(program.turns)]
    return json.dumps(raw, separators=(",", ":"))

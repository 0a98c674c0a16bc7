"""What a trace says of agent programs: frozen values, no prompt text."""

import enum
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
    "runs_length",
    "runs_of",
    "runs_prefix",
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


def runs_length(runs: Runs) -> int:
    """Return the number of block ids in *runs*."""
    return sum(length for _, length in runs)


def runs_prefix(one: Runs, two: Runs) -> int:
    """Return the number of leading block ids that *one* and *two* have in common."""
    common = 0
    left, right = iter(one), iter(two)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        if a[0] != b[0]:
            return common
        step = min(a[1], b[1])
        common += step
        a = (a[0] + step, a[1] - step) if a[1] > step else next(left, None)
        b = (b[0] + step, b[1] - step) if b[1] > step else next(right, None)
    return common

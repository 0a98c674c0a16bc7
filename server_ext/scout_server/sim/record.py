"""What a simulation found: one record, plain values only."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pydantic

from scout_server.sim.distribution import Distribution, Summary

__all__ = ["CellRecord", "CellStats", "Span", "record_from"]


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of one program's life, for the timeline."""

    program: str
    lane: str
    """Sub-agent's session, empty for the program's own."""
    state: str
    """queued, prefill, decode, tool, paused."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """The outcome of one run. Times are simulated seconds; equal inputs give equal records."""

    label: str
    settings: Mapping[str, object]
    programs: int
    turns: int
    aborted: int
    rejected: int
    """Programs given up because a turn can never fit into a replica."""
    kv_blocks: int
    """Of one replica."""
    makespan_s: float
    jct_s: Summary
    """From a program's arrival to its end, aborted ones left out."""
    ttft_s: Summary
    """From a turn's release to its first token."""
    turn_s: Summary
    """From a turn's release to its last token."""
    tpot_s: Summary
    """Between two tokens of a turn, its mean."""
    queue_s: Summary
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    """Share of the prompt tokens, of turns scheduled for the first time, found cached."""
    generated_tokens: int
    tokens_per_s: float
    """Generated tokens a second of makespan."""
    turns_per_s: float
    preemptions: int
    recomputed_tokens: int
    evicted_blocks: int
    steps: int
    busy_fraction: float
    moves: int
    """Turns that did not go where the session's turn before went."""
    migrated_tokens: int
    fetched_tokens: int
    """Tokens brought back from a tier."""
    stored_tokens: int
    tier_wait_s: float
    tool_s: float
    """Seconds of gaps, over all programs."""
    events: int
    most_live: int
    """Most programs under way at once."""
    skipped_lines: int = 0
    """Broken lines of the trace that were left out, as asked."""
    skip_reasons: list[str] = field(default_factory=list)
    """Why, for the first few."""
    jct_points: list[tuple[float, float]] = field(default_factory=list)
    occupancy: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, share of HBM blocks in use, share of tier blocks filled)."""
    spans: list[Span] = field(default_factory=list)

    def plain(self) -> dict[str, object]:
        """Return the record as JSON would hold it."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the record as JSON; equal records give equal text."""
        return json.dumps(self.plain(), sort_keys=True, separators=(",", ":"))


def record_from(raw: Mapping[str, object]) -> CellRecord:
    """Return the record that `CellRecord.plain` wrote."""
    return _ADAPTER.validate_python(dict(raw))


_ADAPTER = pydantic.TypeAdapter(CellRecord)


class CellStats:
    """Counts what `CellRecord` reports; its memory does not grow with finished programs."""

    def __init__(self, timeline: int) -> None:
        self.jct, self.ttft, self.turn = Distribution(), Distribution(), Distribution()
        self.tpot, self.queue = Distribution(), Distribution()
        self.programs = self.turns = self.aborted = 0
        self.moves = self.migrated_tokens = 0
        self.tool_s = 0.0
        self.events = 0
        self.spans: list[Span] = []
        self.timeline = timeline
        """Programs whose spans are kept, the first ones."""
        self.occupancy: list[tuple[float, float, float]] = []
        self._every = 0.0

    def sample(self, now: float, used: float, tier: float) -> None:
        """Keep one sample of the occupancy; at most a few hundred, thinned as time goes on."""
        if self.occupancy and now < self.occupancy[-1][0] + self._every:
            return
        self.occupancy.append((now, used, tier))
        if len(self.occupancy) > 600:
            self.occupancy = self.occupancy[::2]
            self._every = max(self._every * 2, (now - self.occupancy[0][0]) / 300)

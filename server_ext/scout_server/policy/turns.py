"""What TAO is told and what it answers: settings, turns, snapshots; and the pure decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge, Interval

from scout_sdk._hints import Hints
from scout_server.policy.admission import AdmissionSettings, Plan, decide
from scout_server.policy.books import LedgerSettings
from scout_server.policy.credit import CreditSettings
from scout_server.policy.evaluators import EvaluatorSettings, evaluator
from scout_server.policy.placement import Candidate, Placement, Room
from scout_server.policy.planners import PlannerSettings, planner
from scout_server.policy.readiness import ReadinessSettings

__all__ = [
    "UNNAMED",
    "Applied",
    "Snapshot",
    "TaoSettings",
    "Turn",
    "beside",
    "make_plan",
    "with_named_prefix",
]

UNNAMED = "~"
"""What the names of sessions begin with that no client named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaoSettings:
    """Settings of TAO; the same in the gateway, on Ray and in the simulator."""

    evaluator: str = "tao"
    """Name of the evaluator, which values a session on a node."""
    planner: str = "dp"
    """Name of the planner, which chooses who is admitted where."""
    objective: EvaluatorSettings = field(default_factory=EvaluatorSettings)
    search: PlannerSettings = field(default_factory=PlannerSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    credit: CreditSettings = field(default_factory=CreditSettings)
    readiness: ReadinessSettings = field(default_factory=ReadinessSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    use_readiness: bool = True
    """Off: every session in a gap counts as not ready (an ablation)."""
    origin_share: Annotated[float, Interval(ge=0, le=1)] = 0.25
    """A session waits for its origin while its credit there is at least this share of its size."""
    growth_turns: Annotated[float, Ge(0)] = 2.0
    """
    A session without credit on a busy node is let in there only beside room for so many turns'
    growth of all sessions that have room there (at most a quarter of the node): they are not cut
    for it. How much a turn grows is learnt. A node on which nothing runs, and a request that was
    held too long, know no such limit. 0: off.
    """
    idle_waits: bool = True
    """
    An idle node keeps the rooms of gaps for as long as it would need to compute again what they
    hold, and then loses one after the other. Off: it loses them at once to a request that waits.
    """
    joint_s: Annotated[float, Ge(0)] = 1.0
    """How often a decision is made that could admit only by taking rooms kept for gaps."""
    max_waiting: Annotated[int, Ge(1)] = 4096
    """Requests held at the same time; more are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request that wants to run."""

    key: str
    """Unique per request; submitting it again replaces it and keeps its place in the queue."""
    session: str
    tokens: int
    """Tokens it will pin: prompt and output."""
    tenant: str = ""
    prefix: str | None = None
    prefix_tokens: int = 0
    """How many of *tokens* belong to the shared prefix."""
    beside_tokens: int = 0
    """How many of *tokens* are not this request's: the session's other agents hold them."""
    hints: Hints | None = None
    nodes: frozenset[str] | None = None
    """The only nodes it may run on; None: any."""
    avoid: frozenset[str] = frozenset()
    """Nodes that just failed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything one decision needs; immutable, so that a worker may have it."""

    now: float
    candidates: tuple[Candidate, ...]
    rooms: tuple[Room, ...]
    reserved: tuple[tuple[str, str], ...]
    settings: TaoSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of a plan."""

    placements: tuple[Placement, ...]
    dropped: tuple[tuple[str, str], ...]
    """(request, why) of placements that the present no longer allows."""


def make_plan(snapshot: Snapshot) -> Plan:
    """Return the decision for a snapshot; pure, for a worker thread or process."""
    settings = snapshot.settings
    return decide(
        snapshot.candidates,
        snapshot.rooms,
        evaluator=evaluator(settings.evaluator, settings.objective),
        planner=planner(settings.planner, settings.search),
        settings=settings.admission,
        reserved=dict(snapshot.reserved),
        now=snapshot.now,
    )


def beside(rooms: Sequence[Room], taken: Mapping[str, int], *, idle: bool = False) -> list[Room]:
    """Return what is left of busy (and *idle*) rooms beside the tokens *taken* of them."""
    return [
        replace(r, tokens=max(0, r.tokens - taken[r.node]))
        if r.node in taken and (r.running or idle)
        else r
        for r in rooms
    ]


def with_named_prefix(turn: Turn) -> Turn:
    """Return *turn* with a prefix that is shared only with equally long ones, or with none."""
    if turn.prefix is None or not 0 < turn.prefix_tokens < turn.tokens:
        return replace(turn, prefix=None, prefix_tokens=0)
    suffix = f"#{turn.prefix_tokens}"
    if turn.prefix.endswith(suffix):
        return turn
    return replace(turn, prefix=turn.prefix + suffix)

"""The values that planners work on: who wants room, where there is room, what is worth what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Candidate",
    "Evaluator",
    "Placement",
    "Planner",
    "Problem",
    "Room",
    "Solution",
    "TableEvaluator",
]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One session that wants KV room now. Tokens are whole numbers."""

    key: str
    """Unique among candidates: the request that waits, or the session in its gap."""
    session: str
    tenant: str = ""
    footprint: int
    """Tokens it pins when admitted, the shared prefix not counted."""
    prefix: str | None = None
    """Prefix shared with other sessions; takes room once per node."""
    prefix_tokens: int = 0
    waiting: bool = True
    """True: a request waits, on any node. False: in a gap, it keeps its room or loses it."""
    ready: bool = True
    arrived: float = 0.0
    """When the request began to wait."""
    credits: Mapping[str, int] = field(default_factory=dict)
    """Node -> tokens it still holds, already decayed."""
    nodes: frozenset[str] | None = None
    """The only nodes it may go to; None: any."""
    homes: frozenset[str] | None = None
    """Nodes it waits for while they are busy; an idle node, or too long a wait, ends that."""
    origin: str | None = None
    """Node of its latest turn; decides between nodes that are worth the same."""
    turns: int = 0
    """Turns the session has already had."""
    attained: int = 0
    """Tokens that were computed for the session so far."""
    expected: int = 0
    """Tokens its turn is expected to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is left on one node."""

    node: str
    tokens: int
    slots: int
    """Requests it may still run at the same time."""
    prefixes: frozenset[str] = frozenset()
    """Shared prefixes that running sessions hold there already."""
    running: int = 0
    """Requests that run there now."""
    capacity: int = 0
    """Tokens it has in all; a session above it can never fit."""
    forced: bool = False
    """A request that was held too long runs there now; the next such one waits for its end."""
    reserve: int = 0
    """Tokens into which its sessions are about to grow; not for those without credit there."""
    resident: int = 0
    """Sessions in a gap that ran there last; between equals, fewer is better."""
    served: int = 0
    """Turns it has been given so far; the last word between equals, fewer is better."""
    spare: int | None = None
    """While it idles: credit of gaps that may be lost by now to let a request in; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One session gets room on one node."""

    key: str
    session: str
    node: str
    credit: int


class Evaluator(Protocol):
    """Answers: what is it worth to give this session room on that node?"""

    name: str

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """
        Return integers, most important first, always as many.

        A plan's worth is their sum over its placements, compared lexicographically; more is better.
        """


@runtime_checkable
class TableEvaluator(Protocol):
    """An evaluator that can also answer for all sessions and nodes at once."""

    def table(self, candidates: Sequence[Candidate], nodes: Sequence[str]) -> Ints:
        """Return what `values` says, as an array [session, node, component]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """
    Sessions x nodes, discretised. Row s is session s, column i is node i.

    Room is counted in quanta: sessions rounded up, nodes rounded down. `value` packs the
    evaluator's integers into one whose order is their lexicographic order.
    """

    need: Ints
    """Quanta session s takes on node i, without the shared prefix; -1: not allowed there."""
    extra: Ints
    """Quanta of its shared prefix where that is not resident yet, else 0."""
    group: Ints
    """Which sessions share a prefix; -1: none."""
    value: Ints
    room: Ints
    slots: Ints
    takes_slot: Ints
    """1 for sessions that run when placed, 0 for those that only keep room."""
    order: Ints
    """Rank of arrival, 0 first."""
    unit: int = 0
    """
    Packed worth of one unit of the most important component: more than all the rest of all
    sessions together. 0: there is no such component, or not known.
    """

    def worth(self, nodes: Sequence[int]) -> int:
        """Return the packed value of an assignment (node index per session, -1: none)."""
        return sum(int(self.value[s, i]) for s, i in enumerate(nodes) if i >= 0)

    def used(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (quanta, slots) that an assignment takes on every node."""
        quanta, slots = [0] * len(self.room), [0] * len(self.room)
        paid: set[tuple[int, int]] = set()
        for s, i in enumerate(nodes):
            if i < 0:
                continue
            quanta[i] += int(self.need[s, i])
            slots[i] += int(self.takes_slot[s])
            mark = (int(self.group[s]), i)
            if mark[0] >= 0 and mark not in paid:
                paid.add(mark)
                quanta[i] += int(self.extra[s, i])
        return quanta, slots

    def feasible(self, nodes: Sequence[int]) -> bool:
        """Whether an assignment fits everywhere and places nobody where it may not go."""
        if any(i >= 0 and self.need[s, i] < 0 for s, i in enumerate(nodes)):
            return False
        quanta, slots = self.used(nodes)
        return all(q <= r for q, r in zip(quanta, self.room, strict=True)) and all(
            n <= r for n, r in zip(slots, self.slots, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Where a planner put whom."""

    nodes: tuple[int, ...]
    """Node index per session; -1: not placed."""
    exact: bool
    """True: no assignment of this (discretised) problem is worth more."""
    method: str
    states: int
    """Capacity states looked at."""


class Planner(Protocol):
    """Answers: who gets room where, given what everything is worth?"""

    name: str

    def solve(self, problem: Problem) -> Solution:
        """Return a feasible assignment; equal inputs give equal outputs."""

"""Planners: who gets room where. All interchangeable; the dynamic programme is the default."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge

from scout_sdk._errors import ConfigError
from scout_server.policy.beam import beam_search
from scout_server.policy.blocks import improve
from scout_server.policy.capacity_dp import cells, solve_exactly
from scout_server.policy.decouple import Remainder, decouple
from scout_server.policy.placement import Planner, Problem, Solution

__all__ = [
    "BestFitDecreasing",
    "DynamicProgramme",
    "FirstCome",
    "Greedy",
    "PlannerSettings",
    "ValueBestFit",
    "planner",
    "planners",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings of the dynamic programme. Budgets are counts, so that equal inputs plan equally."""

    state_budget: Annotated[int, Ge(1)] = 32768
    """Capacity states up to which a plan is exact; above, it degrades to a beam and says so."""
    beam_width: Annotated[int, Ge(1)] = 8
    """Partial plans that the beam keeps."""
    block_states: Annotated[int, Ge(2)] = 4096
    """Capacity states of one block of nodes that is planned again, exactly, after the beam."""
    work: Annotated[int, Ge(0)] = 12_000
    """State updates spent on such blocks, per session and node."""


class _Fill:
    """Room left while sessions are placed one by one."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nodes = [-1] * len(problem.group)
        self.room: list[int] = problem.room.tolist()
        self.slots: list[int] = problem.slots.tolist()
        self.need: list[list[int]] = problem.need.tolist()
        self.value: list[list[int]] = problem.value.tolist()
        self._extra: list[list[int]] = problem.extra.tolist()
        self._group: list[int] = problem.group.tolist()
        self._slot: list[int] = problem.takes_slot.tolist()
        self._paid: set[tuple[int, int]] = set()

    def left(self, s: int, i: int) -> int:
        """Return the quanta left on node *i* after placing *s* there; negative: does not fit."""
        need = self.need[s][i]
        if need < 0 or self.slots[i] < self._slot[s]:
            return -1
        if (self._group[s], i) not in self._paid:
            need += self._extra[s][i]
        return self.room[i] - need

    def place(self, s: int, i: int) -> None:
        """Put *s* on node *i*."""
        self.room[i] = self.left(s, i)
        self.slots[i] -= self._slot[s]
        if self._group[s] >= 0:
            self._paid.add((self._group[s], i))
        self.nodes[s] = i

    def by_value(self, order: Sequence[int]) -> list[int]:
        """Place in *order*, each on its most valuable node that fits, the emptiest of equals."""
        for s in order:
            options = [
                (self.value[s][i], left, -i)
                for i in range(len(self.room))
                if (left := self.left(s, i)) >= 0
            ]
            if options:
                self.place(s, -max(options)[2])
        return self.nodes

    def by_fit(self, order: Sequence[int]) -> list[int]:
        """Place in *order*, each where it leaves least room, the most valuable of equals."""
        for s in order:
            options = [
                (left, -self.value[s][i], i)
                for i in range(len(self.room))
                if (left := self.left(s, i)) >= 0
            ]
            if options:
                self.place(s, min(options)[2])
        return self.nodes


def _best_values(problem: Problem) -> list[int]:
    masked = np.where(problem.need >= 0, problem.value, np.iinfo(np.int64).min)
    best: list[int] = masked.max(axis=1, initial=np.iinfo(np.int64).min).tolist()
    return best


def _value_order(problem: Problem) -> list[int]:
    best, order = _best_values(problem), problem.order.tolist()
    return sorted(range(len(best)), key=lambda s: (-best[s], order[s], s))


class Greedy:
    """Most valuable session first, each on its most valuable node."""

    name = "greedy"

    def solve(self, problem: Problem) -> Solution:
        """Return the greedy assignment."""
        nodes = _Fill(problem).by_value(_value_order(problem))
        return Solution(nodes=tuple(nodes), exact=False, method=self.name, states=len(nodes))


class FirstCome:
    """Earliest arrival first, each on its most valuable node."""

    name = "first-come"

    def solve(self, problem: Problem) -> Solution:
        """Return the assignment in order of arrival."""
        order = sorted(range(len(problem.order)), key=lambda s: (int(problem.order[s]), s))
        nodes = _Fill(problem).by_value(order)
        return Solution(nodes=tuple(nodes), exact=False, method=self.name, states=len(nodes))


class BestFitDecreasing:
    """Largest session first, each on the node where it leaves least room."""

    name = "best-fit-decreasing"

    def solve(self, problem: Problem) -> Solution:
        """Return the best-fit-decreasing assignment."""
        need = (problem.need + problem.extra).max(axis=1, initial=-1).tolist()
        order = sorted(range(len(need)), key=lambda s: (-need[s], int(problem.order[s]), s))
        nodes = _Fill(problem).by_fit(order)
        return Solution(nodes=tuple(nodes), exact=False, method=self.name, states=len(nodes))


class ValueBestFit:
    """Most valuable session first, each on the node where it leaves least room."""

    name = "value-best-fit"

    def solve(self, problem: Problem) -> Solution:
        """Return the assignment in order of value, packed by best fit."""
        nodes = _Fill(problem).by_fit(_value_order(problem))
        return Solution(nodes=tuple(nodes), exact=False, method=self.name, states=len(nodes))


class DynamicProgramme:
    """
    Capacity-state dynamic programme: which sessions, on which nodes, are together worth most?

    What the most important component settles is settled first (`decouple`). Up to `state_budget`
    states of the remainder the plan is optimal. Beyond, a beam of `beam_width` partial plans (and a
    greedy one) is the start, and blocks of one and two nodes are then planned again exactly with
    the rest fixed, until nothing improves or the work is spent; the method says "beam". So it does
    where what was settled is not proved to be best: then that plan is the start.
    """

    name = "dp"

    def __init__(self, settings: PlannerSettings | None = None) -> None:
        self.settings = settings or PlannerSettings()

    def solve(self, problem: Problem) -> Solution:
        """Return the assignment that is worth most, or nearly so beyond the state budget."""
        if not len(problem.group) or not len(problem.room):
            return Solution(
                nodes=(-1,) * len(problem.group), exact=True, method=self.name, states=0
            )
        parts = decouple(problem)
        if parts is None:
            return self._whole(problem)
        joined = [self._joined(problem, rest) for rest in parts.remainders]
        best = max(joined, key=lambda plan: problem.worth(plan.nodes))
        if not parts.proved:
            return self._whole(problem, best.nodes)
        exact = all(plan.exact for plan in joined)
        return replace(best, exact=exact, method=self.name if exact else "beam")

    def _joined(self, problem: Problem, parts: Remainder) -> Solution:
        """Return the plan of what is settled and of the remainder together."""
        nodes = [-1] * len(problem.group)
        for s, i in parts.settled:
            nodes[s] = i
        if parts.problem is None:
            return Solution(
                nodes=tuple(nodes), exact=True, method=self.name, states=len(parts.settled)
            )
        rest = self._whole(parts.problem)
        columns = parts.columns.tolist()
        for s, i in zip(parts.rows.tolist(), rest.nodes, strict=True):
            if i >= 0:
                nodes[s] = columns[i]
        return Solution(
            nodes=tuple(nodes), exact=rest.exact, method=rest.method, states=rest.states
        )

    def _whole(self, problem: Problem, known: Sequence[int] | None = None) -> Solution:
        """Return the plan of *problem*, at least as good as one that is *known*."""
        size = cells(problem)
        if size <= self.settings.state_budget:
            nodes = solve_exactly(problem)
            return Solution(
                nodes=tuple(nodes),
                exact=True,
                method=self.name,
                states=size * len(problem.group),
            )
        if known is not None:
            start = list(known)
        else:
            starts = [
                _Fill(problem).by_value(_density_order(problem)),
                beam_search(problem, _density_order(problem), width=self.settings.beam_width),
            ]
            start = max(starts, key=problem.worth)
        work = self.settings.work * len(problem.group) * len(problem.room)
        nodes, spent = improve(problem, start, block_states=self.settings.block_states, work=work)
        return Solution(nodes=tuple(nodes), exact=False, method="beam", states=max(1, spent))


def _density_order(problem: Problem) -> list[int]:
    """Sort sessions by value per quantum, densest first."""
    size = np.maximum(problem.need + problem.extra, 1).astype(np.float64)
    density = np.where(problem.need >= 0, problem.value / size, -np.inf).max(axis=1).tolist()
    order = problem.order.tolist()
    return sorted(range(len(density)), key=lambda s: (-density[s], order[s], s))


def planners(settings: PlannerSettings | None = None) -> dict[str, Planner]:
    """Return every planner by name."""
    known: tuple[Planner, ...] = (
        DynamicProgramme(settings),
        BestFitDecreasing(),
        ValueBestFit(),
        Greedy(),
        FirstCome(),
    )
    return {p.name: p for p in known}


def planner(name: str, settings: PlannerSettings | None = None) -> Planner:
    """Return the planner called *name*; ConfigError names the known ones."""
    known = planners(settings)
    if name not in known:
        msg = f"unknown planner {name!r}; known: {', '.join(sorted(known))}"
        raise ConfigError(msg)
    return known[name]

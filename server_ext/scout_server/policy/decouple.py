"""Solve what the most important component decides node by node, exactly, and leave the rest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from scout_server.policy.claims import best_set, node_claims
from scout_server.policy.contested import grant
from scout_server.policy.placement import Ints, Problem

Bools = npt.NDArray[np.bool_]

__all__ = ["Decoupled", "Remainder", "decouple"]

_BRANCHED = 3
"""Sessions with a claim on several nodes up to which all their choices are looked at."""
_GUESTS = 15
"""Such sessions of one node up to which all sets of them are looked at."""
_SETS = 4096
"""Sets of them, over all nodes, up to which the best choice is looked for."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left to plan when the most important component is settled."""

    settled: list[tuple[int, int]]
    """(session, node): who has it where."""
    problem: Problem | None
    """Sessions that still fit, in the room that is left; None: nobody does."""
    rows: Ints
    """Which sessions of the whole problem the rows of *problem* are."""
    columns: Ints
    """Which nodes its columns are."""


@dataclass(frozen=True, slots=True)
class Decoupled:
    """The ways to settle the most important component best."""

    remainders: list[Remainder]
    """One at least."""
    proved: bool
    """Every optimal plan is one of these with an optimal plan of its remainder."""


def decouple(problem: Problem) -> Decoupled | None:
    """
    Return what is left when the most important component is settled; None: there is no telling.

    Values are packed, so that one unit of the most important component outweighs all else. A
    session that has any of it on one node only competes for it there only, so that every optimal
    plan reaches, node by node, the most of it that the node can hold. Where one set of sessions
    alone reaches that, it is in every optimal plan; and nobody else who has any of it there is.
    Whoever has it on several nodes is tried on each; of many such sessions `grant` finds who gets
    what, all ways if they are few.
    """
    unit = problem.unit
    if unit <= 1 or int(problem.value.min(initial=0)) < 0:
        return None
    allowed = problem.need >= 0
    claims = np.where(allowed, problem.value // unit, 0)
    hot = claims > 0
    found = _settle(problem, claims, hot)
    if found is None:
        return None
    plans, proved = found
    return Decoupled([_rest(problem, hot, settled) for settled in plans], proved)


def _rest(problem: Problem, hot: Bools, settled: list[tuple[int, int]]) -> Remainder:
    """Return who still fits where nobody has a claim, and the room there."""
    room, slots, extra = problem.room.copy(), problem.slots.copy(), problem.extra
    if extra.any():
        extra = extra.copy()
    placed = np.zeros(len(problem.group), dtype=np.bool_)
    for s, i in settled:
        room[i] -= problem.need[s, i] + extra[s, i]
        slots[i] -= problem.takes_slot[s]
        placed[s] = True
        if extra[s, i]:
            extra[problem.group == problem.group[s], i] = 0
    fits = (
        (problem.need >= 0)
        & ~hot
        & (problem.need + extra <= room)
        & ((problem.takes_slot[:, None] == 0) | (slots > 0))
        & ~placed[:, None]
    )
    rows, columns = np.flatnonzero(fits.any(axis=1)), np.flatnonzero(fits.any(axis=0))
    if not len(rows):
        return Remainder(settled, None, rows, columns)
    part = np.ix_(rows, columns)
    rest = Problem(
        need=np.where(fits, problem.need, -1)[part],
        extra=extra[part],
        group=problem.group[rows],
        value=problem.value[part],
        room=room[columns],
        slots=slots[columns],
        takes_slot=problem.takes_slot[rows],
        order=problem.order[rows],
    )
    return Remainder(settled, rest, rows, columns)


def _settle(
    problem: Problem, claims: Ints, hot: Bools
) -> tuple[list[list[tuple[int, int]]], bool] | None:
    """Return who may get which claim, and whether every optimal plan grants one of these."""
    sessions, nodes = np.nonzero(hot)
    if not len(sessions):
        return [[]], True
    on: dict[int, list[int]] = {}
    choices: dict[int, list[int]] = {}
    for s, i in zip(sessions.tolist(), nodes.tolist(), strict=True):
        choices.setdefault(s, []).append(i)
    several = {s: where for s, where in choices.items() if len(where) > 1}
    for s, where in choices.items():
        if s not in several:
            on.setdefault(where[0], []).append(s)
    if len(several) > _BRANCHED:
        return _granted(problem, claims, on, several)
    chosen = _tried(problem, claims, on, several)
    return None if chosen is None else ([chosen], True)


def _granted(
    problem: Problem,
    claims: Ints,
    on: Mapping[int, Sequence[int]],
    several: Mapping[int, Sequence[int]],
) -> tuple[list[list[tuple[int, int]]], bool] | None:
    guests: dict[int, list[int]] = {}
    for s, where in several.items():
        for i in where:
            guests.setdefault(i, []).append(s)
    at = sorted({*on, *guests})
    nodes = []
    left = _SETS
    for i in at:
        of_node = node_claims(
            problem, claims, i, list(on.get(i, ())), guests.get(i, []), most=_GUESTS
        )
        if of_node is None or len(of_node.worth) > left:
            return None
        left -= len(of_node.worth)
        nodes.append(of_node)
    best = grant(nodes)
    plans = [
        [
            (s, i)
            for i, of_node, row in zip(at, nodes, rows, strict=True)
            for s in of_node.sessions(row)
        ]
        for rows in best.choices
    ]
    return plans, best.proved


def _tried(
    problem: Problem,
    claims: Ints,
    on: Mapping[int, Sequence[int]],
    several: Mapping[int, Sequence[int]],
) -> list[tuple[int, int]] | None:
    """Return the one best choice out of all; None: there is not one only."""
    known: dict[tuple[int, tuple[int, ...]], tuple[int, list[int]] | None] = {}

    def of_node(i: int, guests: tuple[int, ...]) -> tuple[int, list[int]] | None:
        key = (i, guests)
        if key not in known:
            known[key] = best_set(problem, claims, i, [*on.get(i, ()), *guests])
        return known[key]

    found: list[tuple[int, int]] = []
    touched = {i for where in several.values() for i in where}
    for i in on:
        if i in touched:
            continue
        answer = of_node(i, ())
        if answer is None:
            return None
        found += [(s, i) for s in answer[1]]
    if not several:
        return found
    best, plans = -1, 0
    chosen: list[tuple[int, int]] = []
    for guests in _choices(several):
        total, plan = 0, []
        for i in touched:
            answer = of_node(i, guests.get(i, ()))
            if answer is None:
                return None
            total += answer[0]
            plan += [(s, i) for s in answer[1]]
        if total > best or (total == best and sorted(plan) != sorted(chosen)):
            plans = 1 if total > best else plans + 1
            best, chosen = max(best, total), plan
    return found + chosen if plans == 1 else None


def _choices(several: Mapping[int, Sequence[int]]) -> Iterator[dict[int, tuple[int, ...]]]:
    """Yield every way to give each session one of its nodes, as node -> sessions."""
    for picked in product(*several.values()):
        guests: dict[int, tuple[int, ...]] = {}
        for s, i in zip(several, picked, strict=True):
            guests[i] = (*guests.get(i, ()), s)
        yield guests

"""Solve what the most important component decides node by node, exactly, and leave the rest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from scout_server.policy.placement import Ints, Problem

Bools = npt.NDArray[np.bool_]

__all__ = ["Remainder", "decouple"]

_ENUMERATED = 12
"""Rows of one node up to which all sets are looked at."""
_BRANCHED = 3
"""Sessions with a claim on several nodes up to which all their choices are looked at."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left to plan when the most important component is settled."""

    settled: list[tuple[int, int]]
    """(session, node) of every optimal plan."""
    problem: Problem | None
    """Sessions that still fit, in the room that is left; None: nobody does."""
    rows: Ints
    """Which sessions of the whole problem the rows of *problem* are."""
    columns: Ints
    """Which nodes its columns are."""


def decouple(problem: Problem) -> Remainder | None:
    """
    Return the remainder that has the same optimal plans, or None where that cannot be shown.

    Values are packed, so that one unit of the most important component outweighs all else. A
    session that has any of it on one node only competes for it there only, so that every optimal
    plan reaches, node by node, the most of it that the node can hold. Where one set of sessions
    alone reaches that, it is in every optimal plan; and nobody else who has any of it there is.
    """
    unit = problem.unit
    if unit <= 1 or int(problem.value.min(initial=0)) < 0:
        return None
    allowed = problem.need >= 0
    claims = np.where(allowed, problem.value // unit, 0)
    hot = claims > 0
    settled = _settle(problem, claims, hot)
    if settled is None:
        return None
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
        allowed
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


def _settle(problem: Problem, claims: Ints, hot: Bools) -> list[tuple[int, int]] | None:
    """Return who has a claim that every optimal plan grants, and where; None: not one set only."""
    sessions, nodes = np.nonzero(hot)
    if not len(sessions):
        return []
    on: dict[int, list[int]] = {}
    choices: dict[int, list[int]] = {}
    for s, i in zip(sessions.tolist(), nodes.tolist(), strict=True):
        choices.setdefault(s, []).append(i)
    several = {s: where for s, where in choices.items() if len(where) > 1}
    if len(several) > _BRANCHED:
        return None
    for s, where in choices.items():
        if s not in several:
            on.setdefault(where[0], []).append(s)
    known: dict[tuple[int, tuple[int, ...]], tuple[int, list[int]] | None] = {}

    def of_node(i: int, guests: tuple[int, ...]) -> tuple[int, list[int]] | None:
        key = (i, guests)
        if key not in known:
            known[key] = _best_set(problem, claims, i, [*on.get(i, ()), *guests])
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


def _best_set(
    problem: Problem, claims: Ints, i: int, rows: list[int]
) -> tuple[int, list[int]] | None:
    """Return (most claims that fit node *i*, who has them); None: several sets reach that."""
    room, slots = int(problem.room[i]), int(problem.slots[i])
    need, claim = problem.need[rows, i], claims[rows, i]
    takes, extra = problem.takes_slot[rows], problem.extra[rows, i]
    shared = bool(extra.any())
    if int(need.sum() + extra.sum()) <= room and int(takes.sum()) <= slots:
        return int(claim.sum()), rows
    fit = (need + extra <= room) & (takes <= slots)
    if not fit.all():
        rows = [s for s, ok in zip(rows, fit.tolist(), strict=True) if ok]
        if not rows:
            return 0, []
        need, claim, takes, extra = need[fit], claim[fit], takes[fit], extra[fit]
    if len(rows) <= _ENUMERATED:
        sets = _sets(len(rows))
        size = sets @ need
        if shared:
            group = problem.group[rows]
            for name in set(group[extra > 0].tolist()):
                members = group == name
                if int(extra[members].min()) < int(extra[members].max()):
                    return None
                size = size + sets[:, members].any(axis=1) * int(extra[members][0])
        possible = size <= room
        if int(takes.sum()) > slots:
            possible &= sets @ takes <= slots
        worth = np.where(possible, sets @ claim, -1)
        at = int(worth.argmax())
        most = int(worth[at])
        if int((worth == most).sum()) > 1:
            return None
        return most, [s for s, inside in zip(rows, sets[at].tolist(), strict=True) if inside]
    if shared or int(takes.sum()) > slots:
        return None
    return _knapsack(need.tolist(), claim.tolist(), room, rows)


@cache
def _sets(count: int) -> Ints:
    """Return all subsets of *count* things, one a row."""
    numbers = np.arange(1 << count, dtype=np.int64)
    return (numbers[:, None] >> np.arange(count)) & 1


def _knapsack(
    need: Sequence[int], claim: Sequence[int], room: int, rows: Sequence[int]
) -> tuple[int, list[int]] | None:
    best = np.zeros(room + 1, dtype=np.int64)
    ways = np.ones(room + 1, dtype=np.int64)
    taken: list[Bools] = []
    for quanta, worth in zip(need, claim, strict=True):
        with_it = np.full(room + 1, -1, dtype=np.int64)
        with_it[quanta:] = best[: room + 1 - quanta] + worth
        more = with_it > best
        same = with_it == best
        count = np.zeros_like(ways)
        count[quanta:] = ways[: room + 1 - quanta]
        ways = np.minimum(np.where(more, count, np.where(same, ways + count, ways)), 2)
        best = np.maximum(best, with_it)
        taken.append(more)
    if int(ways[room]) > 1:
        return None
    left, chosen = room, []
    for s, quanta, took in zip(reversed(rows), reversed(need), reversed(taken), strict=True):
        if took[left]:
            chosen.append(s)
            left -= quanta
    return int(best[room]), chosen

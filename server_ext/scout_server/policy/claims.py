"""The most claims that one node can grant, and to whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from scout_server.policy.placement import Ints, Problem

__all__ = ["NodeClaims", "best_set", "node_claims"]

Bools = npt.NDArray[np.bool_]

_ENUMERATED = 12
"""Rows of one node up to which all sets are looked at."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sessions that fit a node one by one."""

    sessions: list[int]
    need: Ints
    claim: Ints
    takes: Ints
    extra: Ints


def _fitting(problem: Problem, claims: Ints, i: int, rows: list[int]) -> _Rows:
    room, slots = int(problem.room[i]), int(problem.slots[i])
    need, claim = problem.need[rows, i], claims[rows, i]
    takes, extra = problem.takes_slot[rows], problem.extra[rows, i]
    fit = (need + extra <= room) & (takes <= slots)
    if not fit.all():
        rows = [s for s, ok in zip(rows, fit.tolist(), strict=True) if ok]
        need, claim, takes, extra = need[fit], claim[fit], takes[fit], extra[fit]
    return _Rows(rows, need, claim, takes, extra)


def best_set(
    problem: Problem, claims: Ints, i: int, rows: list[int]
) -> tuple[int, list[int]] | None:
    """Return (most claims that fit node *i*, who has them); None: several sets reach that."""
    room, slots = int(problem.room[i]), int(problem.slots[i])
    if (
        int(problem.need[rows, i].sum() + problem.extra[rows, i].sum()) <= room
        and int(problem.takes_slot[rows].sum()) <= slots
    ):
        return int(claims[rows, i].sum()), rows
    fit = _fitting(problem, claims, i, rows)
    if not fit.sessions:
        return 0, []
    if len(fit.sessions) <= _ENUMERATED:
        worth = _worths(problem, fit, room, slots)
        if worth is None:
            return None
        at = int(worth.argmax())
        most = int(worth[at])
        if int((worth == most).sum()) > 1:
            return None
        return most, _members(fit.sessions, _sets(len(fit.sessions))[at])
    if fit.extra.any() or int(fit.takes.sum()) > slots:
        return None
    table = _knapsack(fit.need.tolist(), fit.claim.tolist(), room)
    if int(table.ways[room]) > 1:
        return None
    return int(table.best[room]), table.sessions(fit.sessions, room)


def _worths(problem: Problem, fit: _Rows, room: int, slots: int) -> Ints | None:
    """Return the claims of every set of the rows, -1 where it does not fit; None: unequal extra."""
    sets = _sets(len(fit.sessions))
    size = sets @ fit.need
    if fit.extra.any():
        group = problem.group[fit.sessions]
        for name in set(group[fit.extra > 0].tolist()):
            members = group == name
            if int(fit.extra[members].min()) < int(fit.extra[members].max()):
                return None
            size = size + sets[:, members].any(axis=1) * int(fit.extra[members][0])
    possible = size <= room
    if int(fit.takes.sum()) > slots:
        possible &= sets @ fit.takes <= slots
    worths: Ints = np.where(possible, sets @ fit.claim, -1)
    return worths


@cache
def _sets(count: int) -> Ints:
    """Return all subsets of *count* things, one a row."""
    numbers = np.arange(1 << count, dtype=np.int64)
    return (numbers[:, None] >> np.arange(count)) & 1


def _members(sessions: Sequence[int], inside: Ints) -> list[int]:
    return [s for s, there in zip(sessions, inside.tolist(), strict=True) if there]


@dataclass(frozen=True, slots=True)
class _Table:
    """The most claims in every room up to the node's."""

    best: Ints
    ways: Ints
    """How many sets reach that; 2: more than one."""
    taken: list[Bools]
    need: list[int]

    def sessions(self, rows: Sequence[int], left: int) -> list[int]:
        """Return who has the most claims that fit *left*."""
        chosen = []
        for s, quanta, took in zip(
            reversed(rows), reversed(self.need), reversed(self.taken), strict=True
        ):
            if took[left]:
                chosen.append(s)
                left -= quanta
        return chosen


def _knapsack(need: list[int], claim: Sequence[int], room: int) -> _Table:
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
    return _Table(best, ways, taken, need)


@dataclass(frozen=True, slots=True)
class NodeClaims:
    """What a node can grant to its own sessions beside each set of guests."""

    guests: list[int]
    sets: Ints
    """[set, guest]: 1 for a guest inside; one set is empty."""
    worth: Ints
    """Most claims with exactly that set of guests."""
    ways: Ints
    """How many sets of its own reach that; 2: more than one."""
    _own: list[int]
    _at: Ints
    """Room left for its own, or the number of the set of its own."""
    _table: _Table | None

    def sessions(self, row: int) -> list[int]:
        """Return who has the claims of one set."""
        guests = _members(self.guests, self.sets[row])
        at = int(self._at[row])
        if self._table is not None:
            return guests + self._table.sessions(self._own, at)
        return guests + _members(self._own, _sets(len(self._own))[at])


def node_claims(
    problem: Problem, claims: Ints, i: int, own: list[int], guests: list[int], *, most: int
) -> NodeClaims | None:
    """
    Return what node *i* can grant beside each set of at most *most* guests; None: too many to see.

    A set is left out where fewer guests reach more.
    """
    room, slots = int(problem.room[i]), int(problem.slots[i])
    fit = _fitting(problem, claims, i, [*guests, *own])
    there = set(fit.sessions)
    guests = [s for s in guests if s in there]
    own = [s for s in own if s in there]
    count = len(guests)
    if count > most:
        return None
    sets = _sets(count)
    table: _Table | None = None
    if fit.extra.any() or int(fit.takes.sum()) > slots:
        if len(fit.sessions) > _ENUMERATED:
            return None
        flat = _worths(problem, fit, room, slots)
        if flat is None:
            return None
        each = flat.reshape(-1, 1 << count)  # the guests are the lowest bits
        worth, at = each.max(axis=0), each.argmax(axis=0)
        ways = np.minimum((each == worth).sum(axis=0), 2)
    else:
        table = _knapsack(fit.need[count:].tolist(), fit.claim[count:].tolist(), room)
        size = sets @ fit.need[:count]
        at = np.maximum(room - size, 0)
        worth = np.where(size <= room, table.best[at] + sets @ fit.claim[:count], -1)
        ways = table.ways[at]
    best = worth.copy()
    for bit in range(count):
        pairs = best.reshape(-1, 2, 1 << bit)
        np.maximum(pairs[:, 1], pairs[:, 0], out=pairs[:, 1])
    kept = np.flatnonzero((worth >= best) & (worth >= 0))
    return NodeClaims(guests, sets[kept], worth[kept], ways[kept], own, at[kept], table)

"""The most claims that one node can grant, and to whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from scout_server.policy.placement import Ints, Problem

__all__ = ["NodeClaims", "best_set", "node_claims"]

Bools = npt.NDArray[np.bool_]

_ENUMERATED = 12
"""Rows of one node up to which all sets are looked at."""
_PREFIXES = 4
"""Shared prefixes that a node does not hold yet up to which all sets of them are looked at."""


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
    prefixes = _prefixes(problem, fit)
    if prefixes is None or len(prefixes) > _PREFIXES or int(fit.takes.sum()) > slots:
        return None
    tables = _Tables(problem, fit, 0, prefixes, room)
    granted, ways, left, table = tables.best(np.array([room]), np.zeros(1, dtype=np.int64))
    if int(ways[0]) > 1:
        return None
    return int(granted[0]), tables.sessions(int(table[0]), int(left[0]))


def _worths(problem: Problem, fit: _Rows, room: int, slots: int) -> Ints | None:
    """Return the claims of every set of the rows, -1 where it does not fit; None: unequal extra."""
    prefixes = _prefixes(problem, fit)
    if prefixes is None:
        return None
    sets = _sets(len(fit.sessions))
    size = sets @ fit.need
    group = problem.group[fit.sessions]
    for name, quanta in prefixes.items():
        size = size + sets[:, group == name].any(axis=1) * quanta
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


def _prefixes(problem: Problem, fit: _Rows) -> dict[int, int] | None:
    """Return the quanta of each shared prefix that is not there yet; None: not the same for all."""
    found: dict[int, int] = {}
    if fit.extra.any():
        group = problem.group[fit.sessions]
        for name in sorted(set(group[fit.extra > 0].tolist())):
            extra = fit.extra[group == name]
            if int(extra.min()) < int(extra.max()):
                return None
            found[name] = int(extra[0])
    return found


class _Tables:
    """
    The most claims of some sessions in every room, for every set of shared prefixes that is paid.

    Table p has the sessions that need no prefix but those of the bits of p.
    """

    def __init__(
        self, problem: Problem, fit: _Rows, first: int, prefixes: Mapping[int, int], room: int
    ) -> None:
        """Look at the rows from *first* on."""
        self._rows = fit.sessions[first:]
        self._need: list[int] = fit.need[first:].tolist()
        self._claim: list[int] = fit.claim[first:].tolist()
        bit = {name: 1 << k for k, name in enumerate(prefixes)}
        self._bits = [bit.get(g, 0) for g in problem.group[self._rows].tolist()]
        self._cost = [
            sum(q for k, q in enumerate(prefixes.values()) if p >> k & 1)
            for p in range(1 << len(prefixes))
        ]
        self._tables = [self._table(p, room) for p in range(len(self._cost))]

    def _table(self, paid: int, room: int) -> tuple[Ints, Ints, Ints, list[tuple[int, Bools]]]:
        """Return (most claims, in how many ways, prefixes used, who is taken) in every room."""
        best = np.zeros(room + 1, dtype=np.int64)
        ways = np.ones(room + 1, dtype=np.int64)
        used = np.zeros(room + 1, dtype=np.int64)
        taken: list[tuple[int, Bools]] = []
        for row, (quanta, worth, bit) in enumerate(
            zip(self._need, self._claim, self._bits, strict=True)
        ):
            if bit & ~paid:
                continue
            with_it = np.full(room + 1, -1, dtype=np.int64)
            with_it[quanta:] = best[: room + 1 - quanta] + worth
            more = with_it > best
            same = with_it == best
            count = np.zeros_like(ways)
            count[quanta:] = ways[: room + 1 - quanta]
            ways = np.minimum(np.where(more, count, np.where(same, ways + count, ways)), 2)
            if paid:
                needs = np.zeros_like(used)
                needs[quanta:] = used[: room + 1 - quanta] | bit
                used = np.where(more, needs, used)
            best = np.maximum(best, with_it)
            taken.append((row, more))
        return best, ways, used, taken

    def best(self, room: Ints, paid: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """
        Return (most claims, ways, room left, table) where each *room* is, prefixes *paid* in it.

        No room, below 0: -1 claims. A plan counts as a way in the table of just its prefixes.
        """
        most = np.full(len(room), -1, dtype=np.int64)
        ways, at, table = (np.zeros(len(room), dtype=np.int64) for _ in range(3))
        for p, (best, count, used, _) in enumerate(self._tables):
            left = room - self._cost[p] + np.take(self._cost, paid)
            possible = (paid & ~p == 0) & (left >= 0)
            left = np.maximum(left, 0)
            worth = np.where(possible, best[left], -1)
            here = np.where(count[left] > 1, 2, (used[left] | paid) == p)
            ways = np.where(worth > most, here, np.where(worth == most, ways + here, ways))
            better = (worth > most) | ((worth == most) & (here > 0))
            at, table = np.where(better, left, at), np.where(better, p, table)
            most = np.maximum(most, worth)
        return most, np.minimum(ways, 2), at, table

    def sessions(self, table: int, left: int) -> list[int]:
        """Return who has the most claims of a table."""
        chosen = []
        for row, took in reversed(self._tables[table][3]):
            if took[left]:
                chosen.append(self._rows[row])
                left -= self._need[row]
        return chosen


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
    _table: Ints
    _tables: _Tables | None

    def sessions(self, row: int) -> list[int]:
        """Return who has the claims of one set."""
        guests = _members(self.guests, self.sets[row])
        at = int(self._at[row])
        if self._tables is not None:
            return guests + self._tables.sessions(int(self._table[row]), at)
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
    prefixes = _prefixes(problem, fit)
    if prefixes is None:
        return None
    sets = _sets(count)
    tables: _Tables | None = None
    if int(fit.takes.sum()) > slots or len(prefixes) > _PREFIXES:
        if len(fit.sessions) > _ENUMERATED:
            return None
        flat = _worths(problem, fit, room, slots)
        if flat is None:
            return None
        each = flat.reshape(-1, 1 << count)  # the guests are the lowest bits
        worth, at = each.max(axis=0), each.argmax(axis=0)
        ways = np.minimum((each == worth).sum(axis=0), 2)
        table = np.zeros_like(at)
    else:
        tables = _Tables(problem, fit, count, prefixes, room)
        left = room - sets @ fit.need[:count]
        paid = np.zeros(len(sets), dtype=np.int64)
        group = problem.group[guests] if guests else np.zeros(0, dtype=np.int64)
        for k, (name, quanta) in enumerate(prefixes.items()):
            there_now = sets[:, group == name].any(axis=1)
            paid |= there_now.astype(np.int64) << k
            left = left - there_now * quanta
        worth, ways, at, table = tables.best(left, paid)
        worth = np.where(worth >= 0, worth + sets @ fit.claim[:count], -1)
    best = worth.copy()
    for bit in range(count):
        pairs = best.reshape(-1, 2, 1 << bit)
        np.maximum(pairs[:, 1], pairs[:, 0], out=pairs[:, 1])
    kept = np.flatnonzero((worth >= best) & (worth >= 0))
    return NodeClaims(
        guests, sets[kept], worth[kept], ways[kept], own, at[kept], table[kept], tables
    )

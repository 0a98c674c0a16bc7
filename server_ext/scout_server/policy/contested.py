"""
Which node gets a session that several have claims for: the most claims in all, proved.

Every node takes one of its sets of guests (`claims`), and no session is a guest twice. A programme
over the nodes finds the best choice: its state is who was taken so far, and a price on every
session (Lagrange's multipliers) bounds what the nodes to come can add.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scout_server.policy.claims import NodeClaims
from scout_server.policy.placement import Ints

__all__ = ["Grant", "grant"]

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

_ROUNDS = 60
"""Rounds of prices."""
_FEW = 8
"""Sets of a node looked at for a first choice."""
_WIDTHS = (64, 4096)
"""States kept for the first choice, and to prove the best."""
_PAIRS = 2**18
"""States and sets of one node that are put together at most."""
_TIES = 8
"""Best choices up to which all are told."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Which set every node takes."""

    choices: list[list[int]]
    """Every best choice: which set of each node. One at least."""
    worth: int
    proved: bool
    """There is no other choice, nor another plan of a node with its set, of as many claims."""


@dataclass(frozen=True, slots=True)
class _Column:
    sets: Bools
    worth: Ints
    ways: Ints
    rows: Ints
    """Which sets of the node they are."""

    def at(self, rows: Ints) -> "_Column":
        return _Column(self.sets[rows], self.worth[rows], self.ways[rows], self.rows[rows])


def grant(nodes: Sequence[NodeClaims]) -> Grant:
    """Return the choices with the most claims, one set a node."""
    columns = _columns(nodes)
    order = _order(columns)
    columns = [columns[i] for i in order]
    prices = _prices(columns)
    reduced = [c.worth - c.sets @ prices for c in columns]
    few = [
        c.at(np.union1d(np.argsort(-r, kind="stable")[:_FEW], np.flatnonzero(~c.sets.any(axis=1))))
        for c, r in zip(columns, reduced, strict=True)
    ]
    first = _search(few, prices, width=_WIDTHS[0], floor=-1)
    assert first is not None  # every node may take its empty set
    bound = sum(int(r.max()) for r in reduced) + int(prices.sum())
    kept = [
        c.at(np.flatnonzero(bound - int(r.max()) + r >= first.worth))
        for c, r in zip(columns, reduced, strict=True)
    ]
    found = _search(kept, prices, width=_WIDTHS[1], floor=first.worth)
    best = first if found is None else found
    choices = []
    for picked in best.choices[:_TIES]:
        rows = [0] * len(order)
        for i, row in zip(order, picked, strict=True):
            rows[i] = row
        choices.append(rows)
    return Grant(choices, best.worth, proved=best.whole and len(best.choices) <= _TIES)


def _columns(nodes: Sequence[NodeClaims]) -> list[_Column]:
    place: dict[int, int] = {}
    for node in nodes:
        for s in node.guests:
            place.setdefault(s, len(place))
    columns = []
    for node in nodes:
        sets = np.zeros((len(node.sets), len(place)), dtype=np.bool_)
        sets[:, [place[s] for s in node.guests]] = node.sets
        columns.append(_Column(sets, node.worth, node.ways, np.arange(len(node.sets))))
    return columns


def _order(columns: Sequence[_Column]) -> list[int]:
    """Return the nodes so that few sessions wait for a node to come."""
    of = [set(np.flatnonzero(c.sets.any(axis=0)).tolist()) for c in columns]
    left = set(range(len(columns)))
    order: list[int] = []
    waiting: set[int] = set()

    def cost(i: int) -> tuple[int, int, int]:
        to_come = set().union(*(of[j] for j in left if j != i))
        return len((waiting | of[i]) & to_come), len(of[i]), i

    while left:
        best = min(left, key=cost)
        left.remove(best)
        order.append(best)
        waiting = (waiting | of[best]) & set().union(*(of[j] for j in left))
    return order


def _prices(columns: Sequence[_Column]) -> Ints:
    """Return a price for every session, such that the bound comes near the optimum."""
    sets = np.concatenate([c.sets for c in columns]).astype(np.int64)
    worth = np.concatenate([c.worth for c in columns])
    starts = np.cumsum([0, *(len(c.worth) for c in columns)])
    cuts = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    prices: Ints = np.zeros(sets.shape[1], dtype=np.int64)
    best, lowest = prices, -1
    step, stale = 0.01, 0
    for _ in range(_ROUNDS):
        reduced = worth - sets @ prices
        at = [int(reduced[a:b].argmax()) + a for a, b in cuts]
        bound = int(reduced[at].sum() + prices.sum())
        if bound < lowest or lowest < 0:
            best, lowest, stale = prices, bound, 0
        else:
            stale += 1
            if stale >= 4:
                step, stale, prices = step / 2, 0, best
        over = sets[at].sum(axis=0) - 1
        over[(prices <= 0) & (over < 0)] = 0
        norm = int(over @ over)
        if norm == 0:
            break
        prices = np.maximum(0, prices + np.rint(over * (step * lowest / norm)).astype(np.int64))
    return best


@dataclass(frozen=True, slots=True)
class _Found:
    choices: list[list[int]]
    worth: int
    whole: bool
    """No state was left out, and each choice is one plan."""


def _search(columns: Sequence[_Column], prices: Ints, *, width: int, floor: int) -> _Found | None:
    """Return the best choice of at least *floor* claims with *width* states a node, or None."""
    to_come = np.zeros((len(columns) + 1, len(prices)), dtype=np.bool_)
    most = [0] * (len(columns) + 1)
    for i in range(len(columns) - 1, -1, -1):
        to_come[i] = to_come[i + 1] | columns[i].sets.any(axis=0)
        most[i] = most[i + 1] + int((columns[i].worth - columns[i].sets @ prices).max())
    taken = np.zeros((1, len(prices)), dtype=np.bool_)
    worth: Ints = np.zeros(1, dtype=np.int64)
    single = np.ones(1, dtype=np.bool_)
    trail: list[tuple[Ints, Ints]] = []
    whole = True
    for i, column in enumerate(columns):
        later = to_come[i + 1]
        sold = prices * later
        free = most[i + 1] + int(sold.sum())
        hopes = (worth - taken @ sold)[:, None] + (column.worth - column.sets @ sold + free)
        parent, row = np.nonzero(_apart(taken, column.sets) & (hopes >= floor))
        if not len(parent):
            return None
        value, used = worth[parent] + column.worth[row], (taken[parent] | column.sets[row]) & later
        at = _best_of_each(_words(used), value)
        sets_next = len(columns[i + 1].worth) if i + 1 < len(columns) else 1
        most_states = max(1, min(width, _PAIRS // sets_next))
        if len(at) > most_states:
            whole = False
            hope = hopes[parent[at], row[at]]
            at = at[np.argsort(-hope, kind="stable")[:most_states]]
        trail.append((parent[at], column.rows[row[at]]))
        single = single[parent[at]] & (column.ways[row[at]] == 1)
        taken, worth = used[at], value[at]
    reached = int(worth.max())
    ends = np.flatnonzero(worth == reached)
    whole = whole and bool(single[ends].all())
    choices = []
    for end in ends[: _TIES + 1].tolist():
        picked: list[int] = []
        for came_from, chose in reversed(trail):
            picked.append(int(chose[end]))
            end = int(came_from[end])
        choices.append(picked[::-1])
    return _Found(choices, reached, whole)


def _words(sets: Bools) -> Words:
    """Return sets as bits, 64 sessions a word."""
    padded = np.zeros((len(sets), -(-max(1, sets.shape[1]) // 64) * 64), dtype=np.bool_)
    padded[:, : sets.shape[1]] = sets
    words: Words = np.packbits(padded, axis=1).view(np.uint64)
    return words


def _apart(some: Bools, others: Bools) -> Bools:
    """Return which of *some* (rows) and *others* (columns) have nobody in common."""
    apart = np.ones((len(some), len(others)), dtype=np.bool_)
    for one, other in zip(_words(some).T, _words(others).T, strict=True):
        apart &= (one[:, None] & other) == 0
    return apart


def _best_of_each(key: Words, value: Ints) -> Ints:
    """Return where each key has its highest value, all places of equals."""
    by = np.lexsort((-value, *key.T))
    sorted_key, sorted_value = key[by], value[by]
    new = np.ones(len(by), dtype=np.bool_)
    new[1:] = (sorted_key[1:] != sorted_key[:-1]).any(axis=1)
    starts = np.flatnonzero(new)
    best = np.repeat(sorted_value[starts], np.diff([*starts, len(by)]))
    places: Ints = by[sorted_value == best]
    return places

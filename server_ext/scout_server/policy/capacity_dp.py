"""Exact dynamic programme over the remaining capacity of a few nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scout_server.policy.placement import Ints, Problem

__all__ = ["cells", "solve_exactly"]

_IMPOSSIBLE = -(2**62)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Which capacities can bind, and where they stand in the state array."""

    shape: tuple[int, ...]
    tokens: tuple[int, ...]
    """Axis of node i's quanta, or -1: they cannot bind."""
    slots: tuple[int, ...]


def _axes(problem: Problem) -> _Axes:
    shape: list[int] = []
    tokens, slots = [], []
    takes = problem.takes_slot > 0
    for i, (room, slot) in enumerate(
        zip(problem.room.tolist(), problem.slots.tolist(), strict=True)
    ):
        need = problem.need[:, i]
        allowed = need >= 0
        most = int(need[allowed].sum() + problem.extra[allowed, i].sum())
        if most > room:
            tokens.append(len(shape))
            shape.append(room + 1)
        else:
            tokens.append(-1)
        runners = np.sort(need[allowed & takes])
        if len(runners) > slot and int(runners[: slot + 1].sum()) <= room:
            slots.append(len(shape))
            shape.append(slot + 1)
        else:
            slots.append(-1)
    return _Axes(tuple(shape) or (1,), tuple(tokens), tuple(slots))


def cells(problem: Problem) -> int:
    """Return how many capacity states the programme has, shared prefixes included."""
    total = 1
    for size in _axes(problem).shape:
        total *= size
    groups, counts = np.unique(problem.group[problem.group >= 0], return_counts=True)
    bits = 0
    for group in groups[counts > 1].tolist():
        bits = max(bits, int((problem.extra[problem.group == group] > 0).any(axis=0).sum()))
    return total << bits


def solve_exactly(problem: Problem) -> list[int]:
    """
    Return the assignment that is worth most; node index per session, -1 for none.

    State: capacity left per node, quanta and slots. Sessions in a fixed order, each skipped or put
    on a node. Capacities that cannot bind are no dimension. Sessions that share a prefix come one
    after the other, so that one bit per node says whether the prefix is paid there.
    """
    axes = _axes(problem)
    count = len(problem.group)
    alone = np.bincount(problem.group[problem.group >= 0], minlength=1)
    order = sorted(range(count), key=lambda s: (int(problem.group[s]), int(problem.order[s]), s))
    states: dict[int, Ints] = {0: np.zeros(axes.shape, dtype=np.int64)}
    history: list[tuple[int, dict[int, Ints]]] = []
    current = -1
    need, extra, value = problem.need.tolist(), problem.extra.tolist(), problem.value.tolist()
    for s in order:
        group = int(problem.group[s])
        if group != current:
            current = group
            if len(states) > 1:
                history.append((-1, states))
                states = {0: np.maximum.reduce(list(states.values()))}
        shared = group >= 0 and alone[group] > 1
        after = {mask: array.copy() for mask, array in states.items()}
        for i, quanta in enumerate(need[s]):
            if quanta < 0:
                continue
            for mask, array in states.items():
                bits, size = _step(mask, i, quanta, extra[s][i], shared=shared)
                cut = _shift(axes, i, size, int(problem.takes_slot[s]))
                if cut is None:
                    continue
                source, target = cut
                if bits not in after:
                    after[bits] = np.full(axes.shape, _IMPOSSIBLE, dtype=np.int64)
                goal = after[bits][target]
                np.maximum(goal, array[source] + value[s][i], out=goal)
        history.append((s, states))
        states = after
    return _trace(problem, axes, history, states, alone.tolist())


def _step(mask: int, node: int, quanta: int, extra: int, *, shared: bool) -> tuple[int, int]:
    """Return (paid prefixes, quanta taken) after putting a session on *node*."""
    if not shared or extra == 0:
        return mask, quanta + extra
    if mask >> node & 1:
        return mask, quanta
    return mask | 1 << node, quanta + extra


def _shift(
    axes: _Axes, node: int, quanta: int, slot: int
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return (from, to) slices that take *quanta* and *slot* off *node*; None: never fits."""
    source = [slice(None)] * len(axes.shape)
    target = [slice(None)] * len(axes.shape)
    for axis, amount in ((axes.tokens[node], quanta), (axes.slots[node], slot)):
        if axis < 0 or amount == 0:
            continue
        size = axes.shape[axis]
        if amount >= size:
            return None
        source[axis] = slice(None, size - amount)
        target[axis] = slice(amount, None)
    return tuple(source), tuple(target)


def _trace(
    problem: Problem,
    axes: _Axes,
    history: Sequence[tuple[int, dict[int, Ints]]],
    states: dict[int, Ints],
    alone: Sequence[int],
) -> list[int]:
    """Walk back from full capacity along states that explain the value reached."""
    nodes = [-1] * len(problem.group)
    at = tuple(size - 1 for size in axes.shape)
    mask = max(states, key=lambda m: (int(states[m][at]), -m))
    worth = int(states[mask][at])
    for s, before in reversed(history):
        if s < 0:
            mask = next(m for m, array in sorted(before.items()) if int(array[at]) == worth)
            continue
        if mask in before and int(before[mask][at]) == worth:
            continue
        nodes[s], mask, at, worth = _explain(problem, axes, s, before, mask, at, worth, alone)
    return nodes


def _explain(
    problem: Problem,
    axes: _Axes,
    s: int,
    before: dict[int, Ints],
    mask: int,
    at: tuple[int, ...],
    worth: int,
    alone: Sequence[int],
) -> tuple[int, int, tuple[int, ...], int]:
    group = int(problem.group[s])
    shared = group >= 0 and alone[group] > 1
    slot = int(problem.takes_slot[s])
    for i, quanta in enumerate(problem.need[s].tolist()):
        if quanta < 0:
            continue
        for old, array in before.items():
            bits, size = _step(old, i, quanta, int(problem.extra[s, i]), shared=shared)
            if bits != mask:
                continue
            back = list(at)
            for axis, amount in ((axes.tokens[i], size), (axes.slots[i], slot)):
                if axis >= 0:
                    back[axis] -= amount
            if min(back, default=0) < 0:
                continue
            rest = worth - int(problem.value[s, i])
            if int(array[tuple(back)]) == rest:
                return i, old, tuple(back), rest
    raise AssertionError("a state without a predecessor")

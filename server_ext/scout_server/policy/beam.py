"""A beam over capacity states, for problems too large to plan exactly."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scout_server.policy.placement import Ints, Problem

__all__ = ["beam_search"]

_IMPOSSIBLE = -(2**62)
Floats = npt.NDArray[np.float64]


def beam_search(problem: Problem, order: Sequence[int], *, width: int) -> list[int]:
    """
    Return the best of *width* partial plans kept per session; node index per session, -1 for none.

    *order* is densest first. Partial plans are ranked by what they hold plus the most that the
    remaining sessions could add to the room left (sessions may be cut, nodes are one). Of plans
    that left the same room on equivalent nodes, only the most valuable is kept.
    """
    count, nodes = problem.need.shape
    room: Ints = problem.room[None, :].astype(np.int64)
    slots: Ints = problem.slots[None, :].astype(np.int64)
    worth: Ints = np.zeros(1, dtype=np.int64)
    _, dense_group = np.unique(problem.group, return_inverse=True)
    paid = np.zeros((1, int(dense_group.max(initial=0)) + 1, nodes), dtype=np.bool_)
    bounds = _Bounds(problem, order)
    twins = _equivalent(problem)
    trail: list[tuple[Ints, Ints]] = []
    for rank, s in enumerate(order):
        need = problem.need[s][None, :]
        grouped = int(problem.group[s]) >= 0
        extra = problem.extra[s][None, :]
        if grouped:
            extra = np.where(paid[:, dense_group[s]], 0, extra)
        size = need + extra
        takes = int(problem.takes_slot[s])
        fits = (need >= 0) & (room >= size) & (slots >= takes)
        options = np.concatenate(
            [worth[:, None], np.where(fits, worth[:, None] + problem.value[s], _IMPOSSIBLE)], axis=1
        )
        left = np.concatenate(
            [np.zeros((len(worth), 1), dtype=np.int64), np.broadcast_to(size, fits.shape)], axis=1
        )
        total = room.sum(axis=1)[:, None] - left
        hope = np.where(options > _IMPOSSIBLE, options + bounds.after(rank, total), -np.inf)
        flat = hope.ravel()
        keep = np.argsort(-flat, kind="stable")[: 2 * width]
        keep = keep[np.isfinite(flat[keep])]
        parent, choice = keep // (nodes + 1), keep % (nodes + 1) - 1
        next_room, next_slots = room[parent], slots[parent]
        next_paid = paid[parent]
        placed = np.flatnonzero(choice >= 0)
        at = choice[placed]
        next_room[placed, at] -= left[parent[placed], at + 1]
        next_slots[placed, at] -= takes
        if grouped:
            next_paid[placed, dense_group[s], at] = True
        unique = _distinct(next_room, twins)[:width]
        trail.append((parent[unique], choice[unique]))
        worth = options.ravel()[keep][unique]
        room, slots, paid = next_room[unique], next_slots[unique], next_paid[unique]
    result = [-1] * count
    at_plan = int(np.argmax(worth))
    for s, (parent, choice) in zip(reversed(order), reversed(trail), strict=True):
        result[s] = int(choice[at_plan])
        at_plan = int(parent[at_plan])
    return result


class _Bounds:
    """The most that sessions later in the order can add, as if all nodes were one."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        at = np.asarray(order, dtype=np.int64)
        allowed = problem.need >= 0
        need = np.where(allowed, problem.need, np.iinfo(np.int32).max).min(axis=1)[at]
        value = np.where(allowed, problem.value, 0).max(axis=1)[at]
        self._need: Floats = np.concatenate([[0.0], np.cumsum(need, dtype=np.float64)])
        self._value: Floats = np.concatenate([[0.0], np.cumsum(value, dtype=np.float64)])

    def after(self, rank: int, room: Ints) -> Floats:
        """Return the bound for sessions after place *rank* of the order, given *room* in all."""
        reach = np.interp(room + self._need[rank + 1], self._need, self._value)
        bound: Floats = reach - self._value[rank + 1]
        return bound


def _equivalent(problem: Problem) -> list[Ints]:
    """Return groups of nodes that no session can tell apart (more than one each)."""
    columns: dict[bytes, list[int]] = {}
    for i in range(len(problem.room)):
        key = (
            problem.need[:, i].tobytes()
            + problem.extra[:, i].tobytes()
            + problem.value[:, i].tobytes()
        )
        columns.setdefault(key, []).append(i)
    return [np.asarray(c, dtype=np.int64) for c in columns.values() if len(c) > 1]


def _distinct(room: Ints, twins: list[Ints]) -> Ints:
    """Return the indices of rows whose room differs, first ones first."""
    canonical = room
    if twins:
        canonical = room.copy()
        for group in twins:
            canonical[:, group] = np.sort(room[:, group], axis=1)
    seen: dict[bytes, int] = {}
    for row in range(len(canonical)):
        seen.setdefault(canonical[row].tobytes(), row)
    return np.asarray(list(seen.values()), dtype=np.int64)

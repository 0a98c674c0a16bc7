"""Plan blocks of nodes again, exactly, while the rest of a plan stands."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from scout_server.policy.capacity_dp import cells, solve_exactly
from scout_server.policy.placement import Ints, Problem

__all__ = ["improve"]

_CALL = 3000
"""What one array operation costs beyond its cells, in cells."""


def improve(
    problem: Problem, start: Sequence[int], *, block_states: int, work: int
) -> tuple[list[int], int]:
    """
    Return a plan at least as good as *start*, and the state updates spent (about *work* at most).

    In turn: every node alone, then every pair of nodes, until a round of both changes nothing. A
    block may take sessions from other nodes where they are worth less.
    """
    nodes = np.asarray(start, dtype=np.int64)
    value = problem.value
    size = np.maximum(problem.need + problem.extra, 1)
    density = np.where(problem.need >= 0, value / size, -np.inf)
    spent = 0
    settled: set[tuple[int, ...]] = set()
    for block in _blocks(len(problem.room)):
        if len(settled) == _count(len(problem.room)) or spent >= work:
            break
        if block in settled:
            continue
        at = np.asarray(block, dtype=np.int64)
        rows, gain = _rows(problem, nodes, at, density, most=48 if len(block) > 1 else 96)
        if not len(rows):
            settled.add(block)
            continue
        sub = _coarse(_restrict(problem, rows, at, gain), block_states)
        spent += len(rows) * len(block) * (cells(sub) + _CALL)
        answer = np.asarray(solve_exactly(sub), dtype=np.int64)
        before = int(value[rows, nodes[rows]][nodes[rows] >= 0].sum())
        moved = nodes.copy()
        chosen = answer >= 0
        moved[rows[chosen]] = at[answer[chosen]]
        inside = np.isin(nodes[rows], at)
        moved[rows[~chosen & inside]] = -1
        after = int(value[rows, moved[rows]][moved[rows] >= 0].sum())
        if after > before:
            nodes = moved
            settled = {block}
        else:
            settled.add(block)
    return nodes.tolist(), spent


def _count(nodes: int) -> int:
    return nodes + nodes * (nodes - 1) // 2


def _blocks(nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield single nodes, then pairs (near ones first, each node in turn), for ever."""
    pairs = sorted(combinations(range(nodes), 2), key=lambda p: (p[1] - p[0], p[0]))
    while True:
        yield from ((i,) for i in range(nodes))
        yield from pairs


def _rows(
    problem: Problem, nodes: Ints, block: Ints, density: Ints, *, most: int
) -> tuple[Ints, Ints]:
    """Return the sessions a block may use, and what each is worth elsewhere now."""
    count = len(nodes)
    current = np.where(nodes >= 0, problem.value[np.arange(count), nodes], 0)
    inside = np.isin(nodes, block)
    allowed = (problem.need[:, block] >= 0) & (problem.need[:, block] <= problem.room[block])
    better = (allowed & (problem.value[:, block] > current[:, None])).any(axis=1) & ~inside
    outside = np.flatnonzero(better)
    if len(outside) > most:
        best = np.where(allowed[outside], density[outside][:, block], -np.inf).max(axis=1)
        outside = np.sort(outside[np.argsort(-best, kind="stable")[:most]])
    rows = np.concatenate([np.flatnonzero(inside), outside])
    gain = np.where(inside[rows], 0, current[rows])
    return rows, gain


def _restrict(problem: Problem, rows: Ints, block: Ints, gain: Ints) -> Problem:
    need = problem.need[np.ix_(rows, block)]
    value = problem.value[np.ix_(rows, block)] - gain[:, None]
    return Problem(
        need=np.where(value > 0, need, -1),
        extra=problem.extra[np.ix_(rows, block)],
        group=problem.group[rows],
        value=value,
        room=problem.room[block],
        slots=problem.slots[block],
        takes_slot=problem.takes_slot[rows],
        order=problem.order[rows],
    )


def _coarse(problem: Problem, states: int) -> Problem:
    """Return the problem in larger quanta, so that it has about *states* states."""
    size = cells(problem)
    if size <= states:
        return problem
    factor = int(np.ceil((size / states) ** (1 / len(problem.room))))
    return Problem(
        need=np.where(problem.need >= 0, -(-problem.need // factor), -1),
        extra=-(-problem.extra // factor),
        group=problem.group,
        value=problem.value,
        room=problem.room // factor,
        slots=problem.slots,
        takes_slot=problem.takes_slot,
        order=problem.order,
    )

"""From sessions and nodes in tokens to a problem in quanta with packed values."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scout_server.policy.placement import (
    Candidate,
    Evaluator,
    Ints,
    Problem,
    Room,
    TableEvaluator,
)

__all__ = ["cold", "discretise", "pack", "worth_table"]

_LIMIT = 2**61
Bools = npt.NDArray[np.bool_]


def worth_table(
    candidates: Sequence[Candidate], nodes: Sequence[str], evaluator: Evaluator
) -> Ints:
    """Return the evaluator's integers as an array [session, node, component]."""
    if isinstance(evaluator, TableEvaluator):
        return evaluator.table(candidates, nodes)
    if not candidates or not nodes:
        return np.zeros((len(candidates), len(nodes), 0), dtype=np.int64)
    return np.array(
        [[evaluator.values(c, node) for node in nodes] for c in candidates], dtype=np.int64
    )


def cold(candidate: Candidate, room: Room) -> bool:
    """Whether *candidate* would come to a node that holds nothing of its session."""
    return candidate.waiting and not candidate.credits.get(room.node)


def discretise(
    candidates: Sequence[Candidate],
    rooms: Sequence[Room],
    evaluator: Evaluator,
    *,
    quantum: int,
    table: Ints | None = None,
) -> tuple[Problem, int]:
    """
    Return the problem, and the tokens that rounding hides. O(sessions x nodes).

    *table* is the `worth_table` of these candidates and rooms, where the caller has it.

    Sessions are rounded up and nodes down, so that a plan always fits. Whoever comes to a node that
    holds nothing of it takes its reserve as well. A session that is larger
    than a whole node is cut to the node: it may have it alone.
    """
    count, width = len(candidates), len(rooms)
    tokens = np.fromiter((max(0, r.tokens) for r in rooms), np.int64, width)
    capacity = np.fromiter((max(r.capacity, r.tokens) for r in rooms), np.int64, width)
    own = np.fromiter((max(1, c.footprint) for c in candidates), np.int64, count)
    group = np.full(count, -1, dtype=np.int64)
    extra = np.zeros((count, width), dtype=np.int64)
    named = [(s, c) for s, c in enumerate(candidates) if c.prefix]
    if named:
        rank = {name: i for i, name in enumerate(sorted({c.prefix or "" for _, c in named}))}
        resident = [r.prefixes for r in rooms]
        for s, candidate in named:
            group[s] = rank[candidate.prefix or ""]
            extra[s] = [0 if candidate.prefix in r else candidate.prefix_tokens for r in resident]
    need = np.broadcast_to(own[:, None], (count, width)).copy()
    if any(r.reserve for r in rooms):
        need += _reserves(candidates, rooms)
    too_large = need + extra > capacity[None, :]
    large = bool(too_large.any())
    if large:
        need = np.where(too_large, capacity[None, :], need)
        extra = np.where(too_large, 0, extra)
    quanta = -(-need // quantum)
    more = -(-extra // quantum) if named else extra
    room_quanta = tokens // quantum
    if large:
        # A session that takes a whole empty node fits there although both were rounded.
        whole = too_large & (tokens >= capacity)[None, :]
        quanta = np.where(whole, np.maximum(room_quanta[None, :], 1), quanta)
    allowed = np.ones((count, width), dtype=np.bool_)
    masks: dict[frozenset[str], Bools] = {}
    for s, candidate in enumerate(candidates):
        for only in (candidate.nodes, candidate.homes):
            if only is not None:
                if only not in masks:
                    masks[only] = np.array([r.node in only for r in rooms], dtype=np.bool_)
                allowed[s] &= masks[only]
    allowed &= quanta + more <= room_quanta[None, :]
    takes = np.fromiter((int(c.waiting) for c in candidates), np.int64, count)
    slots = np.fromiter((max(0, r.slots) for r in rooms), np.int64, width)
    allowed &= ~((takes[:, None] > 0) & (slots[None, :] < 1))
    hidden = int((tokens - room_quanta * quantum).sum())
    if count and width:
        hidden += int((quanta * quantum - need).min(axis=1).sum())
    if table is None:
        table = worth_table(candidates, [r.node for r in rooms], evaluator)
    value, unit = _packed(table)
    problem = Problem(
        need=np.where(allowed, quanta, -1),
        extra=np.where(allowed, more, 0),
        group=group,
        value=value,
        room=room_quanta,
        slots=slots,
        takes_slot=takes,
        order=np.arange(count, dtype=np.int64),
        unit=unit,
    )
    return problem, hidden


def _reserves(candidates: Sequence[Candidate], rooms: Sequence[Room]) -> Ints:
    """Return the reserve of every node that is `cold` for a session, else 0."""
    reserve = np.array([r.reserve for r in rooms], dtype=np.int64)
    waiting = np.array([c.waiting for c in candidates], dtype=np.int64)
    reserves: Ints = waiting[:, None] * reserve
    columns = {room.node: i for i, room in enumerate(rooms)}
    for s, candidate in enumerate(candidates):
        for node, credit in candidate.credits.items():
            if credit and node in columns:
                reserves[s, columns[node]] = 0
    return reserves


def pack(candidates: Sequence[Candidate], rooms: Sequence[Room], evaluator: Evaluator) -> Ints:
    """
    Return one integer per (session, node) whose sums compare like the lexicographic sums.

    Where 61 bits do not hold them all, the largest component loses its lowest bits.
    """
    return _packed(worth_table(candidates, [r.node for r in rooms], evaluator))[0]


def _packed(parts: Ints) -> tuple[Ints, int]:
    """Return `pack`'s values and what one unit of the first component is worth; 0: not known."""
    count, width, _ = parts.shape
    if not count or not width:
        return np.zeros((count, width), dtype=np.int64), 0
    reach = np.abs(parts).max(axis=1).sum(axis=0).tolist()
    signed = (parts.min(axis=(0, 1)) < 0).tolist()
    shift = [0] * parts.shape[2]
    while True:
        spans = [
            ((r >> bits) + count) * (2 if neg else 1) + 1
            for r, bits, neg in zip(reach, shift, signed, strict=True)
        ]
        product = 1
        for span in spans:
            product *= span
        if product < _LIMIT:
            break
        widest = max(range(len(spans)), key=lambda c: (spans[c], c))
        shift[widest] += 1
    packed = np.zeros((count, width), dtype=np.int64)
    for component, span in enumerate(spans):
        packed = packed * span + (parts[:, :, component] >> shift[component])
    unit = 0 if any(signed) else math.prod(spans[1:])
    return packed, unit

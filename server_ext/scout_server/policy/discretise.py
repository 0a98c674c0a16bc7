"""From sessions and nodes in tokens to a problem in quanta with packed values."""

from collections.abc import Sequence

import numpy as np

from scout_server.policy.placement import Candidate, Evaluator, Ints, Problem, Room

__all__ = ["discretise", "pack"]

_LIMIT = 2**61


def discretise(
    candidates: Sequence[Candidate], rooms: Sequence[Room], evaluator: Evaluator, *, quantum: int
) -> tuple[Problem, int]:
    """
    Return the problem, and the tokens that rounding hides. O(sessions x nodes).

    Sessions are rounded up and nodes down, so that a plan always fits. A session that is larger
    than a whole node is cut to the node: it may have it alone.
    """
    count, width = len(candidates), len(rooms)
    tokens = np.fromiter((max(0, r.tokens) for r in rooms), np.int64, width)
    capacity = np.fromiter((max(r.capacity, r.tokens) for r in rooms), np.int64, width)
    own = np.fromiter((max(1, c.footprint) for c in candidates), np.int64, count)
    prefix = np.fromiter((c.prefix_tokens if c.prefix else 0 for c in candidates), np.int64, count)
    names = sorted({c.prefix for c in candidates if c.prefix})
    rank = {name: i for i, name in enumerate(names)}
    group = np.fromiter((rank[c.prefix] if c.prefix else -1 for c in candidates), np.int64, count)
    extra = np.broadcast_to(prefix[:, None], (count, width)).copy()
    for i, room in enumerate(rooms):
        if room.prefixes:
            resident = np.fromiter((c.prefix in room.prefixes for c in candidates), np.bool_, count)
            extra[resident, i] = 0
    need = np.broadcast_to(own[:, None], (count, width)).copy()
    too_large = need + extra > capacity[None, :]
    need = np.where(too_large, capacity[None, :], need)
    extra = np.where(too_large, 0, extra)
    quanta = -(-need // quantum)
    more = -(-extra // quantum)
    room_quanta = tokens // quantum
    # A session that takes a whole empty node fits there although both were rounded.
    whole = too_large & (tokens >= capacity)[None, :]
    quanta = np.where(whole, np.maximum(room_quanta[None, :], 1), quanta)
    allowed = np.ones((count, width), dtype=np.bool_)
    for s, candidate in enumerate(candidates):
        for only in (candidate.nodes, candidate.homes):
            if only is not None:
                allowed[s] &= np.fromiter((r.node in only for r in rooms), np.bool_, width)
    allowed &= quanta + more <= room_quanta[None, :]
    takes = np.fromiter((int(c.waiting) for c in candidates), np.int64, count)
    slots = np.fromiter((max(0, r.slots) for r in rooms), np.int64, width)
    allowed &= ~((takes[:, None] > 0) & (slots[None, :] < 1))
    hidden = int((tokens - room_quanta * quantum).sum())
    if count and width:
        hidden += int((quanta * quantum - need).min(axis=1).sum())
    problem = Problem(
        need=np.where(allowed, quanta, -1),
        extra=np.where(allowed, more, 0),
        group=group,
        value=pack(candidates, rooms, evaluator),
        room=room_quanta,
        slots=slots,
        takes_slot=takes,
        order=np.arange(count, dtype=np.int64),
    )
    return problem, hidden


def pack(candidates: Sequence[Candidate], rooms: Sequence[Room], evaluator: Evaluator) -> Ints:
    """
    Return one integer per (session, node) whose sums compare like the lexicographic sums.

    Where 61 bits do not hold them all, the largest component loses its lowest bits.
    """
    count, width = len(candidates), len(rooms)
    if not count or not width:
        return np.zeros((count, width), dtype=np.int64)
    parts = np.array(
        [[evaluator.values(c, r.node) for r in rooms] for c in candidates], dtype=np.int64
    )
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
    return packed

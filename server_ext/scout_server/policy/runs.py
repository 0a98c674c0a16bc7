"""Runs of free blocks: what the two orders of a pool are lists of."""

__all__ = ["Group", "Run", "add_run"]


class Run:
    """A few blocks of one group that stand side by side in both orders."""

    __slots__ = ("blocks", "gnext", "gprev", "live", "next", "owner", "prev", "start")

    blocks: list[int]
    """A block that was taken out of the middle is still in it; it has another run, or none."""
    start: int
    """Place in `blocks`: what is before it was taken."""
    live: int
    """How many of its blocks are still there."""
    owner: "Group"
    next: "Run"
    prev: "Run"
    gnext: "Run"
    gprev: "Run"


class Group(Run):
    """The free blocks of one group: a ring of runs that it is itself the end of."""

    __slots__ = ("group", "key", "size", "stamp")

    group: int
    size: int
    key: int
    """Sequence of its current place in the heap."""
    stamp: int
    """How many blocks had been given back when it got its last one."""


def add_run(run: Run, blocks: list[int], owner: Group, *, before: Run, within: Run) -> Run:
    """Link a new *run* in *before* one of the engine's order, and *within* its group; return it."""
    run.blocks = blocks
    run.start = 0
    run.live = len(blocks)
    run.owner = owner
    last = run.prev = before.prev
    last.next = before.prev = run
    run.next = before
    last = run.gprev = within.gprev
    last.gnext = within.gprev = run
    run.gnext = within
    return run

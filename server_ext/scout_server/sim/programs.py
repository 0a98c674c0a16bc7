"""The state machine of one agent program: the only owner of program state."""

import enum
from collections.abc import Iterator

from scout_server.replica import Request, State
from scout_server.sim.traces.records import Program

__all__ = ["ProgramRun", "ProgramState"]


class ProgramState(enum.Enum):
    """Where a program stands; with parallel turns, the most advanced of theirs."""

    READY = "ready"
    """Arrived; nothing has been sent yet."""
    PAUSED = "paused"
    """A turn is released, and held back before it reaches a replica."""
    QUEUED = "queued"
    RUNNING = "running"
    TOOL = "tool"
    DONE = "done"
    ABORTED = "aborted"


class ProgramRun:
    """
    One program under way: which turns are released, in a gap, sent, finished.

    A turn is due when all its parents have finished, and released a gap later; several parents are
    a join barrier, several children of one parent are parallel branches.
    """

    __slots__ = (
        "_children",
        "_missing",
        "_session_turns",
        "active",
        "arrived_at",
        "attained_tokens",
        "finished_at",
        "gaps",
        "home",
        "left",
        "number",
        "paused",
        "program",
        "stopped",
    )

    def __init__(self, program: Program, number: int, now: float) -> None:
        self.program = program
        self.number = number
        self.arrived_at = now
        self.finished_at: float | None = None
        self.left = len(program.turns)
        self.gaps = 0
        """Turns whose gap is running."""
        self.paused = 0
        """Turns released and held back."""
        self.active: dict[int, Request] = {}
        """Requests at a replica, by turn."""
        self.attained_tokens = 0
        self.home: dict[str, int] = {}
        """Replica of each session, by the router."""
        self.stopped = False
        self._missing = [len(turn.parents) for turn in program.turns]
        self._children: list[list[int]] = [[] for _ in program.turns]
        for index, turn in enumerate(program.turns):
            for parent in turn.parents:
                self._children[parent].append(index)
        self._session_turns: dict[tuple[str, str | None], int] = {}

    @property
    def state(self) -> ProgramState:
        """Return where the program stands."""
        if self.stopped:
            return ProgramState.ABORTED
        if not self.left:
            return ProgramState.DONE
        if any(request.state is State.RUNNING for request in self.active.values()):
            return ProgramState.RUNNING
        if self.active:
            return ProgramState.QUEUED
        if self.paused:
            return ProgramState.PAUSED
        return ProgramState.TOOL if self.gaps else ProgramState.READY

    def roots(self) -> Iterator[int]:
        """Yield the turns that wait for no other."""
        return (index for index, missing in enumerate(self._missing) if not missing)

    def children(self, index: int) -> list[int]:
        """Return the turns that name turn *index* as a parent."""
        return self._children[index]

    def begin_gap(self) -> None:
        """Say that the gap before one turn has begun."""
        self.gaps += 1

    def end_gap(self) -> None:
        """Say that one gap has ended."""
        self.gaps -= 1

    def send(self, index: int, request: Request) -> None:
        """Say that turn *index* reached a replica."""
        self.active[index] = request

    def count_turn(self, index: int) -> int:
        """Return the number, from 1, of turn *index* among those of its session and agent."""
        turn = self.program.turns[index]
        key = (turn.session, turn.agent)
        number = self._session_turns.get(key, 0) + 1
        self._session_turns[key] = number
        return number

    def finish(self, index: int, now: float) -> list[int]:
        """Say that turn *index* has finished; return the turns that are due now."""
        request = self.active.pop(index)
        self.attained_tokens += request.attained_tokens
        self.left -= 1
        due = []
        for child in self._children[index]:
            self._missing[child] -= 1
            if not self._missing[child]:
                due.append(child)
        if not self.left:
            self.finished_at = now
        return due

    def session(self, index: int) -> str:
        """Return the name of the session that turn *index* belongs to."""
        sub = self.program.turns[index].session
        return f"{self.program.program}/{sub}" if sub else self.program.program

"""What the event loop remembers of a turn that was sent, and shows of a replica."""

from collections.abc import Sequence

from scout_server.replica import Replica
from scout_server.sim.programs import ProgramRun
from scout_server.sim.views import TurnView

__all__ = ["Seen", "Sent"]


class Sent:
    """One turn at a replica: what the cell remembers with the request."""

    __slots__ = ("index", "outstanding", "released_at", "replica", "run", "view")

    def __init__(
        self, run: ProgramRun, index: int, replica: int, view: TurnView, released_at: float
    ) -> None:
        self.run = run
        self.index = index
        self.replica = replica
        self.view = view
        self.released_at = released_at
        self.outstanding = 0

    @property
    def attained_tokens(self) -> int:
        """Tokens computed for its program so far."""
        run = self.run
        return run.attained_tokens + sum(r.attained_tokens for r in run.active.values())


class Seen:
    """A replica as the router sees it."""

    __slots__ = ("_replica", "index", "outstanding_tokens")

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
        self._replica = replica
        self.outstanding_tokens = 0

    @property
    def waiting(self) -> int:
        """Requests that wait there."""
        return self._replica.waiting_count

    @property
    def running(self) -> int:
        """Requests that run there."""
        return len(self._replica.running)

    @property
    def used_fraction(self) -> float:
        """Share of the blocks in use."""
        return self._replica.pool.usage

    def cached_blocks(self, hashes: Sequence[int]) -> int:
        """Return the length of the longest cached prefix."""
        return len(self._replica.pool.lookup(hashes, len(hashes)))

"""How long a node takes to compute a token, and since when it has nothing to do."""

__all__ = ["Pace"]

_KEEP = 1 - 1 / 64
"""Share of what is known that stays when another turn ends."""


class Pace:
    """
    Seconds of work per computed token of one node, learnt from the turns that ended there.

    Work is the time in which at least one turn runs, whatever it does: what would be lost has to be
    computed again in such time.
    """

    __slots__ = ("_mark", "_seconds", "_tokens", "idle_since")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._mark: float | None = None
        self.idle_since: float | None = None
        """Since when nothing runs; None: something does, or nothing ever did."""

    def runs(self, now: float) -> None:
        """A turn starts."""
        if self._mark is None:
            self._mark = now
        self.idle_since = None

    def ended(self, computed: int, *, now: float, idle: bool) -> None:
        """A turn ended that had *computed* tokens; *idle*: none runs any more."""
        if self._mark is not None:
            self._seconds = self._seconds * _KEEP + max(0.0, now - self._mark)
            self._tokens = self._tokens * _KEEP + computed
        self._mark = None if idle else now
        self.idle_since = now if idle else None

    def stopped(self) -> None:
        """The last turn that ran there was broken off: nothing is learnt of it."""
        self._mark = None
        self.idle_since = None

    def spare(self, *, now: float) -> int | None:
        """Return the tokens that could be computed in the time it has idled; None: not known."""
        if self.idle_since is None or self._tokens <= 0 or self._seconds <= 0:
            return None
        return int((now - self.idle_since) * self._tokens / self._seconds)

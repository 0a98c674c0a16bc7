"""What one node's cache still holds of sessions that do not run: the latest used stays longest."""

from collections import OrderedDict

__all__ = ["Shelf"]


class Shelf:
    """
    The sessions that one node served, by their latest use; no clock.

    An engine's prefix cache evicts what was used longest ago. So of a session is left, at most,
    what fits beside the requests that run and beside what sessions used since then: a session's end
    goes first, its beginning last. Sizes are tokens.
    """

    __slots__ = ("_key", "_known", "_left")

    def __init__(self) -> None:
        self._left: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._known: dict[tuple[str, str], int] = {}
        self._key = (-1, -1)
        """Capacity and use for which *_known* was worked out; negative: for none."""

    def put(self, session: tuple[str, str], tokens: int) -> None:
        """A turn of *session* ended and left *tokens*: the last to be evicted."""
        self._left.pop(session, None)
        self._left[session] = tokens
        self._key = (-1, -1)

    def take(self, session: tuple[str, str]) -> None:
        """A turn of *session* runs: what it left is in use."""
        if self._left.pop(session, None) is not None:
            self._key = (-1, -1)

    def clear(self) -> None:
        """The node lost what it held."""
        self._left.clear()
        self._key = (-1, -1)

    def room(self, session: tuple[str, str], *, capacity: int, used: int) -> int:
        """
        Return the most tokens that can be left of *session*, which does not run.

        *used*: tokens of the requests that run. Who is found to have nothing left is forgotten.
        """
        if (capacity, used) != self._key:
            self._work_out(capacity, used)
        return self._known.get(session, 0)

    def _work_out(self, capacity: int, used: int) -> None:
        left = capacity - used
        known: dict[tuple[str, str], int] = {}
        for session, tokens in reversed(self._left.items()):
            if left <= 0:
                break
            known[session] = left
            left -= tokens
        while len(self._left) > len(known):
            self._left.popitem(last=False)
        self._known, self._key = known, (capacity, used)

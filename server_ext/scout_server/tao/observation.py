"""What a response says of its tokens and of the tools it calls, read after it was sent on."""

from collections.abc import Iterable

from scout_server.ingress.responses import Ending, ResponseObserver, ToolUse
from scout_server.tao.usage import Usage

__all__ = ["Observation"]

_BATCH = 8192
_MAX_HELD = 262_144
_MARKS = (b"_call", b"tool_use")
"""What stands in every response that calls a tool; all others are not parsed."""


class Observation(Usage):
    """
    Usage, and the calls of tools with the seconds that their arguments say they take.

    Bytes are gathered and looked at a few kilobytes at a time; only what holds a tool call is
    parsed. A JSON body of more than 256 KiB says only the names of its calls, and so does what is
    compressed or broken. No method raises.
    """

    __slots__ = ("_called", "_ending", "_look_at", "_observer", "_pending", "_size_held", "_whole")

    def __init__(self) -> None:
        super().__init__()
        self._ending: Ending | None = None
        self._observer: ResponseObserver | None = None
        self._whole = False
        self._called = False
        """A call was seen: from here on all is parsed."""
        self._pending: list[bytes] = []
        self._size_held = 0
        self._look_at = _BATCH

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note the response's head; without it only tokens and names are read."""
        named = [(name.lower(), value) for name, value in headers]
        self._observer = ResponseObserver(self._ended)
        self._observer.start(status, named)
        kind = next((value for name, value in named if name == b"content-type"), b"")
        self._whole = b"json" in kind

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        super().feed(chunk)
        if self._observer is None:
            return
        self._pending.append(chunk)
        self._size_held += len(chunk)
        if self._size_held >= self._look_at:
            self._look()

    def calls(self) -> list[ToolUse]:
        """Return the tools that the response calls; it is complete."""
        if self._observer is not None:
            self._look(last=True)
        if self._observer is not None:
            self._observer.end()
            self._observer = None
        if self._ending is not None:
            return list(self._ending.tools)
        return [(name, None) for name in self.tools]

    def _ended(self, ending: Ending) -> None:
        self._ending = ending

    def _look(self, *, last: bool = False) -> None:
        """Give on what is gathered, as far as it may hold a call; keep a line that is cut."""
        observer = self._observer
        assert observer is not None
        if self._size_held > _MAX_HELD:
            self._pending.clear()
            self._observer = None
            return
        if self._whole and not last:
            self._look_at = _MAX_HELD + 1
            return
        data = b"".join(self._pending)
        cut = len(data) if last else data.rfind(b"\n") + 1
        self._called = self._called or any(mark in data for mark in _MARKS)
        if self._called:
            observer.feed(data[:cut])
        elif last:
            self._observer = None
        self._pending = [data[cut:]]
        self._size_held = len(data) - cut
        self._look_at = self._size_held + _BATCH

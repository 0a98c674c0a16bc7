"""What a response says about its tokens, read from its bytes as they pass."""

import re
from collections import deque

__all__ = ["Usage"]

_TAIL = 8192
_FIELDS = {
    name: re.compile(rb'"(?:' + keys + rb')"\s*:\s*([0-9]{1,12})')
    for name, keys in (
        ("prompt", rb"prompt_tokens|input_tokens"),
        ("output", rb"completion_tokens|output_tokens"),
        ("cached", rb"cached_tokens|cache_read_input_tokens"),
    )
}
_TOOL = re.compile(rb'"function"\s*:\s*\{[^{}]{0,200}?"name"\s*:\s*"([\w.-]{1,64})"')


class Usage:
    """
    Watches a response's bytes without changing them; keeps only its last kilobytes.

    Works on JSON bodies and event streams alike. What is not said is None.
    """

    __slots__ = ("_parts", "_size", "events", "tools")

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._size = 0
        self.events = 0
        """Server-sent events seen: about one per output token of a stream."""
        self.tools: list[str] = []
        """Names of tools that the output calls, as far as they were seen."""

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        self.events += chunk.count(b"data:")
        if b'"function"' in chunk and len(self.tools) < 16:
            self.tools += [name.decode("ascii", "replace") for name in _TOOL.findall(chunk)][:16]
        parts = self._parts
        parts.append(chunk)
        self._size += len(chunk)
        while self._size - len(parts[0]) >= _TAIL:  # joined once, when it is asked for
            self._size -= len(parts.popleft())

    def tokens(self) -> tuple[int | None, int | None, int | None]:
        """Return (prompt, output, cached) tokens as far as the response said them."""
        tail = b"".join(self._parts)[-_TAIL:]
        said = {name: _last(pattern, tail) for name, pattern in _FIELDS.items()}
        return said["prompt"], said["output"], said["cached"]


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None

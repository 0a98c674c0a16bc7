"""What a response says about its tokens, read from its bytes as they pass."""

import re

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

    __slots__ = ("_tail", "events", "tools")

    def __init__(self) -> None:
        self._tail = b""
        self.events = 0
        """Server-sent events seen: about one per output token of a stream."""
        self.tools: list[str] = []
        """Names of tools that the output calls, as far as they were seen."""

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        self.events += chunk.count(b"data:")
        if b'"function"' in chunk and len(self.tools) < 16:
            self.tools += [name.decode("ascii", "replace") for name in _TOOL.findall(chunk)][:16]
        self._tail = chunk[-_TAIL:] if len(chunk) >= _TAIL else (self._tail + chunk)[-_TAIL:]

    def tokens(self) -> tuple[int | None, int | None, int | None]:
        """Return (prompt, output, cached) tokens as far as the response said them."""
        said = {name: self._last(pattern) for name, pattern in _FIELDS.items()}
        return said["prompt"], said["output"], said["cached"]

    def _last(self, pattern: re.Pattern[bytes]) -> int | None:
        found = pattern.findall(self._tail)
        return int(found[-1]) if found else None

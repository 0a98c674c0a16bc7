"""What an answer tells while it passes: token counts, tool names, whether it came to its end."""

import json
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

__all__ = ["Answer", "watch"]

_MAX_BODY = 8 << 20
_MAX_TOOLS = 16
_BYTES_PER_TOKEN = 4
"""What a token is taken for where the server does not count them."""


class Answer:
    """
    Reads an answer of a completion endpoint as its bytes pass; keeps counts and names only.

    Chat completions, completions, responses and messages; whole or as server-sent events; plain,
    gzip or deflate. What it cannot read it does not count.
    """

    def __init__(self, content_type: str, encoding: str) -> None:
        self.prompt_tokens = 0
        """0: the answer does not tell."""
        self.cached_tokens: int | None = None
        self.calls_tool: bool | None = None
        self.tools: list[str] = []
        self.ended = False
        """Whether the model came to its end."""
        self._told = 0
        self._deltas = 0
        self._size = 0
        self._rest = bytearray()
        self._events = "event-stream" in content_type
        self._readable = encoding in ("", "identity", "gzip", "deflate")
        self._unzip = zlib.decompressobj(zlib.MAX_WBITS | 32) if encoding in _ZLIB else None

    @property
    def output_tokens(self) -> int:
        """Generated tokens: as told, else one for each piece of a stream, else by length."""
        return self._told or self._deltas or self._size // _BYTES_PER_TOKEN

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes of the body."""
        if not self._readable:
            self._size += len(chunk)
            return
        if self._unzip is not None:
            chunk = self._unzip.decompress(chunk, _MAX_BODY)
        self._size += len(chunk)
        self._rest += chunk
        if self._events:
            *lines, rest = self._rest.split(b"\n")
            self._rest = rest
            for line in lines:
                self._line(bytes(line))
        if len(self._rest) > _MAX_BODY:
            self._readable = False
            self._rest.clear()

    def close(self) -> None:
        """Take in what is left."""
        if self._events:
            self._line(bytes(self._rest))
        elif self._readable:
            self._take(_object(bytes(self._rest)))
        self._rest.clear()

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.strip()
        if name != b"data" or not value:
            return
        if value == b"[DONE]":
            self.ended = True
            return
        self._take(_object(value))

    def _take(self, said: dict[str, Any]) -> None:
        inner = said.get("response")
        if not isinstance(inner, dict):
            inner = said.get("message")
        for body in (said, inner):
            if isinstance(body, dict):
                self._usage(body.get("usage"))
                self._items(body)
        kind = said.get("type")
        if isinstance(kind, str):
            self._deltas += kind.endswith((".delta", "_delta"))
            self.ended = self.ended or kind in ("response.completed", "message_stop")
        choices = said.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice)

    def _usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        for name in ("prompt_tokens", "input_tokens"):
            self.prompt_tokens = _count(usage.get(name)) or self.prompt_tokens
            details = usage.get(f"{name}_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = cached if _count(cached) else self.cached_tokens
        for name in ("completion_tokens", "output_tokens"):
            self._told = _count(usage.get(name)) or self._told

    def _items(self, body: dict[str, Any]) -> None:
        """Take in the output of a response or the content of a message."""
        items = body.get("output", body.get("content"))
        if not isinstance(items, list):
            return
        for item in items:
            if isinstance(item, dict) and item.get("type") in ("function_call", "tool_use"):
                self._tool(item.get("name"))
        if body.get("status") == "completed" or body.get("stop_reason"):
            self.ended = True
            self.calls_tool = bool(self.tools)

    def _choice(self, choice: dict[str, Any]) -> None:
        part = choice.get("delta", choice.get("message"))
        part = part if isinstance(part, dict) else {}
        self._deltas += bool(part.get("content") or part.get("tool_calls") or choice.get("text"))
        calls = part.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            self._tool(function.get("name") if isinstance(function, dict) else None)
        if choice.get("finish_reason"):
            self.ended = True
            self.calls_tool = bool(self.tools) or choice["finish_reason"] == "tool_calls"

    def _tool(self, name: object) -> None:
        if isinstance(name, str) and name and len(self.tools) < _MAX_TOOLS:
            self.calls_tool = True
            self.tools.append(name)


_ZLIB = ("gzip", "deflate")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def watch(response: Any, read: Callable[[bytes], None], done: Callable[[], None]) -> None:
    """
    Let *read* see the raw bytes of an httpx or httpx2 *response* as they pass, then call *done*.

    *done* is called once, also when the reader leaves early. Neither may raise.
    """
    stream = response.stream
    package = sys.modules[type(response).__module__.partition(".")[0]]
    kind = "AsyncByteStream" if hasattr(stream, "__aiter__") else "SyncByteStream"
    base = getattr(package, kind)
    methods = _ASYNC if kind == "AsyncByteStream" else _SYNC
    watched = type("_Watched", (base,), methods)()
    watched.stream, watched.read, watched.done = stream, read, _once(done)
    response.stream = watched


def _once(function: Callable[[], None]) -> Callable[[], None]:
    called = False

    def inner() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    return inner


def _iterate(self: Any) -> Iterator[bytes]:
    for chunk in self.stream:
        self.read(chunk)
        yield chunk
    self.done()


def _close(self: Any) -> None:
    try:
        self.stream.close()
    finally:
        self.done()


async def _aiterate(self: Any) -> AsyncIterator[bytes]:
    async for chunk in self.stream:
        self.read(chunk)
        yield chunk
    self.done()


async def _aclose(self: Any) -> None:
    try:
        await self.stream.aclose()
    finally:
        self.done()


_SYNC = {"__iter__": _iterate, "close": _close}
_ASYNC = {"__aiter__": _aiterate, "aclose": _aclose}

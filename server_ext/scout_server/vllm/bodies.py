"""Request bodies on their way to vLLM: read up to a bound, completed, and given on."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from scout_server.vllm.seal import CALL_XARG, SEAL_XARG, TENANT_XARG

__all__ = ["Body", "parsed_body", "with_xargs"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Xargs = Mapping[str, object]

_OURS = frozenset({TENANT_XARG, CALL_XARG, SEAL_XARG})


class Body:
    """A request body: read up to a bound, replaced, and given on message by message."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        self._read: list[Message] = []
        self._whole = False

    async def read(self, bound: int) -> bytes | None:
        """
        Return the body, or None where it is longer than *bound* bytes or breaks off.

        What was read is given on in any case.
        """
        size = 0
        while size <= bound:
            message = await self._receive()
            self._read.append(message)
            if message["type"] != "http.request":
                return None
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                self._whole = size <= bound
                break
        if not self._whole:
            return None
        return b"".join(message.get("body", b"") for message in self._read)

    def replace(self, body: bytes) -> None:
        """Give on *body* instead of what was read."""
        headers = [
            (name, str(len(body)).encode() if name.lower() == b"content-length" else value)
            for name, value in self.scope["headers"]
        ]
        self.scope = {**self.scope, "headers": headers}
        self._read = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self) -> Message:
        """Return the next message."""
        return self._read.pop(0) if self._read else await self._receive()


def parsed_body(body: bytes | None) -> dict[str, object] | None:
    """Return the JSON object that *body* is, or None where it is none that can take xargs."""
    if body is None:
        return None
    try:
        if json.detect_encoding(body) != "utf-8":
            return None
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    theirs = parsed.get("vllm_xargs")
    if theirs is not None and not isinstance(theirs, dict):
        return None  # invalid; vLLM says so
    return parsed


def with_xargs(
    body: bytes,
    parsed: Mapping[str, object],
    xargs: Xargs,
    members: Mapping[str, object] | None = None,
) -> bytes:
    """
    Return *body*, of which *parsed* is the object, with *xargs* in its `vllm_xargs`.

    What the body already says there wins, save for what only servers say: that is ours, or is
    taken out. *members*, which the body does not have, are added beside. Everything else in the
    body keeps its bytes unless it has `vllm_xargs` of its own.
    """
    added = dict(members or {})
    if "vllm_xargs" in parsed:
        given = parsed["vllm_xargs"]
        theirs = given if isinstance(given, dict) else {}
        said = {name: value for name, value in theirs.items() if name not in _OURS}
        merged = {**parsed, **added, "vllm_xargs": {**xargs, **said}}
        return json.dumps(merged, separators=(",", ":")).encode()
    if xargs:
        added["vllm_xargs"] = dict(xargs)
    if not added:
        return body
    start = body.index(b"{") + 1
    head = json.dumps(added, separators=(",", ":")).encode()[1:-1]
    return b"".join((body[:start], head, b"," if parsed else b"", body[start:]))

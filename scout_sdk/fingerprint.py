"""
Fingerprint of an anchor: the recurring fixed prefix of an agent's requests.

Equal system prompts, tools and examples give equal fingerprints in every process and every
language; docs/protocol.md has the bytes that are hashed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["fingerprint", "fingerprint_of_request"]

_MAX_PART_BYTES = 1_048_576
_MAX_ITEMS = 1024
_SYSTEM_ROLES = frozenset({"system", "developer"})


def fingerprint(
    system: str | None = None,
    *,
    tools: Sequence[object] | None = None,
    examples: Sequence[object] | None = None,
) -> str | None:
    """
    Return 16 hexadecimal digits for an anchor, or None for an empty one.

    system: the system prompt. tools: tool definitions as sent, in their order. examples:
    few-shot messages as sent. Of each, the first MiB and the first 1,024 items count.
    Never raises; what is no JSON counts by the name of its type.
    """
    parts = (
        system if isinstance(system, str) else "",
        _canonical(tools),
        _canonical(examples),
    )
    if not any(parts):
        return None
    import xxhash

    digest = xxhash.xxh3_64()
    for part in parts:
        octets = part.encode("utf-8", "replace")[:_MAX_PART_BYTES]
        digest.update(len(octets).to_bytes(8, "little"))
        digest.update(octets)
    return digest.hexdigest()


def fingerprint_of_request(body: Mapping[str, object]) -> str | None:
    """
    Return the fingerprint of a chat, responses or messages request's own anchor, or None.

    Its system prompt (the leading system and developer messages, `instructions`, or
    `system`) and its tools. Never raises.
    """
    try:
        tools = body.get("tools")
        texts = [_text(body.get(key)) for key in ("instructions", "system")]
        texts += _leading(body.get("messages", body.get("input")))
        system = "\n".join(text for text in texts if text)
        return fingerprint(system or None, tools=tools if isinstance(tools, list) else None)
    except Exception:  # a body of another shape
        return None


def _leading(messages: object) -> Iterator[str]:
    """Yield the texts of the system messages that *messages* start with."""
    if isinstance(messages, list):
        for message in messages[:_MAX_ITEMS]:
            if not isinstance(message, dict) or message.get("role") not in _SYSTEM_ROLES:
                return
            yield _text(message.get("content"))


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content[:_MAX_ITEMS] if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _canonical(items: Sequence[object] | None) -> str:
    """Return *items* as JSON without spaces, keys sorted, not escaped; empty for none."""
    if not isinstance(items, list | tuple) or not items:
        return ""
    try:
        return json.dumps(
            items[:_MAX_ITEMS],
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            default=lambda other: type(other).__qualname__,
        )
    except (TypeError, ValueError, RecursionError):  # keys of several types, or a circle
        return f"[{len(items)}]"

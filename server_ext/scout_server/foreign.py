"""
Identity and hints that others already send, read as Scout hints (issue 3, section 4).

docs/foreign-hints.md has the table. Scout's own headers win field by field; after them the first
source in `SOURCES` that says a field wins. Nothing here raises, and every value is bounded: what
does not fit is dropped and counted as ignored.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from scout_sdk._hints import Evidence, HintOutcome, Hints, ToolEvent, ToolState
from scout_server.priority import Polarity, Priority

__all__ = ["SOURCES", "Foreign", "merge", "read"]

_MAX_ID = 256
_MAX_HEADER = 4096
_MAX_SECONDS = 24 * 3600.0
_MAX_PRIORITY = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What the sources of others say about one request."""

    hints: Hints | None = None
    """None: no source said anything."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Name of the source of each field that was read."""
    outcomes: Mapping[str, HintOutcome] = field(default_factory=dict)
    """Outcome of each field that a source sent."""
    priority: Priority | None = None
    expected_output_tokens: int | None = None


@dataclass(slots=True)
class _Found:
    values: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, HintOutcome] = field(default_factory=dict)
    source: str = ""

    def put(self, name: str, value: object | None) -> None:
        """Keep the first usable *value* of field *name*; note unusable ones as ignored."""
        if value is None:
            self.outcomes.setdefault(name, HintOutcome.IGNORED)
        elif name not in self.values:
            self.values[name] = value
            self.sources[name] = self.source
            self.outcomes[name] = HintOutcome.ACCEPTED

    def text(self, name: str, value: object) -> None:
        """Keep *value* when it is a usable identifier; absence says nothing."""
        if value is not None:
            self.put(name, _identifier(value))


_Headers = Mapping[str, str]
_Body = Mapping[str, object]
_Reader = Callable[[_Headers, _Body, _Found], None]


def _identifier(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    text = value.strip()
    if not text or len(text) > _MAX_ID or not text.isprintable():
        return None
    return text


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object, low: float, high: float) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or not low <= value <= high:
        return None
    return float(value)


def _flag(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in ("true", "1", "?1"):
        return True
    return False if text in ("false", "0", "?0") else None


def _say_final(found: _Found, value: object) -> None:
    if value is not None:
        found.put("final", _flag(value))


def _gap(found: _Found, seconds: float | None) -> None:
    """Note the declared time until the session's next request."""
    if seconds is None:
        found.put("tools", None)
        return
    found.put(
        "tools",
        (
            ToolEvent(
                name="declared-gap",
                state=ToolState.STARTED,
                remaining_s=seconds,
                evidence=Evidence.DECLARED,
            ),
        ),
    )


def _dynamo(headers: _Headers, body: _Body, found: _Found) -> None:
    found.text("session", headers.get("x-dynamo-session-id"))
    found.text("parent", headers.get("x-dynamo-parent-session-id"))
    _say_final(found, headers.get("x-dynamo-session-final"))
    nvext = _mapping(body.get("nvext"))
    hints = _mapping(nvext.get("agent_hints"))
    if "priority" in hints:
        value = _number(hints["priority"], -_MAX_PRIORITY, _MAX_PRIORITY)
        priority = None if value is None else Priority(int(value), Polarity.HIGH_FIRST)
        found.put("priority", priority)
    if "osl" in hints:
        found.put("expected_output_tokens", _number(hints["osl"], 0, 1 << 24))
    found.text("session", hints.get("prefix_id"))
    if "iat" in hints:
        millis = _number(hints["iat"], 0, _MAX_SECONDS * 1000)
        _gap(found, None if millis is None else millis / 1000)


def _claude_code(headers: _Headers, body: _Body, found: _Found) -> None:
    root = _identifier(headers.get("x-claude-code-session-id"))
    agent = _identifier(headers.get("x-claude-code-agent-id"))
    parent = _identifier(headers.get("x-claude-code-parent-agent-id"))
    if root is None:
        found.text("session", headers.get("x-claude-code-session-id"))
        return
    # A sub-agent has a chain and a life of its own: it is a session with a parent.
    found.text("session", root if agent is None else f"{root}/{agent}")
    if agent is not None:
        found.text("parent", root if parent is None else f"{root}/{parent}")


def _codex(headers: _Headers, body: _Body, found: _Found) -> None:
    # `thread-id` is the conversation; `session-id` may hold several of them.
    found.text("session", headers.get("thread-id"))
    found.text("session", headers.get("session-id"))
    found.text("session", headers.get("session_id"))


def _opencode(headers: _Headers, body: _Body, found: _Found) -> None:
    found.text("session", headers.get("x-session-affinity"))
    found.text("parent", headers.get("x-parent-session-id"))


def _vllm(headers: _Headers, body: _Body, found: _Found) -> None:
    # In vLLM the body wins over the header.
    xargs = _mapping(body.get("vllm_xargs"))
    found.text("session", body.get("session_id"))
    found.text("session", xargs.get("session_id"))
    found.text("session", headers.get("x-session-id"))
    if "x-vllm-priority" in headers:
        value = _number(headers["x-vllm-priority"], -_MAX_PRIORITY, _MAX_PRIORITY)
        priority = None if value is None else Priority(int(value), Polarity.LOW_FIRST)
        found.put("priority", priority)
    actions = _mapping(body.get("kv_hints")).get("actions")
    for action in actions[:16] if isinstance(actions, list) else ():
        kind = _mapping(action).get("action_type")
        payload = _mapping(_mapping(action).get("payload"))
        if kind == "demote":
            found.put("final", True)
        elif kind in ("retain", "pin"):
            _gap(found, _number(payload.get("ttl_s"), 0, _MAX_SECONDS))


def _nemo(headers: _Headers, body: _Body, found: _Found) -> None:
    if "x-nat-remaining-llm-calls" in headers:
        left = _number(headers["x-nat-remaining-llm-calls"], 0, 1 << 24)
        found.put("final", None if left is None else left == 0)
    if "x-nat-interarrival-ms" in headers:
        millis = _number(headers["x-nat-interarrival-ms"], 0, _MAX_SECONDS * 1000)
        _gap(found, None if millis is None else millis / 1000)
    if "x-nat-expected-output-tokens" in headers:
        tokens = _number(headers["x-nat-expected-output-tokens"], 0, 1 << 24)
        found.put("expected_output_tokens", tokens)


def _hermes(headers: _Headers, body: _Body, found: _Found) -> None:
    raw = headers.get("x-agent-hint")
    if raw is None:
        return
    try:
        padded = raw + "=" * (-len(raw) % 4)
        hint = json.loads(base64.urlsafe_b64decode(padded.encode("ascii")))
    except (ValueError, binascii.Error, RecursionError):
        found.put("session", None)
        return
    found.text("session", _mapping(hint).get("session_id"))


def _aibrix(headers: _Headers, body: _Body, found: _Found) -> None:
    found.text("session", headers.get("x-aibrix-session-key"))


def _baggage(headers: _Headers, body: _Body, found: _Found) -> None:
    """W3C Baggage with the GenAI attribute names of OpenTelemetry."""
    names = {
        "gen_ai.agent.name": "agent",
        "gen_ai.agent.id": "agent",
        "gen_ai.conversation.id": "session",
        "session.id": "session",
    }
    raw = headers.get("baggage", "")
    members: dict[str, str] = {}
    for member in raw.split(",")[:64]:
        key, _, value = member.partition(";")[0].partition("=")
        members.setdefault(key.strip(), unquote(value.strip(), errors="replace"))
    for key, name in names.items():
        found.text(name, members.get(key))


def _openai(headers: _Headers, body: _Body, found: _Found) -> None:
    # OpenAI's key groups requests that share a prefix: it names a prefix, not a session.
    found.text("anchor", body.get("prompt_cache_key"))


SOURCES: Mapping[str, _Reader] = {
    "dynamo": _dynamo,
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "vllm": _vllm,
    "nemo-agent-toolkit": _nemo,
    "hermes": _hermes,
    "aibrix": _aibrix,
    "baggage": _baggage,
    "openai": _openai,
}
"""Every source by name, the ones that know most first."""


def read(headers: Mapping[str, str], body: Mapping[str, object] | None = None) -> Foreign:
    """
    Return what other clients' headers and body fields say.

    *headers* has lower-case names; *body* is the parsed JSON object, if there is one.
    """
    short = {name: value for name, value in headers.items() if len(value) <= _MAX_HEADER}
    found = _Found()
    for name, reader in SOURCES.items():
        found.source = name
        reader(short, body or {}, found)
    values = found.values
    priority = values.pop("priority", None)
    output = values.pop("expected_output_tokens", None)
    hints = Hints(**values) if values else None  # type: ignore[arg-type]
    return Foreign(
        hints=hints,
        sources=dict(found.sources),
        outcomes=dict(found.outcomes),
        priority=priority if isinstance(priority, Priority) else None,
        expected_output_tokens=int(output) if isinstance(output, float) else None,
    )


def merge(own: Hints | None, foreign: Foreign) -> Hints | None:
    """Return *own* with the fields that only *foreign* says; None when neither says anything."""
    other = foreign.hints
    if own is None or other is None:
        return own if other is None else other
    names = (
        "session",
        "agent",
        "path",
        "anchor",
        "turn",
        "parent",
        "tools",
        "next_agents",
        "final",
    )
    missing = {
        name: getattr(other, name)
        for name in names
        if not getattr(own, name) and getattr(other, name)
    }
    return replace(own, **missing)

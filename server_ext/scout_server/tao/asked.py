"""What is understood of a request before it is sent on."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scout_sdk import HintOutcome, Hints, _wire
from scout_server import foreign
from scout_server.policy.turns import UNNAMED
from scout_server.tao.chains import Chains, digests_of
from scout_server.tenancy import TenancySettings, tenant_of

try:  # comes with the extra `kv-events`; long bodies are read four times as fast with it
    import msgspec
except ImportError:  # pragma: no cover
    _shallow = None
else:
    _shallow = msgspec.json.Decoder(dict[str, msgspec.Raw])

__all__ = ["TURN_PATHS", "Asked", "linked", "understand"]

TURN_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""POST here is a turn of a session and needs KV room; everything else just passes."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MAX_PARSED = 8 * 1024 * 1024
_SMALL = 2048
_MEDIA_BYTES = 4096
"""What an image, a sound or a file counts as: about a thousand tokens."""
_MAX_MEDIA = 256
_TEXTS = frozenset({"input", "instructions", "messages", "prompt", "system", "tools"})
"""Members that nothing is read from; in long bodies they are skipped."""
_TIMEOUT_HEADERS = ("x-request-timeout", "x-stainless-read-timeout", "x-stainless-timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, understood."""

    key: str
    session: str
    tenant: str
    hints: Hints | None
    outcomes: Mapping[str, HintOutcome]
    final: bool
    """True: nothing of its session will come any more."""
    body_bytes: int
    """Size of its text; an image, a sound or a file in it counts as a few kilobytes."""
    output_tokens: int
    """Output to expect."""
    timeout_s: float | None
    """How long the client waits; None: it does not say."""
    stream: bool = False
    """Whether it asks for an event stream."""
    tentative: bool = False
    """Its session was not named, and nothing but a tool call tells that it goes on."""
    chain: tuple[bytes, ...] = ()
    """What tells the session of a request that names none: see `linked`."""


def understand(
    raw: Sequence[tuple[bytes, bytes]],
    body: bytes,
    *,
    tenancy: TenancySettings,
    output_tokens: int,
    growing: bool = False,
) -> Asked:
    """
    Return what a request says; whatever is malformed is as if it were not said.

    A request that names no session is one of one turn; with *growing* it has the chain by which
    `linked` finds its session.
    """
    headers = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in raw}
    decoded = _wire.decode(raw)
    document = _document(body)
    others = foreign.read(headers, document)
    hints = foreign.merge(decoded.hints, others)
    key = secrets.token_hex(8)
    session = hints.session if hints is not None else None
    tenant = tenant_of(headers, tenancy)
    expected = output_tokens
    if others.expected_output_tokens is not None:
        expected = min(expected, others.expected_output_tokens)
    for name in _LIMITS:
        limit = document.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
            expected = min(expected, limit)
            break
    return Asked(
        key=key,
        session=session if session is not None else f"{UNNAMED}{key}",
        tenant=tenant,
        hints=hints,
        outcomes={**others.outcomes, **decoded.outcomes},
        final=session is None or (hints is not None and hints.final),
        body_bytes=_text_bytes(body),
        output_tokens=expected,
        stream=document.get("stream") is True,
        chain=digests_of(tenant, body) if growing and session is None else (),
        timeout_s=_timeout(headers),
    )


def linked(asked: Asked, chains: Chains) -> Asked:
    """Return *asked* with the session that *chains* knows by its growing history, if it has one."""
    link = chains.link(asked.chain, new=f"{UNNAMED}{asked.key}")
    if link is None:
        return asked
    final = asked.hints is not None and asked.hints.final
    return replace(asked, session=link.session, final=final, tentative=not link.goes_on, chain=())


def _document(body: bytes) -> dict[str, object]:
    if not body or len(body) > _MAX_PARSED:
        return {}
    if _shallow is not None and len(body) > _SMALL:
        try:
            members = _shallow.decode(body)
            return {n: json.loads(bytes(v)) for n, v in members.items() if n not in _TEXTS}
        except (ValueError, RecursionError):
            pass  # the other parser takes a little more, such as NaN
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text_bytes(body: bytes) -> int:
    """Return the size of a body without what is written in base64: it has far fewer tokens."""
    size = len(body)
    at = body.find(b'"data') if size > _MEDIA_BYTES else -1
    for _ in range(_MAX_MEDIA):
        if at < 0:
            break
        begin = at + 1  # "data:image/png;base64,...": the text itself
        key = body.startswith(b'":', at + 5)  # "data": "...": what is named so
        if key:
            begin = body.find(b'"', at + 7) + 1
        end = body.find(b'"', begin) if begin else -1
        if end < 0:
            break
        head = body[begin : begin + 512]
        coded = b" " not in head if key else head.startswith(b"data:") and b";base64," in head
        if coded and not body.startswith(b"\\", at - 1):  # else it is a quotation in a text
            size -= max(0, end - begin - _MEDIA_BYTES)
        at = body.find(b'"data', end if key else at + 5)
    return size


def _timeout(headers: Mapping[str, str]) -> float | None:
    for name in _TIMEOUT_HEADERS:
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:
            continue
        if 0 < seconds < 86_400:
            return seconds
    return None

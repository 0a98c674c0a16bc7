"""The SDK against the protocol's test vectors, which are there for other languages too."""

import hashlib
import json
from pathlib import Path

import pytest

from scout_sdk import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_sdk._limits import MAX_HEADERS_BYTES
from scout_sdk.fingerprint import fingerprint

VECTORS = Path(__file__).parent.parent / "vectors"


def load(name, *keys):
    content = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    return [pytest.param(case, id=case["name"]) for key in keys for case in content[key]]


def tool(fields):
    evidence = fields.get("evidence")
    return ToolEvent(
        **fields
        | {"state": ToolState(fields["state"]), "evidence": evidence and Evidence(evidence)}
    )


def hints(fields):
    if fields is None:
        return None
    return Hints(
        **fields
        | {
            "tools": tuple(tool(each) for each in fields.get("tools", ())),
            "next_agents": tuple(fields.get("next_agents", ())),
        }
    )


def event(fields):
    return SessionEvent(**fields | {"tool": tool(fields["tool"]) if "tool" in fields else None})


def outcomes(fields):
    return {name: HintOutcome(value) for name, value in fields.items()}


@pytest.mark.parametrize("case", load("headers", "encode", "clip"))
def test_encode_headers(case):
    """These hints give exactly these headers, within the limit."""
    headers = _wire.encode(hints(case["hints"]))
    assert headers == case["headers"]
    assert sum(len(name) + len(value) + 4 for name, value in headers.items()) <= MAX_HEADERS_BYTES


@pytest.mark.parametrize("case", load("headers", "encode"))
def test_headers_come_back(case):
    """Hints within the limits come back as they were, every field accepted."""
    decoded = _wire.decode(case["headers"])
    assert decoded.hints == hints(case["hints"])
    assert set(decoded.outcomes.values()) == {HintOutcome.ACCEPTED}


@pytest.mark.parametrize("case", load("headers", "clip"))
def test_clipped_headers_are_within_the_limits(case):
    """What a client clipped, a server accepts without clipping it again."""
    decoded = _wire.decode(case["headers"])
    assert set(decoded.outcomes.values()) == {HintOutcome.ACCEPTED}
    assert _wire.encode(decoded.hints) == case["headers"]


@pytest.mark.parametrize("case", load("headers", "decode", "versions", "hostile"))
def test_decode_headers(case):
    """These headers give exactly these hints and outcomes, as text and as bytes."""
    lines = [tuple(line) for line in case["headers"]]
    for given in (lines, [(name.encode(), value.encode()) for name, value in lines]):
        decoded = _wire.decode(given)
        assert decoded.hints == hints(case["hints"])
        assert decoded.outcomes == outcomes(case["outcomes"])


@pytest.mark.parametrize("case", load("events", "encode"))
def test_encode_events(case):
    """These events give this message, and come back when they are within the limits."""
    events = [event(fields) for fields in case["events"]]
    body = _wire.encode_events(events)
    assert json.loads(body) == case["body"]
    decoded, rejected = _wire.decode_events(body)
    assert rejected == 0
    if "over" not in case["name"]:
        assert decoded == events


@pytest.mark.parametrize("case", load("events", "decode"))
def test_decode_events(case):
    """This message gives these events, and as many rejections."""
    expected = [event(fields) for fields in case["events"]], case["rejected"]
    assert _wire.decode_events(case["body"].encode()) == expected


@pytest.mark.parametrize("case", load("outcome", "encode"))
def test_encode_outcome(case):
    """These outcomes give this header value."""
    assert _wire.encode_outcome(outcomes(case["outcomes"])) == case["value"]


@pytest.mark.parametrize("case", load("outcome", "decode"))
def test_decode_outcome(case):
    """This header value gives these outcomes."""
    assert _wire.decode_outcome(case["value"]) == outcomes(case["outcomes"])


@pytest.mark.parametrize("case", load("xargs", "encode"))
def test_encode_xargs(case):
    """These hints give these extra arguments, and come back, also through JSON."""
    xargs = _wire.to_xargs(hints(case["hints"]))
    assert xargs == case["xargs"]
    assert _wire.from_xargs(json.loads(json.dumps(xargs))) == hints(case["hints"])


@pytest.mark.parametrize("case", load("xargs", "decode"))
def test_decode_xargs(case):
    """These extra arguments, whoever wrote them, give these hints."""
    assert _wire.from_xargs(case["xargs"]) == hints(case["hints"])


@pytest.mark.parametrize("case", load("fingerprint", "cases"))
def test_fingerprints(case):
    """This anchor has this fingerprint."""
    given = fingerprint(case["system"], tools=case["tools"], examples=case["examples"])
    assert given == case["fingerprint"]


def test_shortened_identities_as_documented():
    """A text that is too long ends in the first 16 digits of its SHA-256, after a tilde."""
    for text, limit, prefix in (
        ("s" * 129, 128, "s" * 111),
        ("研" * 15, 128, "研" * 12),
        ('"' * 43, 128, '"' * 37),
    ):
        short = _wire.decode(_wire.encode(Hints(session=text))).hints.session
        assert short == f"{prefix}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        assert limit == 128

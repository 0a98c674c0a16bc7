"""Fingerprints: equal for equal anchors everywhere, different otherwise, never a fault."""

import struct
import subprocess
import sys

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from scout_sdk.fingerprint import fingerprint, fingerprint_of_request

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"b": 1, "a": "é"}}}]


def test_the_documented_bytes():
    """It is the XXH3-64 of three length-prefixed parts, as docs/protocol.md says."""
    parts = [
        b"You plan.",
        '[{"function":{"name":"run","parameters":{"a":"é","b":1}},"type":"function"}]'.encode(),
        b"",
    ]
    message = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    assert fingerprint("You plan.", tools=TOOLS) == xxhash.xxh3_64_hexdigest(message)


def test_another_process_agrees():
    """The fingerprint does not depend on the process or its hash seed."""
    code = "from scout_sdk.fingerprint import fingerprint; print(fingerprint('You plan.'))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == fingerprint("You plan.")


def test_what_counts():
    """Key order does not matter; text, tools, their order and the part they are in do."""
    assert fingerprint("a", tools=[{"x": 1, "y": 2}]) == fingerprint("a", tools=[{"y": 2, "x": 1}])
    distinct = [
        fingerprint("a"),
        fingerprint("b"),
        fingerprint("a", tools=[1, 2]),
        fingerprint("a", tools=[2, 1]),
        fingerprint("a", examples=[1, 2]),
        fingerprint(tools=["a"]),
    ]
    assert len(set(distinct)) == len(distinct)
    assert fingerprint() is fingerprint("", tools=[], examples=()) is None


def test_requests():
    """A request's anchor is its leading system messages and its tools, in each API's form."""
    chat = {
        "messages": [
            {"role": "system", "content": "You plan."},
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "later"},
        ],
        "tools": TOOLS,
    }
    expected = fingerprint("You plan.", tools=TOOLS)
    assert fingerprint_of_request(chat) == expected
    assert fingerprint_of_request({"instructions": "You plan.", "input": "x", "tools": TOOLS}) == (
        expected
    )
    parts = [{"type": "text", "text": "You plan."}]
    assert fingerprint_of_request({"system": parts, "messages": [], "tools": TOOLS}) == expected
    assert fingerprint_of_request({"messages": [{"role": "user", "content": "hi"}]}) is None


def test_bounded_and_unbreakable():
    """Huge, circular and foreign values give a fingerprint, never an exception."""
    circle: list[object] = []
    circle.append(circle)
    assert len(fingerprint("x" * 3_000_000, tools=[{"n": n} for n in range(5000)])) == 16
    assert len(fingerprint(tools=circle)) == 16
    assert len(fingerprint(tools=[{1: 2, "a": object()}])) == 16
    assert fingerprint(tools=[object()]) == fingerprint(tools=[object()])
    assert len(fingerprint("\ud800")) == 16
    assert fingerprint_of_request({"messages": 5, "tools": 7}) is None


@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.floats(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json(value):
    """Any JSON value has a stable fingerprint as a tool, and any body is answered."""
    assert fingerprint(tools=[value]) == fingerprint(tools=[value])
    fingerprint_of_request({"messages": value, "system": value, "tools": value})

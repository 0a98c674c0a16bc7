"""What other clients send becomes Scout hints, and nothing else does."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_sdk._hints import Evidence, HintOutcome, Hints
from scout_server.foreign import SOURCES, merge, read
from scout_server.priority import Polarity, Priority


def _agent_hint(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


CASES = [
    ("dynamo", {"x-dynamo-session-id": "s"}, {}, {"session": "s"}),
    ("dynamo", {"x-dynamo-session-id": "s", "x-dynamo-session-final": "true"}, {}, {"final": True}),
    ("dynamo", {"x-dynamo-parent-session-id": "p"}, {}, {"parent": "p"}),
    ("claude-code", {"x-claude-code-session-id": "s"}, {}, {"session": "s", "parent": None}),
    (
        "claude-code",
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
        {},
        {"session": "s/a", "parent": "s"},
    ),
    ("codex", {"session-id": "s"}, {}, {"session": "s"}),
    ("codex", {"session-id": "s", "thread-id": "t"}, {}, {"session": "t"}),
    ("codex", {"session_id": "s"}, {}, {"session": "s"}),
    ("opencode", {"x-session-affinity": "s", "x-parent-session-id": "p"}, {}, {"parent": "p"}),
    ("vllm", {"x-session-id": "s"}, {}, {"session": "s"}),
    ("vllm", {"x-session-id": "header"}, {"session_id": "body"}, {"session": "body"}),
    ("vllm", {}, {"vllm_xargs": {"session_id": "s"}}, {"session": "s"}),
    ("vllm", {}, {"kv_hints": {"actions": [{"action_type": "demote"}]}}, {"final": True}),
    ("nemo-agent-toolkit", {"x-nat-remaining-llm-calls": "0"}, {}, {"final": True}),
    ("nemo-agent-toolkit", {"x-nat-remaining-llm-calls": "3"}, {}, {"final": False}),
    ("hermes", {"x-agent-hint": _agent_hint({"session_id": "s"})}, {}, {"session": "s"}),
    ("aibrix", {"x-aibrix-session-key": "s"}, {}, {"session": "s"}),
    (
        "baggage",
        {"baggage": "a=b, gen_ai.agent.name=plan%20er;p=1 ,gen_ai.conversation.id=c"},
        {},
        {"agent": "plan er", "session": "c"},
    ),
    ("openai", {}, {"prompt_cache_key": "k"}, {"anchor": "k"}),
]


@pytest.mark.parametrize(("source", "headers", "body", "want"), CASES)
def test_each_source_fills_the_fields_of_the_table(source, headers, body, want):
    """
    Every row of docs/foreign-hints.md holds.
    """
    got = read(headers, body)

    assert got.hints is not None
    assert {name: getattr(got.hints, name) for name in want} == want
    assert source in got.sources.values()


def test_every_source_has_a_case_and_a_row_in_the_docs(request):
    """
    No source is untested or undocumented.
    """
    table = (request.config.rootpath / "docs" / "foreign-hints.md").read_text()

    assert {case[0] for case in CASES} == set(SOURCES)
    assert [name for name in SOURCES if f"| {name} |" not in table] == []


def test_an_interarrival_time_is_a_declared_gap():
    """
    A profile's milliseconds until the next call become a declared remaining time in seconds.
    """
    got = read({"x-nat-interarrival-ms": "2500"})

    assert got.hints is not None
    assert got.hints.tools[0].remaining_s == 2.5
    assert got.hints.tools[0].evidence is Evidence.DECLARED


@pytest.mark.parametrize(
    ("headers", "body", "low_first"),
    [
        ({"x-vllm-priority": "3"}, {}, 3),
        ({}, {"nvext": {"agent_hints": {"priority": 3}}}, -3),
    ],
)
def test_priorities_keep_their_direction(headers, body, low_first):
    """
    vLLM's 3 means later, Dynamo's 3 means earlier.
    """
    priority = read(headers, body).priority

    assert priority is not None
    assert priority.as_(Polarity.LOW_FIRST) == low_first
    assert priority.as_(Polarity.HIGH_FIRST) == -low_first


@given(st.integers(), st.sampled_from(Polarity), st.sampled_from(Polarity))
def test_converting_a_priority_twice_gives_it_back(value, first, second):
    """
    A conversion there and back changes nothing.
    """
    there = Priority(value, first).as_(second)

    assert Priority(there, second).as_(first) == value


@pytest.mark.parametrize("bad", ["", "x" * 300, "a\nb", 7, None, ["s"]])
def test_an_unusable_identifier_is_no_hint(bad):
    """
    Empty, overlong, unprintable and non-text identifiers are ignored.
    """
    assert read({}, {"session_id": bad}).hints is None


def test_a_damaged_agent_hint_is_counted_as_ignored():
    """
    A header that does not decode is ignored, and said so.
    """
    got = read({"x-agent-hint": "%%%"})

    assert got.hints is None
    assert got.outcomes["session"] is HintOutcome.IGNORED


def test_scouts_own_fields_win():
    """
    A foreign field only fills a gap.
    """
    own = Hints(session="mine")
    foreign = read({"x-session-id": "theirs", "baggage": "gen_ai.agent.name=coder"})

    assert merge(own, foreign) == Hints(session="mine", agent="coder")
    assert merge(None, foreign) == Hints(session="theirs", agent="coder")
    assert merge(own, read({})) == own


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_NAMES = ["x-dynamo-session-id", "x-agent-hint", "baggage", "x-nat-interarrival-ms", "session-id"]
_FIELDS = ["nvext", "vllm_xargs", "kv_hints", "session_id", "prompt_cache_key"]


@given(
    st.dictionaries(st.sampled_from(_NAMES), st.text()),
    st.dictionaries(st.sampled_from(_FIELDS), _json),
)
def test_reading_never_raises(headers, body):
    """
    Whatever is sent, reading returns.
    """
    got = read(headers, body)

    assert got.hints is None or len(got.hints.session or "") <= 256


def test_agent_hints_of_dynamo_are_read():
    """
    Output length, prefix id and interarrival of nvext.agent_hints are understood.
    """
    hints = {"osl": 128, "prefix_id": "p", "iat": 1500}

    got = read({}, {"nvext": {"agent_hints": hints}})

    assert got.expected_output_tokens == 128
    assert got.hints is not None
    assert (got.hints.session, got.hints.tools[0].remaining_s) == ("p", 1.5)

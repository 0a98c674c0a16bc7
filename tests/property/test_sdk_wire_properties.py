"""The wire: exact within its limits, bounded and unbreakable outside of them."""

import json
import re
from types import SimpleNamespace

import http_sf
import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_sdk._limits import MAX_CALL_ID, MAX_HEADERS_BYTES, MAX_NEXT, MAX_TOOLS, clean_text, cost

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=7).filter(
    lambda text: cost(text) <= MAX_CALL_ID  # the smallest limit of a text
)
names = texts | st.from_regex(r"[ -~]{1,21}", fullmatch=True)
seconds = st.integers(0, 31_536_000_000).map(lambda n: n / 1000)
running = st.sampled_from([ToolState.STARTED, ToolState.PROGRESS])


@st.composite
def tool_events(draw):
    state = draw(st.sampled_from(ToolState))
    over = state in (ToolState.ENDED, ToolState.FAILED)
    remaining = None if over else draw(st.none() | seconds)
    return ToolEvent(
        name=draw(names),
        state=state,
        call_id=draw(st.none() | names),
        elapsed_s=draw(st.none() | seconds),
        remaining_s=remaining,
        evidence=None if remaining is None else draw(st.none() | st.sampled_from(Evidence)),
    )


@st.composite
def valid_hints(draw):
    session = draw(st.none() | names)
    final = draw(st.booleans())
    parent = draw(st.none() | names)
    return Hints(
        session=session,
        agent=draw(st.none() | names),
        path=draw(st.none() | names),
        anchor=draw(st.none() | st.from_regex(r"[0-9a-f]{16}", fullmatch=True)),
        turn=draw(st.none() | st.integers(1, 10**9)),
        parent=None if parent == session else parent,
        tools=tuple(draw(st.lists(tool_events(), max_size=6))),
        next_agents=() if final else tuple(draw(st.lists(names, max_size=6))),
        final=final,
    )


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([*ToolState, *Evidence, "s" * 5000, "é" * 300, "\ud800"])
    | tool_events(),
    lambda inner: st.lists(inner, max_size=20) | st.tuples(inner, inner),
    max_leaves=8,
)
wild_tools = st.builds(
    ToolEvent,
    name=anything,
    state=anything,
    call_id=anything,
    elapsed_s=anything,
    remaining_s=anything,
    evidence=anything,
)
wild_hints = st.builds(
    Hints,
    session=anything,
    agent=anything,
    path=anything,
    anchor=anything,
    turn=anything,
    parent=anything,
    tools=anything | st.lists(wild_tools, max_size=40).map(tuple),
    next_agents=anything | st.lists(st.text(max_size=300), max_size=40).map(tuple),
    final=anything,
)


def check_headers(headers):
    """The headers are within the limit, valid structured fields, and httpx takes them."""
    size = sum(len(name) + len(value) + 4 for name, value in headers.items())
    assert size <= MAX_HEADERS_BYTES
    for name, value in headers.items():
        assert re.fullmatch(r"x-scout-[a-z]+|x-session-id", name)
        assert re.fullmatch(r"[!-~]([ -~]*[!-~])?", value)
        if name != "x-session-id":
            kind = "list" if name in ("x-scout-tools", "x-scout-next") else "item"
            parsed = http_sf.parse(value.encode(), tltype=kind)
            assert (http_sf.ser_list if kind == "list" else http_sf.ser_item)(parsed) == value
    httpx.Request("GET", "http://localhost", headers=headers)


@settings(max_examples=200)
@given(valid_hints())
def test_round_trip_is_exact(hints):
    """Hints within the limits come back as they were: headers, extra arguments."""
    headers = _wire.encode(hints)
    check_headers(headers)
    decoded = _wire.decode(headers)
    assert decoded.hints == hints
    assert set(decoded.outcomes.values()) == {HintOutcome.ACCEPTED}
    assert decoded.size_bytes == sum(len(n) + len(v) + 4 for n, v in headers.items())
    assert _wire.from_xargs(json.loads(json.dumps(_wire.to_xargs(hints)))) == hints


@settings(max_examples=60)
@given(wild_hints)
def test_any_hints_give_valid_headers(hints):
    """Whatever the fields hold: valid headers, and a server clips nothing further."""
    headers = _wire.encode(hints)
    check_headers(headers)
    decoded = _wire.decode(headers)
    clipped = HintOutcome.CLIPPED in decoded.outcomes.values()
    assert not clipped
    again = _wire.encode(decoded.hints)
    assert _wire.decode(again).hints == decoded.hints
    xargs = _wire.to_xargs(hints)
    assert all(isinstance(v, str | int | float | list) for v in xargs.values())
    assert isinstance(_wire.from_xargs(xargs), Hints)


@given(anything)
def test_no_hints_at_all(value):
    """Something that is no Hints encodes to something harmless."""
    check_headers(_wire.encode(value))
    check_headers(_wire.encode(SimpleNamespace(session=value)))
    _wire.to_xargs(value)


header_names = st.sampled_from(
    [f"x-scout-{f}" for f in ("version", "session", "agent", "turn", "tools", "next", "final")]
    + ["X-Scout-Parent", "x-session-id", "accept", "x-scout-unknown"]
)
PIECES = """
" a 1 , ; = ( ) ?1 %" %e7 \\ state started remaining elapsed - . @1 :YQ==: é 99999999999
"""
pieces = st.sampled_from([*PIECES.split(), " ", "\x00"])
values = st.lists(pieces, max_size=20).map("".join) | st.text(max_size=30)


@settings(max_examples=200)
@given(st.lists(st.tuples(header_names, values), max_size=12))
def test_any_headers_are_decoded(lines):
    """Whatever the headers: no exception, and hints that are within the limits."""
    as_bytes = [(n.encode(), v.encode("utf-8", "replace")) for n, v in lines]
    decoded = _wire.decode(as_bytes)
    assert _wire.decode(lines).hints == decoded.hints
    if decoded.hints is not None:
        assert len(decoded.hints.tools) <= MAX_TOOLS
        assert len(decoded.hints.next_agents) <= MAX_NEXT
        assert decoded.hints.turn is None or 1 <= decoded.hints.turn <= 10**9
        assert _wire.decode(_wire.encode(decoded.hints)).hints == decoded.hints
    assert _wire.decode_outcome(_wire.encode_outcome(decoded.outcomes)) == decoded.outcomes


@given(anything | st.dictionaries(st.text() | st.integers(), anything))
def test_no_headers_at_all(value):
    """Something that is no list of headers decodes to nothing."""
    assert _wire.decode(value).hints is None
    assert _wire.from_xargs(value) is None


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *_wire.to_xargs(
                    Hints(
                        session="s",
                        agent="a",
                        path="p",
                        anchor="f",
                        turn=1,
                        parent="q",
                        final=True,
                        next_agents=("b",),
                        tools=(ToolEvent(name="t", state=ToolState.ENDED),),
                    )
                )
            ]
        ),
        anything,
    )
)
def test_any_xargs_are_decoded(xargs):
    """Whatever a client wrote into our extra arguments: no exception."""
    hints = _wire.from_xargs({"scout_version": 1} | xargs)
    assert hints is None or isinstance(hints, Hints)


@given(
    st.lists(
        st.builds(
            SessionEvent,
            session=names,
            agent=st.none() | names,
            tool=st.none() | tool_events(),
            final=st.booleans(),
            age_s=seconds,
        ),
        max_size=20,
    )
)
def test_events_come_back(events):
    """Events within the limits come back as they were."""
    assert _wire.decode_events(_wire.encode_events(events)) == (events, 0)


@settings(max_examples=40)
@given(
    st.lists(
        anything | st.builds(SessionEvent, session=anything, tool=anything | wild_tools), max_size=4
    )
)
def test_any_events_are_encoded(events):
    """Whatever is among the events: a message that is taken without a rejection."""
    decoded, rejected = _wire.decode_events(_wire.encode_events(events))
    assert rejected == 0
    assert len(decoded) <= len(events)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(["session", "agent", "tool", "final", "age_s", "name", "state"]), inner
        )
    ),
)


@given(st.binary() | json_values.map(lambda v: json.dumps({"version": 1, "events": v}).encode()))
def test_any_message_is_decoded(body):
    """Whatever the message: no exception; every entry is an event or a rejection."""
    events, rejected = _wire.decode_events(body)
    assert all(isinstance(event, SessionEvent) for event in events)
    assert rejected >= 0


@given(st.text(), st.integers(17, 300))
def test_shortening(text, limit):
    """Texts fit after shortening, and shortening again changes nothing."""
    short, changed = clean_text(text, limit)
    if text == "":
        assert short is None
        return
    assert cost(short) <= limit
    assert changed or short == text
    assert clean_text(short, limit) == (short, False)


@given(st.text(max_size=200), st.text(max_size=200))
def test_distinct_identities_stay_distinct(one, other):
    """Two identities become one only if they were one."""
    if "\ud800" <= max(one + other, default="") <= "\udfff" or one == other:
        return
    assert clean_text(one, 64)[0] != clean_text(other, 64)[0]


def test_bounds_of_the_decoder():
    """Neither many lines, nor long ones, nor deep JSON get through or cost much."""
    lines = [(b"accept", b"x")] * 5000 + [(b"x-scout-agent", b"late")]
    assert _wire.decode(lines).hints is None
    long = [(b"x-scout-tools", b"a," * 1_000_000), (b"x-scout-agent", b"a")]
    assert _wire.decode(long).hints == Hints(agent="a")
    assert _wire.decode([(b"x" * 10_000_000, b"")]).size_bytes == 0
    assert _wire.decode_events(b"[" * 500_000) == ([], 1)
    assert _wire.decode_events(b'{"version":1,"events":[' + b"1," * 200_000 + b"1]}") == (
        [],
        200_001,
    )
    assert _wire.decode_events(b" " * 600_000) == ([], 1)
    many = [SessionEvent(session=f"s{n}") for n in range(300)]
    assert len(_wire.decode_events(_wire.encode_events(many))[0]) == 256


def test_the_largest_message_fits():
    """256 events with every text at its worst are within the size that a server takes."""
    tool = ToolEvent(
        name="\x00" * 500,
        state=ToolState.STARTED,
        call_id="\x00" * 500,
        elapsed_s=12345678.123,
        remaining_s=12345678.123,
        evidence=Evidence.DEADLINE,
    )
    event = SessionEvent(session="\x00" * 500, agent="\x00" * 500, tool=tool, age_s=12345678.123)
    body = _wire.encode_events([event] * 256)
    events, rejected = _wire.decode_events(body)
    assert (len(events), rejected) == (256, 0)

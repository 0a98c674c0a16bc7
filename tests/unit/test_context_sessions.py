"""What the SDK remembers of sessions between requests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import Evidence, SessionEvent, ToolEvent, ToolState
from scout_sdk._sessions import Credentials, Sessions, at
from scout_sdk.testing import FakeClock


class Sink:
    """Keeps what it is given."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.events: list[SessionEvent] = []
        self.credentials: list[Credentials | None] = []
        self.closed = False

    def emit(self, event: SessionEvent, credentials: Credentials | None = None) -> None:
        self.events.append(event)
        self.credentials.append(credentials)

    def flush(self, timeout_s: float = 2.0) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def make(clock: FakeClock | None = None, limit: int = 100) -> tuple[Sessions, dict[str, Sink]]:
    sinks: dict[str, Sink] = {}

    def make_sink(endpoint: str) -> Sink:
        return sinks.setdefault(endpoint, Sink(endpoint))

    return Sessions(clock=clock or FakeClock(), make_sink=make_sink, limit=limit), sinks


def started(call_id: str, remaining_s: float | None = None) -> ToolEvent:
    return ToolEvent(
        name="shell",
        state=ToolState.STARTED,
        call_id=call_id,
        elapsed_s=0.0,
        remaining_s=remaining_s,
        evidence=None if remaining_s is None else Evidence.SLEEP,
    )


def ended(call_id: str) -> ToolEvent:
    return ToolEvent(name="shell", state=ToolState.ENDED, call_id=call_id, elapsed_s=2.0)


def test_relative_times_move_on():
    """A running tool's times are those of the moment of asking; an ended one's stay."""
    clock = FakeClock()
    sessions, _ = make(clock)
    sessions.record_tool("S", "a", started("1", 5.0))
    sessions.record_tool("S", "a", ended("2"))
    clock.advance(3.0)
    running, over = (at(pending, clock.now) for pending in sessions.drain("S"))

    assert (running.elapsed_s, running.remaining_s) == (3.0, 2.0)
    assert over.elapsed_s == 2.0
    assert sessions.drain("S") == ()


def test_remaining_time_is_never_negative():
    """A tool that takes longer than it said has no time left, not less."""
    clock = FakeClock()
    sessions, _ = make(clock)
    sessions.record_tool("S", "a", started("1", 5.0))
    clock.advance(60.0)
    (late,) = (at(pending, clock.now) for pending in sessions.drain("S"))

    assert late.remaining_s == 0.0


def test_only_the_latest_state_of_a_call_waits():
    """A start that was followed by its end is not told on the next request."""
    sessions, _ = make()
    sessions.record_tool("S", "a", started("1"))
    sessions.record_tool("S", "a", ended("1"))

    assert [p.event.state for p in sessions.drain("S")] == [ToolState.ENDED]


def test_the_side_channel_gets_every_event_at_once(monkeypatch):
    """Given, then SCOUT_BASE_URL, then where requests go; without any, events only wait."""
    sessions, sinks = make()
    sessions.record_tool("S", "a", started("1"))
    assert sinks == {}
    sessions.learn_endpoint("S", "http://learnt")
    sessions.record_tool("S", "a", started("2"))
    sessions.record_tool("S", "a", started("3"), endpoint="http://given")
    monkeypatch.setenv("SCOUT_BASE_URL", "http://env")
    sessions.record_tool("S", "a", started("4"))
    sessions.finish("S", agent="a")

    calls = {url: [e.tool and e.tool.call_id for e in s.events] for url, s in sinks.items()}
    assert calls == {"http://learnt": ["2"], "http://given": ["3"], "http://env": ["4", None]}
    assert sinks["http://env"].events[-1].final
    assert len(sessions) == 0


def test_events_are_told_in_the_name_of_the_requests():
    """A server takes an event for the tenant whose key came with it, so it is the requests' key."""
    sessions, sinks = make()
    key = ("authorization", "Bearer one")
    sessions.learn_endpoint("S", "http://127.0.0.1:8000", key)
    sessions.learn_endpoint("T", "http://127.0.0.1:8000", ("x-api-key", "two"))
    sessions.record_tool("S", "a", started("1"))
    sessions.record_tool("T", "a", started("2"))
    sessions.record_tool("S", "a", started("3"), endpoint="http://localhost:8000/v1")
    sessions.learn_endpoint("S", "http://127.0.0.1:8000", None)
    sessions.finish("S")

    assert sinks["http://127.0.0.1:8000"].credentials == [key, ("x-api-key", "two"), None]
    assert sinks["http://localhost:8000/v1"].credentials == [key]


def test_a_key_goes_to_no_other_server(monkeypatch):
    """Where events go elsewhere than requests, by argument or by environment, the key does not."""
    sessions, sinks = make()
    key = ("authorization", "Bearer one")
    elsewhere = ["http://model.example:9000", "https://model.example:8000", "http://other:8000"]
    sessions.learn_endpoint("S", "http://model.example:8000", key)
    for url in (*elsewhere, "no url"):
        sessions.record_tool("S", "a", started("1"), endpoint=url)
    sessions.learn_endpoint("S", "http://model.example:8000", key, endpoint="http://given:1")
    sessions.record_tool("S", "a", started("1"))
    monkeypatch.setenv("SCOUT_BASE_URL", "http://env:2")
    sessions.finish("S")

    assert sorted(sinks) == sorted([*elsewhere, "no url", "http://given:1", "http://env:2"])
    assert {None} == {each for sink in sinks.values() for each in sink.credentials}


def test_switched_off(monkeypatch):
    """With SCOUT_SDK_ENABLED=0 the side channel stays silent."""
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "0")
    sessions, sinks = make()
    sessions.record_tool("S", "a", started("1"), endpoint="http://given")

    assert sinks == {}


def test_shutdown_closes_and_forgets():
    """After shutdown nothing is remembered, and later use starts afresh."""
    sessions, sinks = make()
    sessions.record_tool("S", "a", started("1"), endpoint="http://given")
    assert sessions.next_turn("S", "a") == 1
    sessions.shutdown()

    assert sinks["http://given"].closed
    assert len(sessions) == 0
    assert sessions.next_turn("S", "a") == 1


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from("ABCDEF"), st.sampled_from("xyz"), st.integers(0, 5)),
        max_size=80,
    )
)
def test_bounded_and_counted(steps: list[tuple[str, str, int]]):
    """Turns count up one by one for each session and agent, and memory stays within its bounds."""
    sessions, _ = make(limit=3)
    turns: dict[tuple[str, str], int] = {}
    recent: list[str] = []
    for session, agent, call in steps:
        if session not in recent:
            turns = {key: n for key, n in turns.items() if key[0] != session}
        recent = [*(s for s in recent if s != session), session][-3:]
        turns[session, agent] = turns.get((session, agent), 0) + 1
        assert sessions.next_turn(session, agent) == turns[session, agent]
        for i in range(call * 10):
            sessions.record_tool(session, agent, started(str(i)))
        assert len(sessions) <= 3
        assert len(sessions.drain(session)) <= 32

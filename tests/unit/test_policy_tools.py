"""What a session's client says of its tools: when it is back, also where it is told late."""

from scout_sdk import Hints, ToolEvent, ToolState
from scout_server.policy.facts import Finish
from scout_server.policy.learning import into_gap, learn, note_tool
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.tenant import Tenant


class Told:
    """One session that asks, pauses and is told of."""

    def __init__(self) -> None:
        self.tenant = Tenant("", max_agents=8, max_sessions=8, new_group=lambda: 1)
        self.agent = self.tenant.agents.named("a", hinted=True)
        self.session: Session = self.tenant.sessions.named("S", hinted=True)

    def ask(self, now: float) -> None:
        learn(self.tenant, self.session, self.agent, Hints(session="S", agent="a"), now)
        self.session.running = 1

    def answered(self, now: float, *tools: tuple[str, float | None]) -> None:
        self.session.running, self.session.phase, self.session.since = 0, Phase.GAP, now
        finish = Finish.TOOL_CALLS if tools else Finish.STOP
        into_gap(self.session, self.agent, finish, tools, now)

    def started(self, call: str, now: float, remaining: float | None, age: float = 0.0) -> None:
        state = ToolState.STARTED
        tool = ToolEvent(name="sh", state=state, call_id=call, remaining_s=remaining)
        note_tool(self.session, tool, age, now)

    def ended(self, call: str, now: float, age: float = 0.0) -> None:
        tool = ToolEvent(name="sh", state=ToolState.ENDED, call_id=call)
        note_tool(self.session, tool, age, now)

    @property
    def back(self) -> float | None:
        return None if self.session.promise is None else self.session.promise.back


def test_a_tool_that_is_told_of_in_time():
    """It is back when it said, and once it is, nothing is open."""
    told = Told()
    told.ask(0.0)
    told.answered(1.0, ("sh", 5.0))
    told.started("1", 1.1, 4.9)
    assert (told.back, told.session.kind) == (6.0, "tool:sh")
    told.ended("1", 4.0, age=0.5)
    assert (told.back, told.session.kind, told.session.since) == (None, "done:sh", 3.5)


def test_a_quick_tool_whose_events_come_after_the_next_request():
    """It promises nothing for the gap after that request, in which it does not run."""
    told = Told()
    told.ask(0.0)
    told.answered(1.0, ("sh", 600.0))
    told.ask(1.1)
    told.started("1", 1.2, 600.0, age=0.15)
    told.ended("1", 1.2, age=0.14)
    assert told.back is None
    told.answered(2.0)
    assert (told.back, told.session.kind, told.session.since) == (None, "stop:", 2.0)


def test_events_that_come_after_the_next_answer():
    """A client that was away may tell a gap too late: it does not change the one that is now."""
    told = Told()
    told.ask(0.0)
    told.answered(1.0, ("sh", 600.0))
    told.ask(2.0)
    told.answered(3.0, ("make", 30.0))
    told.ended("0", 9.0, age=8.0)
    assert (told.back, told.session.kind, told.session.since) == (33.0, "tool_calls:make", 3.0)
    told.started("1", 9.0, 592.0, age=8.0)
    told.ended("1", 9.0, age=7.5)
    assert (told.back, told.session.kind, told.session.since) == (None, "tool_calls:make", 3.0)


def test_of_several_tools_those_count_that_still_run():
    """When the longest ends early, the session is back with the next longest, if that is known."""
    told = Told()
    told.ask(0.0)
    told.answered(1.0)
    told.started("1", 1.0, 100.0)
    told.started("2", 1.0, 5.0)
    told.started("3", 1.0, None)
    assert told.back == 101.0
    told.ended("1", 2.0)
    assert told.back == 6.0
    told.ended("2", 6.0)
    assert told.back is None
    assert told.session.kind == "tool:sh"

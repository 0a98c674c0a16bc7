"""Readiness of sessions in a tool gap."""

import math

import pytest

from scout_sdk import Evidence, SessionEvent, ToolEvent, ToolState
from scout_sdk._hints import HUMAN
from scout_server.policy.durations import DurationHistory
from scout_server.policy.readiness import Readiness, ReadinessSettings, Source


def started(
    name: str = "build",
    call_id: str | None = "c1",
    *,
    remaining_s: float | None = None,
    evidence: Evidence | None = None,
    elapsed_s: float | None = None,
) -> ToolEvent:
    return ToolEvent(
        name=name,
        state=ToolState.STARTED,
        call_id=call_id,
        remaining_s=remaining_s,
        evidence=evidence,
        elapsed_s=elapsed_s,
    )


def ended(
    name: str = "build", call_id: str | None = "c1", *, elapsed_s: float | None = None
) -> ToolEvent:
    return ToolEvent(name=name, state=ToolState.ENDED, call_id=call_id, elapsed_s=elapsed_s)


def taught(readiness: Readiness, tool: str, *durations_s: float, tenant: str = "") -> Readiness:
    for i, duration in enumerate(durations_s):
        readiness.tool(
            "teacher", ended(tool, f"t{tool}{i}", elapsed_s=duration), tenant=tenant, now=0.0
        )
    readiness.forget("teacher", tenant=tenant, now=0.0)
    return readiness


def test_session_outside_a_gap_has_no_forecast() -> None:
    """Nothing is forecast for a session that runs or is unknown."""
    assert Readiness().forecast("s", now=0.0) is None


def test_default_is_five_seconds() -> None:
    """Without any evidence a tool is expected to take five seconds."""
    readiness = Readiness()
    readiness.tool("s", started(), now=10.0)
    forecast = readiness.forecast("s", now=12.0)
    assert forecast is not None
    assert (forecast.remaining_s, forecast.source, forecast.ready) == (3.0, Source.DEFAULT, False)


def test_evidence_order() -> None:
    """Each stronger kind of evidence replaces the weaker one, and completion all of them."""
    readiness = taught(Readiness(), "other", 40.0)
    seen = []

    def look() -> None:
        forecast = readiness.forecast("s", now=0.0)
        assert forecast is not None
        seen.append((forecast.source, forecast.remaining_s))

    readiness.tool("s", started(), now=0.0)
    look()
    taught(readiness, "build", 20.0)
    look()
    readiness.tool("s", started(remaining_s=15.0, evidence=Evidence.SLEEP), now=0.0)
    look()
    readiness.tool("s", started(remaining_s=12.0, evidence=Evidence.DEADLINE), now=0.0)
    look()
    readiness.tool("s", started(remaining_s=10.0, evidence=Evidence.PROGRESS), now=0.0)
    look()
    readiness.tool("s", ended(), now=0.0)
    look()
    assert seen == [
        (Source.GLOBAL, 40.0),
        (Source.TOOL, 20.0),
        (Source.SLEEP, 15.0),
        (Source.DEADLINE, 12.0),
        (Source.PROGRESS, 10.0),
        (Source.COMPLETED, 0.0),
    ]


def test_progress_never_exceeds_the_enforced_deadline() -> None:
    """A deadline bounds what progress extrapolates to."""
    readiness = Readiness()
    readiness.tool("s", started(remaining_s=8.0, evidence=Evidence.DEADLINE), now=0.0)
    readiness.tool("s", started(remaining_s=90.0, evidence=Evidence.PROGRESS), now=0.0)
    forecast = readiness.forecast("s", now=0.0)
    assert forecast is not None
    assert (forecast.remaining_s, forecast.source) == (8.0, Source.DEADLINE)


def test_a_deadline_that_a_tool_always_beats_is_only_a_bound() -> None:
    """After four calls that ended long before their deadline, the tool's own history counts."""
    readiness = Readiness()
    sources = []
    for i in range(6):
        call = f"c{i}"
        hint = started(call_id=call, remaining_s=120.0, evidence=Evidence.DEADLINE)
        readiness.tool("s", hint, now=100.0 * i)
        forecast = readiness.forecast("s", now=100.0 * i)
        assert forecast is not None
        sources.append((forecast.source, forecast.remaining_s))
        readiness.tool("s", ended(call_id=call), now=100.0 * i + 3)
    assert sources == [(Source.DEADLINE, 120.0)] * 4 + [(Source.TOOL, 3.0)] * 2


def test_ready_within_a_second_of_the_predicted_return() -> None:
    """A session is ready from one second before its predicted return, not earlier."""
    readiness = Readiness()
    readiness.tool("s", started(remaining_s=10.0, evidence=Evidence.PROGRESS), now=0.0)
    early, due = readiness.forecast("s", now=8.99), readiness.forecast("s", now=9.0)
    assert early is not None
    assert due is not None
    assert (early.ready, due.ready) == (False, True)
    assert early.recheck_s == pytest.approx(0.01)


def test_hint_counts_only_when_refreshed_within_thirty_seconds() -> None:
    """A predicted time that nobody repeated for 30 s gives way to weaker evidence."""
    stale, fresh = Readiness(), Readiness()
    hint = started(remaining_s=60.0, evidence=Evidence.PROGRESS)
    stale.tool("s", hint, now=0.0)
    fresh.tool("s", hint, now=0.0)
    fresh.tool("s", started(remaining_s=20.0, evidence=Evidence.PROGRESS), now=40.0)
    old, new = stale.forecast("s", now=59.5), fresh.forecast("s", now=59.5)
    assert old is not None
    assert new is not None
    assert (old.source, old.ready) == (Source.DEFAULT, False)
    assert (new.source, new.ready) == (Source.PROGRESS, True)


def test_parsed_sleep_does_not_go_stale() -> None:
    """A parsed sleep holds as long as the command runs."""
    readiness = Readiness()
    readiness.tool("s", started(remaining_s=60.0, evidence=Evidence.SLEEP), now=0.0)
    forecast = readiness.forecast("s", now=59.5)
    assert forecast is not None
    assert (forecast.source, forecast.ready) == (Source.SLEEP, True)


def test_overdue_session_gets_a_bounded_number_of_probes() -> None:
    """An overdue session is ready for its probes only, with growing pauses, then never."""
    readiness = Readiness(ReadinessSettings(probes=2, probe_s=1.0))
    readiness.tool("s", started(), now=0.0)
    ready_at = []
    for tenth in range(51, 1000):
        forecast = readiness.assess("s", now=tenth / 10)
        assert forecast is not None
        if forecast.ready:
            ready_at.append(tenth)
    assert ready_at == [*range(51, 61), *range(81, 91)]


def test_probes_are_bounded_over_all_sessions() -> None:
    """No more than max_probing sessions are probed at a time."""
    readiness = Readiness(ReadinessSettings(max_probing=3))
    for i in range(10):
        readiness.tool(f"s{i}", started(), now=0.0)
    answers = [readiness.assess(f"s{i}", now=6.0) for i in range(10)]
    assert sum(a is not None and a.ready for a in answers) == 3


def test_parallel_tools_are_ready_when_all_are() -> None:
    """A session waits for the slowest of its parallel tools."""
    readiness = Readiness()
    readiness.tool("s", started("a", "1"), now=0.0)
    readiness.tool("s", started("b", "2", remaining_s=20.0, evidence=Evidence.SLEEP), now=0.0)
    readiness.tool("s", ended("a", "1"), now=1.0)
    waiting = readiness.forecast("s", now=2.0)
    readiness.tool("s", ended("b", "2"), now=3.0)
    back = readiness.forecast("s", now=3.0)
    assert waiting is not None
    assert back is not None
    assert (waiting.ready, waiting.remaining_s) == (False, 18.0)
    assert back.ready


def test_parallel_calls_without_ids_are_told_apart() -> None:
    """Two unnamed calls of one tool need two ends."""
    readiness = Readiness()
    readiness.tool("s", started("a", None), now=0.0)
    readiness.tool("s", started("a", None), now=0.0)
    readiness.tool("s", ended("a", None), now=1.0)
    one = readiness.forecast("s", now=1.0)
    readiness.tool("s", ended("a", None), now=1.0)
    both = readiness.forecast("s", now=1.0)
    assert one is not None
    assert both is not None
    assert (one.source, both.source) == (Source.TOOL, Source.COMPLETED)


def test_late_start_does_not_reopen_an_ended_call() -> None:
    """Events out of order leave an ended call ended."""
    readiness = Readiness()
    readiness.tool("s", ended(elapsed_s=2.0), now=2.0)
    readiness.tool("s", started(), age_s=2.0, now=2.0)
    forecast = readiness.forecast("s", now=2.0)
    assert forecast is not None
    assert forecast.ready


def test_client_takes_over_the_call_seen_in_the_output() -> None:
    """A call announced by the model's output and then by the client is one call."""
    readiness = Readiness()
    readiness.gap("s", [("build", 7.0)], now=0.0)
    readiness.tool("s", started(), now=1.0)
    readiness.tool("s", ended(), now=2.0)
    forecast = readiness.forecast("s", now=2.0)
    assert forecast is not None
    assert forecast.ready


def test_next_request_ends_the_gap_and_teaches() -> None:
    """The session's next request closes its calls, and their durations are learnt."""
    readiness = Readiness()
    readiness.gap("s", [("build", None)], now=0.0)
    readiness.turn("s", now=9.0)
    assert readiness.forecast("s", now=9.0) is None
    assert readiness.expected_s("build") == (9.0, Source.TOOL)


def test_request_of_another_agent_leaves_the_call_open() -> None:
    """A parallel branch of the session does not end another agent's tool."""
    readiness = Readiness()
    readiness.tool("s", started(), agent="coder", now=0.0)
    readiness.turn("s", agent="planner", now=1.0)
    assert readiness.forecast("s", now=1.0) is not None
    readiness.turn("s", agent="coder", now=2.0)
    assert readiness.forecast("s", now=2.0) is None


def test_request_that_says_its_tool_still_runs_keeps_the_call() -> None:
    """A tool that the request itself reports as running is still open."""
    readiness = Readiness()
    readiness.tool("s", started(), now=0.0)
    readiness.turn("s", [ToolEvent(name="build", state=ToolState.PROGRESS, call_id="c1")], now=1.0)
    forecast = readiness.forecast("s", now=1.0)
    assert forecast is not None
    assert not forecast.ready


def test_age_of_an_event_moves_it_into_the_past() -> None:
    """An event sent late counts from when it happened."""
    readiness = Readiness()
    readiness.event(SessionEvent(session="s", tool=started(), age_s=3.0), now=10.0)
    forecast = readiness.forecast("s", now=10.0)
    assert forecast is not None
    assert forecast.remaining_s == 2.0


@pytest.mark.parametrize("evidence", list(Evidence))
def test_what_remains_is_as_of_sending(evidence: Evidence) -> None:
    """An event that waited says what remains now: its age is not taken off a second time."""
    readiness = Readiness()
    tool = started(remaining_s=3.0, elapsed_s=2.0, evidence=evidence)
    readiness.event(SessionEvent(session="s", tool=tool, age_s=2.0), now=10.0)
    forecast = readiness.forecast("s", now=10.0)
    assert forecast is not None
    assert 3.0 == forecast.remaining_s
    readiness.tool("s", ended(elapsed_s=None), now=13.0)
    assert readiness.expected_s("build") == (5.0, Source.TOOL)


def test_final_event_forgets_the_session() -> None:
    """A session that said goodbye is in no gap."""
    readiness = Readiness()
    readiness.tool("s", started(), now=0.0)
    readiness.event(SessionEvent(session="s", final=True), now=1.0)
    assert (readiness.forecast("s", now=1.0), len(readiness)) == (None, 0)


def test_tenants_do_not_teach_each_other() -> None:
    """What one tenant's tools take is unknown to another."""
    readiness = taught(Readiness(), "build", 30.0, tenant="a")
    assert readiness.expected_s("build", tenant="a") == (30.0, Source.TOOL)
    assert readiness.expected_s("build", tenant="b") == (5.0, Source.DEFAULT)


def test_waiting_for_a_person_teaches_nothing_about_tools() -> None:
    """A person's pace stays out of the global history."""
    readiness = taught(Readiness(), HUMAN, 600.0)
    assert readiness.expected_s(HUMAN) == (600.0, Source.TOOL)
    assert readiness.expected_s("build") == (5.0, Source.DEFAULT)


def test_worthless_numbers_are_ignored() -> None:
    """Infinite, missing and negative durations count as not said."""
    readiness = Readiness()
    for bad in (math.inf, math.nan, -1.0):
        readiness.tool("s", started(remaining_s=bad, elapsed_s=bad), age_s=bad, now=0.0)
    forecast = readiness.forecast("s", now=0.0)
    assert forecast is not None
    assert (forecast.remaining_s, forecast.source) == (5.0, Source.DEFAULT)


def test_median_counts_cut_calls_as_at_least_that_long() -> None:
    """Censored durations move the median up, where dropping them would not."""
    history = DurationHistory(64)
    for _ in range(5):
        history.add(1.0, censored=False)
    for _ in range(5):
        history.add(10.0, censored=False)
    plain = history.median_s()
    for _ in range(8):
        history.add(5.0, censored=True)
    assert (plain, history.median_s()) == (1.0, 10.0)


def test_history_without_an_end_knows_nothing() -> None:
    """Only censored durations give no median."""
    history = DurationHistory(4)
    history.add(3.0, censored=True)
    assert history.median_s() is None


def test_history_forgets_the_oldest() -> None:
    """The median follows the latest samples."""
    history = DurationHistory(3)
    for duration in (100.0, 100.0, 1.0, 1.0, 1.0):
        history.add(duration, censored=False)
    assert (len(history), history.median_s()) == (3, 1.0)

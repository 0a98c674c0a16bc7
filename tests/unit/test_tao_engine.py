"""TAO's engine, and the failures that others measured in the same place (FIELD.md, C2)."""

import math
from pathlib import Path

import pytest

from scout_sdk import ConfigError, Hints, SessionEvent, ToolEvent, ToolState
from scout_server.gateway.cli import _settings
from scout_server.policy.admission import AdmissionSettings
from scout_server.policy.books import LedgerSettings, SessionState
from scout_server.policy.credit import CreditSettings
from scout_server.policy.engine import TaoEngine, TaoSettings, Turn, make_plan


def engine(nodes: int = 1, capacity: int = 8192, **settings: object) -> TaoEngine:
    tao = TaoEngine(TaoSettings(**settings))  # type: ignore[arg-type]
    for i in range(nodes):
        tao.set_node(f"n{i}", capacity=capacity, slots=16)
    return tao


def turn(key: str, session: str, tokens: int = 4000, **more: object) -> Turn:
    return Turn(key=key, session=session, tokens=tokens, **more)  # type: ignore[arg-type]


def run(tao: TaoEngine, key: str, session: str, *, now: float, tokens: int = 4000) -> str:
    """Run one turn to its end and return its node."""
    assert tao.submit(turn(key, session, tokens), now=now)
    placed = tao.resume(key, now=now) or tao.step(now=now).placements[0]
    tao.finish(key, prompt_tokens=tokens, output_tokens=0, cached_tokens=tokens // 2, now=now)
    return placed.node


def test_a_session_takes_its_kept_room_back_without_a_decision() -> None:
    """A request whose session kept its room starts at once, on its origin."""
    tao = engine(2)
    node = run(tao, "a1", "a", now=0.0)
    assert tao.submit(turn("a2", "a"), now=1.0)
    placement = tao.resume("a2", now=1.0)
    assert placement is not None
    assert placement.node == node
    assert set(tao.ledger.bookings) == {"a2"}


def test_a_kept_room_is_not_given_back_over_the_nodes_capacity() -> None:
    """When the session has outgrown what is left, its request waits for a decision."""
    tao = engine(1)
    run(tao, "a1", "a", now=0.0)
    assert tao.submit(turn("b1", "b", 4000), now=0.0)
    assert tao.step(now=0.0).placements
    assert tao.submit(turn("a2", "a", 6000), now=1.0)
    assert tao.resume("a2", now=1.0) is None
    assert set(tao.waiting) == {"a2"}


def test_resume_goes_to_the_origin_while_its_credit_lives_else_anywhere() -> None:
    """A session waits for its busy origin while much is cached there; later it goes away."""
    tao = engine(2, credit=CreditSettings(half_life_s=10.0))
    origin = run(tao, "a1", "a", now=0.0)
    other = "n1" if origin == "n0" else "n0"
    assert tao.submit(turn("x", "x", 5000, nodes=frozenset({origin})), now=0.0)
    assert tao.submit(turn("y", "y", 2000, nodes=frozenset({other})), now=0.0)
    assert len(tao.step(now=0.0).placements) == 2
    assert tao.submit(turn("a2", "a"), now=1.0)
    assert tao.resume("a2", now=1.0) is None
    assert tao.step(now=1.0).placements == ()
    late = tao.step(now=25.0).placements
    assert [(p.key, p.node) for p in late] == [("a2", other)]
    assert tao.ledger.sessions["", "a"].moves == 1


def test_credit_is_at_most_what_others_have_left_on_the_node() -> None:
    """What later turns used has pushed out the oldest: that is no credit, however young it is."""
    for bounded, left in ((True, {"n0": 1000}), (False, {"n0": 4000})):
        tao = engine(1, capacity=10_000, credit=CreditSettings(bounded=bounded))
        run(tao, "a1", "a", now=0.0, tokens=4000)
        run(tao, "b1", "b", now=0.0, tokens=5000)
        assert tao.submit(turn("c1", "c", 4000), now=0.0)
        assert tao.step(now=1.0).placements  # 10,000 less 5,000 of b and 4,000 that c uses
        assert tao.ledger.credits(tao.ledger.sessions["", "a"], now=0.0) == left


def test_what_a_node_says_that_it_holds_is_not_doubted() -> None:
    """An engine that reports what it holds need not evict the oldest; its word is the credit."""
    tao = engine(1, capacity=10_000)
    run(tao, "a1", "a", now=0.0, tokens=4000)
    tao.observe_held("a", "n0", 3500, used=False, now=0.0)
    run(tao, "b1", "b", now=0.0, tokens=9000)
    assert tao.ledger.credits(tao.ledger.sessions["", "a"], now=0.0) == {"n0": 3500}


def test_a_session_that_runs_on_a_node_holds_what_it_used_there() -> None:
    """While one turn of a session runs, its credit is not cut by what it uses itself."""
    tao = engine(1, capacity=10_000)
    run(tao, "a1", "a", now=0.0, tokens=6000)
    assert tao.submit(turn("a2", "a", 6000), now=0.0)
    assert tao.resume("a2", now=0.0) is not None
    assert tao.ledger.credits(tao.ledger.sessions["", "a"], now=0.0) == {"n0": 6000}


def test_a_node_that_was_lost_holds_nothing_when_it_is_back() -> None:
    """Nothing of what a node held before it went down counts again."""
    tao = engine(1, capacity=10_000)
    run(tao, "a1", "a", now=0.0)
    tao.lose_node("n0")
    tao.set_node("n0", capacity=10_000, slots=16)
    assert tao.ledger.credits(tao.ledger.sessions["", "a"], now=0.0) == {}


def test_an_idle_node_waits_for_its_gaps_as_long_as_they_cost() -> None:
    """A node that needs 1 ms a token waits 3 s for a gap of 3,000 tokens before it lets it go."""
    tao = engine(1, capacity=4000, credit=CreditSettings(half_life_s=1e9, whole_s=60.0))
    assert tao.submit(turn("a1", "a", 3000), now=0.0)
    assert tao.step(now=0.0).placements
    tao.finish("a1", prompt_tokens=3000, output_tokens=0, cached_tokens=0, now=3.0)
    tao.ledger.nodes["n0"].rate.observe(1, 2)
    assert tao.submit(turn("a2", "a", 3000), now=3.0)
    assert tao.resume("a2", now=3.0) is not None
    tao.finish("a2", prompt_tokens=3000, output_tokens=0, cached_tokens=0, now=6.0)
    assert tao.submit(turn("b1", "b", 3000), now=6.0)
    assert tao.step(now=6.0).placements == ()
    assert tao.step(now=8.9).placements == ()
    assert [p.key for p in tao.step(now=9.1).placements] == ["b1"]


def test_without_release_gaps_would_hold_everything_for_ever() -> None:
    """
    A gap's room fades, so that a queue behind silent sessions moves on.

    Measured elsewhere: without decay and release eight times slower than no policy.
    """
    tao = engine(1, capacity=9000)
    run(tao, "a1", "a", now=0.0)
    run(tao, "b1", "b", now=0.0)
    assert tao.submit(turn("c1", "c", 1000), now=0.0)  # keeps the node from being idle
    assert tao.step(now=0.0).placements
    assert tao.submit(turn("d1", "d", 6000), now=0.1)
    admitted = next(t for t in range(1, 200) if tao.step(now=float(t)).placements)
    assert admitted <= 30
    states = {s.id[1]: s.state for s in tao.ledger.sessions.values()}
    assert states["d"] is SessionState.RUNNING


def test_without_decay_the_same_queue_waits_until_it_is_aged() -> None:
    """The ablation without decay keeps the gaps' rooms until the waiting request is aged."""
    tao = engine(
        1,
        capacity=9000,
        credit=CreditSettings(half_life_s=math.inf),
        admission=AdmissionSettings(max_hold_s=90.0),
    )
    run(tao, "a1", "a", now=0.0)
    run(tao, "b1", "b", now=0.0)
    assert tao.submit(turn("c1", "c", 1000), now=0.0)
    assert tao.step(now=0.0).placements
    assert tao.submit(turn("d1", "d", 6000), now=0.0)
    admitted = next(t for t in range(1, 200) if tao.step(now=float(t)).placements)
    assert admitted == 90


def test_no_tick_stands_between_free_room_and_the_queue() -> None:
    """Room that is given back is used in the very next decision, at the same instant."""
    tao = engine(1)
    assert tao.submit(turn("a", "a", 8000), now=0.0)
    assert tao.step(now=0.0).placements
    assert tao.submit(turn("b", "b", 8000), now=0.0)
    assert tao.step(now=0.0).placements == ()
    tao.finish("a", prompt_tokens=8000, final=True, now=3.3)
    assert tao.changed
    assert [p.key for p in tao.step(now=3.3).placements] == ["b"]


def test_a_request_that_races_with_its_own_plan_is_no_error() -> None:
    """Clients that leave and nodes that die during a decision void only their placements."""
    tao = engine(2)
    for key in "abc":
        assert tao.submit(turn(key, key), now=0.0)
    snapshot = tao.snapshot(now=0.0)
    assert snapshot is not None
    plan = make_plan(snapshot)
    tao.cancel("a", now=0.1)
    tao.lose_node("n1")
    applied = tao.apply(plan, now=0.2)
    assert {reason for _, reason in applied.dropped} <= {"gone", "node"}
    assert ("a", "gone") in applied.dropped
    assert all(p.node == "n0" for p in applied.placements)
    assert set(tao.waiting) | {p.key for p in applied.placements} == {"b", "c"}


def test_a_client_that_leaves_ends_its_booking() -> None:
    """Disconnects do not leave programs running in the books (76 booked against 17 running)."""
    tao = engine(4, capacity=10**6)
    for i in range(60):
        assert tao.submit(turn(f"r{i}", f"s{i}"), now=0.0)
        tao.step(now=0.0)
    for i in range(60):
        tao.cancel(f"r{i}", now=1.0)
    assert not tao.ledger.bookings
    assert all(tao.ledger.used(n) == (0, 0) for n in tao.ledger.nodes)


def test_a_booking_without_news_ends_with_its_lease() -> None:
    """A lost end of a request is made up for by its lease; signs of life prolong it."""
    tao = engine(1, ledger=LedgerSettings(lease_s=30.0))
    for key in ("a", "b"):
        assert tao.submit(turn(key, key, 1000), now=0.0)
    tao.step(now=0.0)
    tao.renew("b", now=20.0)
    assert tao.expire(now=31.0) == ["a"]
    assert set(tao.ledger.bookings) == {"b"}


def test_a_missing_final_message_leaves_no_session() -> None:
    """A session that never says goodbye is forgotten after session_s."""
    tao = engine(1, ledger=LedgerSettings(session_s=100.0))
    run(tao, "a1", "a", now=0.0)
    tao.expire(now=99.0)
    assert len(tao.ledger.sessions) == 1
    tao.expire(now=101.0)
    assert not tao.ledger.sessions


def test_readiness_keeps_the_room_of_who_is_about_to_return() -> None:
    """Of two gaps with equal credit the one whose tool has ended keeps its room."""
    for back, away in (("a", "b"), ("b", "a")):
        tao = engine(1, capacity=20_000, credit=CreditSettings(bounded=False))
        for session in ("a", "b"):
            run(tao, f"{session}1", session, now=0.0, tokens=4096)
        assert tao.submit(turn("x", "x", 1024), now=0.0)
        assert tao.step(now=0.0).placements
        tao.set_node("n0", capacity=5200, slots=16)  # room for one of the two gaps
        running = ToolEvent(name="", state=ToolState.STARTED, call_id="c", remaining_s=20.0)
        ended = ToolEvent(name="", state=ToolState.ENDED, call_id="c")
        tao.event(SessionEvent(session=away, tool=running), now=0.0)
        tao.event(SessionEvent(session=back, tool=ended), now=0.0)
        assert tao.submit(turn("c", "c", 4096), now=0.0)
        assert tao.step(now=1.0).placements == ()
        states = {s.id[1]: s.state for s in tao.ledger.sessions.values()}
        assert (states[back], states[away]) == (SessionState.TOOL, SessionState.PAUSED)


def test_a_decision_that_can_only_take_kept_rooms_is_made_at_intervals() -> None:
    """While all free room is kept for gaps, a decision is made once per joint_s, not per event."""
    tao = engine(1, capacity=9000, joint_s=5.0)
    run(tao, "a1", "a", now=0.0)
    run(tao, "b1", "b", now=0.0)
    assert tao.submit(turn("x", "x", 1000), now=0.0)
    assert tao.step(now=0.0).placements
    assert tao.submit(turn("c", "c", 4000), now=0.0)
    decided = [t for t in range(8) if tao.snapshot(now=t / 2) is not None]
    assert decided == []
    assert tao.snapshot(now=5.0) is not None
    assert tao.snapshot(now=5.5) is None


def test_what_a_node_reports_is_its_credit() -> None:
    """No evidence, no credit; a node that finds tokens again holds what it has just computed."""
    tao = engine(1)
    for key, cached in (("a1", None), ("a2", 0), ("a3", 1500), ("a4", 1600)):
        assert tao.submit(turn(key, "a", 2000), now=0.0)
        assert tao.resume(key, now=0.0) or tao.step(now=0.0).placements
        tao.finish(key, prompt_tokens=2000, output_tokens=100, cached_tokens=cached, now=0.0)
        session = tao.ledger.sessions["", "a"]
        credit = tao.ledger.credits(session, now=0.0).get("n0", 0)
        expected = {"a1": 0, "a2": 0, "a3": 2100, "a4": 2100}[key]
        assert credit == expected, key


def test_a_hint_of_the_last_turn_frees_the_session() -> None:
    """A final turn leaves neither room nor record."""
    tao = engine(1)
    hints = Hints(session="a", final=True)
    assert tao.submit(turn("a1", "a", hints=hints), now=0.0)
    tao.step(now=0.0)
    tao.finish("a1", prompt_tokens=4000, cached_tokens=0, final=True, now=1.0)
    assert not tao.ledger.sessions
    assert len(tao.readiness) == 0


def test_the_pool_is_bounded() -> None:
    """A full pool refuses, and takes again when one leaves."""
    tao = engine(1, max_waiting=2)
    assert [tao.submit(turn(k, k), now=0.0) for k in "abc"] == [True, True, False]
    tao.cancel("a", now=0.0)
    assert tao.submit(turn("c", "c"), now=0.0)


def test_flags_reach_the_decision(tmp_path: Path) -> None:
    """The gateway runs with what the command line and the file say (elsewhere flags were lost)."""
    file = tmp_path / "scout.json"
    file.write_text('{"gateway": {"port": 1, "tao": {"planner": "greedy"}}}')
    settings, _ = _settings(file, ["http://h:1"], None, 2)
    assert (settings.port, settings.tao.planner, settings.nodes) == (2, "greedy", ("http://h:1",))
    file.write_text('{"gateway": {"tao": {"admission": {"quantum_tokens": 0}}, "colour": 1}}')
    with pytest.raises(ConfigError, match="2 error"):
        _settings(file, None, None, None)


def test_a_wrong_policy_name_fails_at_start() -> None:
    """An unknown planner or evaluator is an error before any request is taken."""
    with pytest.raises(ConfigError, match="unknown planner 'x'"):
        engine(1, planner="x")
    with pytest.raises(ConfigError, match="unknown evaluator 'y'"):
        engine(1, evaluator="y")


def test_other_settings_are_taken_whole_or_not_at_all() -> None:
    """New settings count from the next decision on; wrong ones change nothing."""
    tao = engine(1)
    with pytest.raises(ConfigError):
        tao.configure(TaoSettings(planner="x"))
    assert tao.settings.planner == "dp"
    tao.configure(TaoSettings(max_waiting=1, ledger=LedgerSettings(lease_s=5.0)))
    assert [tao.submit(turn(k, k, 1000), now=0.0) for k in "ab"] == [True, False]
    tao.step(now=0.0)
    assert tao.expire(now=5.0) == ["a"]


def test_a_request_that_competes_with_nobody_starts_at_once() -> None:
    """Without a queue a turn that fits beside all kept rooms needs no decision, credit or not."""
    tao = engine(2)
    for index, session in enumerate(("a", "b", "a", "b")):
        key = f"r{index}"
        assert tao.submit(turn(key, session, 1000), now=float(index))
        assert tao.resume(key, now=float(index)) is not None
        tao.finish(key, prompt_tokens=1000, now=float(index))
    assert tao.submit(turn("big", "c", 9000), now=9.0)
    assert tao.resume("big", now=9.0) is None
    assert tao.submit(turn("behind", "d", 10), now=9.0)
    assert tao.resume("behind", now=9.0) is None

"""Room to grow, rooms that stay whole, and when no decision is made."""

import random

import pytest

from scout_sdk import SessionEvent, ToolEvent, ToolState
from scout_server.policy.admission import AdmissionSettings
from scout_server.policy.credit import CreditSettings
from scout_server.policy.engine import Snapshot, TaoEngine, TaoSettings, Turn, make_plan
from scout_server.policy.turns import beside


def engine(nodes: int = 1, capacity: int = 10_000, **settings: object) -> TaoEngine:
    tao = TaoEngine(TaoSettings(**settings))  # type: ignore[arg-type]
    for i in range(nodes):
        tao.set_node(f"n{i}", capacity=capacity, slots=16)
    return tao


def start(tao: TaoEngine, key: str, session: str, tokens: int, *, now: float) -> bool:
    """Submit a turn; whether it runs."""
    assert tao.submit(Turn(key=key, session=session, tokens=tokens), now=now)
    if tao.resume(key, now=now) is None:
        tao.step(now=now)
    return key not in tao.waiting


def end(tao: TaoEngine, key: str, tokens: int, *, now: float) -> None:
    tao.finish(key, prompt_tokens=tokens, output_tokens=0, cached_tokens=tokens // 2, now=now)


def grown(**settings: object) -> TaoEngine:
    """An engine that has seen one session grow by 1000 tokens a turn, which runs its third."""
    tao = engine(**settings)  # type: ignore[arg-type]
    for turn, tokens in ((1, 3000), (2, 4000)):
        assert start(tao, f"a{turn}", "a", tokens, now=0.0)
        end(tao, f"a{turn}", tokens, now=0.0)
    assert start(tao, "a3", "a", 5000, now=0.0)
    assert tao.ledger.growth == 1000
    return tao


def test_a_new_session_leaves_room_for_those_that_run_to_grow() -> None:
    """On a busy node, a cold session needs room beside two turns' growth of who runs there."""
    tao = grown()
    assert not start(tao, "b1", "b", 4000, now=0.0)  # 5000 are free, 2000 of them to grow into
    assert start(tao, "c1", "c", 2900, now=0.0)
    assert start(grown(growth_turns=0.0), "b1", "b", 4000, now=0.0)


def test_room_to_grow_is_not_kept_from_who_was_held_too_long() -> None:
    """A request held for longer than the bound is let in without room for others to grow."""
    tao = grown(admission=AdmissionSettings(max_hold_s=50.0))
    assert not start(tao, "b1", "b", 4000, now=0.0)
    assert not tao.step(now=49.0).placements
    assert [p.key for p in tao.step(now=51.0).placements] == ["b1"]


def test_no_room_to_grow_is_kept_on_a_node_on_which_nothing_runs() -> None:
    """A node where nothing runs takes whoever fits, so that none idles while a request waits."""
    tao = grown()
    assert not start(tao, "b1", "b", 9500, now=0.0)
    end(tao, "a3", 5000, now=0.0)
    assert [p.key for p in tao.step(now=0.0).placements] == ["b1"]


def test_a_session_that_comes_back_needs_no_room_for_others_to_grow() -> None:
    """A session with credit on the node is not held up by the growth of those beside it."""
    tao = grown()
    assert start(tao, "c1", "c", 2900, now=0.0)
    end(tao, "c1", 2900, now=0.0)
    assert start(tao, "c2", "c", 4900, now=0.5)


@pytest.mark.parametrize(("whole_s", "at"), [(10.0, 11.0), (0.0, 4.0)])
def test_a_gap_keeps_its_whole_room_for_a_while(whole_s: float, at: float) -> None:
    """For ten seconds a gap's room is what the session had, then what its credit is."""
    tao = engine(1, capacity=9000, credit=CreditSettings(whole_s=whole_s))
    assert start(tao, "a1", "a", 4000, now=0.0)
    end(tao, "a1", 4000, now=0.0)
    assert start(tao, "c1", "c", 1000, now=0.0)
    assert not start(tao, "d1", "d", 4800, now=0.1)
    placed = next(t for t in (2.0, 4.0, 10.0, 11.0) if tao.step(now=t).placements)
    assert placed == at


@pytest.mark.parametrize("seed", range(6))
def test_no_decision_is_left_out_that_would_let_somebody_in(seed: int) -> None:
    """Whenever there is no snapshot, a plan over everybody, beside kept rooms, places nobody."""
    rng = random.Random(seed)
    tao = engine(3, capacity=20_000, admission=AdmissionSettings(max_hold_s=20.0))
    now, count, left_out = 0.0, 0, 0
    running: list[tuple[str, int]] = []
    for _ in range(500):
        if rng.random() < 0.3:
            now += rng.uniform(1.0, 4.0)
        act = rng.random()
        if act < 0.55:
            count += 1
            key, session, tokens = f"r{count}", f"s{rng.randrange(24)}", rng.randint(200, 9000)
            tao.submit(Turn(key=key, session=session, tokens=tokens), now=now)
            if tao.resume(key, now=now) is not None:
                running.append((key, tokens))
        elif act < 0.9 and running:
            key, tokens = running.pop(rng.randrange(len(running)))
            end(tao, key, tokens, now=now)
        elif tao.waiting and act < 0.93:
            tao.cancel(rng.choice(list(tao.waiting)), now=now)
        else:
            tool = ToolEvent(name="t", state=ToolState.ENDED, call_id="c")
            tao.event(SessionEvent(session=f"s{rng.randrange(24)}", tool=tool), now=now)
        snapshot = tao.snapshot(now=now)
        if snapshot is not None:
            sizes = {key: held.turn.tokens for key, held in tao.waiting.items()}
            applied = tao.apply(make_plan(snapshot), now=now)
            running += [(p.key, sizes[p.key]) for p in applied.placements]
            continue
        left_out += 1
        offers = tao._offers
        everybody = Snapshot(
            now=now,
            candidates=tuple(offers.waiting(held, now=now) for held in tao.waiting.values()),
            rooms=tuple(beside(offers.rooms(now=now), offers.kept(now=now))),
            reserved=tuple(sorted(tao.reserved.items())),
            settings=tao.settings,
        )
        assert make_plan(everybody).placements == ()
    assert left_out > 50

"""The embedded engine on a clock that the test moves."""

import pytest

from scout_sdk import Hints, SessionEvent
from scout_server.embedded.engine import Engine
from scout_server.embedded.errors import ApiError
from scout_server.embedded.script import Wish, write
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy import Finish

_SETTINGS = EmbeddedSettings(
    kv_blocks=64, step_s=1.0, prefill_tokens_per_s=1e9, decode_s_per_sequence=0.0,
    decode_us_per_kv_token=0.0,
)  # fmt: skip


class _Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def _reply(tokens: int):
    return write(Wish(max_tokens=1000, filler_tokens=tokens), [1])


@pytest.fixture
def clock():
    return _Clock()


@pytest.fixture
def engine(clock):
    return Engine(_SETTINGS, clock=clock)


def test_a_late_wake_up_does_not_slow_the_model(engine, clock):
    """
    The process sleeps through five steps; the request ends when it would have ended.
    """
    generation = engine.submit([1] * 20, _reply(3))
    clock.time += 5.5
    engine.pump()
    assert generation.finish is Finish.STOP
    assert generation.request.first_token_at == pytest.approx(101.0)
    assert generation.request.finished_at == pytest.approx(103.0)


def test_an_arrival_after_a_sleep_finds_the_past_worked_off(engine, clock):
    """
    A request that arrives late does not join steps that were over by then.
    """
    first = engine.submit([1] * 20, _reply(5))
    clock.time += 3.5
    second = engine.submit([2] * 20, _reply(1))
    assert first.produced == 3
    assert second.request.arrival == 103.5
    clock.time += 10
    engine.pump()
    assert second.request.first_scheduled_at == pytest.approx(104.0)


def test_an_aborted_generation_holds_nothing(engine, clock):
    """
    After abort all blocks are free and the generation has ended; aborting twice is nothing.
    """
    generation = engine.submit([1] * 200, _reply(500))
    clock.time += 2.5
    engine.abort(generation)
    engine.abort(generation)
    assert generation.finish is Finish.ABORT
    assert engine.replica.pool.free_blocks == 64
    assert engine.finishes == {"abort": 1}


def test_a_request_larger_than_the_pool_is_an_api_error(engine):
    """
    The error is a 400 with OpenAI's code for it.
    """
    with pytest.raises(ApiError, match="the pool has 64") as caught:
        engine.submit([1] * 2000, _reply(3))
    assert caught.value.status == 400
    assert caught.value.code == "context_length_exceeded"


def test_a_fault_of_the_policy_costs_the_moment_not_the_engine(engine, clock, monkeypatch, caplog):
    """
    Running requests fail with 503, it is logged once, the next request is served with plain LRU.
    """
    running = engine.submit([1] * 20, _reply(50))
    monkeypatch.setattr(
        engine.replica.core, "tick", lambda *, now: (_ for _ in ()).throw(KeyError("broken"))
    )
    clock.time += 1.5
    engine.pump()
    assert running.finish is Finish.ABORT
    assert running.error is not None
    assert running.error.status == 503
    assert engine.mode == "stock"
    assert engine.faults == 1
    assert engine.faulted == "KeyError: 'broken'"
    assert len([r for r in caplog.records if "the policy failed" in r.message]) == 1
    before = engine.counters().requests
    after = engine.submit([2] * 20, _reply(2))
    clock.time += 10
    engine.pump()
    assert after.finish is Finish.STOP
    assert engine.counters().requests == before + 1


def test_an_event_reaches_the_policy(engine):
    """
    Side-channel events are counted as accepted; any session is welcome.
    """
    engine.event(SessionEvent(session="s", final=True), tenant="t")
    assert engine.events == {"accepted": 1}
    assert engine.faults == 0


def test_hints_name_the_agent(engine, clock):
    """
    A hinted request is counted as found by its hint.
    """
    engine.submit([1] * 20, _reply(1), hints=Hints(session="s", agent="a"))
    clock.time += 10
    engine.pump()
    assert engine.arrivals == {"hint": 1}


def test_the_lru_policy_has_identity_off():
    """
    `policy="lru"` switches hints and fingerprints off, whatever the policy's settings say.
    """
    engine = Engine(EmbeddedSettings(policy="lru"))
    assert engine.mode == "lru"
    assert not engine.policy.hints
    assert not engine.policy.fingerprints

"""Session lengths and hit densities against references too simple to be wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_server.policy.expected import Outlook
from scout_server.policy.gaps import GapModel
from scout_server.policy.lengths import SessionLengths
from scout_server.policy.transitions import Transitions

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def learn(lengths: list[int]) -> SessionLengths:
    model = SessionLengths()
    for length in lengths:
        for turn in range(1, length):
            model.returned(turn)
        model.ended(length)
    return model


def turns(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_an_end_is_expected_where_sessions_used_to_end():
    """Sessions of exactly five requests: the odds of an end leap at the fifth, not before."""
    model = learn([5] * 50)
    lift = model.lift(turns(1, 4, 5))
    assert lift[0] < 0.5
    assert lift[1] < 0.5
    assert lift[2] > 20.0


def test_the_way_ahead_is_longer_for_a_young_session():
    """Getting through the next three requests is likelier than usual at turn 1 than at turn 4."""
    model = learn([5] * 50)
    young, old = model.ratios(turns(1, 4), 4)
    assert young[0] == old[0] == 1.0
    assert young[3] > 1.0 > old[3]


def test_ends_at_a_constant_rate_say_nothing():
    """Where one session in ten ends after each request, nothing differs from the usual."""
    model = SessionLengths()
    for turn in range(1, 30):
        for _ in range(90):
            model.returned(turn)
        for _ in range(10):
            model.ended(turn)
    assert model.lift(turns(*range(1, 30))) == pytest.approx(np.ones(29), rel=0.02)
    assert model.ratios(turns(*range(1, 15)), 8) == pytest.approx(np.ones((14, 8)), rel=0.02)


@given(LENGTHS, st.integers(0, 60), st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_ratios_are_products_of_single_steps(lengths, turn, steps):
    """The ratio over k requests is the product of those over one, turn by turn."""
    model = learn(lengths)
    found = model.ratios(turns(turn), steps)[0]
    product = 1.0
    for k in range(steps):
        assert found[k] == pytest.approx(product)
        product *= model.ratios(turns(turn + k), 2)[0, 1]
    assert np.isfinite(found).all()


@given(LENGTHS, st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_an_end_that_is_taken_back_leaves_nothing(lengths, turn):
    """An end that proves not to be one changes no count."""
    model = learn(lengths)
    before = model.snapshot()
    model.ended(turn)
    assert model.snapshot() != before
    model.ended(turn, -1.0)
    assert model.snapshot() == before


@given(LENGTHS)
@settings(max_examples=30, deadline=None)
def test_restored_lengths_answer_the_same(lengths):
    """A snapshot holds all that decides."""
    model = learn(lengths)
    copy = SessionLengths()
    copy.restore(model.snapshot())
    every = turns(*range(100))
    fresh = learn(lengths)
    assert copy.lift(every) == pytest.approx(fresh.lift(every))


@pytest.mark.parametrize("damage", [{}, {"returns": [1.0], "ends": [1.0]}, {"returns": 3}])
def test_damaged_lengths_are_refused(damage):
    """A damaged snapshot raises ValueError and changes nothing."""
    model = learn([3, 4])
    before = model.snapshot()
    with pytest.raises(ValueError, match="damaged"):
        model.restore(damage)
    assert model.snapshot() == before


def test_memory_is_bounded_and_old_sessions_fade():
    """After very many short sessions, the few long ones of old hardly count."""
    model = learn([30] * 20)
    for _ in range(60_000):
        model.returned(1)
        model.ended(2)
    assert sum(model.snapshot()["returns"]) <= 20_000
    assert model.lift(turns(2))[0] > 1.0


def outlook() -> Outlook:
    return Outlook(Transitions(4), GapModel(), horizon=8.0, starts_per_s=0.0)


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_a_density_is_the_best_over_all_moments_to_give_up(raises, more):
    """It equals the plain maximum of hits over time kept, and chances later on never lower it."""
    chance = 1.0 - np.cumprod(1.0 - np.array(raises))
    found = float(outlook().density(chance[None])[0])
    times = np.array([0, 1, 2, 4, 8, 16, 32, 64, 96]) * (6.0 * 8.0 / 96)
    padded = np.concatenate(([0.0], chance))
    best = 0.0
    for end in range(1, 9):
        kept = sum(
            (times[i] - times[i - 1]) * (1.0 - (padded[i] + padded[i - 1]) / 2)
            for i in range(1, end + 1)
        )
        best = max(best, padded[end] / max(kept, 1e-9))
    assert found == pytest.approx(best)
    later = chance.copy()
    later[-1] = max(later[-1], more)
    assert float(outlook().density(later[None])[0]) >= found - 1e-9

"""Credit: what a node still holds for a session."""

import math

import pytest

from scout_server.policy.credit import (
    CacheRate,
    CreditSettings,
    Residue,
    credit,
    initial_credit,
)


@pytest.mark.parametrize(("age_s", "tokens"), [(0, 1000), (10, 500), (20, 250), (33, 101)])
def test_credit_halves_every_ten_seconds(age_s: float, tokens: int) -> None:
    """k = k0 * 2^(-age / 10 s), as whole tokens."""
    assert credit(Residue(1000, 5.0), CreditSettings(), now=5.0 + age_s) == tokens


def test_credit_ends_at_the_floor() -> None:
    """Below a 64th of what it began with, credit is none."""
    settings = CreditSettings()
    assert credit(Residue(6400, 0.0), settings, now=60.0) == 100
    assert credit(Residue(6400, 0.0), settings, now=60.1) == 0


def test_without_decay_credit_stays() -> None:
    """An infinite half-life switches decay off (the ablation)."""
    assert credit(Residue(77, 0.0), CreditSettings(half_life_s=math.inf), now=1e6) == 77


def test_evidence_order_of_the_first_credit() -> None:
    """The engine's own word counts before a response's, that before the rate, else nothing."""
    assert initial_credit(held_tokens=900, cached_tokens=500, tokens=1000, rate=0.5) == 900
    assert initial_credit(held_tokens=None, cached_tokens=500, tokens=1000, rate=0.5) == 500
    assert initial_credit(held_tokens=None, cached_tokens=0, tokens=1000, rate=0.5) == 500
    assert initial_credit(held_tokens=None, cached_tokens=None, tokens=1000, rate=None) == 0


def test_cache_rate_needs_evidence_and_stays_a_share() -> None:
    """A node's rate is unknown at first, then a moving average in [0, 1]."""
    rate = CacheRate(0.5)
    rate.observe(10, 0)
    assert rate.value is None
    rate.observe(80, 100)
    rate.observe(500, 100)
    assert rate.value == pytest.approx(0.9)

"""How many tokens a node still holds for a session (issue 5, section 1)."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval

__all__ = ["CacheRate", "CreditSettings", "Residue", "credit", "initial_credit", "kept_room"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """Settings of the credit that a session has on a node."""

    half_life_s: Annotated[float, Gt(0)] = 10.0
    """Credit halves in this time; infinity switches decay off."""
    whole_s: Annotated[float, Ge(0)] = 10.0
    """
    A gap's room is kept whole for this long, then it shrinks with the credit.

    In a published trace of agent tasks (docs/tao.md) 95 % of tools return within 10 s, and their
    sessions need the room that they had.
    """
    floor_share: Annotated[float, Interval(ge=0, le=1)] = 1 / 64
    """Credit below this share of what it began with counts as none."""
    trust_computed: bool = True
    """A node that reports cached tokens holds what it has just computed; off: only what it
    reported."""
    bounded: bool = True
    """Credit is at most what fits on the node beside all that was used there since: engines evict
    what was used longest ago. What a node itself says that it holds is not bounded."""
    rate_weight: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """Weight of the latest response in a node's cache rate."""


@dataclass(frozen=True, slots=True)
class Residue:
    """What a node held for a session when it was last seen."""

    tokens: int
    """k0: cached tokens at *seen*."""
    seen: float
    """Time of that observation, on the caller's clock."""
    told: bool = False
    """The engine itself said so (its extension or KV events), and says when it loses some."""


class CacheRate:
    """
    Share of asked tokens that a node finds in its cache, learnt from responses.

    None until there is evidence: a node that never reported has no rate.
    """

    __slots__ = ("_weight", "value")

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.value: float | None = None

    def observe(self, cached_tokens: int, prompt_tokens: int) -> None:
        """Learn from one response; without prompt tokens there is nothing to learn."""
        if prompt_tokens <= 0:
            return
        share = min(1.0, max(0.0, cached_tokens / prompt_tokens))
        self.value = (
            share if self.value is None else self.value + self._weight * (share - self.value)
        )


def initial_credit(
    *,
    held_tokens: int | None,
    cached_tokens: int | None,
    tokens: int,
    rate: float | None,
    caches: bool = False,
) -> int:
    """
    Return k0, the tokens a node holds for a session at the end of a turn.

    *held_tokens* is what the engine itself says it holds (its extension or KV events);
    *cached_tokens* what the response said it found; *tokens* what the turn left behind (prompt and
    output); *rate* the node's cache rate; *caches* that the node was seen to find such tokens
    again, so that it holds what it has just computed. Without any evidence: 0.
    """
    if held_tokens is not None and held_tokens > 0:
        return held_tokens
    if caches and cached_tokens is not None:
        return tokens
    if cached_tokens is not None and cached_tokens > 0:
        return cached_tokens
    if rate is not None and rate > 0:
        return int(tokens * rate)
    return 0


def credit(residue: Residue | None, settings: CreditSettings, *, now: float) -> int:
    """Return k0 * 2^(-age / half-life) as whole tokens; 0 without a residue."""
    if residue is None or residue.tokens <= 0:
        return 0
    share: float = 2.0 ** (-max(0.0, now - residue.seen) / settings.half_life_s)
    return int(residue.tokens * share) if share >= settings.floor_share else 0


def kept_room(residue: Residue, k: int, settings: CreditSettings, *, now: float) -> int:
    """Return the tokens of room that a gap with credit *k* keeps; 0 without credit."""
    whole = k > 0 and now - residue.seen <= settings.whole_s
    return residue.tokens if whole else k

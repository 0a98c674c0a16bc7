"""Evaluators: what room for a session on a node is worth. All interchangeable, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import numpy as np
from annotated_types import Len

from scout_sdk._errors import ConfigError
from scout_server.policy.placement import Candidate, Evaluator, Ints

__all__ = [
    "AttainedService",
    "CacheAware",
    "Component",
    "EvaluatorSettings",
    "ShortestFirst",
    "SmallestFirst",
    "TaoValue",
    "ThunderAgentLike",
    "ThunderAgentResident",
    "evaluator",
    "evaluators",
]

Component = Literal["credit", "readiness", "footprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSettings:
    """Settings of the default evaluator."""

    objective: Annotated[tuple[Component, ...], Len(1, 3)] = ("credit", "readiness", "footprint")
    """What a plan is compared by, most important first; leave one out to ablate it."""


class TaoValue:
    """
    The triple (credit, readiness, footprint) of TAO, in configurable order (issue 5, section 1).

    Footprint is a gain: of two plans equal in the rest, the one that fills more room wins, so a new
    session without credit is admitted wherever there is room.
    """

    name = "tao"

    def __init__(self, objective: Sequence[str] = ("credit", "readiness", "footprint")) -> None:
        known = ("credit", "readiness", "footprint")
        wrong = [part for part in objective if part not in known]
        if wrong or not objective or len(set(objective)) != len(objective):
            msg = f"bad objective {tuple(objective)!r}; use each at most once: {', '.join(known)}"
            raise ConfigError(msg)
        self.objective = tuple(cast("Component", part) for part in objective)

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return the triple for *candidate* on *node*."""
        parts = {
            "credit": _credit(candidate, node),
            "readiness": int(candidate.ready),
            "footprint": candidate.footprint,
        }
        return tuple(parts[part] for part in self.objective)

    def table(self, candidates: Sequence[Candidate], nodes: Sequence[str]) -> Ints:
        """Return the triples of all candidates on all nodes."""
        table = np.zeros((len(candidates), len(nodes), len(self.objective)), dtype=np.int64)
        for c, part in enumerate(self.objective):
            if part == "readiness":
                table[:, :, c] = np.array([[k.ready] for k in candidates], np.int64).reshape(-1, 1)
            elif part == "footprint":
                sizes = np.array([k.footprint for k in candidates], dtype=np.int64)
                table[:, :, c] = sizes[:, None]
            else:
                columns = {node: i for i, node in enumerate(nodes)}
                for s, candidate in enumerate(candidates):
                    for node in candidate.credits:
                        if node in columns:
                            table[s, columns[node], c] = _credit(candidate, node)
        return table


class ThunderAgentLike:
    """
    Returning sessions, then new ones, then sessions in a gap; within each, small ones first.

    The order in which ThunderAgent resumes programs (FIELD.md, section A). It knows no credit.
    """

    name = "thunderagent"

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return (is a returning turn, is a new session, is one, minus its size)."""
        returning = candidate.waiting and candidate.turns > 0
        new = candidate.waiting and candidate.turns == 0
        return int(returning), int(new), 1, -candidate.footprint


class ThunderAgentResident:
    """
    Sessions in a gap keep what they hold, large ones first; then ThunderAgent's order.

    With a short credit half-life: its capacity rule, in which the tokens of acting programs decay.
    """

    name = "thunderagent-resident"

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return (what it holds in its gap, is a returning turn, is a new one, minus its size)."""
        if not candidate.waiting:
            return candidate.footprint, 0, 0, 0
        return 0, int(candidate.turns > 0), int(candidate.turns == 0), -candidate.footprint


class SmallestFirst:
    """As many sessions as fit, small ones first."""

    name = "smallest-first"

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return (one, minus its footprint)."""
        return int(candidate.waiting), -candidate.footprint


class ShortestFirst:
    """As many sessions as fit, those with the least expected work first."""

    name = "shortest-first"

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return (one, minus the tokens its turn is expected to compute)."""
        return int(candidate.waiting), -candidate.expected


class AttainedService:
    """As many sessions as fit, those that were served least so far first."""

    name = "attained-service"

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return (one, minus the tokens computed for the session so far)."""
        return int(candidate.waiting), -candidate.attained


class CacheAware:
    """As many sessions as fit, each where its prefix is cached."""

    name = "cache-aware"

    def values(self, candidate: Candidate, node: str) -> tuple[int, ...]:
        """Return (one, cached tokens on the node)."""
        return int(candidate.waiting), _credit(candidate, node)


def _credit(candidate: Candidate, node: str) -> int:
    size = candidate.footprint + candidate.prefix_tokens
    return max(0, min(candidate.credits.get(node, 0), size))


def evaluators(settings: EvaluatorSettings | None = None) -> dict[str, Evaluator]:
    """Return every evaluator by name."""
    settings = settings or EvaluatorSettings()
    known: tuple[Evaluator, ...] = (
        TaoValue(settings.objective),
        ThunderAgentLike(),
        ThunderAgentResident(),
        SmallestFirst(),
        ShortestFirst(),
        AttainedService(),
        CacheAware(),
    )
    return {e.name: e for e in known}


def evaluator(name: str, settings: EvaluatorSettings | None = None) -> Evaluator:
    """Return the evaluator called *name*; ConfigError names the known ones."""
    known = evaluators(settings)
    if name not in known:
        msg = f"unknown evaluator {name!r}; known: {', '.join(sorted(known))}"
        raise ConfigError(msg)
    return known[name]

"""Survival: the probability that an anchor is used within the next K steps."""

from collections.abc import Mapping

__all__ = ["combined", "survival"]

Counts = Mapping[int, Mapping[int, float]]


def survival(
    counts: Counts,
    start: Mapping[int, float],
    *,
    steps: int = 4,
    decay: float = 0.7,
    prune: float = 0.02,
) -> dict[int, float]:
    """
    Return for each agent the probability that it is used within *steps* transitions from *start*.

    Breadth-first over the sparse graph of transition counts, paths less probable than *prune* are
    cut, and the k-th step counts *decay*^(k-1) (CacheSage, arXiv 2605.27744). *start* is the
    distribution of the agent used last. Steps are taken for independent, which is the paper's
    simplification.
    """
    mass = dict(start)
    unused: dict[int, float] = {}
    weight = 1.0
    for _ in range(steps):
        following: dict[int, float] = {}
        for agent, probability in mass.items():
            row = counts.get(agent)
            total = sum(row.values()) if row else 0.0
            if not row or total <= 0.0:
                continue
            for successor, count in row.items():
                reached = probability * count / total
                if reached >= prune:
                    following[successor] = following.get(successor, 0.0) + reached
        for agent, reached in following.items():
            unused[agent] = unused.get(agent, 1.0) * (1.0 - min(1.0, reached) * weight)
        mass = following
        weight *= decay
    return {agent: 1.0 - left for agent, left in unused.items()}


def combined(
    rows: Mapping[str, Mapping[int, float]], alive: Mapping[str, float]
) -> dict[int, float]:
    """Combine the survival of several sessions, each weighted by how alive it is."""
    unused: dict[int, float] = {}
    for session, row in rows.items():
        weight = alive.get(session, 0.0)
        for agent, probability in row.items():
            unused[agent] = unused.get(agent, 1.0) * (1.0 - probability * weight)
    return {agent: 1.0 - left for agent, left in unused.items()}

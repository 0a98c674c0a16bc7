"""The dynamic programme against integer programming, on problems too large for brute force."""

from dataclasses import replace

import numpy as np
import pytest

from scout_server.bench.oracle import lexicographic_optimum
from scout_server.bench.planner import component_values, instance
from scout_server.policy.discretise import discretise
from scout_server.policy.evaluators import TaoValue
from scout_server.policy.placement import Problem
from scout_server.policy.planners import DynamicProgramme, PlannerSettings

JUDGE = TaoValue()


def sums(problem: Problem, parts: np.ndarray, nodes: tuple[int, ...]) -> tuple[int, ...]:
    assert problem.feasible(nodes)
    return tuple(sum(int(parts[s, i, c]) for s, i in enumerate(nodes) if i >= 0) for c in range(3))


def compare(seeds: range) -> None:
    dp = DynamicProgramme(PlannerSettings(state_budget=2**20))
    for seed in seeds:
        pool, rooms = instance(10 + seed % 11, 2, seed, prefixes=seed % 3)
        problem, _ = discretise(pool, rooms, JUDGE, quantum=1024)
        parts = component_values(pool, rooms, JUDGE)
        solution = dp.solve(problem)
        assert solution.exact
        oracle = lexicographic_optimum(problem, parts)
        assert oracle.proved
        assert sums(problem, parts, solution.nodes) == oracle.sums, seed


def test_dynamic_programme_equals_the_oracle() -> None:
    """On 12 medium problems every component is exactly the oracle's, shared prefixes included."""
    compare(range(12))


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_dynamic_programme_equals_the_oracle_two_hundred_times() -> None:
    """On 200 medium problems every component is exactly the oracle's, shared prefixes included."""
    compare(range(200))


def test_large_pools_are_planned_exactly() -> None:
    """Of 64 sessions on 4 nodes, and 256 on 16, every component is exactly the oracle's."""
    for sessions, nodes, seed in ((64, 4, 0), (64, 4, 1), (64, 4, 2), (256, 16, 8)):
        pool, rooms = instance(sessions, nodes, seed)
        problem, _ = discretise(pool, rooms, JUDGE, quantum=1024)
        parts = component_values(pool, rooms, JUDGE)
        solution = DynamicProgramme().solve(problem)
        assert (solution.exact, solution.method) == (True, "dp")
        oracle = lexicographic_optimum(problem, parts)
        assert oracle.proved
        assert sums(problem, parts, solution.nodes) == oracle.sums, seed


def test_beam_is_within_one_percent_of_the_oracle() -> None:
    """Where credit is not settled first, every component is at least 99 % of the oracle's."""
    for seed in range(2):
        pool, rooms = instance(64, 4, seed)
        problem, _ = discretise(pool, rooms, JUDGE, quantum=1024)
        parts = component_values(pool, rooms, JUDGE)
        solution = DynamicProgramme().solve(replace(problem, unit=0))
        assert (solution.exact, solution.method) == (False, "beam")
        best = lexicographic_optimum(problem, parts).sums
        ours = sums(problem, parts, solution.nodes)
        assert all(a >= 0.99 * b for a, b in zip(ours, best, strict=True))

"""Planners against brute force, and what they promise."""

import itertools
import random

import numpy as np
import pytest

from scout_sdk import ConfigError
from scout_server.bench.oracle import best_by_trying
from scout_server.policy.discretise import discretise, pack
from scout_server.policy.evaluators import TaoValue, evaluator, evaluators
from scout_server.policy.placement import Candidate, Problem, Room
from scout_server.policy.planners import (
    DynamicProgramme,
    PlannerSettings,
    planner,
    planners,
)


def small_problem(rng: random.Random) -> Problem:
    """A random problem that brute force can enumerate, with slots and shared prefixes."""
    sessions, nodes = rng.randint(1, 5), rng.randint(1, 3)
    groups = [rng.choice([-1, -1, 0, 1]) for _ in range(sessions)]
    prefix = [rng.randint(0, 4), rng.randint(0, 4)]
    resident = [[rng.random() < 0.3 for _ in range(nodes)] for _ in range(2)]
    need = [[rng.choice([-1, *[rng.randint(1, 6)] * 5]) for _ in range(nodes)] for _ in groups]
    extra = [[0 if g < 0 or resident[g][i] else prefix[g] for i in range(nodes)] for g in groups]
    value = [[rng.randint(0, 6) for _ in range(nodes)] for _ in groups]
    return Problem(
        need=np.array(need, dtype=np.int64),
        extra=np.array(extra, dtype=np.int64),
        group=np.array(groups, dtype=np.int64),
        value=np.array(value, dtype=np.int64),
        room=np.array([rng.randint(0, 12) for _ in range(nodes)], dtype=np.int64),
        slots=np.array([rng.randint(0, 4) for _ in range(nodes)], dtype=np.int64),
        takes_slot=np.array([rng.randint(0, 1) for _ in groups], dtype=np.int64),
        order=np.arange(sessions, dtype=np.int64),
    )


def exact_over(seeds: range) -> None:
    dp = DynamicProgramme(PlannerSettings(state_budget=10**7))
    for seed in seeds:
        problem = small_problem(random.Random(seed))
        solution = dp.solve(problem)
        assert solution.exact
        assert problem.feasible(solution.nodes), seed
        assert problem.worth(solution.nodes) == best_by_trying(problem), seed


def test_dynamic_programme_equals_brute_force() -> None:
    """On 600 random small problems the plan is worth exactly the best of all assignments."""
    exact_over(range(600))


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_dynamic_programme_equals_brute_force_ten_thousand_times() -> None:
    """On 10^4 random small problems the plan is worth exactly the best of all assignments."""
    exact_over(range(10_000))


@pytest.mark.parametrize("name", sorted(planners()))
def test_every_planner_is_feasible_and_below_the_optimum(name: str) -> None:
    """No planner overfills a node, places where it may not, or beats brute force."""
    for seed in range(120):
        problem = small_problem(random.Random(seed))
        solution = planner(name).solve(problem)
        assert problem.feasible(solution.nodes), seed
        assert problem.worth(solution.nodes) <= best_by_trying(problem), seed


def test_beyond_its_budget_the_programme_says_beam_and_stays_feasible() -> None:
    """A state budget that is too small gives a feasible plan that does not claim to be exact."""
    dp = DynamicProgramme(PlannerSettings(state_budget=1, beam_width=4))
    reached = 0
    for seed in range(200):
        problem = small_problem(random.Random(seed))
        solution = dp.solve(problem)
        assert problem.feasible(solution.nodes), seed
        if not solution.exact:
            assert solution.method == "beam"
            reached += problem.worth(solution.nodes) == best_by_trying(problem)
    assert reached > 100


def test_packed_values_order_like_tuples() -> None:
    """Sums of packed values compare as the sums of the tuples do."""
    rng = random.Random(7)
    candidates = [
        Candidate(
            key=f"r{i}",
            session=f"s{i}",
            footprint=rng.randint(1, 5),
            ready=rng.random() < 0.5,
            credits={"n": rng.randint(0, 5)},
            turns=rng.randint(0, 1),
        )
        for i in range(8)
    ]
    rooms = [Room(node="n", tokens=100, slots=8)]
    for judge in evaluators().values():
        packed = pack(candidates, rooms, judge)[:, 0].tolist()
        tuples = [judge.values(c, "n") for c in candidates]
        subsets = [s for n in range(5) for s in itertools.combinations(range(8), n)]
        for a, b in zip(subsets, subsets[1:] + subsets[:1], strict=True):
            sums = [[sum(tuples[i][k] for i in s) for k in range(len(tuples[0]))] for s in (a, b)]
            worth = [sum(packed[i] for i in s) for s in (a, b)]
            assert (sums[0] < sums[1]) == (worth[0] < worth[1])


def test_packing_huge_numbers_keeps_the_first_component() -> None:
    """Values that do not fit 61 bits lose low bits, never their order by the first component."""
    candidates = [
        Candidate(key=f"r{i}", session="s", footprint=10**12, credits={"n": i * 10**9})
        for i in range(64)
    ]
    packed = pack(candidates, [Room(node="n", tokens=10**13, slots=1)], TaoValue())[:, 0].tolist()
    assert packed == sorted(packed)
    assert 0 < sum(packed) < 2**62


def test_rounding_is_always_on_the_safe_side() -> None:
    """Sessions are rounded up, nodes down, and the hidden tokens are reported."""
    candidates = [Candidate(key="a", session="a", footprint=1025)]
    problem, hidden = discretise(
        candidates, [Room(node="n", tokens=4095, slots=1)], TaoValue(), quantum=1024
    )
    assert (problem.need.tolist(), problem.room.tolist(), hidden) == ([[2]], [3], 1023 + 1023)


def test_unknown_names_list_the_known_ones() -> None:
    """A wrong planner, evaluator or objective is refused with the allowed names."""
    with pytest.raises(ConfigError, match="best-fit-decreasing, dp"):
        planner("simplex")
    with pytest.raises(ConfigError, match="attained-service, cache-aware"):
        evaluator("magic")
    with pytest.raises(ConfigError, match="credit, readiness, footprint"):
        TaoValue(("credit", "luck"))


@pytest.mark.parametrize("name", sorted(planners()))
def test_planners_take_an_empty_problem(name: str) -> None:
    """Without any node, or any session, a planner places nobody."""
    for candidates, rooms in (
        ([], []),
        ([Candidate(key="a", session="a", footprint=1)], []),
        ([], [Room(node="n", tokens=9, slots=1)]),
    ):
        problem, _ = discretise(candidates, rooms, TaoValue(), quantum=1)
        assert planner(name).solve(problem).nodes == (-1,) * len(candidates)

"""What the most important component settles node by node, against brute force."""

import random

import numpy as np
import pytest

from scout_server.bench.oracle import best_by_trying
from scout_server.policy.decouple import decouple
from scout_server.policy.discretise import discretise, worth_table
from scout_server.policy.evaluators import TaoValue, evaluators
from scout_server.policy.placement import Candidate, Problem, Room
from scout_server.policy.planners import DynamicProgramme, PlannerSettings


def pool(
    rng: random.Random,
    sessions: int,
    nodes: int,
    *,
    most: int = 9,
    counts: tuple[int, ...] = (0, 1, 1, 2),
    prefixes: bool = False,
) -> Problem:
    """A problem out of candidates: gaps and requests, credit on none, one or two nodes, ties."""
    names = [f"n{i}" for i in range(nodes)]
    candidates = []
    for s in range(sessions):
        size = rng.randint(1, most)
        held = {n: rng.randint(1, size) for n in rng.sample(names, min(nodes, rng.choice(counts)))}
        gap = bool(held) and rng.random() < 0.4
        prefix = None if gap or not prefixes else rng.choice((None, "p", "q"))
        if gap:
            origin = sorted(held)[0]
            held = {origin: held[origin]}
        candidates.append(
            Candidate(
                key=f"c{s:02}",
                session=f"s{s:02}",
                footprint=held[origin] if gap else size,
                waiting=not gap,
                prefix=prefix,
                prefix_tokens=0 if prefix is None else 2 if prefix == "p" else 3,
                ready=rng.random() < 0.7,
                credits=held,
                nodes=frozenset(held) if gap else None,
                homes=frozenset(held) if held and rng.random() < 0.3 else None,
            )
        )
    rooms = [
        Room(
            node=n,
            tokens=rng.randint(0, 2 * most),
            slots=rng.randint(0, 4),
            capacity=3 * most,
            prefixes=frozenset("p") if prefixes and rng.random() < 0.3 else frozenset(),
        )
        for n in names
    ]
    return discretise(candidates, rooms, TaoValue(), quantum=rng.choice((1, 1, 2)))[0]


MOSTLY_ONE = (0,) * 8 + (1,) * 15 + (2,)


def exact_over(seeds: range) -> int:
    """Compare plans with brute force; return how many were settled node by node first."""
    decoupled = 0
    dp = DynamicProgramme(PlannerSettings(state_budget=10**7))
    for seed in seeds:
        rng = random.Random(seed)
        problem = pool(rng, rng.randint(1, 5), rng.randint(1, 3), prefixes=seed % 2 > 0)
        solution = dp.solve(problem)
        assert solution.exact
        assert problem.feasible(solution.nodes), seed
        assert problem.worth(solution.nodes) == best_by_trying(problem), seed
        decoupled += decouple(problem) is not None
    return decoupled


def test_settled_sessions_are_in_an_optimal_plan() -> None:
    """On 500 small pools, half with shared prefixes, it is worth what brute force finds."""
    assert exact_over(range(500)) > 300


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_settled_sessions_are_in_an_optimal_plan_ten_thousand_times() -> None:
    """On 10^4 small pools it is worth what brute force finds."""
    assert exact_over(range(10_000)) > 6000


def test_it_agrees_with_the_whole_programme_on_larger_pools() -> None:
    """With 10 to 40 sessions, on one or two nodes, both ways are worth the same."""
    settled = 0
    dp = DynamicProgramme()
    for seed in range(60):
        rng = random.Random(seed)
        problem = pool(rng, rng.randint(10, 40), rng.randint(1, 2), most=60, counts=MOSTLY_ONE)
        parts = decouple(problem)
        if parts is None:
            continue
        settled += len(parts.remainders[0].settled)
        solution = dp._joined(problem, parts.remainders[0])
        assert problem.feasible(solution.nodes), seed
        assert problem.worth(solution.nodes) == problem.worth(dp._whole(problem).nodes), seed
    assert settled > 100


def test_a_tie_is_not_settled() -> None:
    """Where two sets of sessions have equally much credit, nothing is settled."""
    two = [
        Candidate(key=k, session=k, footprint=4, credits={"a": 3}, nodes=frozenset("a"))
        for k in "xy"
    ]
    room = Room(node="a", tokens=5, slots=4, capacity=5)
    assert decouple(discretise(two, [room], TaoValue(), quantum=1)[0]) is None


def test_signed_values_are_left_to_the_whole_programme() -> None:
    """A component below zero ends the shortcut: nothing outweighs the rest then."""
    room = Room(node="a", tokens=50, slots=4, capacity=50)
    plain = Candidate(key="k", session="k", footprint=4, turns=1, credits={"a": 3})
    smallest = evaluators()["smallest-first"]
    assert decouple(discretise([plain], [room], smallest, quantum=1)[0]) is None
    assert decouple(discretise([plain], [room], TaoValue(), quantum=1)[0]) is not None


def test_the_table_of_values_is_what_the_values_say() -> None:
    """All at once or one by one, TAO's evaluator says the same, whatever its objective."""
    rng = random.Random(3)
    nodes = ["a", "b"]
    candidates = [
        Candidate(
            key=str(s),
            session=str(s),
            footprint=rng.randint(1, 99),
            ready=rng.random() < 0.5,
            credits={n: rng.randint(1, 200) for n in rng.sample([*nodes, "gone"], 2)},
        )
        for s in range(20)
    ]
    for objective in (
        ("credit", "readiness", "footprint"),
        ("footprint", "credit"),
        ("readiness",),
    ):
        judge = TaoValue(objective)
        expected = np.array([[judge.values(c, n) for n in nodes] for c in candidates])
        assert (worth_table(candidates, nodes, judge) == expected).all()
    assert worth_table([], nodes, TaoValue()).shape == (0, 2, 3)

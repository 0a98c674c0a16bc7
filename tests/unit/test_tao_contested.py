"""Sessions that have credit on several nodes: who gets what, against brute force."""

import itertools
import random

import numpy as np
import pytest

from scout_server.bench.oracle import best_by_trying
from scout_server.policy import claims as claims_module
from scout_server.policy import contested
from scout_server.policy.claims import NodeClaims, node_claims
from scout_server.policy.contested import grant
from scout_server.policy.decouple import decouple
from scout_server.policy.placement import Problem
from scout_server.policy.planners import DynamicProgramme, PlannerSettings

UNIT = 1000


def pool(rng: random.Random, sessions: int, nodes: int, *, claims: tuple[int, ...]) -> Problem:
    """A problem in which most sessions have claims on as many nodes as *claims* says; with ties."""
    group = [rng.choice((-1, -1, -1, 0, 0, 1)) for _ in range(sessions)]
    shared = [[rng.choice((0, 0, 1, 2)) for _ in range(nodes)] for _ in range(2)]
    value = np.zeros((sessions, nodes), dtype=np.int64)
    for s in range(sessions):
        value[s] = rng.randint(0, 3)
        for i in rng.sample(range(nodes), min(nodes, rng.choice(claims))):
            value[s, i] += UNIT * rng.randint(1, 9)
    need = np.array([[rng.randint(1, 5)] * nodes for _ in group], dtype=np.int64)
    need[np.array([[rng.random() < 0.1 for _ in range(nodes)] for _ in group])] = -1
    return Problem(
        need=need,
        extra=np.array([shared[g] if g >= 0 else [0] * nodes for g in group], dtype=np.int64),
        group=np.array(group, dtype=np.int64),
        value=value,
        room=np.array([rng.randint(0, 12) for _ in range(nodes)], dtype=np.int64),
        slots=np.array([rng.choice((1, 2, 9)) for _ in range(nodes)], dtype=np.int64),
        takes_slot=np.array([rng.randint(0, 1) for _ in group], dtype=np.int64),
        order=np.arange(sessions, dtype=np.int64),
        unit=UNIT,
    )


def claims_of(problem: Problem) -> np.ndarray:
    return np.where(problem.need >= 0, problem.value // UNIT, 0)


def exact_over(seeds: range) -> int:
    """Compare plans with brute force; return how many were proved with many contested sessions."""
    proved = 0
    dp = DynamicProgramme(PlannerSettings(state_budget=10**7))
    for seed in seeds:
        problem = pool(random.Random(seed), 5, 2 + seed % 2, claims=(2, 2, 2, 3, 1))
        solution = dp.solve(problem)
        assert solution.exact
        assert problem.feasible(solution.nodes), seed
        assert problem.worth(solution.nodes) == best_by_trying(problem), seed
        parts = decouple(problem)
        several = ((claims_of(problem) > 0).sum(axis=1) > 1).sum()
        proved += several > 3 and parts is not None and parts.proved
    return proved


@pytest.mark.parametrize("enumerated", [0, 12])
def test_contested_sessions_equal_brute_force(
    monkeypatch: pytest.MonkeyPatch, enumerated: int
) -> None:
    """On 250 small pools of mostly contested sessions the plan is worth the best of all."""
    monkeypatch.setattr(claims_module, "_ENUMERATED", enumerated)
    assert exact_over(range(250)) > 30


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.parametrize("enumerated", [0, 12])
def test_contested_sessions_equal_brute_force_ten_thousand_times(
    monkeypatch: pytest.MonkeyPatch, enumerated: int
) -> None:
    """On 10^4 small pools of mostly contested sessions the plan is worth the best of all."""
    monkeypatch.setattr(claims_module, "_ENUMERATED", enumerated)
    assert exact_over(range(10_000)) > 1200


@pytest.mark.parametrize("enumerated", [0, 12])
def test_a_node_tells_the_most_beside_every_set_of_guests(
    monkeypatch: pytest.MonkeyPatch, enumerated: int
) -> None:
    """What a node grants beside each set of guests is what trying all sets finds, and where."""
    monkeypatch.setattr(claims_module, "_ENUMERATED", enumerated)
    told = 0
    for seed in range(300):
        rng = random.Random(seed)
        problem = pool(rng, 7, 1, claims=(1,))
        claims = claims_of(problem)
        rows = np.flatnonzero(claims[:, 0] > 0).tolist()
        guests, own = rows[: rng.randint(0, 3)], rows[3:]
        found = node_claims(problem, claims, 0, own, guests, most=3)
        if found is None:
            continue
        best = {
            visitors: most_claims(problem, claims, own, visitors)
            for size in range(len(guests) + 1)
            for visitors in itertools.combinations(guests, size)
        }
        for row, worth in enumerate(found.worth.tolist()):
            granted = found.sessions(row)
            visitors = tuple(s for s in guests if s in granted)
            assert worth == best[visitors][0] == int(claims[granted, 0].sum()), seed
            assert problem.feasible([0 if s in granted else -1 for s in range(7)])
            assert (int(found.ways[row]) == 1) == (best[visitors][1] == 1), seed
            told += 1
        assert max(found.worth) == max(worth for worth, _ in best.values())
    assert told > 300


def most_claims(
    problem: Problem, claims: np.ndarray, own: list[int], guests: tuple[int, ...]
) -> tuple[int, int]:
    """Return (most claims with exactly these guests, in how many ways), or (-1, 0)."""
    worths = [
        int(claims[[*some, *guests], 0].sum())
        for size in range(len(own) + 1)
        for some in itertools.combinations(own, size)
        if problem.feasible([0 if s in (*some, *guests) else -1 for s in range(7)])
    ]
    return (max(worths), worths.count(max(worths))) if worths else (-1, 0)


def nodes_of(rng: random.Random, nodes: int, sessions: int) -> list[NodeClaims]:
    found = []
    for i in range(nodes):
        problem = pool(rng, sessions, 1, claims=(0, 1, 1))
        claims = claims_of(problem)
        guests = [s for s in range(sessions) if claims[s, 0] and rng.random() < 0.7]
        node = node_claims(problem, claims, 0, [], guests, most=12)
        if node is not None:
            found.append(node)
        assert len(found) <= i + 1
    return found


def test_a_grant_is_the_best_choice_and_tells_all_of_them() -> None:
    """One set a node and nobody twice: the worth of the best choice, and all that reach it."""
    ties = 0
    for seed in range(400):
        nodes = nodes_of(random.Random(seed), 3, 6)
        best, choices = -1, []
        for rows in itertools.product(*(range(len(n.worth)) for n in nodes)):
            picked = [s for n, row in zip(nodes, rows, strict=True) for s in n.sessions(row)]
            if len(set(picked)) < len(picked):
                continue
            worth = sum(int(n.worth[row]) for n, row in zip(nodes, rows, strict=True))
            if worth > best:
                best, choices = worth, []
            if worth == best:
                choices.append(list(rows))
        found = grant(nodes)
        assert found.worth == best, seed
        assert found.proved == (len(choices) <= contested._TIES)
        if found.proved:
            assert sorted(found.choices) == choices
            ties += len(choices) > 1
    assert ties > 30


def test_without_a_proof_the_plan_is_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many states are left out, the plan is no worse than what was found, nor exact."""
    monkeypatch.setattr(contested, "_WIDTHS", (1, 1))
    dp = DynamicProgramme(PlannerSettings(state_budget=1, work=0))
    unproved = 0
    for seed in range(120):
        problem = pool(random.Random(seed), 6, 3, claims=(2, 2, 3))
        parts = decouple(problem)
        solution = dp.solve(problem)
        assert problem.feasible(solution.nodes), seed
        if parts is None or parts.proved:
            continue
        assert not solution.exact
        joined = [dp._joined(problem, rest).nodes for rest in parts.remainders]
        assert problem.worth(solution.nodes) >= max(problem.worth(nodes) for nodes in joined)
        unproved += 1
    assert unproved > 10

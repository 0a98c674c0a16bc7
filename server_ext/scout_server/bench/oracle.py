"""The best possible plan, found by integer programming: what planners are measured against."""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scout_server.policy.placement import Problem

__all__ = ["Optimum", "best_by_trying", "lexicographic_optimum"]


@dataclass(frozen=True, slots=True)
class Optimum:
    """Largest sums of the components, in order, each with the earlier ones at their largest."""

    sums: tuple[int, ...]
    proved: bool
    """False: the solver ran out of time in some stage."""


def best_by_trying(problem: Problem) -> int:
    """Return what the best plan is worth, found by trying all: (nodes + 1)^sessions of them."""
    choices = range(-1, len(problem.room))
    return max(
        problem.worth(nodes)
        for nodes in itertools.product(choices, repeat=len(problem.group))
        if problem.feasible(nodes)
    )


def lexicographic_optimum(
    problem: Problem, parts: npt.NDArray[np.int64], *, time_limit_s: float = 20.0
) -> Optimum:
    """
    Return the optimum of *problem* for `parts[session, node, component]`, by HiGHS in stages.

    Stage c maximises component c with the sums of all earlier components fixed at their optima.

    Raises ModuleNotFoundError without scipy (extra `sim`), which brings HiGHS.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    count, width = problem.need.shape
    groups = sorted({int(g) for g in problem.group if g >= 0})
    column = {g: i for i, g in enumerate(groups)}
    size = count * width + len(groups) * width  # x[s, i], then y[g, i]: prefix g is paid on i
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    upper: list[float] = []

    def constrain(terms: list[tuple[int, float]], limit: float) -> None:
        for at, weight in terms:
            rows.append(len(upper))
            columns.append(at)
            values.append(weight)
        upper.append(limit)

    need, extra = problem.need.tolist(), problem.extra.tolist()
    for s in range(count):
        constrain([(s * width + i, 1.0) for i in range(width)], 1.0)
    for i in range(width):
        quanta = [(s * width + i, float(max(0, need[s][i]))) for s in range(count)]
        for g in groups:
            member = next(s for s in range(count) if problem.group[s] == g)
            cost = max(extra[s][i] for s in range(count) if problem.group[s] == g)
            if cost > 0:
                at = count * width + column[g] * width + i
                quanta.append((at, float(cost)))
                for s in range(member, count):
                    if problem.group[s] == g:
                        constrain([(s * width + i, 1.0), (at, -1.0)], 0.0)
        constrain(quanta, float(problem.room[i]))
        slots = [(s * width + i, float(problem.takes_slot[s])) for s in range(count)]
        constrain(slots, float(problem.slots[i]))
    matrix = coo_array((values, (rows, columns)), shape=(len(upper), size)).tocsr()
    constraints = [LinearConstraint(matrix, -np.inf, np.asarray(upper))]
    allowed = np.concatenate([(problem.need >= 0).ravel(), np.ones(len(groups) * width)])
    sums: list[int] = []
    proved = True
    for component in range(parts.shape[2]):
        goal = np.concatenate(
            [parts[:, :, component].ravel(), np.zeros(len(groups) * width)]
        ).astype(np.float64)
        found = milp(
            -goal,
            constraints=constraints,
            bounds=Bounds(np.zeros(size), allowed),
            integrality=np.ones(size),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if found.x is None:
            return Optimum(tuple(sums), proved=False)
        proved = proved and found.status == 0
        best = round(float(goal @ np.round(found.x)))
        sums.append(best)
        constraints.append(LinearConstraint(goal[None, :], best - 0.5, np.inf))
    return Optimum(tuple(sums), proved=proved)

"""References that know more than a policy may: the future, or the truth behind a workload."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from scout_server.bench.baselines import Queue
from scout_server.bench.workloads import Request, Workload
from scout_server.policy.agents import AgentTable
from scout_server.policy.gaps import EDGES, Array, GapModel, normal_cdf
from scout_server.policy.tenant import Tenant
from scout_server.policy.transitions import END, Row, Transitions

__all__ = ["Belady", "inform"]


class Belady(Queue):
    """Evicts the block whose next use is furthest away; of one chain the tail (Bélády 1966)."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        self.next_use: list[list[int]] = []
        upcoming: dict[int, int] = {}
        never = len(workload.requests)
        for index in range(never - 1, -1, -1):
            request = workload.requests[index]
            chain = request.prompt + request.output
            self.next_use.append([upcoming.get(name, never) for name in chain])
            for name in request.prompt:
                upcoming[name] = index
        self.next_use.reverse()
        self.index = 0
        self.free: dict[int, int] = {}
        self.heap: list[tuple[int, int, int]] = []
        self.empty: list[int] = []

    def arrive(self, request: Request, index: int) -> None:
        """Note which request is served."""
        self.index = index

    def fill(self, blocks: Sequence[int]) -> None:
        """Take blocks that hold nothing."""
        self.empty.extend(blocks)

    def take(self, blocks: list[int]) -> None:
        """Use free *blocks* again."""
        for block in blocks:
            self.free.pop(block, None)

    def give(self, blocks: list[int], names: list[int], request: Request) -> None:
        """Take a chain's blocks back."""
        for place, (block, use) in enumerate(zip(blocks, self.next_use[self.index], strict=True)):
            self.free[block] = use
            heapq.heappush(self.heap, (-use, -place, block))

    def pop(self, n: int, now: float) -> list[int]:
        """Choose *n* victims."""
        victims = [self.empty.pop() for _ in range(min(n, len(self.empty)))]
        while len(victims) < n:
            use, _, block = heapq.heappop(self.heap)
            if self.free.get(block) == -use:
                del self.free[block]
                victims.append(block)
        return victims


class _TrueTransitions(Transitions):
    """The true transition matrix, read by the learner's interface."""

    def __init__(self, symbols: int, workload: Workload, agents: AgentTable) -> None:
        super().__init__(symbols)
        assert workload.transitions is not None
        self._truth = workload.transitions
        self._agents = agents
        self._ends = 1.0 / (workload.turns or 1e9)

    def _row(self, before: int, now: int, certain: Sequence[int], earlier: int) -> Row:
        agent = self._agents.by_symbol.get(now)
        if now == END or agent is None:
            return super()._row(before, now, certain, earlier)
        p = np.zeros(self.used + 1)
        p[END] = self._ends
        for successor, weight in zip(*self._truth[int(agent.name)], strict=True):
            found = self._agents.find(str(successor))
            if found is not None and found.symbol <= self.used:
                p[found.symbol] += weight * (1.0 - self._ends)
        return p

    def rows(self, contexts: Sequence[tuple[int, int, int]]) -> Row:
        """Return the true distributions of what comes after many contexts."""
        rows = [self._row(before, now, (), earlier) for earlier, before, now in contexts]
        return np.array(rows).reshape(len(rows), -1)

    def matrix(self) -> Row:
        """Return the true matrix."""
        matrix = super().matrix()
        for symbol in self._agents.by_symbol:
            if symbol < len(matrix):
                matrix[symbol] = self._row(END, symbol, (), 0)
        return matrix


class _TrueGaps(GapModel):
    """The true distribution of gaps, read by the model's interface."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self._truth = np.asarray(normal_cdf((np.log(EDGES) - mean) / deviation))
        self._patience = math.exp(mean + 2.6 * deviation)

    def cdf(self, kind: str) -> Array:
        """Return the true distribution."""
        return self._truth

    def cycle(self) -> Array:
        """Return the true distribution."""
        return self._truth

    def patience(self, deviations: float = 2.6) -> float:
        """Return the true patience."""
        return self._patience


def inform(tenant: Tenant, workload: Workload) -> None:
    """Let *tenant* know the true transitions and gaps of *workload*, but not its future."""
    if workload.transitions is not None:
        tenant.transitions = _TrueTransitions(tenant.transitions.symbols, workload, tenant.agents)
    if workload.log_gap is not None:
        tenant.gaps = _TrueGaps(*workload.log_gap)

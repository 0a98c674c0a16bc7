"""The policies that ours is compared with."""

import heapq
import math
from bisect import bisect_right, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from scout_server.bench.workloads import Request, Workload
from scout_server.policy.facts import UNHASHED
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.survival import survival

__all__ = ["BASELINES", "Arc", "Fifo", "KvFlow", "Lfu", "Lru", "Scored", "StaticRate", "Ttl"]

_SESSION = 1 << 20  # first group of session chains


class Queue:
    """The engine's own queue: least recently used first."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        self.order = RetentionOrder(capacity + working)
        self.capacity = capacity
        self.groups: dict[tuple[int, int], int] = {}

    def arrive(self, request: Request, index: int) -> None:
        """Learn that *request* arrives."""

    def finish(self, request: Request, index: int) -> None:
        """Learn that *request* has ended."""

    def admit(self, blocks: list[int], names: list[int]) -> None:
        """Note new content."""

    def take(self, blocks: list[int]) -> None:
        """Use free *blocks* again."""
        self.order.discard_all(blocks)

    def pop(self, n: int, now: float) -> list[int]:
        """Choose *n* victims."""
        return self.order.pop(n, now=now)

    def fill(self, blocks: Sequence[int]) -> None:
        """Take blocks that hold nothing."""
        self.order.extend(blocks, UNHASHED)

    def give(self, blocks: list[int], names: list[int], request: Request) -> None:
        """Take a chain's blocks back."""
        at = request.anchor
        if len(blocks) > at:
            self.order.extend(blocks[: at - 1 if at else None : -1], self.group(request))
        if at:
            self.order.extend(blocks[at - 1 :: -1], 1 + request.agent)

    def group(self, request: Request) -> int:
        """Return the group of the request's session chain."""
        return self.groups.setdefault((request.session, request.agent), _SESSION + len(self.groups))


Lru = Queue


class Fifo(Queue):
    """First in, first out: use does not matter."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        self.sequence = 0
        self.key: dict[int, tuple[float, ...]] = {}
        self.heap: list[tuple[tuple[float, ...], int]] = []
        self.free: set[int] = set()

    def fill(self, blocks: Sequence[int]) -> None:
        """Take blocks that hold nothing."""
        for block in blocks:
            self.free.add(block)
            self.key[block] = (-1.0, block)
            heapq.heappush(self.heap, (self.key[block], block))

    def take(self, blocks: list[int]) -> None:
        """Use free *blocks* again."""
        self.free.difference_update(blocks)

    def give(self, blocks: list[int], names: list[int], request: Request) -> None:
        """Take a chain's blocks back."""
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            self.sequence += 1
            self.key[block] = self.rank(block, names[place])
            self.free.add(block)
            heapq.heappush(self.heap, (self.key[block], block))

    def rank(self, block: int, name: int) -> tuple[float, ...]:
        """Return the sort key of *block*, least first out."""
        old = self.key.get(block)
        return old if old is not None else (float(self.sequence),)

    def admit(self, blocks: list[int], names: list[int]) -> None:
        """Note new content."""
        for block in blocks:
            self.key.pop(block, None)

    def pop(self, n: int, now: float) -> list[int]:
        """Choose *n* victims."""
        victims: list[int] = []
        while len(victims) < n:
            key, block = heapq.heappop(self.heap)
            if block in self.free and self.key[block] == key:
                self.free.discard(block)
                victims.append(block)
        return victims


class Lfu(Fifo):
    """Least frequently used, counted over all time; of equals the least recently used."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        self.count: Counter[int] = Counter()

    def rank(self, block: int, name: int) -> tuple[float, ...]:
        """Return the sort key of *block*."""
        self.count[name] += 1
        return (float(self.count[name]), float(self.sequence))


class Arc(Queue):
    """Adaptive replacement cache (Megiddo and Modha, FAST'03), over blocks."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        self.empty: list[int] = []
        self.once: OrderedDict[int, int] = OrderedDict()
        self.often: OrderedDict[int, int] = OrderedDict()
        self.ghosts_once: OrderedDict[int, None] = OrderedDict()
        self.ghosts_often: OrderedDict[int, None] = OrderedDict()
        self.kind: dict[int, bool] = {}
        self.target = 0.0

    def fill(self, blocks: Sequence[int]) -> None:
        """Take blocks that hold nothing."""
        self.empty.extend(blocks)

    def take(self, blocks: list[int]) -> None:
        """Use free *blocks* again."""
        for block in blocks:
            if self.once.pop(block, None) is None:
                self.often.pop(block, None)
            self.kind[block] = True

    def admit(self, blocks: list[int], names: list[int]) -> None:
        """Note new content, and adapt to what was evicted too early."""
        for block, name in zip(blocks, names, strict=True):
            often = False
            if name in self.ghosts_once:
                step = max(1.0, len(self.ghosts_often) / max(1, len(self.ghosts_once)))
                self.target = min(self.capacity, self.target + step)
                del self.ghosts_once[name]
                often = True
            elif name in self.ghosts_often:
                step = max(1.0, len(self.ghosts_once) / max(1, len(self.ghosts_often)))
                self.target = max(0.0, self.target - step)
                del self.ghosts_often[name]
                often = True
            self.kind[block] = often

    def give(self, blocks: list[int], names: list[int], request: Request) -> None:
        """Take a chain's blocks back."""
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            (self.often if self.kind[block] else self.once)[block] = names[place]

    def pop(self, n: int, now: float) -> list[int]:
        """Choose *n* victims."""
        victims = [self.empty.pop() for _ in range(min(n, len(self.empty)))]
        while len(victims) < n:
            first = self.once and (len(self.once) > self.target or not self.often)
            queue, ghosts = (
                (self.once, self.ghosts_once) if first else (self.often, self.ghosts_often)
            )
            block, name = queue.popitem(last=False)
            ghosts[name] = None
            if len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
            victims.append(block)
        return victims


class Scored(Queue):
    """Groups with scores that `score` computes when the cache is full."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        self.order.scout = True
        self.last: dict[int, Request] = {}
        self.members: dict[int, tuple[int, int]] = {}
        self.recent: dict[int, float] = {}
        self.current: tuple[int, ...] = ()

    def arrive(self, request: Request, index: int) -> None:
        """Learn that *request* arrives, and score."""
        self.learn(request, index)
        self.last[request.session] = request
        group = self.group(request)
        self.members[group] = (request.session, request.agent)
        self.recent[group] = self.recent[1 + request.agent] = request.time
        self.current = (group, 1 + request.agent)
        self.order.rescore(self.scores(request.time))

    def learn(self, request: Request, index: int) -> None:
        """Learn from *request*."""

    def scores(self, now: float) -> dict[int, float]:
        """Return the score of every group with free blocks."""
        out: dict[int, float] = {}
        for group in {*self.order.groups(), *self.current}:
            if group >= _SESSION:
                session, agent = self.members[group]
                out[group] = self.chain(session, agent, group, now)
            elif group > 0:
                out[group] = self.anchor(group - 1, group, now)
        return out

    def chain(self, session: int, agent: int, group: int, now: float) -> float:
        """Score a session's chain."""
        raise NotImplementedError

    def anchor(self, agent: int, group: int, now: float) -> float:
        """Score an anchor."""
        raise NotImplementedError


class StaticRate(Scored):
    """Anchors by their uses in the whole run (known beforehand), sessions by recency."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        uses = Counter(request.agent for request in workload.requests)
        self.uses = {agent: count / len(workload.requests) for agent, count in uses.items()}

    def chain(self, session: int, agent: int, group: int, now: float) -> float:
        """Score a session's chain."""
        return self.recent[group] / 1e12

    def anchor(self, agent: int, group: int, now: float) -> float:
        """Score an anchor."""
        return self.uses[agent]


class Ttl(Scored):
    """
    Keeps what was used less than a time to live ago (Continuum, 2511.02230), else LRU.

    *learnt*: per class of gap, the time by which nine of ten sessions are back, where sessions that
    have not returned yet count as censored (Kaplan-Meier).
    """

    def __init__(
        self, workload: Workload, capacity: int, working: int, *, ttl: float | None = None
    ) -> None:
        super().__init__(workload, capacity, working)
        self.fixed = ttl
        self.gaps: dict[str, list[float]] = defaultdict(list)
        self.limits: dict[str, float] = {}
        self.seen = 0

    def learn(self, request: Request, index: int) -> None:
        """Learn a gap."""
        before = self.last.get(request.session)
        if self.fixed is None and before is not None:
            insort(self.gaps[before.tool], request.time - before.time)
            self.seen += 1
            if self.seen % 64 == 0:
                for tool, gaps in self.gaps.items():
                    self.limits[tool] = self._limit(tool, gaps, request.time)

    def _limit(self, tool: str, gaps: list[float], now: float) -> float:
        waiting = sorted(now - each.time for each in self.last.values() if each.tool == tool)
        alive, at_risk, lost = 1.0, len(gaps) + len(waiting), 0
        for place, gap in enumerate(gaps):
            lost = bisect_right(waiting, gap)
            at_risk = len(gaps) - place + len(waiting) - lost
            alive *= 1.0 - 1.0 / max(1, at_risk)
            if alive <= 0.1:
                return gap
        return gaps[-1] if gaps else 2.0

    def _kept(self, group: int, tool: str, now: float) -> float:
        limit = self.fixed if self.fixed is not None else self.limits.get(tool, 2.0)
        kept = now - self.recent[group] <= limit
        return (1.0 if kept else 0.0) + self.recent[group] / 1e12

    def chain(self, session: int, agent: int, group: int, now: float) -> float:
        """Score a session's chain."""
        return self._kept(group, self.last[session].tool, now)

    def anchor(self, agent: int, group: int, now: float) -> float:
        """Score an anchor."""
        return self._kept(group, "", now)


class KvFlow(Scored):
    """Fewest steps to execution on the known agent graph first kept (KVFlow, 2507.07400)."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        table = workload.transitions or []
        self.steps = [self._distances(table, agent) for agent in range(len(table))]

    @staticmethod
    def _distances(table: list[tuple[list[int], list[float]]], source: int) -> dict[int, int]:
        found: dict[int, int] = {}
        frontier = [source]
        for step in range(1, len(table) + 1):
            following = []
            for agent in frontier:
                for successor in table[agent][0]:
                    if successor not in found:
                        found[successor] = step
                        following.append(successor)
            frontier = following
        return found

    def scores(self, now: float) -> dict[int, float]:
        """Score all groups."""
        self.active = {
            request.agent
            for request in self.last.values()
            if request.back is not None  # the graph's owner knows which runs are over
        }
        return super().scores(now)

    def anchor(self, agent: int, group: int, now: float) -> float:
        """Score an anchor."""
        if not self.steps:
            return self.recent[group] / 1e12
        steps = min((self.steps[each].get(agent, 99) for each in self.active), default=99)
        return -steps + self.recent[group] / 1e12

    def chain(self, session: int, agent: int, group: int, now: float) -> float:
        """Score a session's chain."""
        last = self.last[session]
        if last.back is None:
            return -1e6
        steps = self.steps[last.agent].get(agent, 99) if self.steps else 0
        return -steps - 0.5 + self.recent[group] / 1e12


class Survival(Scored):
    """The probability of use within K steps (CacheSage, 2605.27744); silence halves it."""

    def __init__(self, workload: Workload, capacity: int, working: int) -> None:
        super().__init__(workload, capacity, working)
        self.counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.one: dict[int, dict[int, float]] = {}
        self.all: dict[int, float] = {}

    def learn(self, request: Request, index: int) -> None:
        """Learn a transition."""
        before = self.last.get(request.session)
        if before is not None:
            self.counts[before.agent][request.agent] += 1.0

    def scores(self, now: float) -> dict[int, float]:
        """Score all groups."""
        live = {
            session: (request.agent, 0.5 ** ((now - request.time) / 20.0))
            for session, request in self.last.items()
            if now - request.time <= 60.0
        }
        by_agent = {agent: survival(self.counts, {agent: 1.0}) for agent, _ in live.values()}
        self.one = {
            session: {to: p * alive for to, p in by_agent[agent].items()}
            for session, (agent, alive) in live.items()
        }
        dead: dict[int, float] = {}
        for row in self.one.values():
            for to, p in row.items():
                dead[to] = dead.get(to, 1.0) * (1.0 - p)
        self.all = {to: 1.0 - p for to, p in dead.items()}
        return super().scores(now)

    def anchor(self, agent: int, group: int, now: float) -> float:
        """Score an anchor."""
        return self.all.get(agent, 0.0) + self._recency(group, now)

    def chain(self, session: int, agent: int, group: int, now: float) -> float:
        """Score a session's chain."""
        use = self.one.get(session, {}).get(agent, 0.0)
        return use + self._recency(group, now)

    def _recency(self, group: int, now: float) -> float:
        return 0.05 * math.exp((self.recent[group] - now) / 43.0)


BASELINES: dict[str, Callable[[Workload, int, int], Queue]] = {
    "fifo": Fifo,
    "lru": Lru,
    "lfu": Lfu,
    "arc": Arc,
    "static-rate": StaticRate,
    "ttl-fixed": lambda workload, capacity, working: Ttl(workload, capacity, working, ttl=10.0),
    "ttl-learnt": Ttl,
    "kvflow": KvFlow,
    "survival": Survival,
}
"""Name to constructor (workload, capacity, working blocks)."""

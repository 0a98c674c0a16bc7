"""Gives every group of free blocks its score, off the eviction path and at a bounded rate."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from scout_server.policy.agents import Agent
from scout_server.policy.expected import Cycles, Outlook
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.sessions import Chain, Phase, Session
from scout_server.policy.tenant import Tenant

__all__ = ["Scoring"]

_MAX_LIVE = 512  # sessions scored at all: the most recent ones
_MAX_CHAINS = 2048  # of their chains that are scored, the most recent sessions' first
_FOLLOWED = 64  # agents, the most recent ones, whose successors are followed
_TYPICAL_AGE = 4  # renewals after which the scores of sessions that have just left are renewed
_SECONDS = (1e-2, 1e-6)  # pause per renewal, and per session and agent: keeps scoring cheap
_CELLS_PER_ARRIVAL = 64  # sessions times agents that one request may have scored anew
_FREE_CELLS = 512  # that many may be scored anew with every request
_IDLE_PAUSES = 8  # pauses after which scores are renewed however few requests came
_HORIZON_S = (0.25, 36000.0)
_LONGEST_PAUSE_S = 15.0
_WINDOWS = 8
_SUPERSEDED = 0.1
_LEAST_KEPT = 0.3  # of what is evicted, what at least had been kept for a while


class Scoring:
    """
    Scores groups by expected use within the time in which the pool turns over.

    The turnover time is measured over the last pool's worth of evictions. A group's score is the
    probability that its blocks are asked for within it: for an anchor over all live sessions and
    those to come, for a session's chain over that session alone.
    """

    def __init__(
        self, order: RetentionOrder, *, rescore_share: float, retained_share: float = 1.0
    ) -> None:
        self._order = order
        self.capacity = order.capacity
        """Blocks that turn over; less than the pool where some never hold anything reusable."""
        self._share = rescore_share
        self._marks: deque[tuple[float, int, dict[str, int], int]] = deque(maxlen=_WINDOWS + 1)
        self._renewed: float | None = None
        self._outlooks: dict[str, Outlook] = {}
        self._typical: dict[str, _Typical] = {}
        self._cycles: dict[str, Cycles] = {}
        self.uses: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.following = "use"
        self.horizon = 60.0
        self.renewals = 0
        self._cells = 0
        self._pause = 0.0  # before the next renewal
        self._awaited = 0  # arrivals before the next renewal
        self.arrivals = 0
        """Requests since the last renewal; to be counted by the owner."""
        self._retained_share = retained_share
        self._held: dict[str, frozenset[int]] = {}
        self.clipped: dict[int, int] = {}
        """Groups that are over their tenant's share, with their free blocks."""

    def renew(self, tenants: Iterable[Tenant], now: float, *, force: bool = False) -> bool:
        """Score everything anew if it is time, or *force* says so; return whether it was."""
        if self._renewed is not None and not force:
            away = now - self._renewed
            if away < self._pause:
                return False
            if self.arrivals < self._awaited and away < _IDLE_PAUSES * self._pause:
                return False
        self.arrivals = 0
        self._cells = 0
        self._renewed = now
        self.renewals += 1
        tenants = list(tenants)
        starts = self._measure(now, tenants)
        scores: dict[int, float] = {}
        for tenant in tenants:
            self._tenant(tenant, now, starts[tenant.name], scores)
        self.uses, self.rates = (
            scores,
            {
                group: rate
                for tenant in tenants
                for agent in tenant.agents
                for _, group in agent.segments
                for rate in (agent.rate(now, self.horizon),)
            },
        )
        self._clip(tenants)
        self.follow(self.following)
        fixed, each = _SECONDS
        least = fixed + self._cells * each
        self._pause = max(min(self._share * self.horizon, _LONGEST_PAUSE_S), least)
        self._awaited = (self._cells - _FREE_CELLS) // _CELLS_PER_ARRIVAL
        return True

    def follow(self, name: str) -> None:
        """Order by `use` (expected use) or by `rate` (how often anchors were used)."""
        self.following = name
        self._order.rescore(self.uses if name == "use" else self.rates)
        if self._held:
            self._order.set_scores(dict.fromkeys(self._all_held(), math.inf))

    def hold(self, request_id: str, groups: Iterable[int]) -> None:
        """Let *groups* go last of all until `let_go`: their request was preempted, and resumes."""
        self._held[request_id] = frozenset(groups)
        self._order.set_scores(dict.fromkeys(self._held[request_id], math.inf))

    def let_go(self, request_id: str) -> None:
        """Let the groups of a request that was held count like others again."""
        groups = self._held.pop(request_id, None)
        if groups:
            scores = self.uses if self.following == "use" else self.rates
            left = groups - self._all_held()
            self._order.set_scores({group: scores.get(group, 0.0) for group in left})

    def _all_held(self) -> frozenset[int]:
        return frozenset().union(*self._held.values())

    def use(self, group: int) -> float:
        """Return the hit density that is expected of *group*."""
        return self.uses.get(group, 0.0)

    def rate(self, group: int) -> float:
        """Return how often *group* is used, if it is an anchor's."""
        return self.rates.get(group, 0.0)

    def _clip(self, tenants: Iterable[Tenant]) -> None:
        """Take their scores from what tenants keep beyond their share, the least useful first."""
        self.clipped.clear()
        if self._retained_share >= 1.0:
            return
        limit = self._retained_share * self.capacity
        for tenant in tenants:
            kept = 0
            groups = sorted(_groups(tenant), key=lambda group: (-self.uses.get(group, 0.0), group))
            for group in groups:
                size = self._order.size(group)
                kept += size
                if size and kept > limit:
                    self.uses[group] = self.rates[group] = 0.0
                    self.clipped[group] = size

    def _put(self, scores: dict[int, float]) -> None:
        if self.clipped:
            scores = {group: scores[group] for group in scores if group not in self.clipped}
        self.uses.update(scores)
        if self._held:
            held = self._all_held()
            scores = {group: scores[group] for group in scores if group not in held}
        if self.following == "use":
            self._order.set_scores(scores)

    def touched(self, tenant: Tenant, session: Session, now: float) -> bool:
        """
        Score the chains of *session* anew: something happened to it.

        Return whether its client had a say in it, so that the change may be a large one.
        """
        if not session.groups:
            return False
        if session.phase == Phase.ENDED:
            self._put(dict.fromkeys(session.groups.values(), 0.0))
            return True
        outlook = self._outlooks.get(tenant.name)
        if outlook is None or session.agent >= len(outlook.place):
            return False
        if session.promise is not None or session.ended_said:
            outlook.ask([session], [tenant.trust(session.agent)], now)
            self._put(dict(zip(*self._chains(tenant, outlook, [session]), strict=True)))
            return True
        typical = self._typical[tenant.name].rows.get(session.agent)
        if typical is not None:
            known = len(typical)
            self._put({g: typical[at] for at, g in session.groups.items() if at < known})
        return False

    def _measure(self, now: float, tenants: Sequence[Tenant]) -> dict[str, float]:
        """Update the horizon; return how many sessions of each tenant start per second."""
        started = {tenant.name: tenant.started for tenant in tenants}
        popped = self._order.popped
        marks = self._marks
        if not marks:
            marks.append((now, popped, started, self._order.passed))
        first = marks[0]
        seconds = max(now - first[0], 1e-3)
        if popped > first[1]:
            evicted = popped - first[1]
            kept = max(evicted - (self._order.passed - first[3]), _LEAST_KEPT * evicted)
            horizon = self.capacity * seconds / kept
            self.horizon = min(max(horizon, _HORIZON_S[0]), _HORIZON_S[1])
        rates = {name: (count - first[2].get(name, 0)) / seconds for name, count in started.items()}
        if popped - marks[-1][1] >= self.capacity / _WINDOWS:
            marks.append((now, popped, started, self._order.passed))
        return rates

    def _tenant(self, tenant: Tenant, now: float, starts: float, scores: dict[int, float]) -> None:
        tenant.bury(now)
        agents = [agent for agent in tenant.agents if agent.symbol <= tenant.transitions.used]
        agents.sort(key=_last_used, reverse=True)
        followed, others = agents[:_FOLLOWED], agents[_FOLLOWED:]
        outlook = Outlook(
            tenant.transitions,
            tenant.gaps,
            tenant.lengths,
            horizon=self.horizon,
            starts_per_s=starts,
            unnoticed=tenant.unnoticed,
            symbols=[agent.symbol for agent in followed],
            cycles=self._cycles.get(tenant.name),
        )
        self._outlooks[tenant.name] = outlook
        self._cycles[tenant.name] = outlook.cycles
        live = [*islice(reversed(tenant.live.values()), _MAX_LIVE)]
        self._cells += len(live) * len(followed)
        if not followed:
            self._typical[tenant.name] = _Typical(outlook, 0)
            return
        if live:
            outlook.ask(live, [tenant.trust(session.agent) for session in live], now)
            tenant.unnoticed = float((1.0 - outlook.living).sum())
            scores.update(zip(*self._chains(tenant, outlook, live), strict=True))
        typical = self._typical.get(tenant.name)
        if typical is None or typical.stale(outlook, self.renewals):
            typical = self._typical[tenant.name] = _Typical(outlook, self.renewals)
            table = outlook.leave([a.symbol for a in followed], [a.kind for a in followed])
            wide = np.zeros((len(table), len(outlook.place)))
            for agent in followed:
                at = outlook.place[agent.symbol]
                wide[:, agent.symbol] = table[:, at] * agent.extension
            typical.rows = {a.symbol: row for a, row in zip(followed, wide.tolist(), strict=True)}
        densities = outlook.density(outlook.anchors()).tolist()
        for agent in followed:
            self._anchor(tenant, agent, densities[outlook.place[agent.symbol]], now, scores)
        if others:
            rare = outlook.others([agent.symbol for agent in others]).tolist()
            for agent, score in zip(others, rare, strict=True):
                self._anchor(tenant, agent, score, now, scores)

    def _anchor(
        self, tenant: Tenant, agent: Agent, score: float, now: float, scores: dict[int, float]
    ) -> None:
        score = agent.smooth(score, now, self.horizon)
        for _, group in tenant.agents.segments(agent):
            scores[group] = scores.get(group, 0.0) + score
        for group in agent.old_groups:
            scores[group] = max(scores.get(group, 0.0), 0.5 * score)

    @staticmethod
    def _chains(
        tenant: Tenant,
        outlook: Outlook,
        sessions: Sequence[Session],
    ) -> tuple[list[int], list[float]]:
        """Return the chains of *sessions*, which *outlook* was asked about, and their scores."""
        counts: list[int] = []
        symbols: list[int] = []
        groups: list[int] = []
        old: list[tuple[int, Chain]] = []
        for at, session in enumerate(sessions):
            own = session.groups
            counts.append(len(own))
            symbols += own
            groups += own.values()
            if session.old:
                old += [(at, chain) for chain in session.old if chain.agent is not None]
            if len(groups) > _MAX_CHAINS:
                break
        extension = np.zeros(len(outlook.place))
        for agent in tenant.agents:
            if agent.symbol < len(extension):
                extension[agent.symbol] = agent.extension
        who = np.repeat(np.arange(len(counts)), counts)
        if old:
            who = np.concatenate([who, [at for at, _ in old]])
        symbols += [chain.agent.symbol for _, chain in old if chain.agent is not None]
        groups += [chain.group for _, chain in old]
        where = np.array(symbols, dtype=np.int64)
        where[where >= len(extension)] = 0
        place = outlook.place[where]
        scores = outlook.chains(who, np.maximum(place, 0))
        scores *= np.where(place >= 0, extension[where], 0.0)
        values = scores.tolist()
        for at, (_, chain) in enumerate(old, len(values) - len(old)):
            if chain.superseded:
                values[at] *= _SUPERSEDED
        return groups, values


class _Typical:
    """Scores of the chains of sessions that have just left an agent, by agent."""

    __slots__ = ("horizon", "made", "rows", "size")

    def __init__(self, outlook: Outlook, made: int) -> None:
        self.rows: dict[int, list[float]] = {}
        self.made = made
        self.horizon = outlook.horizon
        self.size = len(outlook.place)

    def stale(self, outlook: Outlook, renewals: int) -> bool:
        """Whether it is time to make another one."""
        changed = abs(outlook.horizon - self.horizon) > 0.1 * self.horizon
        return changed or self.size != len(outlook.place) or renewals - self.made >= _TYPICAL_AGE


def _last_used(agent: Agent) -> float:
    return agent.last_used


def _groups(tenant: Tenant) -> Iterator[int]:
    """Yield every group that belongs to *tenant*, once."""
    found: set[int] = set()
    for session in tenant.sessions:
        found.update(session.groups.values())
        found.update(chain.group for chain in session.old)
    for agent in tenant.agents:
        found.update(group for _, group in tenant.agents.segments(agent))
        found.update(agent.old_groups)
    yield from found

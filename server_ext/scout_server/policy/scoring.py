"""Gives every group of free blocks its score, off the eviction path and at a bounded rate."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from scout_server.policy.expected import Outlook
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.tenant import Tenant

__all__ = ["Scoring"]

_MAX_LIVE = 512  # sessions scored at all: the most recent ones
_MAX_PROBES = 64  # agents, the most recent ones, whose typical session is scored
_CELLS = 16384  # sessions x agents scored in full; other sessions are scored by their agent's
_MIN_EXACT = 16
_SECONDS_PER_CELL = 5e-5  # keeps scoring below about a fiftieth of the time
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
        self._typical: dict[tuple[str, int], list[float]] = {}
        self.uses: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.following = "use"
        self.horizon = 60.0
        self.renewals = 0
        self._cells = 0
        self._retained_share = retained_share
        self.clipped: dict[int, int] = {}
        """Groups that are over their tenant's share, with their free blocks."""

    def renew(self, tenants: Iterable[Tenant], now: float, *, force: bool = False) -> bool:
        """Score everything anew if it is time, or *force* says so; return whether it was."""
        pause = max(
            min(self._share * self.horizon, _LONGEST_PAUSE_S), self._cells * _SECONDS_PER_CELL
        )
        if self._renewed is not None and now - self._renewed < pause and not force:
            return False
        self._cells = 0
        self._renewed = now
        self.renewals += 1
        tenants = list(tenants)
        starts = self._measure(now, tenants)
        scores: dict[int, float] = {}
        self._typical.clear()
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
        return True

    def follow(self, name: str) -> None:
        """Order by `use` (expected use) or by `rate` (how often anchors were used)."""
        self.following = name
        self._order.rescore(self.uses if name == "use" else self.rates)

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

    def _put(self, group: int, score: float) -> None:
        if group in self.clipped:
            return
        self.uses[group] = score
        if self.following == "use":
            self._order.set_score(group, score)

    def touched(self, tenant: Tenant, session: Session, now: float) -> None:
        """Score the chains of *session* anew: something happened to it."""
        if not session.chains:
            return
        put = self._put
        if session.phase == Phase.ENDED:
            for chain in session.chains.values():
                put(chain.group, 0.0)
            return
        outlook = self._outlooks.get(tenant.name)
        if outlook is None:
            return
        if session.promise is not None or session.ended_said:
            q = outlook.uses([session], [tenant.trust(session.agent)], now)[0]
            self._chains(session, outlook.density(q).tolist(), put)
        else:
            row = self._typical.get((tenant.name, session.agent))
            if row is not None:
                self._chains(session, row, put)

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
        outlook = Outlook(
            tenant.transitions,
            tenant.gaps,
            horizon=self.horizon,
            starts_per_s=starts,
            unnoticed=tenant.unnoticed,
        )
        self._outlooks[tenant.name] = outlook
        agents = sorted(
            (agent for agent in tenant.agents if agent.symbol <= outlook.size),
            key=lambda agent: -agent.last_used,
        )[:_MAX_PROBES]
        # one more session per agent, that has just gone from it, stands for many
        probes = [
            Session(key="", hinted=False, agent=agent.symbol, since=now, kind=agent.kind)
            for agent in agents
        ]
        exact = max(_MIN_EXACT, _CELLS // max(1, outlook.size) - len(probes))
        live = list(tenant.live.values())[-_MAX_LIVE:]
        live, rest = live[-exact:], live[:-exact]
        every = live + probes
        self._cells += len(every) * outlook.size
        unused = -outlook.newcomers
        if every:
            q = outlook.uses(every, [tenant.trust(session.agent) for session in every], now)
            tenant.unnoticed = float((1.0 - outlook.living[: len(live)]).sum())
            left = np.log1p(-np.minimum(q, 0.999999))
            unused = unused + left[: len(live)].sum(0)
            rows = outlook.density(q)
            for session, row in zip(live, rows.tolist(), strict=False):
                self._chains(session, row, scores.__setitem__)
            typical = {agent.symbol: len(live) + at for at, agent in enumerate(agents)}
            for symbol, at in typical.items():
                self._typical[(tenant.name, symbol)] = rows[at].tolist()
            rest = [session for session in rest if session.agent in typical]
        if rest:
            alive = outlook.alive(
                rest + probes, [tenant.trust(session.agent) for session in rest + probes], now
            )
            back = dict(zip(typical, alive[len(rest) :].tolist(), strict=True))
            weights = np.zeros(len(every))
            for session, chance in zip(rest, alive.tolist(), strict=False):
                at = typical[session.agent]
                weight = min(1.0, chance / max(back[session.agent], 1e-9))
                weights[at] += weight
                self._chains(session, (rows[at] * weight).tolist(), scores.__setitem__)
            unused = unused + np.einsum("s,sap->ap", weights, left)
        densities = outlook.density(1.0 - np.exp(unused)).tolist()
        for agent in tenant.agents:
            if agent.symbol > len(densities):
                continue
            score = agent.smooth(densities[agent.symbol - 1], now, self.horizon)
            for _, group in tenant.agents.segments(agent):
                scores[group] = scores.get(group, 0.0) + score
            for group in agent.old_groups:
                scores[group] = max(scores.get(group, 0.0), 0.5 * score)

    @staticmethod
    def _chains(session: Session, row, put) -> None:  # type: ignore[no-untyped-def]
        for symbol, chain in session.chains.items():
            if 0 < symbol <= len(row) and chain.agent is not None:
                put(chain.group, float(row[symbol - 1]) * chain.agent.extension)
        for chain in session.old:
            if chain.agent is not None and chain.agent.symbol <= len(row):
                score = float(row[chain.agent.symbol - 1]) * chain.agent.extension
                put(chain.group, score * (_SUPERSEDED if chain.superseded else 1.0))


def _groups(tenant: Tenant) -> Iterator[int]:
    """Yield every group that belongs to *tenant*, once."""
    found: set[int] = set()
    for session in tenant.sessions:
        found.update(chain.group for chain in session.chains.values())
        found.update(chain.group for chain in session.old)
    for agent in tenant.agents:
        found.update(group for _, group in tenant.agents.segments(agent))
        found.update(agent.old_groups)
    yield from found

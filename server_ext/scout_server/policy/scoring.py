"""Gives every group of free blocks its score, off the eviction path and at a bounded rate."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from scout_server.policy.expected import Outlook
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.tenant import Tenant

__all__ = ["Scoring"]

_MAX_LIVE = 512  # sessions scored in full: the most recent ones
_HORIZON_S = (0.25, 3600.0)
_WINDOWS = 8
_SUPERSEDED = 0.1


class Scoring:
    """
    Scores groups by expected use within the time in which the pool turns over.

    The turnover time is measured over the last pool's worth of evictions. A group's score is the
    probability that its blocks are asked for within it: for an anchor over all live sessions and
    those to come, for a session's chain over that session alone.
    """

    def __init__(self, order: RetentionOrder, *, rescore_share: float) -> None:
        self._order = order
        self._share = rescore_share
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=_WINDOWS + 1)
        self._renewed: float | None = None
        self._outlooks: dict[str, Outlook] = {}
        self.horizon = 60.0
        self.renewals = 0

    def renew(self, tenants: Iterable[Tenant], now: float) -> bool:
        """Score everything anew if it is time; return whether it was."""
        if self._renewed is not None and now - self._renewed < self._share * self.horizon:
            return False
        self._renewed = now
        self.renewals += 1
        tenants = list(tenants)
        starts = self._measure(now, sum(tenant.started for tenant in tenants))
        scores: dict[int, float] = {}
        share = starts / max(1, sum(tenant.started for tenant in tenants))
        for tenant in tenants:
            self._tenant(tenant, now, share * tenant.started, scores)
        self._order.rescore(scores)
        return True

    def touched(self, tenant: Tenant, session: Session, now: float) -> None:
        """Score the chains of *session* anew: something happened to it."""
        outlook = self._outlooks.get(tenant.name)
        if outlook is None or not session.chains:
            return
        if session.phase == Phase.ENDED:
            for chain in session.chains.values():
                self._order.set_score(chain.group, 0.0)
            return
        row = outlook.uses([session], [tenant.trust(session.agent)], now)[0]
        self._chains(session, row, self._order.set_score)

    def _measure(self, now: float, started: int) -> float:
        """Update the horizon; return how many sessions start per second."""
        popped = self._order.popped
        marks = self._marks
        if not marks:
            marks.append((now, popped, started))
        first = marks[0]
        seconds = max(now - first[0], 1e-3)
        if popped > first[1]:
            horizon = self._order.capacity * seconds / (popped - first[1])
            self.horizon = min(max(horizon, _HORIZON_S[0]), _HORIZON_S[1])
        rate = (started - first[2]) / seconds
        if popped - marks[-1][1] >= self._order.capacity / _WINDOWS:
            marks.append((now, popped, started))
        return rate

    def _tenant(self, tenant: Tenant, now: float, starts: float, scores: dict[int, float]) -> None:
        tenant.bury(now)
        outlook = Outlook(
            tenant.transitions, tenant.gaps, horizon=self.horizon, starts_per_s=starts
        )
        self._outlooks[tenant.name] = outlook
        live = list(tenant.live.values())[-_MAX_LIVE:]
        unused = -outlook.newcomers.copy()
        if live:
            q = outlook.uses(live, [tenant.trust(session.agent) for session in live], now)
            unused += np.log1p(-np.minimum(q, 0.999999)).sum(0)
            rows = q.tolist()
            for session, row in zip(live, rows, strict=True):
                self._chains(session, row, scores.__setitem__)
        for agent in tenant.agents:
            used = 1.0
            if agent.symbol <= len(unused):
                used = float(np.exp(unused[agent.symbol - 1]))
            for _, group in tenant.agents.segments(agent):
                scores[group] = 1.0 - (1.0 - scores.get(group, 0.0)) * used
            for group in agent.old_groups:
                scores[group] = max(scores.get(group, 0.0), 0.5 * (1.0 - used))

    @staticmethod
    def _chains(session: Session, row, put) -> None:  # type: ignore[no-untyped-def]
        for symbol, chain in session.chains.items():
            if 0 < symbol <= len(row) and chain.agent is not None:
                put(chain.group, float(row[symbol - 1]) * chain.agent.extension)
        for chain in session.old:
            if chain.agent is not None and chain.agent.symbol <= len(row):
                score = float(row[chain.agent.symbol - 1]) * chain.agent.extension
                put(chain.group, score * (_SUPERSEDED if chain.superseded else 1.0))

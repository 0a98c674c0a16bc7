"""Answers: which agents will live sessions ask for next, and what is each agent's anchor worth?"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scout_server.policy.agents import Agent
from scout_server.policy.expected import SPAN, Cycles, Outlook
from scout_server.policy.runtime import PolicyCore
from scout_server.policy.sessions import Session
from scout_server.policy.tenant import Tenant

__all__ = ["Candidate", "Warmth"]

_MAX_LIVE = 512  # sessions looked at: the most recent ones
_NEXT = 2  # agents that a session is thought to go to


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An agent that a live session may ask for next."""

    tenant: str
    agent: Agent
    probability: float
    """Probability that a session's next request within the horizon is for it, in [0, 1]."""
    worth: float
    """Score of its anchor's own part, in the units of the order of eviction."""
    predictability: float
    """R of its tenant."""


class Warmth:
    """
    Foresees the next request of every live session, from what the policy core has learnt.

    A session returns with the probability that follows from its gap's class, its silence and its
    client's promises; where to is the transition learner's guess, of which the best two count.
    """

    def __init__(self, core: PolicyCore, *, horizon_s: float) -> None:
        self._core = core
        self._horizon_s = horizon_s
        self._cycles: dict[str, Cycles] = {}
        """Of each tenant that was looked at last, so that they are not computed anew each time."""

    def candidates(self, *, now: float) -> list[Candidate]:
        """Return the agents asked for next, of all tenants, by tenant and number."""
        found: list[Candidate] = []
        tenants = self._core.refresh(now=now)
        for tenant in tenants:
            found.extend(self._of(tenant, now))
        names = {tenant.name for tenant in tenants}
        self._cycles = {name: each for name, each in self._cycles.items() if name in names}
        return found

    def worth(self, group: int) -> float:
        """Return what a block of *group* is worth."""
        return self._core.scoring.use(group)

    def _of(self, tenant: Tenant, now: float) -> Iterator[Candidate]:
        live = [
            session for session in list(tenant.live.values())[-_MAX_LIVE:] if session.agent != 0
        ]
        if not live:
            return
        outlook = Outlook(
            tenant.transitions,
            tenant.gaps,
            tenant.lengths,
            horizon=self._horizon_s / SPAN,
            starts_per_s=0.0,
            unnoticed=tenant.unnoticed,
            cycles=self._cycles.get(tenant.name),
        )
        self._cycles[tenant.name] = outlook.cycles
        back = outlook.alive(live, [tenant.trust(session.agent) for session in live], now)
        unasked: dict[int, float] = {}
        for session, returns in zip(live, back.tolist(), strict=True):
            for symbol, chance in _next(tenant, session):
                unasked[symbol] = unasked.get(symbol, 1.0) * (1.0 - returns * chance)
        for symbol, none in sorted(unasked.items()):
            agent = tenant.agents.by_symbol.get(symbol)
            if agent is None or not agent.anchor:
                continue
            parts = tenant.agents.segments(agent)
            yield Candidate(
                tenant=tenant.name,
                agent=agent,
                probability=1.0 - none,
                worth=self.worth(parts[-1][1]),
                predictability=tenant.transitions.predictability,
            )


def _next(tenant: Tenant, session: Session) -> list[tuple[int, float]]:
    """Return the likeliest next agents of *session* and their chances, given that it returns."""
    row = tenant.transitions.row(
        session.before, session.agent, session.certain, earlier=session.earlier
    )
    step = np.asarray(row[1:] / max(1e-9, 1.0 - float(row[0])))
    best = np.argsort(-step, kind="stable")[:_NEXT]
    return [(int(at) + 1, float(step[at])) for at in best if step[at] > 0.0]

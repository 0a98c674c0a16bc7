"""
The TTL arm of `scout bench engine`: what a session just used is kept for a fixed time.

As Continuum (arXiv 2511.02230) does it, in the same queue as Scout's order and with the same
knowledge of sessions: while a session's tool runs, the blocks of its last request go after all
others; when the time is over, or the session, they go by least recent use.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from scout_server.policy import PolicyCore
from scout_server.policy.scoring import Scoring
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.tenant import Tenant

__all__ = ["TTL_S", "TtlScheduler", "TtlScoring", "keep_by_time"]

TTL_S = 4.0
"""How long a session's last blocks are kept, in seconds."""
_PAUSE_S = 0.1


class TtlScoring(Scoring):
    """Scores 1 what a session in its gap used last, for *ttl_s*; everything else 0."""

    def __init__(self, scoring: Scoring, *, ttl_s: float) -> None:
        self.__dict__.update(scoring.__dict__)
        self._ttl_s = ttl_s

    def renew(self, tenants: Iterable[Tenant], now: float, *, force: bool = False) -> bool:
        """Let go what is over its time; return whether it was time to look."""
        self._order.scout = True  # whatever else decides: this arm has one order
        if self._renewed is not None and now - self._renewed < _PAUSE_S and not force:
            return False
        self._renewed = now
        self.renewals += 1
        scores: dict[int, float] = {}
        for tenant in tenants:
            for session in tenant.live.values():
                self._keep(tenant, session, now, scores.__setitem__)
        self.uses = scores
        self._order.rescore(scores)
        return True

    def touched(self, tenant: Tenant, session: Session, now: float) -> bool:
        """Keep what *session* used last, if its gap has begun; no client has a say in it: False."""

        def put(group: int, score: float) -> None:
            self.uses[group] = score
            self._order.set_score(group, score)

        self._keep(tenant, session, now, put)
        return False

    def _keep(
        self, tenant: Tenant, session: Session, now: float, put: Callable[[int, float], None]
    ) -> None:
        if session.phase != Phase.GAP or session.ended_said or now - session.since >= self._ttl_s:
            return
        chain = session.chains.get(session.agent)
        agent = tenant.agents.by_symbol.get(session.agent)
        if chain is not None:
            put(chain.group, 1.0)
        if agent is not None:
            for _, group in tenant.agents.segments(agent):
                put(group, 1.0)


def keep_by_time(core: PolicyCore, *, ttl_s: float = TTL_S) -> None:
    """Make *core* order by time to live instead of by Scout's scores."""
    core.settings = replace(core.settings, duel=False)
    core.scoring = TtlScoring(core.scoring, ttl_s=ttl_s)


class TtlScheduler:
    """Scout's scheduler for vLLM with the order of the TTL arm."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler, changed."""
        from scout_server.vllm import ScoutScheduler

        scheduler: Any = ScoutScheduler(*args, **kwargs)
        if scheduler.scout is not None:
            keep_by_time(scheduler.scout.core)
        return scheduler

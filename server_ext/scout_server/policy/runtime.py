"""The policy core of one replica: the one object that every adapter drives, from one thread."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from scout_sdk._hints import SessionEvent
from scout_server.policy.duel import Duel
from scout_server.policy.facts import (
    UNOWNED,
    Assignment,
    Finish,
    FinishFacts,
    RequestFacts,
    Segment,
)
from scout_server.policy.identity import GENERIC, chain_of, identify, parts_of
from scout_server.policy.learning import into_gap, learn, note_tool, say_final
from scout_server.policy.readout import AgentState, CoreState
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.scoring import Scoring
from scout_server.policy.sessions import Phase, Session
from scout_server.policy.tenant import Tenant
from scout_server.policy.underway import Underway
from scout_server.policy.usage import AgentTokens

__all__ = ["SNAPSHOT_VERSION", "PolicyCore", "PolicySettings"]

_MAX_REQUESTS = 65536
_MAX_ENDED = 4096
_MAX_TENANTS = 256
_REGRET_S = 60.0

SNAPSHOT_VERSION = 1
"""Version of what PolicyCore.snapshot returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of the policy core; every adapter has the same."""

    hints: bool = True
    """Use client hints. With *fingerprints* off too, eviction is exactly LRU."""
    fingerprints: bool = True
    """Recognise agents and sessions of unhinted requests by their prefixes."""
    max_agents: Annotated[int, Ge(1)] = 256
    """Agents remembered per tenant; the least recently used is forgotten."""
    max_sessions: Annotated[int, Ge(1)] = 4096
    """Sessions remembered per tenant; the least recently used is forgotten."""
    max_retained_share: Annotated[float, Ge(0), Le(1)] = 1.0
    """Largest share of the cache that one tenant keeps by what is known of it; 1: all of it."""
    min_predictability: Annotated[float, Ge(0), Le(1)] = 0.05
    """While the next agent is less predictable than this, eviction is exactly LRU."""
    duel: bool = True
    """Follow our order only while it beats LRU in shadow; off: follow it always."""
    duel_half_life: Annotated[float, Ge(1)] = 60.0
    """Requests after which a shadow hit counts half."""
    rescore_share: Annotated[float, Ge(0), Le(1)] = 1 / 48
    """Scores are renewed after this share of the cache's turnover time."""


class PolicyCore:
    """
    Learns from facts, orders the free blocks of one replica.

    Calls for one request come in this order: arrive, then any number of (segments, order.append...)
    as the engine hands its blocks back (preemption, end), then finish. `now` never goes back.
    """

    def __init__(
        self, settings: PolicySettings, *, capacity_blocks: int, block_tokens: int
    ) -> None:
        self.settings = settings
        self.block_tokens = block_tokens
        self.order = RetentionOrder(capacity_blocks)
        self._enabled = settings.hints or settings.fingerprints
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._requests: OrderedDict[str, Underway] = OrderedDict()
        self._ended: OrderedDict[str, Underway] = OrderedDict()
        self._groups = 0
        self._seen = self._hinted = self._recognised = self._regretted = 0
        self._tokens = AgentTokens()
        self.scoring = Scoring(
            self.order,
            rescore_share=settings.rescore_share,
            retained_share=settings.max_retained_share,
        )
        self.duel = self.new_duel(capacity_blocks)

    def new_duel(self, capacity_blocks: int) -> Duel:
        """Return a fresh duel between our orders and LRU in shadow pools of *capacity_blocks*."""
        return Duel(
            capacity_blocks,
            {"use": self.scoring.use, "rate": self.scoring.rate},
            half_life=self.settings.duel_half_life,
        )

    # ---- facts -----------------------------------------------------------------------------

    def arrive(self, facts: RequestFacts, *, now: float) -> Assignment:
        """Learn from a request's arrival; return whom it was taken for."""
        if not self._enabled:
            return Assignment(agent=None, session=None, from_hint=False)
        tenant = self.tenant(facts.tenant)
        hints = facts.hints if self.settings.hints else None
        blocks = facts.block_hashes
        session, agent, hinted = identify(
            tenant, hints, blocks, fingerprints=self.settings.fingerprints
        )
        chain = chain_of(
            tenant, session, agent, blocks, group=self._new_group, learn=not facts.warmup
        )
        parts = parts_of(tenant, agent, blocks)
        known = parts[-1][0] if parts and now - agent.last_used <= _REGRET_S else 0
        if chain.blocks and now - chain.last_used <= _REGRET_S:
            known = min(chain.blocks, len(blocks))
        if not facts.warmup:
            learn(tenant, session, agent, hints, now)
            if tenant.agents.learn(agent, blocks, session.key):
                parts = parts_of(tenant, agent, blocks)
            tenant.sessions.tail(chain, blocks)
            self._seen += 1
            self._hinted += hinted
            self._recognised += not hinted and agent.name != GENERIC
        request = Underway(
            tenant=tenant,
            session=session,
            agent=agent,
            chain=chain,
            parts=parts,
            blocks=len(blocks),
            total=len(blocks),
            known=known,
            final=hints is not None and hints.final,
            warmup=facts.warmup,
            prompt_tokens=facts.prompt_tokens,
        )
        self._requests[facts.request_id] = request
        if len(self._requests) > _MAX_REQUESTS:
            self.scoring.let_go(self._requests.popitem(last=False)[0])
        if not facts.warmup:
            chain.last_used = now
            session.running += 1
            self.scoring.arrivals += 1
        self.tick(now=now)
        return Assignment(agent=agent.name, session=session.key, from_hint=hinted)

    def segments(self, request_id: str, block_hashes: Sequence[Hashable]) -> list[Segment]:
        """
        Return the owners of a request's chain: segments in order, the last covers the rest.

        *block_hashes* has every full block so far, output included. Ask before its blocks are
        handed to `order`; unknown requests give one unowned segment.
        """
        total = len(block_hashes)
        request = self._requests.get(request_id)
        if request is None:
            return [Segment(total, UNOWNED)]
        return request.segments(total)

    def finish(self, facts: FinishFacts, *, now: float) -> None:
        """Learn from a request's end; unknown requests are ignored."""
        if facts.finish is Finish.PREEMPTED:
            held = self._requests.get(facts.request_id)
            if held is not None:
                groups = {held.chain.group, *(group for _, group in held.parts)}
                self.scoring.hold(facts.request_id, groups)
            return
        self.scoring.let_go(facts.request_id)
        request = self._requests.pop(facts.request_id, None)
        if request is None or request.warmup:
            return
        session, tenant = request.session, request.tenant
        if facts.cached_tokens is not None:
            lost = request.known - facts.cached_tokens // self.block_tokens
            self._regretted += max(0, lost)
            self._tokens.record(
                request.agent.name,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=min(facts.cached_tokens, request.prompt_tokens),
            )
        self._duel(request)
        session.running = max(0, session.running - 1)
        if session.running == 0 and session.phase != Phase.ENDED:
            session.phase = Phase.GAP
            session.since = request.ended = now
            finish, tools = request.said or (facts.finish, facts.tools)
            into_gap(session, request.agent, finish, tools, now)
            self._ended[facts.request_id] = request
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)
        if request.final or session.ended_said:
            say_final(tenant, session)
        self._touched(tenant, session, now)

    def tools(
        self,
        request_id: str,
        finish: Finish,
        tools: tuple[tuple[str, float | None], ...],
        *,
        now: float,
    ) -> bool:
        """
        Learn how a request's output ends, where an engine cannot read it itself.

        *tools* as in FinishFacts; before or after `finish`. False, and nothing learnt, when the
        request is not known or its session has gone on, or its client said more by then.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.said = (finish, tools)
            return True
        request = self._ended.pop(request_id, None)
        if request is None:
            return False
        session = request.session
        if session.running or session.phase != Phase.GAP or session.calls:
            return False
        if session.since != request.ended:
            return False
        into_gap(session, request.agent, finish, tools, now)
        self._touched(request.tenant, session, now)
        return True

    def knows(self, session: str, *, tenant: str = "") -> bool:
        """Whether a request of *session* came here; asking changes nothing."""
        owner = self._tenants.get(tenant)
        found = None if owner is None else owner.sessions.get(session)
        return found is not None and found.turns > 0

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Learn from the side channel; unknown sessions are remembered within bounds."""
        if not self.settings.hints:
            return
        owner = self.tenant(tenant)
        session = owner.sessions.named(event.session, hinted=True)
        if event.tool is not None:
            note_tool(session, event.tool, max(0.0, event.age_s), now)
        if not session.turns:
            if event.final:  # its requests failed, or went elsewhere: nothing is left to know
                owner.sessions.drop(session)
            return
        if event.final:
            say_final(owner, session)
        self._touched(owner, session, now)

    def _touched(self, tenant: Tenant, session: Session, now: float) -> None:
        """Score a session's chains anew, in the shadows too where its client had a say."""
        if self.scoring.touched(tenant, session, now):
            self.duel.changed(session.groups.values())

    def tick(self, *, now: float) -> None:
        """Do the work that need not wait for an eviction; call once per engine step."""
        if self._enabled and self.scoring.renew(self._tenants.values(), now):
            self.duel.rescored()

    def refresh(self, *, now: float) -> list[Tenant]:
        """Renew the scores at once, for a decision in idle time; return all tenants."""
        tenants = list(self._tenants.values())
        if self._enabled and self.scoring.renew(tenants, now, force=True):
            self.duel.rescored()
        return tenants

    # ---- readout and persistence -----------------------------------------------------------

    def state(self, *, now: float) -> CoreState:
        """Return what the core knows, frozen."""
        mode = "off" if not self._enabled else "scout" if self.order.scout else "lru"
        following = self.scoring.following if self.order.scout else None
        agents: list[AgentState] = []
        phases = {Phase.RUNNING: 0, Phase.GAP: 0, Phase.ENDED: 0}
        for tenant in self._tenants.values():
            agents.extend(
                AgentState(
                    tenant=tenant.name,
                    name=agent.name,
                    hinted=agent.hinted,
                    anchor_blocks=len(agent.anchor),
                    uses=agent.uses,
                    score=max((self.order.score(g) for _, g in agent.segments), default=0.0),
                    idle_s=max(0.0, now - agent.last_used),
                )
                for agent in tenant.agents
            )
            for session in tenant.sessions:
                phases[session.phase] += 1
        agents.sort(key=lambda agent: (-agent.uses, agent.tenant, agent.name))
        return CoreState(
            mode=mode,
            following=following,
            predictability=self.predictability,
            agents=tuple(agents),
            sessions_running=phases[Phase.RUNNING],
            sessions_gap=phases[Phase.GAP],
            sessions_ended=phases[Phase.ENDED],
            horizon_s=self.scoring.horizon,
            evicted_blocks=self.order.popped,
            renewals=self.scoring.renewals,
            shadow_requests=self.duel.requests,
            shadow_hits=dict(self.duel.hits),
            shadow_hits_lru=self.duel.hits_lru,
            shadow_leads=dict(self.duel.leads),
            regretted_blocks=self._regretted,
            clipped_blocks=sum(self.scoring.clipped.values()),
            agent_tokens=self._tokens.totals(),
            requests=self._seen,
            requests_hinted=self._hinted,
            requests_recognised=self._recognised,
        )

    @property
    def predictability(self) -> float:
        """R in [0, 1]: how well the next agent can be told, for the tenant last seen busiest."""
        busiest = max(self._tenants.values(), key=lambda tenant: tenant.started, default=None)
        return busiest.transitions.predictability if busiest is not None else 0.0

    def snapshot(self) -> dict[str, object]:
        """Return what was learnt as plain data; live sessions and blocks are not in it."""
        return {
            "version": SNAPSHOT_VERSION,
            "tenants": {name: tenant.snapshot() for name, tenant in self._tenants.items()},
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a snapshot; ValueError (and no change) when it is damaged or too new."""
        if state.get("version") != SNAPSHOT_VERSION:
            msg = f"snapshot version {state.get('version')!r}; supported: {SNAPSHOT_VERSION}"
            raise ValueError(msg)
        tenants = state.get("tenants")
        if not isinstance(tenants, dict):
            raise ValueError("field 'tenants' of the snapshot is damaged")
        restored: dict[str, Tenant] = {}
        for name, value in list(tenants.items())[-_MAX_TENANTS:]:
            tenant = self._new_tenant(str(name))
            try:
                tenant.restore(value)
            except (AttributeError, KeyError, TypeError, OverflowError, ValueError) as error:
                raise ValueError(f"tenant {name!r} of the snapshot is damaged: {error}") from error
            restored[str(name)] = tenant
        self._tenants.update(restored)

    # ---- identity --------------------------------------------------------------------------

    def tenant(self, name: str) -> Tenant:
        """Return what is learnt about tenant *name*, made when new."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            self._tenants.move_to_end(name)
            return tenant
        tenant = self._tenants[name] = self._new_tenant(name)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return tenant

    def _new_tenant(self, name: str) -> Tenant:
        return Tenant(
            name,
            max_agents=self.settings.max_agents,
            max_sessions=self.settings.max_sessions,
            new_group=self._new_group,
        )

    def _new_group(self) -> int:
        self._groups += 1
        return self._groups

    # ---- whom to follow --------------------------------------------------------------------

    def _duel(self, request: Underway) -> None:
        parts, final = request.owners()
        self.duel.step(parts, final)
        bar = self.settings.min_predictability
        predictable = any(each.transitions.regular >= bar for each in self._tenants.values())
        if self.settings.duel:
            leader = self.duel.leader
            self.order.scout = predictable and leader is not None
            if leader is not None and leader != self.scoring.following:
                self.scoring.follow(leader)
        else:
            self.order.scout = predictable

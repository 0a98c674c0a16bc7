"""Whose a request is: its session, its agent, and the chain of blocks that it continues."""

from collections.abc import Callable, Hashable, Sequence

from scout_sdk._hints import Hints
from scout_server.policy.agents import Agent, common_prefix
from scout_server.policy.facts import Segment
from scout_server.policy.sessions import Chain, Session
from scout_server.policy.tenant import Tenant

__all__ = ["GENERIC", "chain_of", "identify", "parts_of"]

GENERIC = "~"
"""The agent of requests that nothing is known of."""


def identify(
    tenant: Tenant, hints: Hints | None, blocks: Sequence[Hashable], *, fingerprints: bool
) -> tuple[Session, Agent, bool]:
    """Return whose request it is, and whether a hint said so; made when new."""
    name = (hints.agent or hints.path) if hints is not None else None
    session = agent = None
    if name:
        agent = tenant.agents.named(name, hinted=True)
    if hints is not None and hints.session:
        session = tenant.sessions.named(hints.session, hinted=True)
    hinted = session is not None or agent is not None
    if fingerprints and (session is None or agent is None):
        chain = tenant.sessions.continued(blocks)
        if chain is not None and session is None:
            session = tenant.sessions.named(chain.session.key, hinted=False)
        if agent is None and chain is not None and chain.session is session:
            agent = chain.agent
        if agent is None:
            agent = tenant.agents.discover(blocks)
    if session is None:
        session = tenant.sessions.fresh()
    if agent is None or tenant.agents.find(agent.name) is not agent:
        agent = tenant.agents.named(GENERIC, hinted=False)
    return session, agent, hinted


def chain_of(
    tenant: Tenant,
    session: Session,
    agent: Agent,
    blocks: Sequence[Hashable],
    *,
    group: Callable[[], int],
    learn: bool,
) -> Chain:
    """Return the chain that *blocks* continue; a new one, with a new *group*, if they do not."""
    current = session.chains.get(agent.symbol)
    found = None
    if current is not None and current.agent is agent:
        if _continues(current, blocks):
            found = current
        else:
            for old in session.old:
                if old.agent is agent and _continues(old, blocks):
                    found = old
                    break
        if learn:
            agent.returned(extended=found is not None)
    if found is not None:
        found.superseded = False
        return found
    return tenant.sessions.start_chain(session, agent, group())


def parts_of(tenant: Tenant, agent: Agent, blocks: Sequence[Hashable]) -> list[Segment]:
    """
    Return the parts of *agent*'s anchor that *blocks* start with.

    The list is the table's own: read it only.
    """
    segments = tenant.agents.segments(agent)
    shared = common_prefix(agent.anchor, blocks)
    if shared == len(agent.anchor):
        return segments
    return [part for part in segments if part[0] <= shared]


def _continues(chain: Chain, blocks: Sequence[Hashable]) -> bool:
    """Whether *blocks* start with what *chain* had, but for perhaps its last block."""
    n, tails, length = chain.blocks, chain.tails, len(blocks)
    if tails and n <= length and blocks[n - 1] == tails[0]:
        return True
    return len(tails) > 1 and n - 1 <= length and bool(blocks[n - 2] == tails[1])

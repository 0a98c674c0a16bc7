"""What is learnt of a session when it comes, goes, or says something."""

import math
from collections.abc import Sequence

from scout_sdk._hints import Hints, ToolEvent, ToolState
from scout_server.policy.agents import Agent
from scout_server.policy.facts import Finish
from scout_server.policy.sessions import Phase, Promise, Session
from scout_server.policy.tenant import Tenant
from scout_server.policy.transitions import END

__all__ = ["into_gap", "learn", "note_tool", "say_final"]

_WITHOUT_TOOLS = {finish: f"{finish.value}:" for finish in Finish}


def learn(tenant: Tenant, session: Session, agent: Agent, hints: Hints | None, now: float) -> None:
    """Learn from a request of *session* to *agent*: who followed whom, and how long it was away."""
    turn = hints.turn if hints is not None else None
    if turn is not None and session.last_turn == (agent.symbol, turn):
        return  # a retry
    session.last_turn = (agent.symbol, turn)
    if session.phase == Phase.ENDED:
        tenant.transitions.retract(session.ended_by, END)
        tenant.gaps.observe_end(session.kind, -1.0)
        tenant.lengths.ended(session.turns, -1.0)
    if session.ended_said:
        trust = tenant.trust(session.agent)
        trust.final_kept = max(0.0, trust.final_kept - 1.0)
        session.ended_said = False
    if session.turns:
        if session.running == 0 and session.phase != Phase.RUNNING:
            if session.promise is not None:
                said, back = session.promise.said, session.promise.back
                own = tenant.gaps.density(session.kind, max(0.05, now - said))
                tenant.trust(session.agent).learn(back - said, now - said, own)
            tenant.gaps.observe(session.kind, max(0.0, now - session.since))
        tenant.lengths.returned(session.turns)
        tenant.gaps.observe_cycle(now - session.arrived)
        tenant.transitions.observe(
            session.before, session.agent, agent.symbol, earlier=session.earlier
        )
    else:
        tenant.transitions.observe(END, END, agent.symbol)
        tenant.started += 1
    session.earlier, session.before = session.before, session.agent
    session.agent = agent.symbol
    session.turns += 1
    session.phase = Phase.RUNNING
    session.since = session.arrived = now
    session.promise = None
    session.calls.clear()
    session.certain = ()
    if hints is not None and hints.next_agents:
        known = (tenant.agents.find(each) for each in hints.next_agents[:16])
        session.certain = tuple(sorted({each.symbol for each in known if each is not None}))
    agent.uses += 1
    agent.last_used = now
    tenant.live[session.key] = session
    tenant.live.move_to_end(session.key)


def say_final(tenant: Tenant, session: Session) -> None:
    """
    Note that the client of *session* said it was done; believed by its track record.

    While a request of it runs it goes on: say it again when that ends.
    """
    if not session.turns:
        return
    trust = tenant.trust(session.agent)
    if not session.ended_said:
        session.ended_said = True
        trust.final_said += 1.0
        trust.final_kept += 1.0
    if trust.final > 0.5 and session.running == 0:
        tenant.end(session)


def note_tool(session: Session, tool: ToolEvent, age: float, now: float) -> None:
    """
    Note that a tool of *session* started, goes on or ended, *age* seconds ago.

    What remains of it is as of *now*.
    """
    call = tool.call_id or tool.name
    # A request and the side channel race: what was before the session's last request may be told
    # after it, and then says which calls are open, but nothing of the gap that is now.
    late = now - age < session.arrived
    if tool.state in (ToolState.ENDED, ToolState.FAILED):
        if call in session.calls or not late:
            session.calls.pop(call, None)
            _promise(session, now - age)
        if not session.calls and session.running == 0 and not late:
            session.kind = f"done:{tool.name[:64]}"
            session.since = now - age
        return
    back = None
    if tool.remaining_s is not None and math.isfinite(tool.remaining_s):
        back = now + max(0.0, tool.remaining_s)
    if len(session.calls) < 64 or call in session.calls:
        session.calls[call] = back
    if session.running == 0 and not late:
        session.kind = f"tool:{tool.name[:64]}"
    if any(each is not None for each in session.calls.values()):
        _promise(session, now - age)


def _promise(session: Session, said: float) -> None:
    """Say when the open calls of *session* will all be back, as far as that is known."""
    known = [each for each in session.calls.values() if each is not None]
    session.promise = Promise(said=said, back=max(known)) if known else None


def into_gap(
    session: Session,
    agent: Agent,
    finish: Finish,
    tools: Sequence[tuple[str, float | None]],
    now: float,
) -> None:
    """Say what kind of gap follows a request of *session*, and until when its tools take."""
    session.kind = agent.kind = _WITHOUT_TOOLS[finish]
    if not tools:
        return
    names = "+".join(sorted({name for name, _ in tools}))[:64]
    session.kind = agent.kind = session.kind + names
    seconds = [s for _, s in tools if s is not None and math.isfinite(s) and s >= 0]
    if seconds:
        session.promise = Promise(said=now, back=now + max(seconds))

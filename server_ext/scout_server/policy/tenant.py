"""Everything learnt about one tenant; nothing of it is shared with another."""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from scout_server.policy.agents import Agent, AgentTable
from scout_server.policy.gaps import GapModel, HintTrust
from scout_server.policy.lengths import SessionLengths
from scout_server.policy.sessions import Phase, Session, SessionTable
from scout_server.policy.transitions import END, Transitions

__all__ = ["Tenant"]


class Tenant:
    """Agents, sessions, transitions, gaps and the worth of hints of one tenant."""

    def __init__(
        self, name: str, *, max_agents: int, max_sessions: int, new_group: Callable[[], int]
    ) -> None:
        self.name = name
        self.agents = AgentTable(max_agents, new_group, self._forget_agent)
        self.sessions = SessionTable(max_sessions, self._forget_session)
        self.transitions = Transitions(max_agents)
        self.gaps = GapModel()
        self.lengths = SessionLengths()
        self.live: OrderedDict[str, Session] = OrderedDict()
        """Sessions that may come back, in the order of their last arrival."""
        self.started = 0
        """Sessions begun so far."""
        self.unnoticed = 0.0
        """How many live sessions have probably ended, as last computed."""
        self._trust: dict[int, HintTrust] = {}

    def trust(self, symbol: int) -> HintTrust:
        """Return the track record of hints of sessions that used agent *symbol* last."""
        trust = self._trust.get(symbol)
        if trust is None:
            trust = self._trust[symbol] = HintTrust()
        return trust

    def end(self, session: Session) -> None:
        """Take *session* for ended until it proves otherwise."""
        if session.phase == Phase.ENDED:
            return
        session.phase = Phase.ENDED
        session.ended_by = session.agent
        self.transitions.observe(session.before, session.agent, END, earlier=session.earlier)
        self.gaps.observe_end(session.kind)
        self.lengths.ended(session.turns)
        self.live.pop(session.key, None)

    def bury(self, now: float) -> None:
        """End the sessions that were silent for longer than almost any gap."""
        patience = self.gaps.patience()
        for session in list(self.live.values()):
            if now - session.arrived <= patience:
                break
            if session.running or now - session.since <= patience:
                continue
            promise = session.promise
            if promise is not None and now - promise.back <= patience:
                continue
            self.end(session)

    def snapshot(self) -> dict[str, object]:
        """Return what outlives a restart as plain data."""
        return {
            "agents": [
                [agent.name, agent.symbol, agent.uses, agent.extends, agent.returns]
                for agent in self.agents
                if agent.hinted
            ],
            "transitions": self.transitions.snapshot(),
            "gaps": self.gaps.snapshot(),
            "lengths": self.lengths.snapshot(),
            "trust": {str(symbol): trust.snapshot() for symbol, trust in self._trust.items()},
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a snapshot; raises one of several errors when it is damaged."""
        transitions, gaps = state["transitions"], state["gaps"]
        agents, trust = state["agents"], state["trust"]
        if not (isinstance(transitions, dict) and isinstance(gaps, dict)):
            raise ValueError("a field is no mapping")
        if not (isinstance(agents, list) and isinstance(trust, dict)):
            raise ValueError("agents or trust have the wrong type")
        self.transitions.restore(transitions)
        self.gaps.restore(gaps)
        lengths = state.get("lengths")
        if isinstance(lengths, dict):
            self.lengths.restore(lengths)
        for name, symbol, uses, extends, returns in agents:
            agent = self.agents.restore(str(name), int(symbol))
            agent.uses, agent.extends, agent.returns = int(uses), float(extends), float(returns)
        kept = {END, *(agent.symbol for agent in self.agents)}
        for symbol in range(1, self.transitions.used + 1):
            if symbol not in kept:
                self.transitions.forget(symbol)
        for symbol, value in trust.items():
            if int(symbol) in kept:
                self.trust(int(symbol)).restore(value)

    def _forget_session(self, session: Session) -> None:
        self.live.pop(session.key, None)

    def _forget_agent(self, agent: Agent) -> None:
        self.transitions.forget(agent.symbol)
        self._trust.pop(agent.symbol, None)
        for session in self.sessions:
            session.chains.pop(agent.symbol, None)
            session.groups.pop(agent.symbol, None)
            if session.agent == agent.symbol:
                session.agent = 0
            if session.before == agent.symbol:
                session.before = 0
            if session.earlier == agent.symbol:
                session.earlier = 0

"""Live sessions, and the chains of blocks that they have built."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from scout_server.policy.agents import Agent

__all__ = ["Chain", "Phase", "Promise", "Session", "SessionTable"]

_MAX_CHAINS = 64


class Phase:
    """Where a session stands."""

    RUNNING = "running"
    GAP = "gap"
    ENDED = "ended"


@dataclass(slots=True)
class Promise:
    """A client's word on when a session comes back; absolute times on our clock."""

    said: float
    back: float


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks that one session has built with one agent, past the agent's anchor."""

    group: int
    agent: Agent | None
    session: "Session"
    blocks: int = 0
    tails: tuple[Hashable, ...] = ()
    last_used: float = 0.0
    superseded: bool = False
    """True once a later request of the same session and agent left it behind."""


@dataclass(slots=True, eq=False)
class Session:
    """One agent program."""

    key: str
    hinted: bool
    earlier: int = 0
    """Symbol of the agent before *before*; 0 is the start."""
    before: int = 0
    """Symbol of the agent before the last one; 0 is the start."""
    agent: int = 0
    """Symbol of the agent used last; 0 before the first."""
    phase: str = Phase.GAP
    running: int = 0
    since: float = 0.0
    """When the current gap began (the last request's end, or its arrival while it runs)."""
    kind: str = ""
    """Class of the current gap."""
    promise: Promise | None = None
    ended_said: bool = False
    """True when its client said that it would send nothing more."""
    arrived: float = 0.0
    """When its last request arrived."""
    last_turn: tuple[int, int | None] | None = None
    calls: dict[str, float | None] = field(default_factory=dict)
    """Open tool calls and when they should be back."""
    certain: tuple[int, ...] = ()
    ended_by: int = 0
    """Symbol whose END was counted for it, to be taken back if it returns."""
    chains: dict[int, Chain] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    """The groups of `chains`."""
    old: list[Chain] = field(default_factory=list)
    turns: int = 0


class SessionTable:
    """The sessions of one tenant; bounded, the least recently used is forgotten."""

    def __init__(self, limit: int, forgotten: Callable[[Session], None]) -> None:
        self._limit = limit
        self._forgotten = forgotten
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._tails: dict[Hashable, Chain] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: str) -> Session | None:
        """Return the session *key* if it is known."""
        return self._sessions.get(key)

    def named(self, key: str, *, hinted: bool) -> Session:
        """Return the session *key*, made when new."""
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.move_to_end(key)
            return session
        while len(self._sessions) >= self._limit:
            _, old = self._sessions.popitem(last=False)
            self.release(old)
            self._forgotten(old)
        session = self._sessions[key] = Session(key=key, hinted=hinted)
        return session

    def fresh(self) -> Session:
        """Make a session that no client named."""
        self._made += 1
        return self.named(f"~{self._made}", hinted=False)

    def drop(self, session: Session) -> None:
        """Forget *session*."""
        if self._sessions.pop(session.key, None) is not None:
            self.release(session)

    def release(self, session: Session) -> None:
        """Make the chains of *session* unfindable."""
        for chain in (*session.chains.values(), *session.old):
            self._untail(chain)

    def continued(self, blocks: Sequence[Hashable]) -> Chain | None:
        """Return the chain that *blocks* continue: the one with the longest known end."""
        tails = self._tails
        for block in reversed(blocks):
            if block in tails:
                return tails[block]
        return None

    def tail(self, chain: Chain, blocks: Sequence[Hashable]) -> None:
        """Let requests that start with all of *blocks* but perhaps the last be found as *chain*."""
        self._untail(chain)
        n = chain.blocks = len(blocks)
        if n > 1:
            last, second = blocks[n - 1], blocks[n - 2]
            chain.tails = (last, second)
            self._tails[last] = self._tails[second] = chain
        elif n:
            chain.tails = (blocks[0],)
            self._tails[blocks[0]] = chain

    def _untail(self, chain: Chain) -> None:
        for block in chain.tails:
            if self._tails.get(block) is chain:
                del self._tails[block]
        chain.tails = ()

    def start_chain(self, session: Session, agent: Agent | None, group: int) -> Chain:
        """Begin a chain of *session* with *agent*; the one before it is superseded."""
        symbol = agent.symbol if agent is not None else 0
        old = session.chains.get(symbol)
        if old is not None:
            old.superseded = True
            session.old.append(old)
            while len(session.old) > _MAX_CHAINS:
                self._untail(session.old.pop(0))
        chain = session.chains[symbol] = Chain(group=group, agent=agent, session=session)
        session.groups[symbol] = group
        return chain

"""Who sends a request: agents, told by hint or recognised by the prefix that they repeat."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from scout_server.policy.facts import Segment

__all__ = ["Agent", "AgentTable", "common_prefix"]

_WINDOW = 5  # prefix lengths that an anchor is judged by
_REPRESENTATIVE_BLOCKS = 1024
_REPRESENTATIVES = 256
_LEVEL_HORIZONS = 4.0
LEVEL_SHARE = 0.5


def common_prefix(one: Sequence[Hashable], two: Sequence[Hashable], *, guess: int = 0) -> int:
    """Return how many leading blocks two chains share, given that hashes are chained."""
    low, high = 0, min(len(one), len(two))
    if high and one[high - 1] == two[high - 1]:
        return high
    if 0 < guess < high and one[guess - 1] == two[guess - 1]:
        if one[guess] != two[guess]:
            return guess
        low = guess
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == two[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True, eq=False)
class Agent:
    """One agent of one tenant."""

    symbol: int
    """Its number in the tenant's transition learner, from 1."""
    name: str
    hinted: bool
    anchor: tuple[Hashable, ...] = ()
    """Hashes of its fixed prefix; empty while unknown."""
    segments: list[Segment] = field(default_factory=list)
    """The anchor's parts; parts shared with other agents are apart."""
    old_groups: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    """Groups that earlier segmentations used; blocks may still carry them."""
    version: int = -1
    example: tuple[Hashable, ...] = ()
    example_session: object = None
    shared: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    uses: int = 0
    last_used: float = 0.0
    level: float = 0.0
    scored: float = -1.0
    kind: str = ""
    """Class of the gap after its last request."""
    extends: float = 1.0
    """How many of its sessions' later requests extended their chain, and how many there were."""
    returns: float = 1.3

    @property
    def extension(self) -> float:
        """Probability that a session's next request to this agent continues its chain."""
        return self.extends / self.returns

    def smooth(self, score: float, now: float, horizon: float) -> float:
        """
        Return *score* drawn towards its mean over some turnover times.

        What is evicted in a low moment is missing at the next high one, so a moment counts less
        than the level about which scores swing.
        """
        fade = math.exp(-max(0.0, now - self.scored) / (_LEVEL_HORIZONS * horizon))
        self.level = score if self.scored < 0.0 else fade * self.level + (1.0 - fade) * score
        self.scored = now
        return (1.0 - LEVEL_SHARE) * score + LEVEL_SHARE * self.level

    def rate(self, now: float, horizon: float) -> float:
        """Return how often it is used, as a share that fades slowly once it is not used at all."""
        idle = max(0.0, now - self.last_used - 4.0 * horizon)
        return self.uses / (1.0 + idle / (4.0 * horizon))

    def returned(self, *, extended: bool) -> None:
        """Learn whether a session's return to it continued the session's chain."""
        self.returns = 0.97 * self.returns + 1.0
        self.extends = 0.97 * self.extends + (1.0 if extended else 0.0)


class AgentTable:
    """
    The agents of one tenant; bounded, the least recently used is forgotten.

    An agent's anchor is the longest common prefix of its requests over different sessions. Without
    hints, an agent is an anchor that two sessions had in common.
    """

    def __init__(
        self, limit: int, new_group: Callable[[], int], forgotten: Callable[[Agent], None]
    ) -> None:
        self._limit = limit
        self._new_group = new_group
        self._forgotten = forgotten
        self._agents: OrderedDict[str, Agent] = OrderedDict()
        self.by_symbol: dict[int, Agent] = {}
        self._unused = list(range(limit, 0, -1))
        self._carriers: dict[Hashable, int] = {}  # anchor block -> agents whose anchor has it
        self._ends: dict[Hashable, Agent] = {}  # last block of an anchor -> unhinted agent
        self._nodes: dict[Hashable, int] = {}  # last block of a part -> group
        self._version = 0
        self._examples: deque[tuple[Hashable, ...]] = deque()
        self._passed: dict[Hashable, int] = {}  # block of an example -> sessions that began with it

    def __len__(self) -> int:
        return len(self._agents)

    def __iter__(self) -> Iterator[Agent]:
        return iter(list(self._agents.values()))

    def named(self, name: str, *, hinted: bool) -> Agent:
        """Return the agent called *name*, made when new."""
        agent = self._agents.get(name)
        if agent is not None:
            self._agents.move_to_end(name)
            return agent
        if not self._unused:
            self._drop(next(iter(self._agents)))
        agent = Agent(symbol=self._unused.pop(), name=name, hinted=hinted)
        self._agents[name] = agent
        self.by_symbol[agent.symbol] = agent
        return agent

    def restore(self, name: str, symbol: int) -> Agent:
        """Make the hinted agent *name* with the number that it had; ValueError if it is taken."""
        if symbol not in self._unused or name in self._agents:
            raise ValueError(f"agent {name!r} cannot have symbol {symbol}")
        self._unused.remove(symbol)
        agent = self._agents[name] = Agent(symbol=symbol, name=name, hinted=True)
        self.by_symbol[symbol] = agent
        return agent

    def find(self, name: str) -> Agent | None:
        """Return the agent called *name* if it is known."""
        return self._agents.get(name)

    def recognise(self, chain: Sequence[Hashable]) -> Agent | None:
        """Return the agent with the longest anchor that *chain* starts with."""
        found = None
        for block in chain:
            if block not in self._carriers:
                break
            found = self._ends.get(block, found)
        if found is not None:
            self._agents.move_to_end(found.name)
        return found

    def discover(self, chain: Sequence[Hashable]) -> Agent | None:
        """
        Recognise the agent of a new, unhinted session by *chain*, and learn from the chain.

        A prefix that another session began with makes an agent; a longer one than a known agent's
        anchor does so only when two sessions had it before.
        """
        known = self.recognise(chain)
        depth = len(known.anchor) if known is not None else 0
        need = 1 if known is None else 2
        shared = 0
        for place, block in enumerate(chain[:_REPRESENTATIVE_BLOCKS]):
            if self._passed.get(block, 0) < need:
                break
            shared = place + 1
        if shared > depth:
            name = "~" + blake2b(repr(chain[shared - 1]).encode(), digest_size=6).hexdigest()
            agent = self.named(name, hinted=False)
            if not agent.anchor:
                self._set_anchor(agent, tuple(chain[:shared]))
            known = agent
        self._remember(chain[:_REPRESENTATIVE_BLOCKS])
        return known

    def learn(self, agent: Agent, chain: Sequence[Hashable], session: object) -> bool:
        """Learn *agent*'s anchor from one of its requests; return whether it changed."""
        known = agent.example
        if not agent.hinted or (known and session == agent.example_session):
            return False
        agent.example, agent.example_session = tuple(chain), session
        if not known:
            return False
        anchor = agent.anchor
        agent.shared.append(common_prefix(known, chain, guess=len(anchor)))
        ordered = sorted(agent.shared)
        length = ordered[0] if len(ordered) < _WINDOW else ordered[2]
        same = length == len(anchor) <= len(chain)
        if same and (not length or anchor[-1] == chain[length - 1]):
            return False
        self._set_anchor(agent, tuple(chain[:length]))
        return True

    def segments(self, agent: Agent) -> list[Segment]:
        """Return the parts of *agent*'s anchor."""
        if agent.version != self._version:
            self._segment(agent)
        return agent.segments

    def _segment(self, agent: Agent) -> None:
        agent.version = self._version
        parts: list[Segment] = []
        carriers, anchor = self._carriers, agent.anchor
        for place, block in enumerate(anchor):
            if place + 1 == len(anchor) or carriers[anchor[place + 1]] != carriers[block]:
                group = self._nodes.get(block)
                if group is None:
                    group = self._nodes[block] = self._new_group()
                parts.append(Segment(place + 1, group))
        kept = {group for _, group in parts}
        for _, group in agent.segments:
            if group not in kept and group not in agent.old_groups:
                agent.old_groups.append(group)
        agent.segments = parts

    def _set_anchor(self, agent: Agent, anchor: tuple[Hashable, ...]) -> None:
        self._unset_anchor(agent)
        agent.anchor = anchor
        for block in anchor:
            self._carriers[block] = self._carriers.get(block, 0) + 1
        if anchor:
            self._ends[anchor[-1]] = agent
        self._version += 1

    def _unset_anchor(self, agent: Agent) -> None:
        for block in agent.anchor:
            left = self._carriers[block] - 1
            if left:
                self._carriers[block] = left
            else:
                del self._carriers[block]
                self._nodes.pop(block, None)
        if agent.anchor and self._ends.get(agent.anchor[-1]) is agent:
            del self._ends[agent.anchor[-1]]
        agent.anchor = ()
        self._version += 1

    def _drop(self, name: str) -> None:
        agent = self._agents.pop(name)
        self._unset_anchor(agent)
        del self.by_symbol[agent.symbol]
        self._unused.append(agent.symbol)
        self._forgotten(agent)

    def _remember(self, chain: Sequence[Hashable]) -> None:
        example = tuple(chain)
        self._examples.append(example)
        passed = self._passed
        for block in example:
            passed[block] = passed.get(block, 0) + 1
        if len(self._examples) > _REPRESENTATIVES:
            for block in self._examples.popleft():
                left = passed[block] - 1
                if left:
                    passed[block] = left
                else:
                    del passed[block]

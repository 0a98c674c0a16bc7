"""What all retention policies of the simulator share: chains, deadlines, shared prefixes."""

import heapq
import math
from collections.abc import Hashable, Sequence

from scout_sdk._hints import SessionEvent, ToolState
from scout_server.policy import (
    UNOWNED,
    Assignment,
    Finish,
    FinishFacts,
    PolicyCore,
    PolicySettings,
    RequestFacts,
    Segment,
)

__all__ = ["SessionCore", "chain_name"]


def chain_name(session: str, agent: str | None) -> str:
    """Return the name of the chain of *agent* in *session*."""
    return f"{session}\n{agent or ''}"


class SessionCore(PolicyCore):
    """
    Base of the retention policies: blocks belong to chains, chains have a deadline.

    A chain is what one agent of one session sends again and again.
    A subclass says until when a finished turn's blocks are kept. Kept blocks go last, those kept
    longest of all last; nothing is pinned: when only kept blocks are left, they go too. A prefix
    that several sessions of an agent have sent belongs to the agent, once, and is kept as long as
    any of them.
    """

    def __init__(self, *, capacity_blocks: int, block_tokens: int) -> None:
        settings = PolicySettings(hints=False, fingerprints=False)
        super().__init__(settings, capacity_blocks=capacity_blocks, block_tokens=block_tokens)
        self.order.scout = True
        self._kept_groups: dict[str, int] = {}
        self._kept_next = 1
        self._kept_requests: dict[str, str] = {}
        self._kept_sessions: dict[str, _Session] = {}
        self._kept_chains: dict[str, set[str]] = {}
        self._kept_anchors: dict[str, _Anchor] = {}
        self._kept_expiry: list[tuple[float, int, str]] = []

    def deadline(self, session: str, tool: str | None, tokens: int, now: float) -> float:
        """Return until when, in seconds of the clock, the session's blocks are kept."""
        raise NotImplementedError

    def learn(self, tool: str | None, gap_s: float) -> None:
        """Learn that a session came back *gap_s* after it had called *tool*."""

    def while_used(self, now: float) -> float:
        """Return the deadline of a chain whose turn waits or runs."""
        return math.inf

    def score(self, deadline: float, now: float) -> float:
        """Return the score of blocks kept until *deadline*; a higher one goes later."""
        return deadline if deadline > now else 0.0

    def arrive(self, facts: RequestFacts, *, now: float) -> Assignment:
        """Learn the gap of the session that came back."""
        hints = facts.hints
        if hints is None or hints.session is None:
            return Assignment(agent=None, session=None, from_hint=False)
        agent = hints.agent
        name = chain_name(hints.session, agent)
        self._kept_chains.setdefault(hints.session, set()).add(name)
        self._kept_requests[facts.request_id] = name
        session = self._kept_sessions.get(name)
        if session is None:
            session = self._kept_sessions[name] = _Session()
        elif session.ended_at is not None:
            self.learn(session.tool, now - session.ended_at)
        session.ended_at = session.tool = None
        session.tokens = facts.prompt_tokens
        session.agent = agent
        self._kept_share(name, agent, facts.block_hashes)
        self._kept_until(name, self.while_used(now), now)
        return Assignment(agent=agent, session=hints.session, from_hint=True)

    def _kept_share(self, name: str, agent: str | None, hashes: Sequence[Hashable]) -> None:
        if agent is None:
            return
        anchor = self._kept_anchors.get(agent)
        if anchor is None:
            self._kept_anchors[agent] = _Anchor(name, hashes)
        elif anchor.session != name:
            most = min(len(anchor.hashes), len(hashes))
            if anchor.blocks is not None:
                most = min(most, anchor.blocks)
            same = 0
            while same < most and anchor.hashes[same] == hashes[same]:
                same += 1
            anchor.blocks = same
            anchor.hashes = anchor.hashes[:same]

    def segments(self, request_id: str, block_hashes: Sequence[Hashable]) -> list[Segment]:
        """Return the agent's part, then the session's."""
        name = self._kept_requests.get(request_id)
        if name is None:
            return [Segment(len(block_hashes), UNOWNED)]
        session = self._kept_sessions.get(name)
        own = Segment(len(block_hashes), self._kept_group(name))
        anchor = self._kept_anchors.get(session.agent) if session and session.agent else None
        if anchor is None or not anchor.blocks or anchor.blocks >= len(block_hashes):
            return [own]
        return [
            Segment(anchor.blocks, self._kept_group(f"agent {session.agent}" if session else "")),
            own,
        ]

    def finish(self, facts: FinishFacts, *, now: float) -> None:
        """Keep the session's blocks as long as the policy says."""
        if facts.finish is Finish.PREEMPTED:
            return
        name = self._kept_requests.pop(facts.request_id, None)
        session = self._kept_sessions.get(name) if name is not None else None
        if name is None or session is None:
            return
        session.ended_at = now
        session.tool = facts.tools[0][0] if facts.tools else None
        tokens = session.tokens + facts.output_tokens
        self._kept_until(name, self.deadline(name, session.tool, tokens, now), now)

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Let go of a session that has ended; remember its tool."""
        if event.final:
            for name in sorted(self._kept_chains.pop(event.session, ())):
                self._kept_until(name, -1.0, now)
                self._kept_sessions.pop(name)
                self._kept_groups.pop(name, None)
        elif event.tool is not None and event.tool.state is ToolState.STARTED:
            for name in self._kept_chains.get(event.session, ()):
                chain = self._kept_sessions[name]
                if chain.ended_at == now:
                    chain.tool = event.tool.name

    def tick(self, *, now: float) -> None:
        """Let go of what has been kept long enough."""
        while self._kept_expiry and self._kept_expiry[0][0] <= now:
            at, _, name = heapq.heappop(self._kept_expiry)
            session = self._kept_sessions.get(name)
            if session is not None and session.deadline == at:
                self.order.set_score(self._kept_group(name), self.score(at, now))
            anchor = self._kept_anchors.get(name.removeprefix("agent "))
            if anchor is not None and name.startswith("agent ") and anchor.deadline == at:
                self.order.set_score(self._kept_group(name), self.score(at, now))

    def _kept_group(self, name: str) -> int:
        group = self._kept_groups.get(name)
        if group is None:
            group = self._kept_groups[name] = self._kept_next
            self._kept_next += 1
        return group

    def _kept_until(self, name: str, deadline: float, now: float) -> None:
        session = self._kept_sessions[name]
        session.deadline = deadline
        group = self._kept_group(name)
        self.order.set_score(group, self.score(deadline, now))
        if now < deadline < math.inf:
            heapq.heappush(self._kept_expiry, (deadline, group, name))
        if session.agent is not None:
            self._kept_shared(session.agent, deadline, now)

    def _kept_shared(self, agent: str, deadline: float, now: float) -> None:
        """Keep an agent's shared prefix as long as the chain that is kept longest."""
        anchor = self._kept_anchors.get(agent)
        if anchor is not None and now < deadline < math.inf and deadline > anchor.deadline:
            anchor.deadline = deadline
            key = f"agent {agent}"
            group = self._kept_group(key)
            self.order.set_score(group, self.score(deadline, now))
            heapq.heappush(self._kept_expiry, (deadline, group, key))


class _Session:
    """What a retention policy remembers of one session."""

    __slots__ = ("agent", "deadline", "ended_at", "tokens", "tool")

    def __init__(self) -> None:
        self.agent: str | None = None
        self.deadline = 0.0
        self.ended_at: float | None = None
        self.tokens = 0
        self.tool: str | None = None


class _Anchor:
    """The prefix that an agent's sessions share."""

    __slots__ = ("blocks", "deadline", "hashes", "session")

    def __init__(self, session: str, hashes: Sequence[Hashable]) -> None:
        self.session = session
        self.hashes = hashes
        self.blocks: int | None = None
        """None until a second session has been seen."""
        self.deadline = 0.0

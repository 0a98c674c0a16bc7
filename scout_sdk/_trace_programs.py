"""From requests as they start and end to the programs of a trace; bounded, on any clock."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from scout_sdk._hints import SessionEvent, ToolEvent, ToolState
from scout_sdk._trace import Program, Runs, Turn

__all__ = ["Programs", "Started"]

_MAX_OPEN = 16_384
_MAX_TURNS = 10_000
_MAX_WEIGHT = 400_000
_MAX_SUBSESSIONS = 1024
_MAX_TOOLS = 16
_MAX_NAME = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is known of a request when it starts."""

    prompt_tokens: int
    """0: not known yet; the end says."""
    session: str | None = None
    """None: it belongs to no session and is a program of its own."""
    parent: str | None = None
    """Session that spawned this one."""
    agent: str | None = None
    tenant: str = ""
    runs: Runs = ()
    tools: tuple[ToolEvent, ...] = ()
    """Tool calls of the session since its last request."""
    final: bool = False


@dataclass(slots=True)
class _Gap:
    """What is known of the time since a session's last turn."""

    tool: str | None = None
    expected_s: float | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """One program under way. Turns stand in the order of their ends: parents come first."""

    key: Hashable
    tenant: str
    root: str | None
    arrival: float
    touched: float
    turns: list[Turn] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    open: dict[str, "_Open"] = field(default_factory=dict)
    leaves: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Ended turns that no later one waited for."""
    gaps: OrderedDict[str, _Gap] = field(default_factory=OrderedDict)
    """By sub-session; "" is the program's own."""
    sessions: set[Hashable] = field(default_factory=set)
    weight: int = 1
    aborted: bool = False
    final: bool = False


@dataclass(slots=True)
class _Open:
    live: _Live
    facts: Started
    start: float
    sub: str
    parents: tuple[int, ...]
    gap_s: float
    gap: _Gap


class Programs:
    """
    Gathers turns into programs and hands each to *write* when it is over.

    A program is a session with those that it spawned. It is over when its session says so, after
    *idle_s* seconds without anything, or early when memory is short. A turn waited for every
    earlier turn of its session that nobody waited for yet; without any, for the one that ended
    last. Sessions are named by short hashes; a tenant is written as given. One thread at a time;
    times are seconds on one clock.
    """

    def __init__(
        self,
        write: Callable[[Program], None],
        *,
        idle_s: float = 600.0,
    ) -> None:
        """Begin a trace; its time is that of its first request."""
        self._write = write
        self._began: float | None = None
        self._idle_s = idle_s
        self._live: OrderedDict[Hashable, _Live] = OrderedDict()
        self._sessions: dict[Hashable, _Live] = {}
        self._requests: dict[str, _Open] = {}
        self._ended: OrderedDict[str, tuple[_Live, int]] = OrderedDict()
        self._weight = 0
        self._made = 0

    def __len__(self) -> int:
        """Return the number of programs under way."""
        return len(self._live)

    def start(self, request: str, facts: Started, *, now: float) -> None:
        """Note that *request* starts; ids of requests under way are unique."""
        if self._began is None:
            self._began = now
        live, sub = self._program(request, facts, now)
        gap = live.gaps.setdefault(sub, _Gap())
        for event in facts.tools:
            _hear(gap, event)
        parents = self._parents(live, sub)
        last = max((live.ends[p] for p in parents), default=live.arrival)
        opened = _Open(live, facts, now, sub, parents, max(0.0, now - last), replace(gap))
        for parent in parents:
            live.leaves.pop(parent, None)
        gap.tool = gap.expected_s = None
        live.open[request] = self._requests[request] = opened
        live.final = live.final or (facts.final and not sub)
        self._touch(live, now)
        while len(self._requests) > _MAX_OPEN:
            self._over(next(iter(self._live.values())))

    def end(
        self,
        request: str,
        *,
        now: float,
        output_tokens: int,
        aborted: bool = False,
        calls_tool: bool | None = None,
        tools: tuple[tuple[str, float | None], ...] = (),
        hit_tokens: int | None = None,
        prompt_tokens: int = 0,
        runs: Runs = (),
    ) -> None:
        """Note that *request* ended; unknown ones are ignored."""
        opened = self._requests.pop(request, None)
        if opened is None:
            return
        live, facts, gap = opened.live, opened.facts, opened.gap
        live.open.pop(request, None)
        index = len(live.turns)
        live.turns.append(
            Turn(
                agent=facts.agent,
                session=opened.sub,
                input_tokens=max(1, prompt_tokens or facts.prompt_tokens),
                output_tokens=output_tokens,
                hash_runs=runs or facts.runs,
                parents=opened.parents,
                gap_s=opened.gap_s,
                tool=gap.tool,
                tool_expected_s=gap.expected_s,
                calls_tool=calls_tool,
                service_s=round(max(0.0, now - opened.start), 6),
                hit_tokens=hit_tokens,
            )
        )
        live.ends.append(now)
        live.leaves[index] = None
        live.aborted = aborted
        weight = 1 + len(live.turns[-1].hash_runs)
        live.weight += weight
        self._weight += weight
        self._ended[request] = (live, index)
        if len(self._ended) > _MAX_TURNS:
            self._ended.popitem(last=False)
        _called(live.gaps.setdefault(opened.sub, _Gap()), tools)
        self._touch(live, now)
        if not live.open and (live.final or live.root is None or len(live.turns) >= _MAX_TURNS):
            self._over(live)
        while self._weight > _MAX_WEIGHT and self._live:
            self._over(next(iter(self._live.values())))

    def forget(self, request: str) -> None:
        """Take back the start of *request*: it failed, and whoever sent it may try again."""
        opened = self._requests.pop(request, None)
        if opened is None:
            return
        live = opened.live
        live.open.pop(request, None)
        for parent in opened.parents:
            live.leaves.setdefault(parent, None)
        live.gaps[opened.sub] = opened.gap
        if not live.open and (live.final or live.root is None or not live.turns):
            self._over(live)

    def tools(self, request: str, tools: tuple[tuple[str, float | None], ...]) -> None:
        """Note which tools a request that has ended calls, as far as that is known only later."""
        live, index = self._ended.get(request, (None, 0))
        if live is None or not tools or index >= len(live.turns):
            return
        live.turns[index] = turn = replace(live.turns[index], calls_tool=True)
        if index in live.leaves:  # nobody came back yet
            _called(live.gaps.setdefault(turn.session, _Gap()), tools)

    def event(self, event: SessionEvent, *, now: float, tenant: str = "") -> None:
        """Note what a client says of a session between its requests; strangers are ignored."""
        live = self._sessions.get((tenant, event.session))
        if live is None:
            return
        sub = "" if event.session == live.root else event.session
        if event.tool is not None:
            _hear(live.gaps.setdefault(sub, _Gap()), event.tool)
        if event.final and not sub:
            live.final = True
            if not live.open:
                self._over(live)
                return
        self._touch(live, now)

    def tick(self, *, now: float) -> None:
        """Write the programs of which nothing was heard for long."""
        while self._live:
            live = next(iter(self._live.values()))
            if now - live.touched < self._idle_s:
                return
            self._over(live)

    def close(self) -> None:
        """Write every program; those that were not done are marked."""
        for live in list(self._live.values()):
            self._over(live, done=False)

    def _program(self, request: str, facts: Started, now: float) -> tuple[_Live, str]:
        session, tenant = facts.session, facts.tenant
        key: Hashable = ("request", request) if session is None else (tenant, session)
        live = self._sessions.get(key)
        if live is None and facts.parent is not None and session is not None:
            live = self._sessions.get((tenant, facts.parent))
            if live is not None and len(live.sessions) < _MAX_SUBSESSIONS:
                live.sessions.add(key)
                self._sessions[key] = live
            else:
                live = None
        if live is None:
            live = _Live(key, tenant, session, now, now, sessions={key})
            self._live[key] = self._sessions[key] = live
            self._weight += live.weight
        return live, "" if session in (None, live.root) else str(session)

    def _parents(self, live: _Live, sub: str) -> tuple[int, ...]:
        turns = live.turns
        waited = [i for i in live.leaves if not sub or turns[i].session == sub]
        if waited:
            return tuple(sorted(waited))
        own = (i for i in range(len(turns) - 1, -1, -1) if turns[i].session == sub)
        last = next(own, len(turns) - 1)  # a spawned session: whatever ended last
        return (last,) if last >= 0 else ()

    def _touch(self, live: _Live, now: float) -> None:
        live.touched = now
        if live.key in self._live:
            self._live.move_to_end(live.key)

    def _over(self, live: _Live, *, done: bool = True) -> None:
        self._live.pop(live.key, None)
        self._weight -= live.weight
        for key in live.sessions:
            if self._sessions.get(key) is live:
                del self._sessions[key]
        broken = live.aborted or bool(live.open)
        for request in live.open:
            self._requests.pop(request, None)
        if not live.turns:
            return
        if not done and not live.final:
            broken = broken or live.turns[-1].calls_tool is True
        self._made += 1
        self._write(
            Program(
                program=str(self._made) + ("" if live.root is None else f"-{_short(live.root)}"),
                arrival_s=max(0.0, live.arrival - (self._began or 0.0)),
                tenant=live.tenant,
                aborted=broken,
                turns=tuple(
                    replace(t, session=_short(t.session)) if t.session else t for t in live.turns
                ),
            )
        )


def _short(session: str) -> str:
    """Return a name that is the same for the same session and does not tell it."""
    return hashlib.blake2s(session.encode("utf-8", "replace"), digest_size=5).hexdigest()


def _hear(gap: _Gap, event: ToolEvent) -> None:
    """Take in one change in the life of a tool call."""
    gap.tool = event.name[:_MAX_NAME]
    if event.remaining_s is not None and event.state is ToolState.STARTED:
        gap.expected_s = max(event.remaining_s, gap.expected_s or 0.0)


def _called(gap: _Gap, tools: tuple[tuple[str, float | None], ...]) -> None:
    """Take in the tool calls of a reply: the longest of those whose time is known."""
    for name, expected in tools[:_MAX_TOOLS]:
        if gap.tool is None or (expected or 0.0) > (gap.expected_s or 0.0):
            gap.tool = name[:_MAX_NAME]
        if expected is not None:
            gap.expected_s = max(expected, gap.expected_s or 0.0)

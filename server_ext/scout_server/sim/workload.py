"""Synthetic agent programs: who speaks next, how much is new, how long tools take."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval, MinLen

from scout_server.sim.traces.records import (
    HashScope,
    HashSource,
    Program,
    Runs,
    TraceInfo,
    Turn,
    runs_of,
)

__all__ = ["GapShape", "WorkloadSettings", "generate", "synthetic_info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GapShape:
    """One tool of a synthetic workload: how often it is called, and how long it takes."""

    tool: str = "shell"
    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the calls, relative to the other tools'."""
    median_s: Annotated[float, Gt(0)] = 2.0
    """Median duration, seconds: the lognormal body."""
    sigma: Annotated[float, Ge(0)] = 1.0
    """Standard deviation of the logarithm of the duration."""
    cap_s: Annotated[float, Gt(0)] = 600.0
    """Timeout: longer calls end here, and are marked as cut off."""
    announced: bool = False
    """The client announces the duration when the call begins (a parsed `sleep`, a deadline)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """A synthetic multi-agent workload. Token counts are rounded up to whole blocks of 16."""

    programs: Annotated[int, Ge(1)] = 150
    rate_per_s: Annotated[float, Gt(0)] = 1.0
    """Program arrivals, Poisson."""
    agents: Annotated[int, Ge(1)] = 8
    """Roles in the workflow."""
    anchor_tokens: Annotated[int, Ge(0)] = 3000
    """Mean tokens of a role's fixed prefix; roles differ by up to half of it."""
    shared_tokens: Annotated[int, Ge(0)] = 0
    """Tokens that all roles' prefixes have in common, before what is their own."""
    turns: Annotated[float, Ge(1)] = 16.0
    """Mean turns of a program (from half to one and a half of it)."""
    determinism: Annotated[float, Interval(ge=0, le=1)] = 0.8
    """Probability of a role's most likely successor; 1: a fixed cycle."""
    successors: Annotated[int, Ge(1)] = 3
    """Roles that can follow a role."""
    observation_tokens: Annotated[float, Ge(0)] = 900.0
    """Mean new prompt tokens of a turn (tool result, message); exponential."""
    output_tokens: Annotated[float, Ge(1)] = 80.0
    """Mean generated tokens of a turn; exponential."""
    history: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Share of a role's earlier exchanges that its next prompt repeats (prefix reuse)."""
    chat: bool = False
    """True: all roles of a program see one common conversation; False: each its own."""
    branches: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of the turns that start parallel sub-agents, joined before the next turn."""
    branch_width: Annotated[int, Ge(2)] = 3
    branch_turns: Annotated[int, Ge(1)] = 2
    abort: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of the programs that end before they are done, at a random turn."""
    tools: Annotated[tuple[GapShape, ...], MinLen(1)] = (
        GapShape(tool="edit", weight=3.0, median_s=0.3, sigma=0.6),
        GapShape(tool="search", weight=2.0, median_s=4.0, sigma=0.8),
        GapShape(tool="test", weight=1.0, median_s=25.0, sigma=1.0),
    )
    tenants: Annotated[int, Ge(1)] = 1


def synthetic_info(settings: WorkloadSettings, seed: int) -> TraceInfo:
    """Return the header of the trace that `generate` makes."""
    return TraceInfo(
        source=f"synthetic, {settings.agents} agents, seed {seed}",
        block_tokens=16,
        scope=HashScope.GLOBAL,
        hashes=HashSource.MEASURED,
    )


_BLOCK = 16
_SESSION_FIRST = 1 << 24
"""Block ids below it belong to anchors, which all programs share."""


def _blocks(tokens: float) -> int:
    return max(math.ceil(tokens / _BLOCK), 0)


class _Roles:
    """The fixed part: prefixes of the roles and who follows whom."""

    def __init__(self, settings: WorkloadSettings, rng: random.Random) -> None:
        shared = _blocks(settings.shared_tokens)
        self.anchor: list[Runs] = []
        at = shared
        for _ in range(settings.agents):
            own = _blocks(settings.anchor_tokens * rng.uniform(0.5, 1.5))
            ids = [*range(shared), *range(at, at + own)]
            self.anchor.append(runs_of(ids))
            at += own
        count = min(settings.successors, max(settings.agents - 1, 1))
        self.followers: list[list[int]] = []
        for role in range(settings.agents):
            first = (role + 1) % settings.agents
            others = [r for r in range(settings.agents) if r not in (role, first)]
            self.followers.append([first, *rng.sample(others, min(count - 1, len(others)))])

    def next_role(self, role: int, determinism: float, rng: random.Random) -> int:
        followers = self.followers[role]
        if len(followers) == 1 or rng.random() < determinism:
            return followers[0]
        return followers[1 + int(rng.random() * (len(followers) - 1))]


class _Memory:
    """The conversation that one agent of one program carries from prompt to prompt."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[int] = []


def _gap(settings: WorkloadSettings, rng: random.Random) -> tuple[GapShape, float, bool]:
    total = sum(tool.weight for tool in settings.tools)
    mark = rng.random() * total
    chosen = settings.tools[-1]
    for tool in settings.tools:
        mark -= tool.weight
        if mark < 0:
            chosen = tool
            break
    drawn = chosen.median_s * math.exp(rng.gauss(0.0, chosen.sigma))
    return chosen, min(drawn, chosen.cap_s), drawn > chosen.cap_s


class _Builder:
    def __init__(
        self, settings: WorkloadSettings, roles: _Roles, rng: random.Random, base: int
    ) -> None:
        self.settings = settings
        self.roles = roles
        self.rng = rng
        self.next_id = base
        self.turns: list[Turn] = []
        self.memory: dict[tuple[str, int], _Memory] = {}

    def _fresh(self, count: int) -> list[int]:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        return ids

    def turn(self, session: str, role: int, parents: tuple[int, ...]) -> int:
        """Add one turn of *role*; return its index."""
        settings, rng = self.settings, self.rng
        memory = self.memory.setdefault((session, 0 if settings.chat else role), _Memory())
        new = max(_blocks(rng.expovariate(1.0) * settings.observation_tokens), 1)
        output = max(_blocks(rng.expovariate(1.0) * settings.output_tokens), 1)
        keep = math.ceil(len(memory.blocks) * settings.history)
        kept = memory.blocks[:keep]
        prompt = kept + self._fresh(new + len(memory.blocks) - keep)
        runs = runs_of([*_ids(self.roles.anchor[role]), *prompt])
        tool: GapShape | None = None
        gap, cut = 0.0, False
        if parents:
            tool, gap, cut = _gap(settings, rng)
        name = None if tool is None else tool.tool
        self.turns.append(
            Turn(
                agent=f"agent-{role}",
                session=session,
                input_tokens=sum(length for _, length in runs) * _BLOCK,
                output_tokens=output * _BLOCK,
                hash_runs=runs,
                parents=parents,
                gap_s=gap,
                gap_censored=cut,
                tool=name,
                tool_expected_s=gap if tool is not None and tool.announced else None,
            )
        )
        memory.blocks = prompt + self._fresh(output)
        return len(self.turns) - 1


def _ids(runs: Runs) -> Iterator[int]:
    for first, length in runs:
        yield from range(first, first + length)


def generate(settings: WorkloadSettings, seed: int) -> Iterator[Program]:
    """Yield the programs of a workload in order of arrival; equal seeds, equal programs."""
    roles = _Roles(settings, random.Random(f"roles {seed}"))
    arrivals = random.Random(f"arrivals {seed}")
    now = 0.0
    base = _SESSION_FIRST
    for number in range(settings.programs):
        now += arrivals.expovariate(settings.rate_per_s)
        rng = random.Random(f"program {seed} {number}")
        builder = _Builder(settings, roles, rng, base)
        length = max(round(settings.turns * rng.uniform(0.5, 1.5)), 1)
        aborted = rng.random() < settings.abort
        if aborted:
            length = rng.randint(1, length)
        role = 0
        last: tuple[int, ...] = ()
        for step in range(length):
            index = builder.turn("", role, last)
            last = (index,)
            if step + 1 < length and rng.random() < settings.branches:
                last = _branch(builder, settings, index)
            role = roles.next_role(role, settings.determinism, rng)
        base = builder.next_id
        yield Program(
            program=f"p{number:06d}",
            arrival_s=now,
            turns=tuple(builder.turns),
            tenant=f"t{number % settings.tenants}" if settings.tenants > 1 else "",
            aborted=aborted,
            workflow="synthetic",
        )


def _branch(builder: _Builder, settings: WorkloadSettings, parent: int) -> tuple[int, ...]:
    ends = []
    for branch in range(settings.branch_width):
        role = builder.rng.randrange(settings.agents)
        last = (parent,)
        for _ in range(settings.branch_turns):
            last = (builder.turn(f"{parent}.{branch}", role, last),)
        ends.append(last[0])
    return tuple(ends)

"""What a trace is like: counts, gaps, reuse, predictability, working set."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scout_server.sim.distribution import Distribution, Summary
from scout_server.sim.traces.records import HashScope, Program, TraceInfo
from scout_server.sim.traces.reuse import (
    IntervalSet,
    accesses,
    belady_hits,
    lru_hits,
    unlimited_hits,
)

__all__ = ["Inspection", "Predictability", "ReusePoint", "inspect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictability:
    """How well the next symbol follows from the ones before, learnt online over all programs."""

    symbols: int
    transitions: int
    majority: float
    """Share of the transitions that go to the most frequent symbol."""
    order1: float
    """Share guessed right from the last symbol."""
    order1_top2: float
    order2: float
    """Share guessed right from the last two, with the last one where the two are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePoint:
    """Hit rates with one cache size."""

    blocks: int
    tokens: int
    lru: float
    belady: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Everything that `scout trace inspect` reports."""

    info: TraceInfo
    programs: int
    turns: int
    aborted: int
    agents: dict[str, int]
    tools: dict[str, int]
    input_tokens: int
    output_tokens: int
    span_s: float
    parallel_turns: int
    """Turns that share a parent with another one."""
    joins: int
    """Turns with more than one parent."""
    censored: int
    turns_per_program: Summary
    input_per_turn: Summary
    output_per_turn: Summary
    gap_s: Summary
    gap_by_tool: dict[str, Summary]
    reuse: float
    """Share of the prompt blocks that a cache without limit would find."""
    agents_next: Predictability
    tools_next: Predictability
    live_tokens_mean: float
    """Context of programs under way, on the recorded clock: the working set."""
    live_tokens_p90: float
    live_tokens_peak: float
    curve: list[ReusePoint] = field(default_factory=list)
    curve_programs_blocks: int = 0
    """Blocks of the prompts that the curve was measured on."""
    gap_points: list[tuple[float, float]] = field(default_factory=list)


class _Guess:
    """First- and second-order online prediction of a sequence of symbols."""

    def __init__(self) -> None:
        self._one: dict[str, Counter[str]] = defaultdict(Counter)
        self._two: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._all: Counter[str] = Counter()
        self.count = self.first = self.second = self.top2 = 0

    def sequence(self, symbols: Sequence[str]) -> None:
        """Predict, then learn, every symbol of one session."""
        for at in range(1, len(symbols)):
            last, now = symbols[at - 1], symbols[at]
            ranked = [s for s, _ in self._one[last].most_common(2)]
            self.count += 1
            self.first += ranked[:1] == [now]
            self.top2 += now in ranked
            two = self._two[symbols[at - 2], last] if at > 1 else Counter()
            best = [s for s, _ in two.most_common(1)] or ranked[:1]
            self.second += best == [now]
            self._one[last][now] += 1
            if at > 1:
                self._two[symbols[at - 2], last][now] += 1
            self._all[now] += 1

    def result(self) -> Predictability:
        """Return the shares; 0 when there was no transition."""
        n = max(self.count, 1)
        return Predictability(
            symbols=len(self._all),
            transitions=self.count,
            majority=max(self._all.values(), default=0) / n,
            order1=self.first / n,
            order1_top2=self.top2 / n,
            order2=self.second / n,
        )


class _Live:
    """Tokens of context of the programs under way, from starts and ends in any order."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, int]] = []

    def program(self, program: Program) -> None:
        """Add one program: each session's context from its turn to its next one."""
        ends: list[float] = []
        held: dict[tuple[str, str | None], int] = {}
        for turn in program.turns:
            start = max((ends[p] for p in turn.parents), default=program.arrival_s) + turn.gap_s
            ends.append(start + (turn.service_s or 0.0))
            key = (turn.session, turn.agent)
            tokens = turn.input_tokens + turn.output_tokens
            heapq.heappush(self._changes, (start, tokens - held.get(key, 0)))
            held[key] = tokens
        heapq.heappush(self._changes, (max(ends), -sum(held.values())))

    def result(self) -> tuple[float, float, float]:
        """Return the mean over time, the 90th percentile over time, the peak."""
        at = level = 0.0
        weighted: list[tuple[float, float]] = []
        first = True
        for time, change in sorted(self._changes):
            if not first and time > at:
                weighted.append((level, time - at))
            first, at = False, time
            level += change
        total = sum(seconds for _, seconds in weighted)
        if total <= 0:
            return 0.0, 0.0, 0.0
        mean = sum(each * seconds for each, seconds in weighted) / total
        passed = 0.0
        p90 = 0.0
        for each, seconds in sorted(weighted):
            passed += seconds
            p90 = each
            if passed >= 0.9 * total:
                break
        return mean, p90, max(each for each, _ in weighted)


def inspect(
    info: TraceInfo,
    programs: Iterable[Program],
    *,
    curve_blocks: int = 1_500_000,
    sizes: int = 7,
) -> Inspection:
    """
    Measure a trace; one pass, but for the curve, which keeps prompts of *curve_blocks* blocks.

    *sizes*: cache sizes of the curve, doubling up to all distinct blocks; 0: no curve.
    """
    kept: list[Program] = []
    kept_blocks = 0
    agents: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    per_program, inputs, outputs, gaps = (Distribution() for _ in range(4))
    by_tool: dict[str, Distribution] = {}
    next_agent, next_tool = _Guess(), _Guess()
    live = _Live()
    shared = IntervalSet()
    blocks = hits = turns = aborted = parallel = joins = censored = count = 0
    begin, end = float("inf"), 0.0
    for program in programs:
        count += 1
        aborted += program.aborted
        seen = shared if info.scope is HashScope.GLOBAL else IntervalSet()
        children: Counter[int] = Counter()
        begin = min(begin, program.arrival_s)
        for turn in program.turns:
            turns += 1
            agents[turn.agent or "(unnamed)"] += 1
            inputs.add(turn.input_tokens)
            outputs.add(turn.output_tokens)
            children.update(turn.parents)
            joins += len(turn.parents) > 1
            if turn.parents:
                tools[turn.tool or "(unnamed)"] += 1
                gaps.add(turn.gap_s)
                by_tool.setdefault(turn.tool or "(unnamed)", Distribution()).add(turn.gap_s)
                censored += turn.gap_censored
            blocks += sum(length for _, length in turn.hash_runs)
            hits += unlimited_hits(seen, turn.hash_runs)
        parallel += sum(1 for t in program.turns if any(children[p] > 1 for p in t.parents))
        per_program.add(len(program.turns))
        main = [t for t in program.turns if not t.session]
        next_agent.sequence([t.agent or "(unnamed)" for t in main])
        next_tool.sequence([t.tool or "(unnamed)" for t in main if t.parents])
        live.program(program)
        end = max(end, program.arrival_s + sum(t.gap_s + (t.service_s or 0.0) for t in main))
        if sizes and kept_blocks < curve_blocks:
            kept.append(program)
            kept_blocks += sum(length for t in program.turns for _, length in t.hash_runs)
    mean, p90, peak = live.result()
    order = accesses(info, kept, most_blocks=curve_blocks)
    return Inspection(
        info=info,
        programs=count,
        turns=turns,
        aborted=aborted,
        agents=dict(agents.most_common(20)),
        tools=dict(tools.most_common(20)),
        input_tokens=int(inputs.total),
        output_tokens=int(outputs.total),
        span_s=max(end - begin, 0.0) if count else 0.0,
        parallel_turns=parallel,
        joins=joins,
        censored=censored,
        turns_per_program=per_program.summary(),
        input_per_turn=inputs.summary(),
        output_per_turn=outputs.summary(),
        gap_s=gaps.summary(),
        gap_by_tool={
            name: by_tool[name].summary() for name, _ in tools.most_common(12) if name in by_tool
        },
        reuse=hits / blocks if blocks else 0.0,
        agents_next=next_agent.result(),
        tools_next=next_tool.result(),
        live_tokens_mean=mean,
        live_tokens_p90=p90,
        live_tokens_peak=peak,
        curve=[
            ReusePoint(
                blocks=size,
                tokens=size * info.block_tokens,
                lru=lru_hits(order, size),
                belady=belady_hits(order, size),
            )
            for size in _sizes(info, kept, sizes)
        ],
        curve_programs_blocks=kept_blocks,
        gap_points=gaps.points(),
    )


def _sizes(info: TraceInfo, kept: Sequence[Program], sizes: int) -> list[int]:
    if not sizes or not kept:
        return []
    distinct = 0
    shared = IntervalSet()
    for program in kept:
        seen = shared if info.scope is HashScope.GLOBAL else IntervalSet()
        for turn in program.turns:
            for first, length in turn.hash_runs:
                distinct += length - seen.covered(first, length)
                seen.add(first, length)
    largest = max((sum(n for _, n in t.hash_runs) for p in kept for t in p.turns), default=1)
    wanted = [max(distinct >> shift, 1) for shift in range(sizes - 1, -1, -1)]
    return sorted({size for size in wanted if size >= min(largest, distinct)})

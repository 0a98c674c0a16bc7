"""Agent programs on several replicas under a virtual clock, behind a router or behind TAO."""

import heapq
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scout_sdk import Evidence, SessionEvent, ToolEvent, ToolState
from scout_server.policy.admission import Plan
from scout_server.policy.engine import Snapshot, TaoEngine, TaoSettings, Turn, make_plan
from scout_server.policy.runtime import PolicySettings
from scout_server.replica.batch import BatchSettings
from scout_server.replica.hooks import KeyedQueue
from scout_server.replica.latency import LinearLatency
from scout_server.replica.replica import Replica
from scout_server.replica.request import Request

__all__ = ["Cell", "Outcome", "Profile", "Program", "Route", "Watch", "programs", "simulate"]

BLOCK = 256
_LRU = PolicySettings(hints=False, fingerprints=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on some hardware; not measured, chosen to span the range."""

    name: str
    latency: LinearLatency
    kv_tokens: int
    """Per node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting of the experiment."""

    profile: Profile
    nodes: int
    concurrency: int
    """Programs alive at any time."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: tokens added to the prompt, tokens answered, then a tool of *gap_s*."""

    new_tokens: int
    output_tokens: int
    gap_s: float
    sleeps: bool


@dataclass(slots=True)
class Program:
    """One agent program and how far it is."""

    index: int
    role: int
    prefix_blocks: int
    steps: list[Step]
    at: int = 0
    tokens: int = 0
    began: float = 0.0

    def hashes(self, tokens: int) -> list[int]:
        """Return the chained hashes of its first *tokens* tokens; the prefix is its role's."""
        count = tokens // BLOCK
        shared = min(count, self.prefix_blocks)
        own = 10**9 + self.index * 10**5
        return [
            *range(self.role * 10**4 + 1, self.role * 10**4 + 1 + shared),
            *range(own + shared, own + count),
        ]


@dataclass(slots=True)
class Outcome:
    """What one arm reached in one cell."""

    latency_s: float = 0.0
    ttft_s: float = 0.0
    ttft_p99_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    hit_rate: float = 0.0
    moves: float = 0.0
    """Share of turns after the first that ran on another node than the one before."""
    longest_hold_s: float = 0.0
    planning_share: float = 0.0
    """
    CPU time of TAO over the virtual time of the run: every call of its engine, that is decisions
    (snapshot, plan, apply) and bookkeeping (submit, resume, finish, events).
    """
    decisions: float = 0.0
    """Plans made."""
    virtual_s: float = 0.0
    """The run's length on its own clock."""
    load: float = 0.0
    """Mean context of live programs, all together, over the KV of all nodes."""


Watch = Callable[[Snapshot, Plan], None]
"""Sees every decision; its own time is not counted."""


class Route(Protocol):
    """Answers at once where a turn goes; the replica queues it."""

    @property
    def queue(self) -> Callable[[Request, float], float] | None:
        """Order of a replica's queue, smallest first; None: first come."""

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the index of the node."""


def programs(count: int, seed: int) -> list[Program]:
    """Return *count* programs: a shared prefix per role, growing contexts, mostly short gaps."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        steps = []
        for turn in range(rng.randint(6, 14)):
            new = rng.randint(12_000, 40_000) if turn == 0 else int(rng.lognormvariate(7.0, 0.7))
            kind = rng.random()
            sleeps = kind > 0.95
            gap = (
                float(rng.randint(15, 40))
                if sleeps
                else rng.lognormvariate(-0.7 if kind < 0.7 else 1.4, 0.6)
            )
            steps.append(Step(min(40_000, max(64, new)), rng.randint(60, 300), gap, sleeps))
        made.append(Program(index, rng.randrange(4), rng.choice((8, 12, 16)), steps))
    return made


@dataclass(slots=True)
class _Live:
    program: Program
    request: Request
    asked: float


@dataclass(slots=True)
class _World:
    cell: Cell
    waiting: deque[Program]
    replicas: list[Replica]
    route: Route | None
    tao: TaoEngine | None
    events: list[tuple[float, int, str, object]] = field(default_factory=list)
    order: "itertools.count[int]" = field(default_factory=itertools.count)
    live: dict[str, _Live] = field(default_factory=dict)
    last_node: dict[int, int] = field(default_factory=dict)
    moves: int = 0
    follow_ups: int = 0
    ttfts: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    output: int = 0
    watch: Watch | None = None
    cpu: float = 0.0
    decisions: int = 0
    hold: float = 0.0
    next_plan: float = 0.0
    recheck: bool = False
    contexts: list[int] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)

    def at(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), kind, what))


PLAN_FLOOR_S = 0.25
RECHECK_S = 1.0
EXPECTED_OUTPUT = 256


def simulate(
    cell: Cell,
    seed: int,
    *,
    route: Route | None = None,
    tao: TaoSettings | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Run three times as many programs as may be alive, and return what came out."""
    engine = None if tao is None else TaoEngine(tao)
    latency, kv = cell.profile.latency, cell.profile.kv_tokens
    replicas = [
        Replica(
            BatchSettings(block_tokens=BLOCK, max_num_seqs=64, max_batched_tokens=2048),
            latency,
            kv_blocks=kv // BLOCK,
            policy=_LRU,
            queue=KeyedQueue(route.queue) if route is not None and route.queue else None,
        )
        for _ in range(cell.nodes)
    ]
    made = programs(3 * cell.concurrency, seed)
    world = _World(cell, deque(made), replicas, route, engine, watch=watch)
    if engine is not None:
        for n in range(cell.nodes):
            engine.set_node(f"n{n}", capacity=kv, slots=64)
    rng = random.Random(seed + 1)
    for _ in range(cell.concurrency):
        world.at(rng.uniform(0, 5), "begin", None)
    now = 0.0
    while True:
        due = min(range(cell.nodes), key=lambda n: (replicas[n].next_event_time(), n))
        engine_time = replicas[due].next_event_time()
        event_time = world.events[0][0] if world.events else float("inf")
        if min(engine_time, event_time) == float("inf"):
            break
        if engine_time <= event_time:
            now = max(now, engine_time)
            for request in replicas[due].step(engine_time).finished:
                _finished(world, request, due, now)
        else:
            now, _, kind, what = heapq.heappop(world.events)
            _happen(world, kind, what, now)
        _plan(world, now)
    if world.live:
        raise RuntimeError(f"{len(world.live)} requests never ended: {cell}")
    counters = [r.counters for r in replicas]
    queried = sum(c.queried_tokens for c in counters)
    return Outcome(
        latency_s=statistics.fmean(world.latencies),
        ttft_s=statistics.fmean(world.ttfts),
        ttft_p99_s=statistics.quantiles(world.ttfts, n=100)[98],
        decode_tokens_per_s=world.output / now,
        hit_rate=sum(c.hit_tokens for c in counters) / queried if queried else 0.0,
        moves=world.moves / max(1, world.follow_ups),
        longest_hold_s=world.hold,
        planning_share=world.cpu / now,
        decisions=world.decisions,
        virtual_s=now,
        load=statistics.fmean(world.contexts) / (kv * cell.nodes),
    )


def _happen(world: _World, kind: str, what: object, now: float) -> None:
    if kind == "begin":
        if world.waiting:
            program = world.waiting.popleft()
            program.began = now
            _ask(world, program, now)
    elif kind == "back":
        assert isinstance(what, Program)
        if world.tao is not None:
            ended = ToolEvent(name="tool", state=ToolState.ENDED, call_id="c")
            event = SessionEvent(session=str(what.index), tool=ended)
            began = time.thread_time()
            world.tao.event(event, now=now)
            world.cpu += time.thread_time() - began
        _ask(world, what, now)
    elif kind == "recheck":
        world.recheck = False
        if world.tao is not None:
            world.tao.changed = True


def _ask(world: _World, program: Program, now: float) -> None:
    """A program sends its next turn."""
    step = program.steps[program.at]
    first = program.at == 0
    program.tokens += step.new_tokens + (program.prefix_blocks * BLOCK if first else 0)
    world.alive[program.index] = program.tokens
    world.contexts.append(sum(world.alive.values()))
    key = f"{program.index}/{program.at}"
    request = Request(
        key,
        prompt_tokens=program.tokens,
        output_tokens=step.output_tokens,
        hashes=program.hashes(program.tokens + step.output_tokens),
        priority=float(program.at),
    )
    world.live[key] = _Live(program, request, now)
    if world.tao is None:
        assert world.route is not None
        _run(world, key, world.route.choose(program, request, world.replicas), now)
        return
    began = time.thread_time()
    turn = Turn(key=key, session=str(program.index), tokens=program.tokens + EXPECTED_OUTPUT)
    world.tao.submit(turn, now=now)
    placement = world.tao.resume(key, now=now)
    world.cpu += time.thread_time() - began
    if placement is not None:
        _run(world, key, int(placement.node[1:]), now)


def _run(world: _World, key: str, node: int, now: float) -> None:
    live = world.live[key]
    before = world.last_node.get(live.program.index)
    if before is not None:
        world.follow_ups += 1
        world.moves += before != node
    world.last_node[live.program.index] = node
    world.hold = max(world.hold, now - live.asked)
    replica = world.replicas[node]
    while replica.next_event_time() < now:  # a step that ended meanwhile
        for request in replica.step(replica.next_event_time()).finished:
            _finished(world, request, node, now)
    replica.submit(live.request, now)


def _finished(world: _World, request: Request, node: int, now: float) -> None:
    live = world.live.pop(request.request_id)
    program = live.program
    step = program.steps[program.at]
    assert request.first_token_at is not None
    world.ttfts.append(request.first_token_at - live.asked)
    world.output += step.output_tokens
    program.tokens += step.output_tokens
    program.at += 1
    final = program.at == len(program.steps)
    if world.tao is not None:
        began = time.thread_time()
        world.tao.finish(
            request.request_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=step.output_tokens,
            cached_tokens=request.cached_tokens,
            tools=[("tool", None)],
            final=final,
            now=now,
        )
        if not final and step.sleeps:
            said = ToolEvent(
                name="tool",
                state=ToolState.STARTED,
                call_id="c",
                remaining_s=step.gap_s,
                evidence=Evidence.SLEEP,
            )
            world.tao.event(SessionEvent(session=str(program.index), tool=said), now=now)
        world.cpu += time.thread_time() - began
    if final:
        world.latencies.append(now - program.began)
        del world.alive[program.index]
        world.at(now, "begin", None)
    else:
        world.at(now + step.gap_s, "back", program)


def _plan(world: _World, now: float) -> None:
    """Decide when something changed, at most every PLAN_FLOOR_S."""
    tao = world.tao
    if tao is None or not tao.waiting:
        return
    if not world.recheck:
        world.recheck = True
        wait = RECHECK_S if now >= world.next_plan else world.next_plan - now
        world.at(now + wait, "recheck", None)
    if not tao.changed or now < world.next_plan:
        return
    began = time.thread_time()
    snapshot = tao.snapshot(now=now)
    if snapshot is None:
        world.cpu += time.thread_time() - began
        return
    world.next_plan = now + PLAN_FLOOR_S
    plan = make_plan(snapshot)
    applied = tao.apply(plan, now=now)
    world.cpu += time.thread_time() - began
    world.decisions += 1
    if world.watch is not None:
        world.watch(snapshot, plan)
    for placement in applied.placements:
        _run(world, placement.key, int(placement.node[1:]), now)

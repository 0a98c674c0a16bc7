"""Request sequences for the retention bench: seeded generators and recorded sessions."""

import gzip
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Request",
    "Workload",
    "coding_sessions",
    "markov",
    "random_draw",
    "short_skewed",
]


@dataclass(slots=True)
class Request:
    """One request; blocks are named by integers, equal only for equal prefixes."""

    time: float
    session: int
    agent: int
    anchor: int
    """Leading blocks of the prompt that are the agent's fixed prefix."""
    prompt: list[int]
    output: list[int]
    tool: str = ""
    """Why it ended: the name of a tool it waits for, or empty for the end of a turn."""
    service: float = 0.0
    back: float | None = None
    """When the session's next request comes; None when it was the last. The future: oracles only,
    and hints, blurred."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A request sequence and the truth behind it."""

    name: str
    requests: list[Request]
    anchors: Sequence[int]
    """Blocks of each agent's anchor."""
    transitions: list[tuple[list[int], list[float]]] | None = None
    """Successors and their probabilities per agent, where known."""
    log_gap: tuple[float, float] | None = None
    """Mean and standard deviation of ln gap, where known."""
    turns: float | None = None
    """Mean requests of a session, where known."""

    @property
    def largest(self) -> int:
        """Blocks of the largest request, output included."""
        return max(len(request.prompt) + len(request.output) for request in self.requests)


class _Blocks:
    """Names blocks by small integers."""

    def __init__(self) -> None:
        self._names: dict[object, int] = {}

    def __call__(self, key: object) -> int:
        return self._names.setdefault(key, len(self._names) + 1)


def _link(requests: list[Request]) -> None:
    upcoming: dict[int, float] = {}
    for request in reversed(requests):
        request.back = upcoming.get(request.session)
        upcoming[request.session] = request.time


def markov(
    *,
    seed: int,
    agents: int = 12,
    sessions: int = 400,
    concurrency: int = 12,
    determinism: float = 0.8,
    anchor: tuple[int, int] = (8, 20),
    history: int = 2,
    turns: tuple[int, int] = (8, 30),
    log_gap: tuple[float, float] = (0.5, 1.2),
    uniform: bool = False,
) -> Workload:
    """
    Agents that follow one another as a Markov chain, in *concurrency* closed sessions.

    Each agent has three successors; the first has probability *determinism*. With *uniform* every
    other agent is as probable. A prompt is the agent's anchor and the session's history with it.
    """
    rng = random.Random(seed)
    lengths = [rng.randint(*anchor) for _ in range(agents)]
    table: list[tuple[list[int], list[float]]] = []
    for agent in range(agents):
        others = [each for each in range(agents) if each != agent] or [agent]
        if uniform:
            table.append((others, [1.0 / len(others)] * len(others)))
            continue
        chosen = rng.sample(others, min(3, len(others)))
        rest = 1.0 - determinism
        weights = [determinism, rest * 0.7, rest * 0.3][: len(chosen)]
        total = sum(weights)
        table.append((chosen, [weight / total for weight in weights]))
    name = _Blocks()
    started = 0

    def begin() -> list[int]:
        nonlocal started
        state = [started, rng.randrange(min(2, agents)), rng.randint(*turns), 0]
        started += 1
        return state

    heap: list[tuple[float, float, list[int]]] = []
    for _ in range(concurrency):
        heapq.heappush(heap, (rng.expovariate(0.2), rng.random(), begin()))
    requests: list[Request] = []
    while heap and started < sessions + concurrency:
        now, _, state = heapq.heappop(heap)
        session, agent, _, past = state
        prompt = [name(("a", agent, i)) for i in range(lengths[agent])]
        prompt += [name((session, agent, i)) for i in range(past)]
        output = [name((session, agent, i)) for i in range(past, past + history)]
        requests.append(Request(now, session, agent, lengths[agent], prompt, output))
        state[3] += history
        state[2] -= 1
        state[1] = rng.choices(*table[agent])[0]
        gap = rng.lognormvariate(*log_gap)
        following = state if state[2] > 0 else begin()
        heapq.heappush(heap, (now + gap, rng.random(), following))
    _link(requests)
    label = "uniform" if uniform else f"determinism {determinism}"
    return Workload(
        f"{agents} agents, {label}, concurrency {concurrency}",
        requests,
        lengths,
        table,
        log_gap,
        (turns[0] + turns[1]) / 2,
    )


def short_skewed(*, seed: int = 2, concurrency: int = 3, sessions: int = 40) -> Workload:
    """Few, short sessions in which few agents dominate: a cold start and little to learn."""
    rng = random.Random(seed)
    agents = 12
    lengths = []
    for _ in range(agents):
        words = rng.randint(150, 300)
        for _ in range(words):
            rng.random()
        lengths.append(int(words * 2.12 / 32))
    table = [
        (rng.sample([j for j in range(agents) if j != i], 3), [0.8, 0.14, 0.06])
        for i in range(agents)
    ]
    name = _Blocks()
    heap: list[tuple[float, int, int, int, random.Random, dict[int, int]]] = []
    started = 0
    requests: list[Request] = []

    def begin(now: float) -> None:
        nonlocal started
        if started < sessions:
            own = random.Random(seed * 1000 + started)
            agent, turns = own.randrange(2), own.randint(4, 8)
            heapq.heappush(heap, (now, started, agent, turns, own, {}))
            started += 1

    for _ in range(concurrency):
        begin(0.0)
    while heap:
        now, session, agent, turns, own, past = heapq.heappop(heap)
        tokens = past.get(agent, 0) * 53
        blocks = tokens // 32
        prompt = [name(("a", agent, i)) for i in range(lengths[agent])]
        prompt += [name((session, agent, i)) for i in range(blocks)]
        output = [name((session, agent, i)) for i in range(blocks, (tokens + 53) // 32)]
        past[agent] = past.get(agent, 0) + 1
        requests.append(Request(now, session, agent, lengths[agent], prompt, output, service=0.15))
        gap = own.lognormvariate(0, 0.8)
        agent = own.choices(*table[agent])[0]
        if turns > 1:
            heapq.heappush(heap, (now + 0.15 + gap, session, agent, turns - 1, own, past))
        else:
            begin(now + 0.15 + gap)
    _link(requests)
    return Workload(f"short and skewed, seed {seed}", requests, lengths, table, (0.0, 0.8), 6.0)


def random_draw(seed: int) -> tuple[Workload, float]:
    """Return the *seed*-th random workload and its cache size as a share of all anchors."""
    rng = random.Random(seed * 7919 + 1)
    middle = rng.uniform(0.1, 1.0) * 10 ** rng.uniform(0, 2.7)
    turns = rng.choice([(2, 5), (3, 8), (8, 30)])
    workload = markov(
        seed=seed,
        agents=rng.choice([3, 4, 6, 12, 24, 40, 64]),
        sessions=rng.choice([40, 120]),
        concurrency=rng.choice([1, 2, 4, 8, 16, 40]),
        determinism=rng.uniform(0.3, 1.0),
        history=rng.choice([1, 2, 4]),
        turns=turns,
        log_gap=(_log(middle), rng.choice([0.5, 1.0, 1.4])),
    )
    return workload, rng.choice([0.25, 0.5, 0.75, 1.0, 1.4, 2.0])


def _log(value: float) -> float:
    from math import log

    return log(min(max(value, 0.1), 600.0))


def coding_sessions(
    path: Path, *, sessions: int = 150, per_minute: float = 1.0, seed: int = 7
) -> Workload:
    """
    Recorded coding sessions (one agent), started at random; blocks of 512 tokens.

    *path* is a gzipped file of one JSON session a line, with per-request times, stop reasons and
    run-length coded hashes of 64-token blocks, local to the session.
    """
    recorded = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            session = json.loads(line)
            if len(session["requests"]) >= 5:
                recorded.append(session)
    rng = random.Random(seed)
    chosen = rng.sample(recorded, min(sessions, len(recorded)))
    requests: list[Request] = []
    made = 0
    start = 0.0
    for number, session in enumerate(chosen):
        start += rng.expovariate(per_minute / 60.0)
        before: list[list[int]] = []
        chain: list[int] = []
        for item in session["requests"]:
            runs = item.get("hash_runs")
            if item["type"] != "n" or not runs:
                continue
            blocks = sum(length for _, length in runs) // 8
            kept = min(_common(before, runs) // 8, len(chain), blocks)
            chain = chain[:kept] + list(range(made + 1, made + 1 + blocks - kept))
            made += blocks - kept
            before = runs
            requests.append(
                Request(
                    start + item["t"],
                    number,
                    0,
                    0,
                    list(chain),
                    [],
                    tool="tool" if item.get("stop") == "tool_use" else "",
                    service=item.get("api_time") or 5.0,
                )
            )
    requests.sort(key=lambda request: request.time)
    _link(requests)
    return Workload(f"{len(chosen)} coding sessions, {per_minute:g}/min", requests, [0])


def _common(one: list[list[int]], two: list[list[int]]) -> int:
    shared = 0
    for (first, length), (second, other) in zip(one, two, strict=False):
        if first != second:
            return shared
        shared += min(length, other)
        if length != other:
            return shared
    return shared

"""
Multi-agent programs in the shape of known benchmarks, as token ids, for `scout bench engine`.

Shape means: which agents follow each other, how long their fixed prompts and histories are, and how
long the tools take. The texts are random tokens: what is measured is the engine, not the answers.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["SHAPES", "Shape", "Turn", "make_sessions"]

_VOCABULARY = (1000, 40000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session and what follows it."""

    agent: str
    prompt: tuple[int, ...]
    output: int
    """Tokens of the answer."""
    gap_s: float
    """Seconds until the session's next request."""
    expected_s: float | None
    """What the tool is said to take, right within a factor of two; None: no tool runs."""
    tool: str
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of multi-agent program."""

    name: str
    anchors: dict[str, int]
    """Agents and the tokens of their fixed prompts."""
    walk: Callable[[random.Random], Iterator[tuple[str, int, float, str]]]
    """Yields (agent, tokens new to its history, seconds of the gap after it, tool)."""
    blocks: int
    """KV blocks of 32 tokens of each server: near the size of all anchors together."""
    output: int = 8
    concurrency: int = 2
    """Sessions at a time."""
    sessions: int = 6
    """Sessions in one repetition."""


def _debate(dice: random.Random) -> Iterator[tuple[str, int, float, str]]:
    """GSM8K: three debaters with worked examples answer a question in two rounds."""
    for _ in range(2):
        for debater in ("solver", "sceptic", "judge"):
            yield debater, dice.randint(60, 100), 0.02, ""


_SUBJECTS = (
    "writing", "roleplay", "reasoning", "maths", "coding", "extraction", "science", "humanities",
)  # fmt: skip


def _router(dice: random.Random) -> Iterator[tuple[str, int, float, str]]:
    """
    MT-Bench: a router sends both turns of a user to the specialist of the subject.

    The second turn has the first answer and a question that follows it up; the user reads first.
    """
    subject = dice.choice(_SUBJECTS)
    for question in (dice.randint(40, 100), dice.randint(160, 300)):
        yield "router", question, 0.02, ""
        yield subject, question, dice.uniform(12.0, 30.0), ""


_TASKS = (
    ("search", "browse", "read", "compute"),
    ("search", "browse", "listen", "compute"),
    ("files", "read", "compute", "search"),
)


def _tools(dice: random.Random) -> Iterator[tuple[str, int, float, str]]:
    """GAIA: a planner calls one tool agent after the other; tools take long and say much."""
    for tool in dice.choice(_TASKS):
        yield "planner", dice.randint(80, 160), 0.05, ""
        yield tool, dice.randint(240, 560), dice.lognormvariate(1.1, 0.4), tool
    yield "planner", 80, 0.0, ""


def _repair(dice: random.Random) -> Iterator[tuple[str, int, float, str]]:
    """SWE-bench: a coder edits, a runner tests, a reviewer reads; contexts get long."""
    for _ in range(dice.randint(2, 3)):
        yield "coder", dice.randint(150, 300), dice.uniform(0.3, 0.9), "edit"
        yield "runner", dice.randint(80, 150), dice.lognormvariate(0.9, 0.4), "pytest"
    yield "reviewer", dice.randint(100, 200), 0.3, ""
    yield "coder", 100, 0.0, ""


_RING = 12


def _ring(dice: random.Random) -> Iterator[tuple[str, int, float, str]]:
    """A chain of agents with a tool after each: idle time, and it is known what comes."""
    for number in range(_RING):
        yield f"ring{number}", dice.randint(20, 40), dice.uniform(0.8, 1.4), "wait"


def _chance(dice: random.Random) -> Iterator[tuple[str, int, float, str]]:
    """Agents without any order, with the same idle time."""
    for _ in range(_RING):
        yield f"dice{dice.randrange(_RING)}", dice.randint(20, 40), dice.uniform(0.8, 1.4), "wait"


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="gsm8k",
            anchors={"solver": 896, "sceptic": 704, "judge": 640},
            walk=_debate,
            blocks=80,
            concurrency=3,
            sessions=10,
        ),
        Shape(
            name="mt-bench",
            anchors={"router": 384, **dict.fromkeys(_SUBJECTS, 512)},
            walk=_router,
            blocks=192,
            concurrency=10,
            sessions=24,
        ),
        Shape(
            name="gaia",
            anchors={
                "planner": 768,
                **dict.fromkeys(("search", "browse", "read", "listen", "files", "compute"), 544),
            },
            walk=_tools,
            blocks=176,
            concurrency=2,
            sessions=6,
        ),
        Shape(
            name="swe-bench",
            anchors={"coder": 768, "runner": 384, "reviewer": 640},
            walk=_repair,
            blocks=96,
            concurrency=2,
            sessions=4,
        ),
        Shape(
            name="idle-gaps",
            anchors={f"ring{number}": 480 for number in range(_RING)},
            walk=_ring,
            blocks=96,
            concurrency=1,
            sessions=2,
        ),
        Shape(
            name="random",
            anchors={f"dice{number}": 480 for number in range(_RING)},
            walk=_chance,
            blocks=96,
            concurrency=1,
            sessions=2,
        ),
    )
}
"""By name: four benchmarks' shapes, and two that show what prefetching does and does not do."""


def make_sessions(
    shape: Shape, sessions: int, *, seed: int, series: int, gaps: float = 1.0
) -> list[list[Turn]]:
    """
    Return *sessions* programs of *shape*; anchors depend on *seed* alone, the rest on *series* too.

    All gaps take *gaps* times as long.
    """
    anchors = {
        agent: _tokens(random.Random(f"{seed}/{shape.name}/{agent}"), length)
        for agent, length in shape.anchors.items()
    }
    return [
        _session(shape, anchors, random.Random(f"{seed}/{shape.name}/{series}/{number}"), gaps)
        for number in range(sessions)
    ]


def _session(
    shape: Shape, anchors: Mapping[str, Sequence[int]], dice: random.Random, gaps: float
) -> list[Turn]:
    histories: dict[str, list[int]] = {agent: [] for agent in anchors}
    steps = list(shape.walk(dice))
    turns = []
    for number, (agent, new, seconds, tool) in enumerate(steps):
        gap = gaps * seconds
        histories[agent] += _tokens(dice, new)
        final = number + 1 == len(steps)
        turns.append(
            Turn(
                agent=agent,
                prompt=(*anchors[agent], *histories[agent]),
                output=shape.output,
                gap_s=0.0 if final else gap,
                expected_s=gap * 2.0 ** dice.uniform(-1.0, 1.0) if tool else None,
                tool=tool,
                final=final,
            )
        )
    return turns


def _tokens(dice: random.Random, n: int) -> list[int]:
    return [dice.randrange(*_VOCABULARY) for _ in range(n)]

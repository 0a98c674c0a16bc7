"""Cells that are measured on a real engine: which server, which programs; pure, from a seed."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scout_server.sim.live import LiveProgram, LiveTurn

__all__ = [
    "CELLS",
    "LOADS",
    "SHAPES",
    "LiveCell",
    "LoadShape",
    "ServerKind",
    "cells_on",
    "programs_of_cell",
    "reference_on",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Sizes of the programs of one model, in tokens and seconds."""

    anchors: tuple[int, ...]
    """Fixed prompts of the agents, which take turns."""
    fresh: tuple[int, int]
    """New prompt tokens of a turn, least and most."""
    output: tuple[int, int]
    turns: tuple[int, int]
    short_s: float
    """Median of short gaps; drawn lognormal."""
    long_s: float
    reference: int = 2
    """Programs of a reference run."""


SHAPES = {
    "smollm2": LoadShape(
        anchors=(210, 330, 150), fresh=(30, 150), output=(8, 24), turns=(5, 8),
        short_s=0.15, long_s=2.0,
    ),
    "tiny": LoadShape(
        anchors=(520, 900, 360), fresh=(60, 500), output=(16, 64), turns=(6, 10),
        short_s=0.05, long_s=0.8, reference=5,
    ),
}  # fmt: skip
"""Of each model: its contexts are as long as its speed on two cores allows."""

VOCABULARY = (256, 8000)
"""Token ids to draw from; every model here has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """One server that several cells share."""

    model: str
    blocks: int
    """KV blocks, as vLLM counts them."""
    eviction: str
    """lru (the stock engine) or scout."""
    shape: str = ""
    """Whose programs it gets; empty: those named like the model."""
    block_tokens: int = 32
    """vLLM's kernels for CPUs want multiples of 32."""
    max_seqs: int = 8
    batched_tokens: int = 2048

    @property
    def name(self) -> str:
        """Return a short name."""
        return f"{self.model}-{self.blocks}-{self.eviction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCell:
    """One cell: a server and a load."""

    server: ServerKind
    concurrency: int
    gaps: str
    """none, short or long."""
    programs: int
    series: str = "validate"
    """Cells of another series draw other programs: calibration never sees those of validation."""

    @property
    def name(self) -> str:
        """Return the name, which the seed is made of too."""
        return f"{self.series}-{self.server.name}-c{self.concurrency}-{self.gaps}"


def cells_on(
    server: ServerKind, loads: Sequence[tuple[int, str]], *, series: str = "validate"
) -> list[LiveCell]:
    """Return the cells of one server: (concurrency, gaps) each."""
    return [
        LiveCell(
            server=server,
            concurrency=concurrency,
            gaps=gaps,
            programs=max(2 * concurrency, 4),
            series=series,
        )
        for concurrency, gaps in loads
    ]


def reference_on(server: ServerKind) -> LiveCell:
    """
    Return what is run before and after every cell, to know how fast the machine is just then.

    Its programs go one after the other and have one agent and few turns: they fit into every pool,
    so that there is always the same to compute.
    """
    return LiveCell(
        server=server,
        concurrency=1,
        gaps="none",
        programs=_shape(server).reference,
        series="reference",
    )


def _shape(server: ServerKind) -> LoadShape:
    return SHAPES[server.shape or server.model]


_PLENTY = ((1, "short"), (2, "long"), (4, "short"), (8, "long"))
_TIGHT = ((4, "short"), (8, "long"))
_THRASHING = ((2, "short"), (4, "long"), (8, "short"))
LOADS = ((1, "short"), (2, "long"), (4, "short"), (4, "long"), (8, "short"), (8, "long"))
"""What a server that somebody else started is given."""


def _model_cells(model: str, plenty: int, tight: int, thrashing: int) -> Iterator[LiveCell]:
    for blocks, eviction, loads in (
        (plenty, "lru", _PLENTY),
        (tight, "scout", _TIGHT),
        (thrashing, "lru", _THRASHING),
        (thrashing, "scout", _THRASHING),
    ):
        yield from cells_on(ServerKind(model=model, blocks=blocks, eviction=eviction), loads)


CELLS: tuple[LiveCell, ...] = (
    *_model_cells("smollm2", 2048, 72, 40),
    *_model_cells("tiny", 4096, 160, 88),
)
"""What `scout sim validate --against vllm` measures on servers that it starts."""


def programs_of_cell(cell: LiveCell, repetition: int) -> list[LiveProgram]:
    """
    Return the programs of one repetition of *cell*.

    Repetitions have equal lengths and gaps but different tokens and names: nothing is found of the
    repetition before, and a policy has not met their agents.
    """
    shape = _shape(cell.server)
    if cell.gaps == "none":
        shape = replace(shape, anchors=shape.anchors[:1], turns=(4, 4))
    low, high = VOCABULARY
    sizes = random.Random(f"sizes {cell.name}")
    tokens = random.Random(f"tokens {cell.name} {repetition}")

    def text(count: int) -> tuple[int, ...]:
        return tuple(tokens.randrange(low, high) for _ in range(count))

    mark = f"{cell.name}.{repetition}"
    agents = [f"{mark}.agent-{n}" for n in range(len(shape.anchors))]
    anchors = {a: text(n) for a, n in zip(agents, shape.anchors, strict=True)}
    median = {"none": 0.0, "short": shape.short_s, "long": shape.long_s}[cell.gaps]
    programs = []
    for number in range(cell.programs):
        turns = []
        for index in range(sizes.randint(*shape.turns)):
            gap = median * math.exp(sizes.gauss(0.0, 0.5))
            turns.append(
                LiveTurn(
                    agent=agents[index % len(agents)],
                    fresh=text(sizes.randint(*shape.fresh)),
                    output_tokens=sizes.randint(*shape.output),
                    gap_s=round(gap, 4) if index else 0.0,
                    tool="tool",
                )
            )
        programs.append(LiveProgram(name=f"{mark}.p{number}", anchors=anchors, turns=tuple(turns)))
    return programs

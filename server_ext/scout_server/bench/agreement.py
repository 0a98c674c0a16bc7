"""`scout bench agreement`: the retention bench against vLLM's own block pool (issue 3, §1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scout_sdk import Hints, ScoutError, _wire
from scout_server.bench.baselines import BASELINES
from scout_server.bench.ours import Ours
from scout_server.bench.recorded import recorded
from scout_server.bench.replay import replay
from scout_server.bench.workloads import Request, Workload, markov, short_skewed
from scout_server.policy import PolicySettings
from scout_server.report import Target, command_line, emit, progress

__all__ = ["Agreement", "agree", "agreement", "engine_hits"]

ORDERS = ("lru", "scout")
_BLOCK_TOKENS = 32
_POINTS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One request sequence in one pool, in the retention bench and in vLLM's block pool."""

    workload: str
    blocks: int
    order: str
    bench: list[int]
    """Hit blocks of each request in the replay of `scout bench retention --pool engine`."""
    engine: list[int]
    """The same in vLLM's pool."""
    queried: int
    """Prompt blocks of all requests."""

    @property
    def points(self) -> float:
        """How far the hit rates are apart, in percentage points."""
        return 100.0 * abs(sum(self.bench) - sum(self.engine)) / max(1, self.queried)

    def row(self) -> Mapping[str, object]:
        """Return the comparison for a table."""
        pairs = zip(self.bench, self.engine, strict=True)
        return {
            "workload": self.workload,
            "blocks": self.blocks,
            "order": self.order,
            "bench hit rate": sum(self.bench) / max(1, self.queried),
            "vLLM hit rate": sum(self.engine) / max(1, self.queried),
            "points apart": self.points,
            "requests": len(self.bench),
            "requests that differ": sum(1 for bench, engine in pairs if bench != engine),
        }


def agree(workload: Workload, blocks: int, order: str) -> Agreement:
    """Replay *workload* in both pools of *blocks* blocks; *order* is `lru` or `scout`."""
    make = Ours if order == "scout" else BASELINES["lru"]
    found = replay(workload.requests, blocks, make(workload, blocks, 0))
    return Agreement(
        workload=workload.name,
        blocks=blocks,
        order=order,
        bench=list(found.hits),
        engine=engine_hits(workload, blocks, order),
        queried=sum(found.queried),
    )


def engine_hits(workload: Workload, blocks: int, order: str) -> list[int]:
    """
    Return the hit blocks of each request in vLLM's KV cache manager, one request at a time.

    With `scout` the pool has our queue, put there by the same bridge as in a server, which is told
    what a server would tell it. Time is that of the requests. There is no model.
    """
    from scout_server.vllm import _compat
    from scout_server.vllm.bridge import Bridge

    # vLLM never hits a whole prompt, so a prompt has one token more than its blocks. Where no
    # output fills that block, it takes a place of its own, which no content ever gets.
    spare = any(not request.output for request in workload.requests)
    manager = _compat.block_manager(blocks + spare, _BLOCK_TOKENS)
    bridge: Bridge | None = None
    if order == "scout":
        bridge = Bridge(manager.block_pool, manager.coordinator, PolicySettings())
    hits: list[int] = []
    for number, each in enumerate(workload.requests):
        prompt = _tokens(each.prompt)
        rest = _tokens(each.output) or [0]
        hints = Hints(session=f"s{each.session}", agent=str(each.agent))
        request = _compat.bare_request(
            str(number), [*prompt, rest[0]], _BLOCK_TOKENS, dict(_wire.to_xargs(hints))
        )
        if bridge is not None:
            bridge.clock = _at(each)
            bridge.arrive(request)
            bridge.tick()
        manager.new_step_starts()
        found, cached, _ = manager.get_computed_blocks(request)
        _take(manager.allocate_slots(request, request.num_tokens - cached, cached, found))
        hits.append(cached // _BLOCK_TOKENS)
        request.num_computed_tokens = request.num_tokens
        if rest[1:]:
            request.append_output_token_ids(rest[1:])
            _take(manager.allocate_slots(request, len(rest) - 1))
            request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids([0])  # the last token generated is never computed
        request.status = _compat.stopped()
        if bridge is not None:
            bridge.release(request)
        manager.free(request)
        if bridge is not None:
            bridge.released(request)
    if bridge is not None and bridge.breaker.open:
        raise ScoutError(f"our queue failed in vLLM's pool: {bridge.breaker.reason}")
    return hits


def _at(request: Request) -> "_Clock":
    return _Clock(request.time)


@dataclass(frozen=True, slots=True)
class _Clock:
    now: float

    def __call__(self) -> float:
        return self.now


def _take(slots: object | None) -> None:
    if slots is None:
        raise ScoutError("the pool cannot hold a request; use more blocks")


def _tokens(names: list[int]) -> list[int]:
    """Return token ids for blocks, equal where the blocks are."""
    return [name for name in names for _ in range(_BLOCK_TOKENS)]


def agreement(
    sessions: Annotated[int, typer.Option(min=10, help="Sessions of the Markov agents.")] = 40,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A recorded trace (docs/traces.md), global block ids."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the Markov agents.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Replay request sequences in the retention bench and in vLLM's own block pool, and compare hits.

    Example: scout bench agreement --trace examples/traces/examples.jsonl
    """
    cells: list[tuple[Workload, int]] = []
    agents = markov(seed=seed, sessions=sessions)
    cells += [(agents, int(sum(agents.anchors) * level)) for level in (0.5, 1.0, 2.0)]
    cells += [(short_skewed(), blocks) for blocks in (110, 150)]
    if trace is not None:
        workload = recorded(trace)
        distinct = len({name for request in workload.requests for name in request.prompt})
        cells += [
            (workload, blocks)
            for blocks in sorted({max(workload.largest, int(distinct * s)) for s in (0.25, 0.5)})
        ]
    found: list[Agreement] = []
    with progress() as bar:
        task = bar.add_task("replaying", total=len(cells) * len(ORDERS))
        for workload, blocks in cells:
            for order in ORDERS:
                found.append(agree(workload, blocks, order))
                bar.advance(task)
    targets = [
        Target.at_most(f"{each.workload}, {each.blocks} blocks: {order}, points", worst, _POINTS)
        for order in ORDERS
        for each in found
        if each.order == order
        for worst in [each.points]
    ]
    results = {"agreement": [each.row() for each in found]}
    emit(Console(), command_line(), seed, results, targets, json_output)

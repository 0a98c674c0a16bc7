"""The arms of `scout bench tao`: routers, ThunderAgent-like admission, TAO and its ablations."""

from collections.abc import Callable, Sequence

from scout_server.bench.taosim import Cell, Outcome, Profile, Program, Route, Watch, simulate
from scout_server.policy.credit import CreditSettings
from scout_server.policy.engine import TaoSettings
from scout_server.policy.evaluators import EvaluatorSettings
from scout_server.replica.latency import LinearLatency
from scout_server.replica.replica import Replica
from scout_server.replica.request import Request

__all__ = ["ABLATIONS", "ARMS", "BASELINES", "CALM", "CELLS", "PROFILES", "cell_name", "run_arm"]

PROFILES = (
    Profile(
        name="30B MoE, large GPU",
        latency=LinearLatency(
            step_s_fixed=0.007,
            prefill_s_per_token=1 / 9000,
            decode_s_per_sequence=5e-5,
            decode_s_per_kv_token=2e-8,
        ),
        kv_tokens=524_288,
    ),
    Profile(
        name="8B, medium GPU",
        latency=LinearLatency(
            step_s_fixed=0.010,
            prefill_s_per_token=1 / 12_000,
            decode_s_per_sequence=8e-5,
            decode_s_per_kv_token=5e-8,
        ),
        kv_tokens=393_216,
    ),
    Profile(
        name="70B, four GPUs",
        latency=LinearLatency(
            step_s_fixed=0.022,
            prefill_s_per_token=1 / 5000,
            decode_s_per_sequence=1e-4,
            decode_s_per_kv_token=3e-8,
        ),
        kv_tokens=524_288,
    ),
)
CELLS = tuple(
    Cell(profile=profile, nodes=nodes, concurrency=per_node * nodes)
    for profile, nodes in zip(PROFILES, (4, 2, 1), strict=True)
    for per_node in (14, 20, 26, 32)
)
"""
Three profiles, on 4, 2 and 1 nodes, with four concurrencies each: about 1 to 2 times the KV room.

Chosen after a look at seed 1: with 10 programs a node there is little to gain (see `CALM`).
"""
CALM = tuple(
    Cell(profile=profile, nodes=nodes, concurrency=10 * nodes)
    for profile, nodes in zip(PROFILES, (4, 2, 1), strict=True)
)
"""Cells below the room that there is (load 0.6 to 0.9); reported beside the twelve."""


class RoundRobin:
    """Every turn on the next node."""

    queue = None

    def __init__(self) -> None:
        self._next = -1

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the next index."""
        self._next += 1
        return self._next % len(replicas)


class Sticky:
    """A session stays where it began: on the node with fewest requests then."""

    queue = None

    def __init__(self) -> None:
        self._home: dict[int, int] = {}

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the session's node."""
        if program.index not in self._home:
            self._home[program.index] = _least(replicas)
        return self._home[program.index]


class CacheAware:
    """The node that holds most of the prompt, unless the load is unbalanced."""

    queue = None

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the node with the longest match, else the least loaded one."""
        load = [r.unfinished for r in replicas]
        if max(load) - min(load) > 32 and max(load) > 1.5 * min(load):
            return _least(replicas)
        found = [len(r.pool.lookup(request.hashes, len(request.hashes))) for r in replicas]
        best = max(range(len(replicas)), key=lambda n: (found[n], -load[n], -n))
        return best if found[best] > 0.5 * len(request.hashes) else _least(replicas)


class KvAware:
    """Least work to prefill and to hold, with queues that put long programs first."""

    @staticmethod
    def queue(request: Request, now: float) -> float:
        """Return the key of a replica's queue: turns already taken, most first."""
        return -request.priority

    def choose(self, program: Program, request: Request, replicas: Sequence[Replica]) -> int:
        """Return the node with the smallest cost in blocks."""
        need = len(request.hashes)

        def cost(n: int) -> tuple[float, int]:
            replica = replicas[n]
            missing = need - len(replica.pool.lookup(request.hashes, need))
            active = sum(len(r.hashes) for r in replica.requests)
            return missing + active, n

        return min(range(len(replicas)), key=cost)


def _least(replicas: Sequence[Replica]) -> int:
    return min(range(len(replicas)), key=lambda n: (replicas[n].unfinished, n))


def _thunderagent(evaluator: str, half_life_s: float) -> TaoSettings:
    """Return admission by ThunderAgent's order, packed by best fit; none of TAO's own rules."""
    return TaoSettings(
        evaluator=evaluator,
        planner="value-best-fit",
        origin_share=1.0,
        growth_turns=0.0,
        idle_waits=False,
        credit=CreditSettings(half_life_s=half_life_s, whole_s=0.0, bounded=False),
    )


BASELINES: dict[str, Callable[[], Route | TaoSettings]] = {
    "round robin": RoundRobin,
    "cache-aware": CacheAware,
    "sticky": Sticky,
    "ThunderAgent-like": lambda: _thunderagent("thunderagent", 10.0),
    "ThunderAgent-like, 1 s": lambda: _thunderagent("thunderagent-resident", 1.0),
    "ThunderAgent-like, 10 s": lambda: _thunderagent("thunderagent-resident", 10.0),
    "Dynamo-like": KvAware,
}
"""
Round robin, cache-aware and sticky route at once; Dynamo-like also orders the replicas' queues.

ThunderAgent-like, three times: a gap's room goes to any turn that waits; or it is kept while it
halves every second, which is its own decay; or every 10 s, which an independent replication found
best (FIELD.md, C2). All three decide at every event, not every 5 s, and with our bounded hold.
"""
ABLATIONS: dict[str, Callable[[], Route | TaoSettings]] = {
    "TAO, no credit": lambda: TaoSettings(
        objective=EvaluatorSettings(objective=("readiness", "footprint")), origin_share=1.0
    ),
    "TAO, no decay": lambda: TaoSettings(credit=CreditSettings(half_life_s=1e9)),
    "TAO, no readiness": lambda: TaoSettings(use_readiness=False),
    "TAO, ThunderAgent order": lambda: TaoSettings(evaluator="thunderagent"),
    "TAO, best-fit decreasing": lambda: TaoSettings(planner="best-fit-decreasing"),
    "TAO, only reported credit": lambda: TaoSettings(credit=CreditSettings(trust_computed=False)),
    "TAO, credit not bounded": lambda: TaoSettings(credit=CreditSettings(bounded=False)),
    "TAO, idle nodes do not wait": lambda: TaoSettings(idle_waits=False),
    "TAO, no room to grow": lambda: TaoSettings(growth_turns=0.0),
    "TAO, rooms fade at once": lambda: TaoSettings(credit=CreditSettings(whole_s=0.0)),
    "TAO, every event decided": lambda: TaoSettings(joint_s=0.0),
}

ARMS: dict[str, Callable[[], Route | TaoSettings]] = {**BASELINES, "TAO": TaoSettings, **ABLATIONS}


def run_arm(name: str, cell: Cell, seed: int, *, watch: Watch | None = None) -> Outcome:
    """Return what the arm called *name* reaches in *cell*; *watch* sees TAO's decisions."""
    arm = ARMS[name]()
    if isinstance(arm, TaoSettings):
        return simulate(cell, seed, tao=arm, watch=watch)
    return simulate(cell, seed, route=arm)


def cell_name(cell: Cell) -> str:
    """Return how reports call *cell*."""
    return f"{cell.profile.name}: {cell.nodes} nodes, {cell.concurrency} programs"

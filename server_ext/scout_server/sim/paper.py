"""Small versions of published findings: what came out, beside what was reported."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scout_server.sim.record import CellRecord
from scout_server.sim.scenario import scenario_of
from scout_server.sim.simulate import simulate
from scout_server.sim.sweep import combine

__all__ = ["EXPERIMENTS", "Finding", "run_experiment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One statement of a paper, and whether it shows here."""

    statement: str
    reported: str
    found: str
    shows: bool
    note: str = ""


Document = Mapping[str, object]

_BASE: dict[str, object] = {
    "cell": {"timeline": 0},
    "hardware": {"gpu": "H100", "model": "llama-3.1-8b"},
    "residency": {"policy": "lru"},
}


def _run(document: Document, **settings: object) -> CellRecord:
    made = copy.deepcopy(dict(document))
    for place, value in settings.items():
        made = combine(made, place.replace("__", "."), value)
    return simulate(scenario_of(made))


def _routing(scale: float) -> Iterator[Finding]:
    workload = {
        "programs": int(160 * scale), "rate_per_s": 3.0, "agents": 4, "anchor_tokens": 1500,
        "turns": 14, "observation_tokens": 250, "output_tokens": 60,
        "tools": [{"tool": "shell", "median_s": 1.5, "sigma": 0.8}],
    }  # fmt: skip
    base = combine(_BASE, "workload", workload)
    ceiling = _run(base, hardware__kv_blocks=120_000).hit_rate
    rates = {
        policy: _run(base, cell__replicas=4, router__policy=policy).hit_rate
        for policy in ("affinity", "round-robin", "least-loaded")
    }
    gap = 100 * (ceiling - rates["affinity"])
    yield Finding(
        statement="affinity routing comes near the hit rate of one instance",
        reported="96.26 %, the one-instance ceiling",
        found=f"{100 * rates['affinity']:.1f} % of {100 * ceiling:.1f} %",
        shows=gap <= 1.5,
    )
    for policy in ("round-robin", "least-loaded"):
        below = 100 * (rates["affinity"] - rates[policy])
        yield Finding(
            statement=f"{policy} stays below affinity",
            reported="3.3 to 3.6 points",
            found=f"{below:.1f} points",
            shows=below >= 2.0,
            note=""
            if below < 8
            else "more than reported: here no two replicas share a session's"
            " context, and contexts grow over more turns",
        )


def _reuse(scale: float) -> Iterator[Finding]:
    gains: dict[float, float] = {}
    for eta in (0.1, 0.25, 0.5, 0.9):
        workload = {
            "programs": int(50 * scale), "agents": 1, "anchor_tokens": 200, "turns": 12,
            "observation_tokens": 4000, "output_tokens": 30, "history": eta, "chat": True,
            "tools": [{"tool": "shell", "median_s": 2.0, "sigma": 0.5}],
        }  # fmt: skip
        base = combine(_BASE, "workload", workload)
        base = combine(base, "arrivals", {"concurrency": 16})
        times = {
            policy: _run(base, residency__policy=policy).jct_s.mean
            for policy in ("discard", "keep", "lru", "oracle-next-use")
        }
        gains[eta] = max(times.values()) / min(times.values())
    shown = ", ".join(f"{eta:g}: {gain:.2f}x" for eta, gain in gains.items())
    yield Finding(
        statement="policy gaps are flat for prefix reuse below 0.3",
        reported="flat",
        found=shown,
        shows=max(gains[0.1], gains[0.25]) < 1.2,
        note="flat: less than 1.2x from the worst to the best",
    )
    yield Finding(
        statement="policy gaps are multiples for prefix reuse of 0.5 and more",
        reported="multiples",
        found=shown,
        shows=gains[0.9] >= 1.5,
        note="worst over best of discard, keep, LRU and the oracle",
    )


def _tool_length(scale: float) -> Iterator[Finding]:
    gains = []
    for factor in (0.5, 2.0, 8.0):
        workload = {
            "programs": int(120 * scale), "agents": 6, "anchor_tokens": 2500, "turns": 12,
            "observation_tokens": 700, "output_tokens": 60, "determinism": 0.9,
            "tools": [{"tool": "shell", "median_s": factor, "sigma": 0.6}],
        }  # fmt: skip
        base = combine(_BASE, "workload", workload)
        # As many programs as keep the machine equally busy, so that only the wait differs.
        base = combine(base, "arrivals", {"concurrency": int(10 + 14 * factor)})
        base = combine(base, "hardware.kv_blocks", 14_000)
        stock = _run(base)
        scout = _run(base, residency__policy="scout")
        gains.append((factor, scout.hit_rate - stock.hit_rate))
    shown = ", ".join(f"{f:g} s: {100 * g:+.1f} points" for f, g in gains)
    yield Finding(
        statement="agent-aware policies gain more as tools get longer",
        reported="gains grow with the tool's duration",
        found=f"hit rate, scout against LRU: {shown}",
        shows=gains[-1][1] > gains[0][1],
    )


def _bimodal(scale: float) -> Iterator[Finding]:
    workload = {
        "programs": int(120 * scale), "agents": 1, "anchor_tokens": 500, "turns": 14,
        "observation_tokens": 900, "output_tokens": 60, "chat": True,
        "tools": [
            {"tool": "edit", "median_s": 0.5, "sigma": 0.3, "weight": 4},
            {"tool": "build", "median_s": 90.0, "sigma": 0.3, "weight": 1},
        ],
    }  # fmt: skip
    base = combine(_BASE, "workload", workload)
    base = combine(base, "arrivals", {"concurrency": 60})
    base = combine(base, "hardware.kv_blocks", 20_000)
    rates = {
        policy: _run(base, residency__policy=policy, residency__ttl_s=5.0).hit_rate
        for policy in ("discard", "lru", "static-ttl", "oracle-next-use")
    }
    room = rates["oracle-next-use"] - rates["discard"]
    share = (rates["static-ttl"] - rates["discard"]) / room if room > 1e-9 else 0.0
    plain = (rates["lru"] - rates["discard"]) / room if room > 1e-9 else 0.0
    yield Finding(
        statement="on bimodal gaps a static threshold captures most of the gain",
        reported="most",
        found=f"{100 * share:.0f} % of {100 * room:.1f} points from evict-always to the oracle",
        shows=share > 0.5,
        note=f"LRU without any threshold: {100 * plain:.0f} %; soft retention with one constant TTL"
        " is LRU in all but name",
    )


def _tiers(scale: float) -> Iterator[Finding]:
    workload = {
        "programs": int(80 * scale), "agents": 1, "anchor_tokens": 500, "turns": 10,
        "observation_tokens": 4000, "output_tokens": 40, "chat": True,
        "tools": [{"tool": "shell", "median_s": 3.0, "sigma": 0.6}],
    }  # fmt: skip
    base = combine(_BASE, "workload", workload)
    base = combine(base, "hardware.kv_blocks", 14_000)
    times = {
        (tier, load): _run(base, arrivals__concurrency=load, tiers__dram_gb=tier).jct_s.mean
        for tier in (0.0, 120.0)
        for load in (14, 40)
    }
    better = {load: 1 - times[120.0, load] / times[0.0, load] for load in (14, 40)}
    yield Finding(
        statement="a second tier softens the collapse under overload",
        reported="softens",
        found=", ".join(
            f"JCT with {load} programs {times[0.0, load]:.0f} s without, {times[120.0, load]:.0f} s"
            " with DRAM"
            for load in (14, 40)
        ),
        shows=better[40] >= 0.2,
        note="it helps the light load as much: both exceed the HBM",
    )
    slow, fast = (
        _run(base, arrivals__concurrency=40, tiers__cxl_gb=120.0, tiers__cxl_bandwidth_gbps=rate)
        for rate in (6.0, 60.0)
    )
    gain = 1 - fast.jct_s.mean / slow.jct_s.mean
    yield Finding(
        statement="CXL bandwidth is worth up to about 10 % of JCT near saturation",
        reported="up to about 10 %",
        found=f"{100 * gain:.1f} % from 6 to 60 GB/s",
        shows=0.0 < gain <= 0.15,
        note="tenfold bandwidth; from 15 GB/s up it is worth next to nothing here",
    )


_CLIFF = ((0.45, 0.93), (0.75, 0.73), (0.87, 0.34), (1.18, 0.04))


def _cliff(scale: float) -> Iterator[Finding]:
    workload = {
        "programs": int(96 * scale), "agents": 1, "anchor_tokens": 300, "turns": 24,
        "observation_tokens": 1400, "output_tokens": 200, "chat": True,
        "tools": [{"tool": "shell", "median_s": 6.0, "sigma": 0.7}],
    }  # fmt: skip
    base = combine(_BASE, "workload", workload)
    base = combine(base, "arrivals", {"concurrency": 32})
    programs = int(96 * scale)
    plenty = _run(base, hardware__kv_blocks=400_000)
    context = (plenty.prompt_tokens + plenty.generated_tokens) / plenty.turns
    working_set = context * min(32, programs)
    found = []
    for ratio in (*(r for r, _ in _CLIFF), 1.5):
        record = _run(base, hardware__kv_blocks=int(working_set / ratio / 16))
        found.append(record.hit_rate)
    beyond = found.pop()
    shown = ", ".join(f"{r:g}: {h:.2f}" for (r, _), h in zip(_CLIFF, found, strict=True))
    falls = all(a > b for a, b in itertools.pairwise(found))
    yield Finding(
        statement="hit rate falls off a cliff as the working set nears the KV memory",
        reported=", ".join(f"{r:g}: {h:g}" for r, h in _CLIFF),
        found=shown,
        shows=falls and found[0] - found[-1] > 0.4,
        note=f"at 1.5: {beyond:.2f}. The knee lies at 1.0 here, at 0.8 in the measured run, whose"
        " working set was estimated from outside and whose prompts were 65k tokens",
    )


_SHAPES: dict[str, dict[str, object]] = {
    "pipeline": {"agents": 6, "determinism": 1.0, "successors": 1},
    "supervisor": {"agents": 8, "determinism": 0.75, "successors": 4},
    "group chat": {"agents": 5, "determinism": 0.6, "successors": 4, "chat": True},
    "swarm": {"agents": 12, "determinism": 0.35, "successors": 8},
}


def _cachescout(scale: float) -> Iterator[Finding]:
    for shape, values in _SHAPES.items():
        workload = {
            "programs": int(80 * scale), "anchor_tokens": 6000, "turns": 14,
            "observation_tokens": 200, "output_tokens": 60,
            "tools": [{"tool": "shell", "median_s": 4.0, "sigma": 0.8}], **values,
        }  # fmt: skip
        base = combine(_BASE, "workload", workload)
        # The regime of the table: recurring agents whose prefixes alone fill the KV memory.
        base = combine(base, "hardware.kv_blocks", 375 * int(str(values["agents"])))
        by_policy: dict[str, list[tuple[int, CellRecord]]] = {}
        for policy in ("lru", "scout"):
            by_policy[policy] = [
                (load, _run(base, residency__policy=policy, arrivals__concurrency=load))
                for load in (4, 8, 16)
            ]
        stock, scout = (dict(by_policy[p])[8] for p in ("lru", "scout"))
        peak = {p: max(r.turns_per_s for _, r in rows) for p, rows in by_policy.items()}
        equal = _load_at(by_policy["scout"], stock.turn_s.mean) / 8
        lift = 100 * (scout.hit_rate - stock.hit_rate)
        ttft = 100 * (scout.ttft_s.mean / stock.ttft_s.mean - 1)
        yield Finding(
            statement=f"CacheScout table, {shape}: scout against LRU",
            reported="hit rate +13 to +37 points, TTFT -12 to -29 %, throughput +6 to +14 %",
            found=(
                f"hit rate {stock.hit_rate:.2f} -> {scout.hit_rate:.2f} ({lift:+.1f} points),"
                f" TTFT {ttft:+.0f} %, turn {stock.turn_s.mean:.2f} -> {scout.turn_s.mean:.2f} s,"
                f" peak throughput {100 * (peak['scout'] / peak['lru'] - 1):+.1f} %,"
                f" load at equal latency {equal:.2f}x"
            ),
            shows=lift >= 13 and ttft <= -12,
            note="" if lift >= 13 else "smaller than reported: see docs/simulator.md",
        )


def _load_at(rows: Sequence[tuple[int, CellRecord]], latency: float) -> float:
    """Return the load at which the mean turn takes *latency*, straight between measured loads."""
    before = rows[0]
    for row in rows[1:]:
        low, high = before[1].turn_s.mean, row[1].turn_s.mean
        if low <= latency <= high and high > low:
            return before[0] + (row[0] - before[0]) * (latency - low) / (high - low)
        before = row
    return float(rows[-1][0] if rows[-1][1].turn_s.mean < latency else rows[0][0])


EXPERIMENTS: dict[str, Callable[[float], Iterator[Finding]]] = {
    "routing": _routing,
    "reuse": _reuse,
    "tools": _tool_length,
    "bimodal": _bimodal,
    "tiers": _tiers,
    "cliff": _cliff,
    "cachescout": _cachescout,
}
"""Experiments by name; each takes a scale of its number of programs and yields findings."""


def run_experiment(name: str, scale: float) -> list[Finding]:
    """Return the findings of one experiment."""
    return list(EXPERIMENTS[name](scale))

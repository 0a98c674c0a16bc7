"""
Metrics of an engine with Scout in it, from its state: the same names whatever the engine.

A state is what `/v1/scout/state` shows of one engine. What it does not say is not shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

__all__ = ["ENGINE_METRICS", "HINTS", "Described", "engine_metrics"]

MODES = ("scout", "lru", "stock")
PHASES = ("running", "gap", "ended")


@dataclass(frozen=True, slots=True)
class Described:
    """One metric family, as Prometheus names it; counters without `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str


HINTS = Described(
    "scout_hints", "counter", ("field", "outcome"), "Hint fields of answered requests"
)
"""Counted where headers are read, not in the engine."""

ENGINE_METRICS: Mapping[str, Described] = {
    described.name: described
    for described in (
        Described("scout_mode", "gauge", ("mode",), "1 for the order of eviction in force"),
        Described("scout_breaker_open", "gauge", (), "1 when a fault took Scout out of the engine"),
        Described("scout_faults", "counter", (), "Exceptions in Scout's code in the engine"),
        Described(
            "scout_requests", "counter", ("origin",), "Requests by how their agent was known"
        ),
        Described("scout_finishes", "counter", ("finish",), "Ends and preemptions of requests"),
        Described("scout_events", "counter", ("outcome",), "Side-channel events"),
        Described(
            "scout_prompt_tokens", "counter", ("agent",), "Prompt tokens of requests that ended"
        ),
        Described("scout_hit_tokens", "counter", ("agent",), "Of those, tokens found in the cache"),
        Described("scout_blocks_popped", "counter", (), "Blocks taken from the free queue"),
        Described("scout_blocks_evicted", "counter", (), "Popped blocks that were still cached"),
        Described(
            "scout_blocks_regretted",
            "counter",
            (),
            "Blocks evicted and asked for again within a minute of their last use",
        ),
        Described(
            "scout_warmups", "counter", ("outcome",), "Warm-ups: started, used, wasted, cancelled"
        ),
        Described("scout_warmup_tokens", "counter", (), "Tokens computed by warm-ups"),
        Described(
            "scout_warmup_confidence", "gauge", (), "Chance of use that a warm-up needs at present"
        ),
        Described(
            "scout_predictability", "gauge", (), "How well the next agent can be told, 0 to 1"
        ),
        Described("scout_sessions", "gauge", ("phase",), "Remembered sessions by phase"),
        Described(
            "scout_shadow_hits",
            "counter",
            ("order",),
            "Hit blocks of the shadow caches",
        ),
        Described(
            "scout_shadow_leader", "gauge", ("order",), "1 for the order that the duel follows"
        ),
        Described(
            "scout_offload_evicted", "counter", ("order",), "Chunks evicted from the CPU tier"
        ),
        Described("scout_decision_seconds", "histogram", (), "Seconds per popped block"),
    )
}
"""What `engine_metrics` shows; every family has the label `engine` before its own."""

ORDERS = ("use", "rate", "lru")


def engine_metrics(states: Sequence[Mapping[str, object]]) -> Iterator[Metric]:
    """Yield the families of ENGINE_METRICS for the engines' *states*, in rank order."""
    shown = _Shown()
    for rank, state in enumerate(states):
        shown.engine(str(rank), state)
    yield from shown.families.values()


class _Shown:
    def __init__(self) -> None:
        self.families: dict[str, Metric] = {name: _family(d) for name, d in ENGINE_METRICS.items()}

    def engine(self, engine: str, state: Mapping[str, object]) -> None:
        """Add one engine's figures."""
        for mode in MODES:
            self._add("scout_mode", float(state.get("mode") == mode), engine, mode)
        breaker = _map(state, "breaker")
        self._add("scout_breaker_open", float(breaker.get("open") is True), engine)
        self._add("scout_faults", _number(breaker, "faults"), engine)
        for name, key in (
            ("scout_requests", "arrivals"),
            ("scout_finishes", "finishes"),
            ("scout_events", "events"),
        ):
            self._each(name, _map(state, key), engine)
        evictions = _map(state, "evictions")
        for key in ("popped", "evicted"):
            if key in evictions:
                self._add(f"scout_blocks_{key}", _number(evictions, key), engine)
        self._each("scout_offload_evicted", _map(_map(state, "offload"), "evicted"), engine)
        self._warmups(engine, _map(state, "prefetch"))
        self._core(engine, _map(state, "core"))
        self._histogram(engine, _map(state, "decision"))

    def _core(self, engine: str, core: Mapping[str, object]) -> None:
        if not core:
            return
        self._add("scout_predictability", _number(core, "predictability"), engine)
        self._add("scout_blocks_regretted", _number(core, "regretted_blocks"), engine)
        for phase in PHASES:
            self._add("scout_sessions", _number(core, f"sessions_{phase}"), engine, phase)
        hits = _map(core, "shadow_hits")
        following = core.get("following") or "lru"
        for order in ORDERS:
            counted = core.get("shadow_hits_lru") if order == "lru" else hits.get(order)
            self._add("scout_shadow_hits", _float(counted), engine, order)
            self._add("scout_shadow_leader", float(order == following), engine, order)
        usages = core.get("agent_tokens")
        for usage in usages if isinstance(usages, list | tuple) else ():
            if isinstance(usage, Mapping) and isinstance(usage.get("name"), str):
                agent = str(usage["name"])
                self._add("scout_prompt_tokens", _number(usage, "prompt_tokens"), engine, agent)
                self._add("scout_hit_tokens", _number(usage, "cached_tokens"), engine, agent)

    def _warmups(self, engine: str, prefetch: Mapping[str, object]) -> None:
        if not prefetch:
            return
        for outcome in ("started", "used", "wasted", "cancelled"):
            self._add("scout_warmups", _number(prefetch, outcome), engine, outcome)
        self._add("scout_warmup_tokens", _number(prefetch, "tokens"), engine)
        self._add("scout_warmup_confidence", _number(prefetch, "confidence"), engine)

    def _histogram(self, engine: str, decision: Mapping[str, object]) -> None:
        bounds, counts = decision.get("bounds_s"), decision.get("buckets")
        if not isinstance(bounds, list) or not isinstance(counts, list):
            return
        if len(counts) != len(bounds) + 1:
            return
        total, buckets = 0.0, []
        for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
            total += _float(count)
            buckets.append((bound, total))
        family = self.families["scout_decision_seconds"]
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric([engine], buckets, _number(decision, "sum_s"))

    def _each(self, name: str, values: Mapping[str, object], engine: str) -> None:
        for label in values:
            self._add(name, _number(values, label), engine, str(label))

    def _add(self, name: str, value: float, *labels: str) -> None:
        family = self.families[name]
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)


def _family(described: Described) -> Metric:
    labels = ("engine", *described.labels)
    if described.kind == "counter":
        return CounterMetricFamily(described.name, described.meaning, labels=labels)
    if described.kind == "gauge":
        return GaugeMetricFamily(described.name, described.meaning, labels=labels)
    return HistogramMetricFamily(described.name, described.meaning, labels=labels)


def _map(state: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = state.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(values: Mapping[str, object], key: str) -> float:
    return _float(values.get(key))


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

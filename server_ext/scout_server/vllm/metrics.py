"""Our figures on the server's own /metrics."""

from collections.abc import Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from scout_server.vllm.link import EngineLink

__all__ = ["OUTCOMES", "EngineCollector", "register_engines"]

OUTCOMES = Counter("scout_hints", "Hint fields of requests by what became of them", ["outcome"])
"""Counted in the API server, once per field of a request that got a response."""

MODES = ("scout", "lru", "stock")


class EngineCollector(Collector):
    """
    Turns the engines' last known states into metrics; asks nobody.

    The middleware refreshes the states before a scrape is answered.
    """

    def __init__(self, link: EngineLink) -> None:
        self.link = link

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the names are known only with a state, and are ours alone."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of every engine."""
        failures = CounterMetricFamily("scout_link_failures", "Engine calls without an answer")
        failures.add_metric([], float(self.link.failures))
        yield failures
        mode = GaugeMetricFamily(
            "scout_mode", "1 for the order of eviction in force", labels=["engine", "mode"]
        )
        breaker = GaugeMetricFamily(
            "scout_breaker_open", "1 when a fault took Scout out of the engine", labels=["engine"]
        )
        counters = {
            name: CounterMetricFamily(f"scout_{name}", meaning, labels=["engine", *labels])
            for name, meaning, labels in (
                ("faults", "Exceptions in Scout's code in the engine", []),
                ("blocks_popped", "Blocks taken from the free queue", []),
                ("blocks_evicted", "Popped blocks that were still cached", []),
                ("requests", "Requests by how their agent was found", ["origin"]),
                ("finishes", "Ends and preemptions of requests", ["finish"]),
                ("events", "Side-channel events", ["outcome"]),
                ("blocks_regretted", "Blocks evicted and asked for again within a minute", []),
                ("shadow_hits", "Hit blocks of the shadow caches that decide", ["order"]),
            )
        }
        decision = HistogramMetricFamily(
            "scout_decision_seconds", "Seconds per popped block", labels=["engine"]
        )
        predictability = GaugeMetricFamily(
            "scout_predictability", "How well the next agent can be told, 0 to 1", labels=["engine"]
        )
        sessions = GaugeMetricFamily(
            "scout_sessions", "Remembered sessions by phase", labels=["engine", "phase"]
        )
        for rank, state in enumerate(self.link.states):
            engine = str(rank)
            for name in MODES:
                mode.add_metric([engine, name], float(state.get("mode") == name))
            condition = _map(state, "breaker")
            breaker.add_metric([engine], float(condition.get("open") is True))
            evictions = _map(state, "evictions")
            counters["faults"].add_metric([engine], _number(condition, "faults"))
            counters["blocks_popped"].add_metric([engine], _number(evictions, "popped"))
            counters["blocks_evicted"].add_metric([engine], _number(evictions, "evicted"))
            for name, key in (
                ("requests", "arrivals"),
                ("finishes", "finishes"),
                ("events", "events"),
            ):
                for label in _map(state, key):
                    counters[name].add_metric([engine, label], _number(_map(state, key), label))
            core = _map(state, "core")
            predictability.add_metric([engine], _number(core, "predictability"))
            for phase in ("running", "gap", "ended"):
                sessions.add_metric([engine, phase], _number(core, f"sessions_{phase}"))
            counters["blocks_regretted"].add_metric([engine], _number(core, "regretted_blocks"))
            for order in ("scout", "lru"):
                hits = _number(core, f"shadow_hits_{order}")
                counters["shadow_hits"].add_metric([engine, order], hits)
            _add_histogram(decision, engine, _map(state, "decision"))
        yield mode
        yield breaker
        yield predictability
        yield sessions
        yield from counters.values()
        yield decision


def register_engines(registry: CollectorRegistry, link: EngineLink) -> EngineCollector:
    """Show *link*'s engines in *registry*; a second call replaces the first one's link."""
    known = getattr(registry, "scout_collector", None)
    if isinstance(known, EngineCollector):
        known.link = link
        return known
    collector = EngineCollector(link)
    registry.register(collector)
    registry.scout_collector = collector  # type: ignore[attr-defined]
    return collector


def _add_histogram(
    family: HistogramMetricFamily, engine: str, decision: Mapping[str, object]
) -> None:
    bounds, counts = decision.get("bounds_s"), decision.get("buckets")
    if not isinstance(bounds, list) or not isinstance(counts, list):
        return
    if len(counts) != len(bounds) + 1:
        return
    total, buckets = 0, []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += int(count)
        buckets.append((bound, float(total)))
    family.add_metric([engine], buckets, _number(decision, "sum_s"))


def _map(state: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = state.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(values: Mapping[str, object], key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else 0.0

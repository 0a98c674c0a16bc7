"""Our figures on vLLM's own /metrics."""

from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from scout_server.exposition import HINTS, engine_metrics
from scout_server.vllm.link import EngineLink

__all__ = ["OUTCOMES", "EngineCollector", "register_engines"]

OUTCOMES = Counter(HINTS.name, HINTS.meaning, HINTS.labels)
"""Counted in the API server, once per field of a request that got a response."""


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
        yield from engine_metrics(self.link.states)


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

"""Prometheus metrics of a gateway or of a pool on Ray; labels have few values."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scout_server.policy.books import SessionState
from scout_server.policy.engine import TaoEngine

__all__ = ["Meters"]

_AGES_S = (0.1, 1.0, 10.0, 60.0, 300.0)


class Meters(Collector):
    """Counters and histograms of one pool, and gauges read from its engine when asked."""

    def __init__(self, engine: TaoEngine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "scout_gateway_requests", "Requests by how they ended", ["outcome"], registry=r
        )
        self.hold = Histogram(
            "scout_gateway_hold_seconds",
            "Time that admitted requests waited for room",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 30, 60, 120, 300, 600),
            registry=r,
        )
        self.plan = Histogram(
            "scout_gateway_plan_seconds",
            "Time of one decision",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
            registry=r,
        )
        self.plans = Counter(
            "scout_gateway_plans",
            "Decisions by how they were found",
            ["method", "exact"],
            registry=r,
        )
        self.dropped = Counter(
            "scout_gateway_placements_dropped",
            "Placements that were void when they were applied",
            ["reason"],
            registry=r,
        )
        self.moves = Counter(
            "scout_gateway_moves", "Turns on another node than the session's last", registry=r
        )
        self.retries = Counter(
            "scout_gateway_retries", "Requests sent to another node after a failure", registry=r
        )
        self.prompt = Counter("scout_gateway_prompt_tokens", "Prompt tokens served", registry=r)
        self.cached = Counter(
            "scout_gateway_cached_tokens", "Prompt tokens that nodes found cached", registry=r
        )
        self.hints = Counter(
            "scout_gateway_hints", "Hint fields by what became of them", ["outcome"], registry=r
        )
        self.expired = Counter(
            "scout_gateway_leases_expired", "Running requests taken for lost", registry=r
        )
        self.drift: dict[str, int] = {}
        """By node: tokens booked less tokens in use, when the node was last looked at."""
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        engine, now = self._engine, self._clock()
        yield GaugeMetricFamily(
            "scout_gateway_queue", "Requests that wait for room", len(engine.waiting)
        )
        ages = GaugeMetricFamily(
            "scout_gateway_holds", "Requests that wait for room, by age", labels=["at_least_s"]
        )
        waited = [now - held.arrived for held in engine.waiting.values()]
        for age in _AGES_S:
            ages.add_metric([f"{age:g}"], sum(w >= age for w in waited))
        yield ages
        states = GaugeMetricFamily("scout_gateway_sessions", "Sessions by state", labels=["state"])
        seen = [s.state for s in engine.ledger.sessions.values()]
        for state in SessionState:
            states.add_metric([state.value], seen.count(state))
        yield states
        gauges = {
            name: GaugeMetricFamily(f"scout_gateway_node_{name}", text, labels=["node"])
            for name, text in (
                ("up", "1 when the node answers"),
                ("capacity_tokens", "KV room of the node"),
                ("booked_tokens", "KV room booked for running requests"),
                ("running", "Requests running through this gateway"),
            )
        }
        for node in engine.ledger.nodes.values():
            tokens, requests = engine.ledger.used(node.name)
            values = (int(node.up), node.capacity, tokens, requests)
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric([node.name], value)
        yield from gauges.values()
        drift = GaugeMetricFamily(
            "scout_gateway_node_drift_tokens",
            "KV room booked less KV room in use, at the last look at the node",
            labels=["node"],
        )
        for name, tokens in self.drift.items():
            if name in engine.ledger.nodes:
                drift.add_metric([name], tokens)
        yield drift

    def text(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self.registry)

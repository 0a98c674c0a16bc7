"""What `/metrics` shows: vLLM's names where the meaning is vLLM's, `scout_*` for the rest."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scout_sdk._hints import HintOutcome
from scout_server.embedded.engine import Engine
from scout_server.exposition import HINTS, Described, engine_metrics
from scout_server.replica.request import Request

__all__ = ["ONLY_HERE", "Metrics"]

ONLY_HERE = (
    Described("scout_recomputed_tokens", "counter", (), "Tokens computed again after preemptions"),
    Described("scout_engine_steps", "counter", (), "Engine steps"),
)
"""What vLLM does not count under a name of ours."""

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BUCKETS_S = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
)


class Metrics(Collector):
    """The metrics of one engine, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels = (engine.settings.model, "0")
        self.hints: dict[tuple[str, str], int] = {}
        """Hints by field and outcome."""
        self.rejected_events = 0
        self._registry = CollectorRegistry()
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token", _TTFT_BUCKETS_S
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", _LATENCY_BUCKETS_S
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first step", _LATENCY_BUCKETS_S
        )
        self._registry.register(self)
        engine.on_first_token = self._ttft.observe
        engine.on_finish = self._finished

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
        return family.labels(*self._labels)

    def _finished(self, request: Request) -> None:
        assert request.finished_at is not None
        assert request.first_scheduled_at is not None
        self._latency.observe(request.finished_at - request.arrival)
        self._queue.observe(request.first_scheduled_at - request.arrival)

    def outcome(self, field: str, outcome: HintOutcome) -> None:
        """Count what became of one hint."""
        key = (field, outcome.value)
        self.hints[key] = self.hints.get(key, 0) + 1

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine counts itself."""
        engine = self._engine
        replica, settings = engine.replica, engine.settings
        counters = engine.counters()
        for name, text, value in (
            ("num_requests_running", "Requests in the batch", len(replica.running)),
            ("num_requests_waiting", "Requests waiting", replica.waiting_count),
            ("kv_cache_usage_perc", "Fraction of KV blocks in use", replica.pool.usage),
        ):
            yield self._gauge(f"vllm:{name}", text, value)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up", counters.queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache", counters.hit_tokens),
            ("num_preemptions", "Preemptions", counters.preemptions),
            ("prompt_tokens", "Prompt tokens", counters.prompt_tokens),
            ("generation_tokens", "Output tokens", counters.generated_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests by how they ended",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in sorted(engine.finishes.items()):
            family.add_metric((*self._labels, reason), count)
        yield family
        info = {
            "block_size": str(settings.block_tokens),
            "num_gpu_blocks": str(settings.kv_blocks),
            "enable_prefix_caching": "True",
            "engine": "0",
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "Configuration", labels=tuple(info))
        gauge.add_metric(tuple(info.values()), 1.0)
        yield gauge
        yield from self._scout(engine)

    def _scout(self, engine: Engine) -> Iterator[Metric]:
        family = CounterMetricFamily(HINTS.name, HINTS.meaning, labels=HINTS.labels)
        for key, count in sorted(self.hints.items()):
            family.add_metric(key, count)
        yield family
        yield from engine_metrics(
            [
                {
                    "mode": engine.mode,
                    "breaker": {"open": engine.faulted is not None, "faults": engine.faults},
                    "arrivals": engine.arrivals,
                    "finishes": engine.finishes,
                    "events": {**engine.events, "rejected": self.rejected_events},
                    "evictions": {"evicted": engine.replica.pool.evicted},
                    "core": engine.core_state(),
                }
            ]
        )
        counters = engine.counters()
        for described, value in zip(
            ONLY_HERE, (counters.recomputed_tokens, counters.steps), strict=True
        ):
            family = CounterMetricFamily(described.name, described.meaning, labels=("engine",))
            family.add_metric(("0",), value)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

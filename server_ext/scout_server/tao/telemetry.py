"""What a node says about itself: vLLM's metrics text, and our extension's state."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NodeReport", "read_metrics", "read_state"]

_LINE = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}]*)\})?\s+([0-9.eE+-]+|NaN|[+-]Inf)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_WANTED = frozenset(
    {
        "vllm:cache_config_info",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    }
)
MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One look at a node; None: not said."""

    capacity_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None
    used_fraction: float | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None


def read_metrics(text: str, *, rank: int | None) -> NodeReport:
    """Return what vLLM's /metrics say; with a *rank* only that engine's lines count."""
    values: dict[str, float] = {}
    capacity: int | None = None
    for name, raw, number in _LINE.findall(text):
        if name not in _WANTED:
            continue
        labels = dict(_LABEL.findall(raw))
        if rank is not None and labels.get("engine", str(rank)) != str(rank):
            continue
        if name == "vllm:cache_config_info":
            size = _whole(labels.get("block_size")), _whole(labels.get("num_gpu_blocks"))
            if size[0] and size[1]:
                capacity = size[0] * size[1] + (capacity or 0 if rank is None else 0)
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        if name == "vllm:kv_cache_usage_perc":
            values[name] = max(values.get(name, 0.0), value)
        else:
            values[name] = values.get(name, 0.0) + value
    return NodeReport(
        capacity_tokens=capacity,
        running=_count(values.get("vllm:num_requests_running")),
        waiting=_count(values.get("vllm:num_requests_waiting")),
        used_fraction=values.get("vllm:kv_cache_usage_perc"),
        queried_tokens=_count(values.get("vllm:prefix_cache_queries_total")),
        hit_tokens=_count(values.get("vllm:prefix_cache_hits_total")),
    )


def read_state(state: object) -> NodeReport:
    """Return what /v1/scout/state of our extension or of the embedded engine says."""
    if not isinstance(state, Mapping):
        return NodeReport()
    cache = state.get("prefix_cache")
    cache = cache if isinstance(cache, Mapping) else {}
    return NodeReport(
        running=_number(state.get("running")),
        waiting=_number(state.get("waiting")),
        queried_tokens=_number(cache.get("queried_tokens")),
        hit_tokens=_number(cache.get("hit_tokens")),
    )


def _number(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and isinstance(value, int) and value >= 0 else None


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _count(value: float | None) -> int | None:
    return None if value is None or value != value or value < 0 else int(value)

"""The shipped profiles against measured serving points: TTFT and TPOT at a concurrency."""

import csv
import gzip
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.policy import PolicySettings
from scout_server.replica import BatchSettings, Replica, Request
from scout_server.sim.hardware import split_over
from scout_server.sim.hardware.fitted import FittedLatency, shipped_profiles
from scout_server.sim.hardware.specs import GPUS, MODELS

__all__ = ["Point", "PointError", "load_points", "simulate_point", "summarise"]

_SYSTEMS = {
    "a100_sxm": "A100", "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "l40s": "L40S",
}  # fmt: skip
_MODELS = {
    "llama-3.1-8b": "llama-3.1-8b",
    "llama-3.1-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "qwen3-32b": "qwen3-32b",
}
_FP8_SPEED = 1.8
"""Dense kernels in fp8 against bf16: half the bytes, somewhat less than twice the rate."""


_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured point: requests of one length at a fixed concurrency."""

    name: str
    gpu: str
    model: str
    backend: str
    precision: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    tensor_parallel: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PointError:
    """One point, simulated: relative errors."""

    point: Point
    ttft: float
    tpot: float


def load_points(path: Path) -> Iterator[Point]:
    """
    Yield the points of aiconfigurator's silicon sample that a profile covers.

    Aggregated serving, bf16 or fp8, one pipeline stage, no attention data parallelism.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                point = _point(row)
                if point is not None:
                    yield point
    except (OSError, KeyError) as error:
        msg = f"{path.name}: not a silicon sample: {error!r}"
        raise ConfigError(msg) from error


def _point(row: dict[str, str]) -> Point | None:
    model_path = row["model_path"].rsplit("/", 1)[-1].lower()
    model = next((m for start, m in _MODELS.items() if model_path.startswith(start)), None)
    gpu = _SYSTEMS.get(row["system"])
    precision = row["precision"] or ("fp8" if "fp8" in model_path else "bf16")
    if model is None or gpu is None or row["mode"] != "agg" or precision not in ("bf16", "fp8"):
        return None

    def number(name: str, default: float = 1.0) -> float:
        return float(row[name]) if row[name] else default

    if number("pp_size") != 1 or number("attention_dp_size") != 1:
        return None
    concurrency = int(number("batch_size", 0))
    if not concurrency or not row["silicon_ttft_ms"] or not row["silicon_tpot_ms"]:
        return None
    return Point(
        name=row["id"],
        gpu=gpu,
        model=model,
        backend=row["backend"],
        precision=precision,
        prompt_tokens=int(number("isl")),
        output_tokens=int(number("osl")),
        concurrency=concurrency,
        tensor_parallel=int(number("tp_size")),
        ttft_s=float(row["silicon_ttft_ms"]) / 1000,
        tpot_s=float(row["silicon_tpot_ms"]) / 1000,
    )


def _latency(point: Point) -> FittedLatency:
    latency = shipped_profiles()[point.gpu, point.model].latency
    if point.precision == "fp8":
        latency = replace(
            latency,
            weights_s=latency.weights_s / 2,
            dense_s_per_token=latency.dense_s_per_token / _FP8_SPEED,
        )
    model, gpu = MODELS[point.model], GPUS[point.gpu]
    return split_over(latency, model, gpu, point.tensor_parallel)


def simulate_point(point: Point) -> PointError:
    """
    Simulate a closed loop of *concurrency* requests and compare the means.

    Output lengths differ by up to 10 % either way, in a fixed order, so that requests do not end in
    lockstep; of six requests per slot the first two, which began together, are left out.
    """
    settings = BatchSettings(block_tokens=64, max_num_seqs=1024, max_batched_tokens=8192)
    need = -(-(point.prompt_tokens + point.output_tokens) // 64) + 1
    replica = Replica(
        settings,
        _latency(point),
        kv_blocks=(need + need // 8 + 1) * (point.concurrency + 1),
        policy=PolicySettings(hints=False, fingerprints=False),
    )
    left = 6 * point.concurrency
    requests: list[Request] = []

    def send(now: float) -> None:
        spread = 0.9 + 0.2 * (len(requests) * _GOLDEN % 1.0)
        request = Request(
            str(len(requests)),
            prompt_tokens=point.prompt_tokens,
            output_tokens=max(round(point.output_tokens * spread), 1),
        )
        requests.append(request)
        replica.submit(request, now)

    for _ in range(min(point.concurrency, left)):
        send(0.0)
    while replica.next_event_time() < math.inf:
        result = replica.step(replica.next_event_time())
        for _ in result.finished:
            if len(requests) < left:
                send(result.time)
    counted = requests[2 * point.concurrency :]
    firsts = [_at(r.first_token_at) - r.arrival for r in counted]
    rest = [
        (_at(r.finished_at) - _at(r.first_token_at)) / max(r.output_tokens - 1, 1) for r in counted
    ]
    return PointError(
        point=point,
        ttft=math.fsum(firsts) / len(firsts) / point.ttft_s - 1,
        tpot=math.fsum(rest) / len(rest) / point.tpot_s - 1,
    )


def _at(time: float | None) -> float:
    assert time is not None
    return time


def summarise(errors: Iterable[PointError]) -> list[dict[str, object]]:
    """Return one row per GPU, model, precision and backend: median and mean absolute errors."""
    groups: dict[tuple[str, str, str, str], list[PointError]] = {}
    for each in errors:
        p = each.point
        groups.setdefault((p.gpu, p.model, p.precision, p.backend), []).append(each)

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    return [
        {
            "GPU": key[0],
            "model": key[1],
            "precision": key[2],
            "backend": key[3],
            "points": len(found),
            "TPOT median error %": 100 * middle([e.tpot for e in found]),
            "TPOT mean |error| %": 100 * math.fsum(abs(e.tpot) for e in found) / len(found),
            "TTFT median error %": 100 * middle([e.ttft for e in found]),
            "TTFT mean |error| %": 100 * math.fsum(abs(e.ttft) for e in found) / len(found),
        }
        for key, found in sorted(groups.items())
    ]

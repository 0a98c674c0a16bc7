"""Fits the shipped profiles on public kernel tables; only coefficients leave this module."""

import csv
import gzip
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from scout_sdk._errors import ConfigError
from scout_server.sim.hardware.fitted import FittedLatency, Profile
from scout_server.sim.hardware.specs import GPUS, MODELS, ModelSpec
from scout_server.sim.hardware.tables import AttentionTable, Curve

__all__ = ["SYSTEMS", "fit_gpu", "fit_profiles", "kernel_profile"]

_HOST_STEP_S = 0.5e-3
"""Host work of a step that its kernels do not hide (sampling, scheduling, copies)."""
_PREFILL_S_PER_LAYER = 0.17e-3
"""Launches of a layer outside a captured graph: 5.5 ms over 32 layers on a B200, where the forward
pass was measured (SIMULATORS_AND_TRACES A3)."""
_GRAPH_S_PER_LAYER = 12e-6
"""Small kernels of a layer inside a captured graph: six of about 2 us."""
_ELEMENTWISE = 3.0
"""Time of elementwise kernels over that of reading and writing their data once. What kernel sums
miss of a measured forward pass of 2k to 16k tokens on a B200 (SIMULATORS_AND_TRACES A3)."""
_ELEMENTWISE_RTX4090 = 0.82
"""The same from the layer tables of the RTX 4090, which have these kernels; caches help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """What was fitted of one GPU."""

    gemm_s: float
    flops_s: float
    bytes_s: float
    knee: float
    context_flops_s: float
    context_s: float
    decode_s: float
    decode_sequence_s: float
    decode_bytes_s: float
    error: Mapping[str, float]
    source: str
    elementwise: float = _ELEMENTWISE


Row = tuple[float, ...]


def _fit(
    model: Callable[[Sequence[float]], np.ndarray], measured: np.ndarray, start: Sequence[float]
) -> tuple[list[float], float]:
    """Return positive parameters and the mean absolute relative error."""

    def distance(p: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(model(list(np.exp(p))) / measured))

    found = least_squares(distance, np.log(start), loss="soft_l1")
    best = [float(v) for v in np.exp(found.x)]
    error = float(np.mean(np.abs(model(best) / measured - 1.0)))
    return best, error


def _rows(path: Path) -> Iterable[dict[str, str]]:
    if not path.is_file():
        msg = f"{path.name} is missing in {path.parent}"
        raise ConfigError(msg)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


SYSTEMS = {
    "a100_sxm": "A100",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTXPRO6000",
}
"""aiconfigurator's names of the GPUs that we know."""


def _kernel_tables(folder: Path) -> dict[str, _Kernels]:
    """Fit the kernel tables of aiconfigurator, vLLM rows, bf16."""
    gemm: dict[str, list[Row]] = {}
    for r in _rows(folder / "gemm_llama_shapes.csv.gz"):
        if r["fw"].startswith("vllm") and r["gemm_dtype"] == "bfloat16":
            row = (float(r["m"]), float(r["n"]), float(r["k"]), float(r["latency"]) * 1e-3)
            gemm.setdefault(r["system"], []).append(row)
    for r in _rows(folder / "gemm_bf16_vllm_fullgrid.csv.gz"):
        n, k = float(r["n"]), float(r["k"])
        if 2048 <= n <= 65536 and 2048 <= k <= 32768:
            row = (float(r["m"]), n, k, float(r["latency"]) * 1e-3)
            gemm.setdefault(r["system"], []).append(row)
    context: dict[str, list[Row]] = {}
    for r in _rows(folder / "context_attention_llama_shapes.csv.gz"):
        if r["fw"].startswith("vllm") and r["kv_cache_dtype"] == "bfloat16":
            names = ("batch_size", "isl", "step", "num_heads")
            values = tuple(float(r[name]) for name in names)
            context.setdefault(r["system"], []).append((*values, float(r["latency"]) * 1e-3))
    decode: dict[str, list[Row]] = {}
    for r in _rows(folder / "generation_attention_llama_shapes.csv.gz"):
        if r["fw"].startswith("vllm") and r["kv_cache_dtype"] == "bfloat16":
            names = ("batch_size", "isl", "step", "num_key_value_heads")
            values = tuple(float(r[name]) for name in names)
            decode.setdefault(r["system"], []).append((*values, float(r["latency"]) * 1e-3))
    return {
        gpu: fit_gpu(np.array(gemm[s]), np.array(context[s]), np.array(decode[s]), _source(s))
        for s, gpu in SYSTEMS.items()
        if s in gemm and s in context and s in decode
    }


def _source(system: str) -> str:
    return f"aiconfigurator-core 0.12.0 kernel tables, {system}, vLLM, bf16 (Apache-2.0)"


def fit_gpu(gemm: np.ndarray, context: np.ndarray, decode: np.ndarray, source: str) -> _Kernels:
    """
    Fit the kernels of one GPU.

    Columns: *gemm* m, n, k; *context* batch, new tokens, tokens before, heads; *decode* batch,
    context in two parts, KV heads; each with its seconds. Heads are of 128.
    """
    m, n, k, seconds = gemm.T
    flops, moved = 2 * m * n * k, 2 * (n * k + m * k + m * n)

    def dense(p: Sequence[float]) -> np.ndarray:
        return np.asarray(p[0] + ((flops / p[1]) ** p[3] + (moved / p[2]) ** p[3]) ** (1 / p[3]))

    (t0, rate, width, knee), dense_error = _fit(dense, seconds, (3e-6, 5e14, 2e12, 3.0))
    b, isl, step, heads, took = context[context[:, 4] > 5e-5].T
    pairs = 4 * heads * 128 * b * isl * (step + isl / 2)
    (c0, c_rate), context_error = _fit(
        lambda p: np.asarray(p[0] + pairs / p[1]), took, (1e-5, 3e14)
    )
    b, isl, step, kv, took = decode[decode[:, 4] > 1e-5].T
    read = b * (isl + step) * kv * 128 * 4
    (d0, d_seq, d_width), decode_error = _fit(
        lambda p: np.asarray(p[0] + b * p[1] + read / p[2]), took, (1e-5, 1e-7, 2e12)
    )
    return _Kernels(
        gemm_s=t0, flops_s=rate, bytes_s=width, knee=knee,
        context_flops_s=c_rate, context_s=c0,
        decode_s=d0, decode_sequence_s=d_seq, decode_bytes_s=d_width,
        error={
            "dense": dense_error, "prefill attention": context_error,
            "decode attention": decode_error,
        },
        source=source,
    )  # fmt: skip


def kernel_profile(gpu: str, model: ModelSpec, kernels: _Kernels, note: str = "") -> Profile:
    """Return the profile of *model*: the GPU's kernels, scaled to the model's shapes."""
    layers, hidden = model.layers, model.hidden
    head = model.vocabulary * hidden
    matmul = model.matmul_parameters - head
    elementwise = 2 * (6 * hidden + 3 * model.intermediate + 2 * model.heads * model.head_dim)
    per_pair = 4 * layers * model.heads * model.head_dim
    latency = FittedLatency(
        weights_s=model.matmul_parameters * model.weight_bytes / kernels.bytes_s,
        dense_s_fixed=(4 * layers + 1) * kernels.gemm_s,
        dense_s_per_token=2 * matmul / kernels.flops_s,
        knee=kernels.knee,
        pair_s=per_pair / kernels.context_flops_s,
        sequence_s=layers * kernels.decode_sequence_s + 2 * head / kernels.flops_s,
        kv_token_s=model.kv_bytes_per_token / kernels.decode_bytes_s,
        attention_s_fixed=layers * kernels.decode_s,
        step_s_fixed=_HOST_STEP_S + layers * _GRAPH_S_PER_LAYER,
        prefill_s_fixed=layers * _PREFILL_S_PER_LAYER,
        elementwise_s_per_token=layers * kernels.elementwise * elementwise / kernels.bytes_s,
    )
    return Profile(
        gpu=gpu,
        model=model.name,
        latency=latency,
        source=kernels.source,
        error={name: round(value, 4) for name, value in kernels.error.items()},
        note=note or "kernels fitted per GPU, scaled to the model's shapes; overheads see docs",
    )


def _rtx4090(folder: Path) -> _Kernels:
    """Fit the measured layer tables of the RTX 4090 (Llama-3.1-8B)."""
    tables = folder / "RTX4090" / "Llama-3.1-8B_bf16_tp1"
    model = MODELS["llama-3.1-8b"]
    layer: dict[str, Curve] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    for r in _rows(tables / "dense.csv"):
        points.setdefault(r["layer"], []).append((float(r["tokens"]), float(r["time_us"]) * 1e-6))
    layer = {name: Curve(each) for name, each in points.items()}
    shapes = {
        "qkv_proj": (model.heads + 2 * model.kv_heads) * model.head_dim * model.hidden,
        "o_proj": model.hidden * model.hidden,
        "gate_up_proj": 2 * model.intermediate * model.hidden,
        "down_proj": model.intermediate * model.hidden,
    }
    rows = [
        (tokens, float(parameters), layer[name](tokens))
        for name, parameters in shapes.items()
        for tokens in layer[name].places
    ]
    tokens_, parameters_, seconds = np.array(rows).T
    flops, moved = 2 * tokens_ * parameters_, 2 * parameters_

    def dense(p: Sequence[float]) -> np.ndarray:
        return np.asarray(p[0] + ((flops / p[1]) ** p[3] + (moved / p[2]) ** p[3]) ** (1 / p[3]))

    (t0, rate, width, knee), dense_error = _fit(dense, seconds, (3e-6, 1.2e14, 8e11, 3.0))
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    table = [tuple(float(r[n]) for n in names) for r in _rows(tables / "attention.csv")]
    AttentionTable([(r[0], r[1], r[2], r[3], r[4]) for r in table])
    per_pair = 4 * model.heads * model.head_dim
    context = np.array([r for r in table if r[2] == 0 and r[4] > 50])
    pairs = per_pair * context[:, 0] * (context[:, 1] + context[:, 0] / 2)
    (c0, c_rate), context_error = _fit(
        lambda p: np.asarray(p[0] + pairs / p[1]), context[:, 4] * 1e-6, (1e-5, 1e14)
    )
    decode = np.array([r for r in table if r[0] == 0 and r[4] > 10])
    read = decode[:, 2] * decode[:, 3] * model.kv_heads * model.head_dim * 4
    (d0, d_seq, d_width), decode_error = _fit(
        lambda p: np.asarray(p[0] + decode[:, 2] * p[1] + read / p[2]),
        decode[:, 4] * 1e-6,
        (1e-5, 1e-7, 8e11),
    )
    return _Kernels(
        gemm_s=t0, flops_s=rate, bytes_s=width, knee=knee,
        context_flops_s=c_rate, context_s=c0,
        decode_s=d0, decode_sequence_s=d_seq, decode_bytes_s=d_width,
        error={
            "dense": dense_error, "prefill attention": context_error,
            "decode attention": decode_error,
        },
        source="LLMServingSim layer tables, RTX 4090, vLLM 0.19, Llama-3.1-8B (MIT)",
        elementwise=_ELEMENTWISE_RTX4090,
    )  # fmt: skip


def _rtx3090(folder: Path) -> _Kernels:
    """Fit the layer table of the RTX 3090; its attention is derived, not measured."""
    model = MODELS["llama-3.1-8b"]
    kv = model.kv_heads * model.head_dim * model.hidden
    shapes = {
        "q_proj": model.hidden * model.hidden, "k_proj": kv, "v_proj": kv,
        "o_proj": model.hidden * model.hidden, "gate_proj": model.intermediate * model.hidden,
        "up_proj": model.intermediate * model.hidden,
        "down_proj": model.intermediate * model.hidden,
    }  # fmt: skip
    rows = [
        (float(r["input"]), float(shapes[r["layer_name"]]), float(r["latency(ns)"]) * 1e-9)
        for r in _rows(folder / "RTX3090_v0_Llama-3.1-8B_tp1_layers.csv.gz")
        if r["layer_name"] in shapes and r["kv_cache"] == "0"
    ]
    tokens, parameters, seconds = np.array(rows).T
    flops, moved = 2 * tokens * parameters, 2 * parameters

    def dense(p: Sequence[float]) -> np.ndarray:
        return np.asarray(p[0] + ((flops / p[1]) ** p[3] + (moved / p[2]) ** p[3]) ** (1 / p[3]))

    (t0, rate, width, knee), error = _fit(dense, seconds, (3e-6, 6e13, 7e11, 3.0))
    gpu = GPUS["RTX3090"]
    return _Kernels(
        gemm_s=t0, flops_s=rate, bytes_s=width, knee=knee,
        context_flops_s=0.5 * gpu.tflops * 1e12, context_s=1e-5,
        decode_s=1e-5, decode_sequence_s=2e-7, decode_bytes_s=0.8 * gpu.bandwidth_gbps * 1e9,
        error={"dense": error},
        source="LLMServingSim v0 layer table, RTX 3090, Llama-3.1-8B (MIT); attention: roofline",
        elementwise=_ELEMENTWISE_RTX4090,
    )  # fmt: skip


_GPU_MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")


def fit_profiles(calibration: Path) -> list[Profile]:
    """
    Return the profiles of every GPU in *calibration*: folders aiconfigurator and llmservingsim.

    Every step is deterministic: equal tables give equal coefficients.
    """
    kernels = _kernel_tables(calibration / "aiconfigurator")
    kernels["RTX4090"] = _rtx4090(calibration / "llmservingsim")
    kernels["RTX3090"] = _rtx3090(calibration / "llmservingsim")
    return [
        _rounded(kernel_profile(gpu, MODELS[name], kernels[gpu]))
        for gpu in sorted(kernels)
        for name in _GPU_MODELS
    ]


def _rounded(profile: Profile) -> Profile:
    def four(value: float) -> float:
        return float(f"{value:.4g}") if value and math.isfinite(value) else value

    names = FittedLatency.__dataclass_fields__
    latency = FittedLatency(**{name: four(getattr(profile.latency, name)) for name in names})
    return Profile(
        gpu=profile.gpu,
        model=profile.model,
        latency=latency,
        source=profile.source,
        error=profile.error,
        note=profile.note,
    )

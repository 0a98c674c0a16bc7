"""Hardware: published numbers, latency models, shipped profiles, tier devices."""

from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.replica.latency import LatencyModel
from scout_server.sim.hardware.fitted import (
    FittedLatency,
    FrontLatency,
    find_profile,
    load_profile,
)
from scout_server.sim.hardware.roofline import RooflineLatency, all_reduce_s
from scout_server.sim.hardware.specs import GpuSpec, ModelSpec
from scout_server.sim.hardware.tables import load_llmservingsim

__all__ = ["front_of", "latency_of", "split_over"]


def split_over(
    latency: FittedLatency, model: ModelSpec, gpu: GpuSpec, devices: int
) -> FittedLatency:
    """Return *latency* in tensor parallel over *devices*, with its all-reduces."""
    if devices == 1:
        return latency
    fixed = all_reduce_s(model, gpu, devices, 0)
    thousand = all_reduce_s(model, gpu, devices, 1000)
    return latency.split(devices, latency_s=fixed, s_per_token=(thousand - fixed) / 1000)


def latency_of(
    *,
    kind: str,
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int = 1,
    tables: str = "",
    profile: str = "",
) -> LatencyModel:
    """Return the latency model called *kind*; ConfigError with the known names otherwise."""
    if kind == "roofline":
        return RooflineLatency(model=model, gpu=gpu, tensor_parallel=tensor_parallel)
    if kind == "fitted":
        shipped = find_profile(gpu.name, model.name)
        return split_over(shipped.latency, model, gpu, tensor_parallel)
    if kind == "calibrated":
        return load_profile(Path(profile)).latency
    if kind == "tables":
        return load_llmservingsim(Path(tables), layers=model.layers, spans=True)
    if kind == "aiconfigurator":
        from scout_server.sim.hardware.aiconfigurator import load_aiconfigurator

        return split_over(load_aiconfigurator(gpu.name, model).latency, model, gpu, tensor_parallel)
    known = "aiconfigurator, calibrated, fitted, roofline, tables"
    msg = f"unknown latency model {kind!r}; known: {known}"
    raise ConfigError(msg)


def front_of(*, kind: str, model: ModelSpec, gpu: GpuSpec, profile: str = "") -> FrontLatency:
    """Return what passes outside the engine; nothing where the latency model does not say."""
    if kind == "fitted":
        return find_profile(gpu.name, model.name).front
    if kind == "calibrated":
        return load_profile(Path(profile)).front
    return FrontLatency()

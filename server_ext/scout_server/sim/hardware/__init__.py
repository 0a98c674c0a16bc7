"""Hardware: published numbers, latency models, shipped profiles, tier devices."""

from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.replica.latency import LatencyModel
from scout_server.sim.hardware.roofline import RooflineLatency
from scout_server.sim.hardware.specs import GpuSpec, ModelSpec
from scout_server.sim.hardware.tables import load_llmservingsim

__all__ = ["latency_of"]


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
    if kind == "roofline" or kind == "fitted":
        return RooflineLatency(model=model, gpu=gpu, tensor_parallel=tensor_parallel)
    if kind == "tables":
        return load_llmservingsim(Path(tables), layers=model.layers, spans=True)
    msg = f"unknown latency model {kind!r}; known: calibrated, fitted, roofline, tables"
    raise ConfigError(msg)

"""Published numbers of models, accelerators and tier devices, and the memory arithmetic."""

from dataclasses import dataclass

from scout_sdk._errors import ConfigError

__all__ = [
    "GPUS",
    "MODELS",
    "TIER_DEVICES",
    "GpuSpec",
    "ModelSpec",
    "PoolSize",
    "TierDevice",
    "find_gpu",
    "find_model",
    "find_tier",
    "pool_blocks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer with grouped-query attention."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    weight_bytes: float = 2.0
    """Bytes per parameter: 2 for bf16."""
    kv_bytes: float = 2.0
    """Bytes per cached number."""
    tied: bool = False
    """True: the output matrix is the embedding, stored once."""

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the bytes of KV cache that one token of context takes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def weights_bytes(self) -> float:
        """Return the bytes of all weights."""
        return self.parameters * self.weight_bytes

    @property
    def matmul_parameters(self) -> float:
        """Return the parameters that every token is multiplied with (no embedding look-up)."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One accelerator: dense bf16 peak, memory and links, as published."""

    name: str
    tflops: float
    memory_gb: float
    """10^9 bytes."""
    bandwidth_gbps: float
    """Memory bandwidth, 10^9 bytes a second."""
    link_gbps: float
    """To its neighbours, one direction, 10^9 bytes a second: NVLink, or PCIe where it has none."""
    host_gbps: float
    """To the host's memory, one direction, 10^9 bytes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDevice:
    """Memory beyond the accelerator that can hold KV blocks."""

    name: str
    bandwidth_gbps: float
    """One direction, 10^9 bytes a second, as seen by the accelerator."""
    latency_s: float


_MODELS = (
    ModelSpec(
        name="llama-3.1-8b", parameters=8.03e9, layers=32, hidden=4096, heads=32, kv_heads=8,
        head_dim=128, intermediate=14336, vocabulary=128256,
    ),
    ModelSpec(
        name="llama-3.1-70b", parameters=70.55e9, layers=80, hidden=8192, heads=64, kv_heads=8,
        head_dim=128, intermediate=28672, vocabulary=128256,
    ),
    ModelSpec(
        name="qwen3-32b", parameters=32.76e9, layers=64, hidden=5120, heads=64, kv_heads=8,
        head_dim=128, intermediate=25600, vocabulary=151936,
    ),
    ModelSpec(
        name="smollm2-135m", parameters=134.5e6, layers=30, hidden=576, heads=9, kv_heads=3,
        head_dim=64, intermediate=1536, vocabulary=49152, tied=True,
    ),
    ModelSpec(
        name="scout-tiny", parameters=7.2e6, layers=4, hidden=256, heads=4, kv_heads=2,
        head_dim=64, intermediate=688, vocabulary=8192,
    ),
)  # fmt: skip
MODELS = {spec.name: spec for spec in _MODELS}

_GPUS = tuple(
    GpuSpec(
        name=name, tflops=tflops, memory_gb=memory, bandwidth_gbps=bandwidth,
        link_gbps=link, host_gbps=host,
    )
    for name, tflops, memory, bandwidth, link, host in (
        ("A100", 312, 85.9, 2039, 300, 32),
        ("H100", 989, 85.9, 3350, 450, 64),
        ("H200", 989, 151.4, 4800, 450, 64),
        ("B200", 2250, 193.3, 7700, 900, 64),
        ("L40S", 362, 48.3, 864, 32, 32),
        ("RTX4090", 165.2, 25.25, 1008, 32, 32),
        ("RTX3090", 71, 25.4, 936, 32, 32),
        ("RTXPRO6000", 468, 102.6, 1792, 64, 64),
        ("CPU", 0.2, 8, 20, 10, 10),
    )
)  # fmt: skip
GPUS = {spec.name: spec for spec in _GPUS}

_TIERS = (
    TierDevice(name="dram-pcie4", bandwidth_gbps=25, latency_s=20e-6),
    TierDevice(name="dram-pcie5", bandwidth_gbps=50, latency_s=20e-6),
    TierDevice(name="dram-c2c", bandwidth_gbps=360, latency_s=5e-6),
    TierDevice(name="cxl", bandwidth_gbps=30, latency_s=25e-6),
    TierDevice(name="cxl-x16", bandwidth_gbps=60, latency_s=25e-6),
)
TIER_DEVICES = {device.name: device for device in _TIERS}
"""Sustained, not peak: PCIe 4/5 x16 at about 80 %, NVLink-C2C 450 at 80 %, CXL x8 and x16."""


def find_model(name: str) -> ModelSpec:
    """Return the model called *name*; ConfigError with the known names otherwise."""
    if name.lower() not in MODELS:
        msg = f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}"
        raise ConfigError(msg)
    return MODELS[name.lower()]


def find_gpu(name: str) -> GpuSpec:
    """Return the accelerator called *name*; ConfigError with the known names otherwise."""
    for known, spec in GPUS.items():
        if known.lower() == name.lower().replace("-", "").replace(" ", ""):
            return spec
    msg = f"unknown gpu {name!r}; known: {', '.join(sorted(GPUS))}"
    raise ConfigError(msg)


def find_tier(name: str) -> TierDevice:
    """Return the tier device called *name*; ConfigError with the known names otherwise."""
    if name not in TIER_DEVICES:
        msg = f"unknown tier device {name!r}; known: {', '.join(sorted(TIER_DEVICES))}"
        raise ConfigError(msg)
    return TIER_DEVICES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How many KV blocks a replica has, with the arithmetic that led there."""

    blocks: int
    arithmetic: str


def pool_blocks(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    tensor_parallel: int,
    memory_fraction: float,
    block_tokens: int,
    reserve_gb: float = 1.25,
    blocks: int = 0,
) -> PoolSize:
    """
    Return the KV blocks that fit beside the weights; ConfigError, with the sum, when none do.

    *reserve_gb*: activations, graphs and library memory per device. *blocks*: so many instead,
    which is a question of "what if"; the weights have to fit even so.
    """
    usable = gpu.memory_gb * memory_fraction
    weights = model.weights_bytes / tensor_parallel / 1e9
    left = usable - weights - reserve_gb
    # A KV head is never split: beyond kv_heads devices it is copied.
    per_block = block_tokens * model.kv_bytes_per_token / min(tensor_parallel, model.kv_heads)
    fit = int(left * 1e9 // per_block)
    arithmetic = (
        f"{gpu.name} {gpu.memory_gb:g} GB x {memory_fraction:g} = {usable:.1f} GB"
        f" - weights {model.weights_bytes / 1e9:.1f} GB / {tensor_parallel} = {weights:.1f} GB"
        f" - reserve {reserve_gb:g} GB = {left:.1f} GB"
        f" / {per_block / 1e6:.2f} MB a block of {block_tokens} tokens = {fit} blocks"
    )
    if fit < 1:
        fitting = [n for n in (1, 2, 4, 8) if usable - model.weights_bytes / n / 1e9 > reserve_gb]
        advice = f"; tensor_parallel {fitting[0]} fits" if fitting else ""
        msg = f"{model.name} does not fit: {arithmetic}{advice}"
        raise ConfigError(msg)
    if blocks:
        return PoolSize(blocks=blocks, arithmetic=f"{blocks}, as set")
    return PoolSize(blocks=fit, arithmetic=arithmetic)

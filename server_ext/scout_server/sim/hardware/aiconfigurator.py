"""Step times from the kernel tables of the optional package `aiconfigurator-core` (Apache-2.0)."""

import functools
import importlib
import re
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from scout_sdk._errors import ConfigError
from scout_server.sim.hardware.fitted import Profile
from scout_server.sim.hardware.fitting import SYSTEMS, fit_gpu, kernel_profile
from scout_server.sim.hardware.specs import ModelSpec

__all__ = ["load_aiconfigurator"]

_PACKAGE = "aiconfigurator_core"
_HEAD_DIM = 128
_MOST_HEADS = 64
_GEMM = ("m", "n", "k")
_CONTEXT = ("batch_size", "isl", "step", "num_heads")
_DECODE = ("batch_size", "isl", "step", "num_key_value_heads")


def load_aiconfigurator(gpu: str, model: ModelSpec, *, data: Path | None = None) -> Profile:
    """
    Return the profile of *model* on *gpu*, fitted on the installed tables when it is asked for.

    Read are vLLM's rows in bf16 of the newest version there: `gemm_perf.parquet` (m, n, k), and of
    heads of 128 without a window `context_attention_perf.parquet` and
    `generation_attention_perf.parquet` (batch, tokens, tokens before, heads); each with its latency
    in milliseconds. *data* replaces the package's folder `systems/data`. ConfigError when the
    package, its reader, or the GPU's tables are missing.
    """
    systems = {name: system for system, name in SYSTEMS.items()}
    if gpu not in systems:
        msg = f"aiconfigurator has no tables of {gpu!r}; known: {', '.join(sorted(systems))}"
        raise ConfigError(msg)
    folder = (_folder() if data is None else data) / systems[gpu]
    if not folder.is_dir():
        msg = f"the installed aiconfigurator-core has no {systems[gpu]} (for {gpu})"
        raise ConfigError(msg)
    source = "tables" if data is not None else f"aiconfigurator-core {_version()} kernel tables"
    return kernel_profile(gpu, model, _kernels(folder, source))


def _folder() -> Path:
    found = util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        msg = "aiconfigurator-core is not installed: pip install aiconfigurator-core"
        raise ConfigError(msg)
    return Path(found.submodule_search_locations[0]) / "systems" / "data"


def _version() -> str:
    try:
        return metadata.version("aiconfigurator-core")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


@functools.cache
def _kernels(folder: Path, source: str) -> Any:
    gemm = _rows(folder / "gemm", "gemm_perf", _GEMM, {"gemm_dtype": "bfloat16"})
    n, k = gemm[:, 1], gemm[:, 2]
    gemm = gemm[(n >= 2048) & (n <= 65536) & (k >= 2048) & (k <= 32768)]
    plain = {"kv_cache_dtype": "bfloat16", "head_dim": _HEAD_DIM, "window_size": 0}
    attention = folder / "attention"
    context = _rows(attention, "context_attention_perf", _CONTEXT, plain)
    decode = _rows(attention, "generation_attention_perf", _DECODE, plain)
    context = context[context[:, 3] <= _MOST_HEADS]
    decode = decode[decode[:, 3] <= _MOST_HEADS]
    wrong = [
        name
        for name, table in (("gemm", gemm), ("context attention", context), ("decode", decode))
        if len(table) < 20
    ]
    if wrong:
        msg = f"{folder.name}: too few bf16 rows of {', '.join(wrong)} for a fit"
        raise ConfigError(msg)
    return fit_gpu(gemm, context, decode, f"{source}, {folder.name}, vLLM, bf16 (Apache-2.0)")


def _rows(
    folder: Path, name: str, columns: Sequence[str], wanted: dict[str, object]
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return *columns* and the latency in seconds of the rows that are as *wanted*."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        msg = "the tables of aiconfigurator-core need pyarrow: pip install pyarrow"
        raise ConfigError(msg) from error
    versions = sorted((folder / "vllm").glob(f"*/{name}.parquet"), key=_place)
    if not versions:
        msg = f"{folder.parent.name}: vLLM has no {name}.parquet in {folder.name}"
        raise ConfigError(msg)
    try:
        present = parquet.read_schema(versions[-1]).names
        # older tables do not know windows
        filters = [(c, "==", value) for c, value in wanted.items() if c in present]
        table = parquet.read_table(versions[-1], columns=[*columns, "latency"], filters=filters)
    except Exception as error:  # pyarrow's own, and missing columns
        msg = f"{versions[-1].name} of {folder.parent.name}: {str(error)[:200]}"
        raise ConfigError(msg) from error
    values = [np.asarray(table[c], dtype=float) for c in columns]
    return np.stack([*values, np.asarray(table["latency"], dtype=float) * 1e-3], axis=1)


def _place(path: Path) -> tuple[int, ...]:
    """Return what orders the versions."""
    return tuple(int(part) for part in re.findall(r"\d+", path.parent.name))

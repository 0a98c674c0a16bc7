"""Tables of the optional package aiconfigurator-core: read when they are there, else an error."""

import sys
from types import ModuleType

import numpy as np
import pytest

from scout_sdk import ConfigError
from scout_server.sim.hardware import latency_of
from scout_server.sim.hardware.aiconfigurator import load_aiconfigurator
from scout_server.sim.hardware.specs import MODELS, find_gpu

MODEL = MODELS["llama-3.1-8b"]
FLOPS, WIDTH = 6e14, 2e12


class Parquet(ModuleType):
    """Stands for pyarrow.parquet over tables in memory: the reader's two functions that we use."""

    def __init__(self, tables):
        super().__init__("pyarrow.parquet")
        self.tables = tables

    def read_schema(self, path):
        schema = ModuleType("schema")
        schema.names = list(self.tables[path.name])
        return schema

    def read_table(self, path, *, columns, filters):
        table = self.tables[path.name]
        keep = np.ones(len(table["latency"]), dtype=bool)
        for column, _, value in filters:
            keep &= np.array(table[column]) == value
        return {c: np.array(table[c])[keep] for c in columns}


def tables():
    """Kernel tables of a GPU with a known rate and bandwidth; rows of other kinds among them."""
    gemm = [
        (m, n, k, 1e3 * (2e-6 + 2 * m * n * k / FLOPS + 2 * (n * k + m * k + m * n) / WIDTH))
        for m in (1, 8, 64, 512, 4096)
        for n in (4096, 14336)
        for k in (4096, 14336)
    ]
    context = [
        (b, isl, step, h, 1e3 * (1e-5 + 512 * h * b * isl * (step + isl / 2) / FLOPS))
        for b in (1, 4)
        for isl in (512, 2048, 8192)
        for step in (0, 4096)
        for h in (32, 64)
    ]
    decode = [
        (b, 1, ctx, h, 1e3 * (1e-5 + b * 1e-7 + b * (ctx + 1) * h * 512 / WIDTH))
        for b in (1, 8, 64)
        for ctx in (128, 2048, 16384)
        for h in (4, 8, 16)
    ]
    names = ("m", "n", "k", "latency")
    found = {"gemm_perf.parquet": dict(zip(names, map(list, zip(*gemm, strict=True)), strict=True))}
    found["gemm_perf.parquet"]["gemm_dtype"] = ["bfloat16"] * len(gemm)
    for file, rows, heads in (
        ("context_attention_perf.parquet", context, "num_heads"),
        ("generation_attention_perf.parquet", decode, "num_key_value_heads"),
    ):
        names = ("batch_size", "isl", "step", heads, "latency")
        table = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        table["kv_cache_dtype"] = ["bfloat16"] * len(rows)
        table["head_dim"] = [128] * len(rows)
        found[file] = table
    wrong = found["gemm_perf.parquet"]
    for column, value in (("m", 1), ("n", 4096), ("k", 4096), ("latency", 1e6)):
        wrong[column].append(value)
    wrong["gemm_dtype"].append("fp8")
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The package's folder of an H100, with an older version beside the one that counts."""
    found = tables()
    parquet = Parquet(found)
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    for name in found:
        kind = "gemm" if name.startswith("gemm") else "attention"
        for version in ("0.9.0", "0.24.0"):
            place = tmp_path / "h100_sxm" / kind / "vllm" / version
            place.mkdir(parents=True, exist_ok=True)
            (place / name).touch()
    return tmp_path


def test_kernel_tables_become_step_times(folder):
    """A long prompt is bound by the rate, a decode step by the bandwidth of the tables."""
    profile = load_aiconfigurator("H100", MODEL, data=folder)
    assert profile.error["dense"] < 0.05
    assert profile.latency.dense_s_per_token * FLOPS == pytest.approx(
        2 * (MODEL.matmul_parameters - MODEL.vocabulary * MODEL.hidden), rel=0.1
    )
    assert profile.latency.kv_token_s == pytest.approx(MODEL.kv_bytes_per_token / WIDTH, rel=0.1)
    assert profile.latency.mixed_s([(4096, 0)], 0, 0) > profile.latency.mixed_s([], 1, 100)


def test_what_is_missing_is_named(folder, monkeypatch):
    """Package, reader, GPU and table: each has its own message."""
    with pytest.raises(ConfigError, match="known: A100, B200"):
        load_aiconfigurator("RTX4090", MODEL, data=folder)
    with pytest.raises(ConfigError, match="no l40s"):
        load_aiconfigurator("L40S", MODEL, data=folder)
    (folder / "l40s").mkdir()
    with pytest.raises(ConfigError, match=r"no gemm_perf\.parquet"):
        load_aiconfigurator("L40S", MODEL, data=folder)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        load_aiconfigurator("L40S", MODEL, data=folder)


def test_without_the_package_the_setting_says_what_to_install(monkeypatch):
    """`hardware.latency: aiconfigurator` needs an optional package."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install aiconfigurator-core"):
        latency_of(kind="aiconfigurator", model=MODEL, gpu=find_gpu("H100"))

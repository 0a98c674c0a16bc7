"""The simulator against what was measured: one run of a real engine, request by request."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scout_sdk._errors import ConfigError
from scout_server.policy import PolicySettings
from scout_server.replica import BatchSettings, Replica, Request
from scout_server.replica.latency import LatencyModel, StepBatch
from scout_server.sim.hardware import split_over
from scout_server.sim.hardware.fitted import find_profile
from scout_server.sim.hardware.roofline import all_reduce_s
from scout_server.sim.hardware.specs import GPUS, MODELS, ModelSpec, find_gpu
from scout_server.sim.hardware.tables import load_llmservingsim

__all__ = [
    "MeasuredRequest",
    "MeasuredRun",
    "RunError",
    "load_run",
    "profile_latency",
    "replay",
    "run_latency",
    "tables_beside",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """One request of a measured run; seconds since the first was queued."""

    queued_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run of vLLM with the times of every request, and the engine's settings."""

    name: str
    model: ModelSpec
    hardware: str
    kv_blocks: int
    engine: BatchSettings
    prefix_caching: bool
    captured_sizes: tuple[int, ...]
    tensor_parallel: int
    requests: tuple[MeasuredRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """One figure of the run, measured and simulated."""

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Return the relative error: 0.05 is 5 % too much."""
        return self.simulated / self.measured - 1.0 if self.measured else math.inf


def _object(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror or error}"
        raise ConfigError(msg) from error
    except ValueError as error:
        msg = f"{path.name}: is not JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(raw, dict):
        msg = f"{path.name}: must be an object"
        raise ConfigError(msg)
    return raw


def _get(raw: Mapping[str, object], place: str) -> object:
    at: object = raw
    for part in place.split("."):
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


def _integer(raw: Mapping[str, object], *places: str, default: int | None = None) -> int:
    for place in places:
        value = _get(raw, place)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if default is None:
        msg = f"meta.json: {' or '.join(places)} is required"
        raise ConfigError(msg)
    return default


def load_run(folder: Path) -> MeasuredRun:
    """Load requests.jsonl and meta.json of *folder*; ConfigError names what is wrong."""
    meta = _object(folder / "meta.json")
    config = folder / "config.json"
    hardware = ""
    if config.is_file():
        nodes = _get(_object(config), "nodes")
        instances = nodes[0].get("instances") if isinstance(nodes, list) and nodes else None
        if isinstance(instances, list) and instances:
            hardware = str(instances[0].get("hardware", ""))
    if not hardware:
        # "NVIDIA GeForce RTX 4090" is RTX4090, "NVIDIA H100 80GB HBM3" is H100.
        device = str(_get(meta, "hardware.device_name") or "").upper().replace(" ", "")
        hardware = next((g for g in sorted(GPUS, key=len, reverse=True) if g in device), "")
    name = str(meta.get("model", "")).rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if name not in MODELS:
        msg = f"meta.json: model {name!r} is unknown; known: {', '.join(sorted(MODELS))}"
        raise ConfigError(msg)
    sizes = _get(meta, "resolved_config.compilation_config.cudagraph_capture_sizes")
    mode = _get(meta, "resolved_config.compilation_config.cudagraph_mode")
    graphs = mode not in (0, "NONE", None, [0, 0])
    reserve = _get(meta, "resolved_config.scheduler_config.scheduler_reserve_full_isl")
    requests = _requests(folder / "requests.jsonl")
    return MeasuredRun(
        name=folder.name,
        model=MODELS[name],
        hardware=hardware,
        kv_blocks=_integer(
            meta, "kv_cache.num_gpu_blocks", "resolved_config.cache_config.num_gpu_blocks"
        ),
        engine=BatchSettings(
            block_tokens=_integer(meta, "kv_cache.block_size", default=16),
            max_num_seqs=_integer(meta, "engine_kwargs.max_num_seqs", default=256),
            max_batched_tokens=_integer(meta, "engine_kwargs.max_num_batched_tokens", default=2048),
            reserve_full_prompt=reserve if isinstance(reserve, bool) else True,
        ),
        prefix_caching=_get(meta, "kv_cache.enable_prefix_caching") is not False,
        captured_sizes=tuple(int(s) for s in sizes) if isinstance(sizes, list) and graphs else (),
        tensor_parallel=_integer(meta, "engine_kwargs.tensor_parallel_size", default=1),
        requests=requests,
    )


def _requests(path: Path) -> tuple[MeasuredRequest, ...]:
    rows: list[tuple[float, float, float, int, int]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror or error}"
        raise ConfigError(msg) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            rows.append(
                (
                    float(raw["queued_ts"]),
                    float(raw["first_token_ts"]),
                    float(raw["last_token_ts"]),
                    int(raw["input_toks"]),
                    int(raw["output_toks"]),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            msg = f"{path.name}:{number}: {error!r}"
            raise ConfigError(msg) from error
    if not rows:
        msg = f"{path.name}: has no request"
        raise ConfigError(msg)
    rows.sort()
    start = rows[0][0]
    return tuple(
        MeasuredRequest(
            queued_s=queued - start,
            first_s=first - start,
            last_s=last - start,
            prompt_tokens=prompt,
            output_tokens=output,
        )
        for queued, first, last, prompt, output in rows
    )


def tables_beside(folder: Path, run: MeasuredRun) -> Path:
    """Return the layer tables that belong to a run: beside it, named after its hardware."""
    wanted = run.model.name.lower()
    for candidate in sorted(folder.resolve().parent.glob(f"{run.hardware or '*'}/*")):
        name = candidate.name.lower()
        if name.startswith(wanted) and name.endswith(f"tp{run.tensor_parallel}"):
            return candidate
    msg = (
        f"no tables for {run.model.name} on {run.hardware or 'this hardware'} (tp"
        f"{run.tensor_parallel}) beside {folder.name}; say where they are with --tables"
    )
    raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class _WithReduce:
    """Kernels of one device, and the all-reduces that join the devices."""

    kernels: LatencyModel
    run: MeasuredRun

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step."""
        tokens = len(batch.decode) + sum(new for new, _ in batch.prefill)
        gpu = find_gpu(self.run.hardware)
        reduce = all_reduce_s(self.run.model, gpu, self.run.tensor_parallel, tokens)
        return self.kernels.step_s(batch) + reduce


def run_latency(run: MeasuredRun, tables: Path) -> LatencyModel:
    """Return the latency model of measured tables, as the run's engine used them."""
    kernels = load_llmservingsim(
        tables,
        layers=run.model.layers,
        captured_sizes=run.captured_sizes,
        degree=run.tensor_parallel,
    )
    return kernels if run.tensor_parallel == 1 else _WithReduce(kernels, run)


def profile_latency(run: MeasuredRun) -> LatencyModel:
    """Return the shipped profile of the run's hardware; ConfigError when there is none."""
    gpu = find_gpu(run.hardware)
    return split_over(
        find_profile(gpu.name, run.model.name).latency, run.model, gpu, run.tensor_parallel
    )


def replay(run: MeasuredRun, latency: LatencyModel) -> tuple[list[RunError], Replica]:
    """
    Simulate a run's requests at their arrival times; return figure by figure, and the replica.

    No two requests share a prefix here; a preempted one finds its own blocks again.
    """
    off = PolicySettings(hints=False, fingerprints=False)
    replica = Replica(run.engine, latency, kv_blocks=run.kv_blocks, policy=off)
    bt = run.engine.block_tokens
    requests = []
    for number, each in enumerate(run.requests):
        blocks = (each.prompt_tokens + each.output_tokens) // bt
        first = (number + 1) << 24
        requests.append(
            Request(
                str(number),
                prompt_tokens=each.prompt_tokens,
                output_tokens=max(each.output_tokens, 1),
                hashes=range(first, first + blocks) if run.prefix_caching else (),
            )
        )
    for request, each in zip(requests, run.requests, strict=True):
        while replica.next_event_time() < each.queued_s:
            replica.step(replica.next_event_time())
        replica.submit(request, each.queued_s)
    while replica.next_event_time() < math.inf:
        replica.step(replica.next_event_time())
    return _compare(run.requests, requests), replica


def _compare(measured: Sequence[MeasuredRequest], simulated: Sequence[Request]) -> list[RunError]:
    pairs = list(zip(measured, simulated, strict=True))
    firsts = [_time(r.first_token_at) for r in simulated]
    lasts = [_time(r.finished_at) for r in simulated]
    many = [i for i, (m, _) in enumerate(pairs) if m.output_tokens > 1]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    def quantile(values: Sequence[float], share: float) -> float:
        return sorted(values)[min(int(share * len(values)), len(values) - 1)]

    ttft_m = [m.first_s - m.queued_s for m in measured]
    ttft_s = [f - m.queued_s for f, m in zip(firsts, measured, strict=True)]
    tpot_m = [
        (measured[i].last_s - measured[i].first_s) / (measured[i].output_tokens - 1) for i in many
    ]
    tpot_s = [(lasts[i] - firsts[i]) / (measured[i].output_tokens - 1) for i in many]
    whole_m = [m.last_s - m.queued_s for m in measured]
    whole_s = [e - m.queued_s for e, m in zip(lasts, measured, strict=True)]
    return [
        RunError(name="mean TTFT s", measured=mean(ttft_m), simulated=mean(ttft_s)),
        RunError(name="mean TPOT s", measured=mean(tpot_m), simulated=mean(tpot_s)),
        RunError(name="mean latency s", measured=mean(whole_m), simulated=mean(whole_s)),
        RunError(name="makespan s", measured=max(m.last_s for m in measured), simulated=max(lasts)),
        RunError(
            name="p50 TTFT s", measured=quantile(ttft_m, 0.5), simulated=quantile(ttft_s, 0.5)
        ),
        RunError(
            name="p99 TTFT s", measured=quantile(ttft_m, 0.99), simulated=quantile(ttft_s, 0.99)
        ),
        RunError(
            name="p99 TPOT s", measured=quantile(tpot_m, 0.99), simulated=quantile(tpot_s, 0.99)
        ),
        RunError(
            name="p99 latency s",
            measured=quantile(whole_m, 0.99),
            simulated=quantile(whole_s, 0.99),
        ),
    ]


def _time(at: float | None) -> float:
    assert at is not None
    return at

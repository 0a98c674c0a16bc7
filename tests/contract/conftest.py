"""vLLM's real schedulers without a model: the tokens come from here."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@dataclass
class Lab:
    """Builds schedulers over one engine configuration."""

    config: Any

    def scheduler(
        self,
        cls: Callable[..., Any],
        *,
        blocks: int,
        block_size: int = 16,
        windows: tuple[tuple[int, int], ...] = (),
        asynchronous: bool = False,
        additional: dict[str, object] | None = None,
    ) -> Any:
        """
        Return a scheduler of *cls* with *blocks* blocks.

        *windows* adds KV groups of sliding-window attention: (block size, window).
        """
        import torch
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        shape = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=block_size, **shape))]
        groups += [
            KVCacheGroupSpec(
                [f"window{i}"], SlidingWindowSpec(block_size=size, sliding_window=window, **shape)
            )
            for i, (size, window) in enumerate(windows)
        ]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.cache_config.block_size = block_size
        self.config.scheduler_config.async_scheduling = asynchronous
        self.config.additional_config = {"scout": additional or {}}
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(cache, self.config)
        return cls(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )

    def request(
        self,
        scheduler: Any,
        request_id: str,
        tokens: list[int],
        *,
        max_tokens: int = 4,
        xargs: dict[str, object] | None = None,
    ) -> Any:
        """Return a request as the engine would make it."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=xargs)
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=get_request_block_hasher(scheduler.hash_block_size, sha256),
        )


class Runner:
    """Steps a scheduler; every request generates tokens that depend on its id and position."""

    def __init__(self, scheduler: Any, *, in_flight: int = 1) -> None:
        self.scheduler = scheduler
        self.in_flight = in_flight
        self.pending: list[tuple[Any, Any]] = []

    def step(self) -> dict[str, Any]:
        """Plan one step, and finish the oldest step in flight; return what the plan was."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            rng = random.Random(f"{request_id}/{request.num_tokens}")
            tokens.append([] if request.is_prefill_chunk else [rng.randrange(5, 1000)])
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
        )
        self.pending.append((output, result))
        if len(self.pending) >= self.in_flight:
            self.scheduler.update_from_output(*self.pending.pop(0))
        return {
            "new": [
                (new.req_id, new.num_computed_tokens, new.block_ids)
                for new in output.scheduled_new_reqs
            ],
            "cached": [
                (*row,)
                for row in zip(
                    output.scheduled_cached_reqs.req_ids,
                    output.scheduled_cached_reqs.num_computed_tokens,
                    output.scheduled_cached_reqs.new_block_ids,
                    strict=True,
                )
            ],
            "tokens": dict(output.num_scheduled_tokens),
        }

    def drain(self) -> None:
        """Step until every request is done."""
        for _ in range(10_000):
            if not self.scheduler.requests:
                break
            self.step()
        while self.pending:
            self.scheduler.update_from_output(*self.pending.pop(0))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One engine configuration for all tests; building it takes seconds."""
    folder: Path = tmp_path_factory.mktemp("vllm-model")
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    from vllm.engine.arg_utils import EngineArgs

    return Lab(
        EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=2048,
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=96,
            enforce_eager=True,
        ).create_engine_config()
    )


@pytest.fixture(scope="session")
def runner() -> type[Runner]:
    """The class that steps a scheduler."""
    return Runner

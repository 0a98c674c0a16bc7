"""The replica against vLLM's real scheduler and block pool, block for block."""

import json
import random
from collections import deque
from pathlib import Path

import pytest

from scout_server.policy import PolicySettings
from scout_server.replica import (
    BatchSettings,
    LinearLatency,
    Replica,
    Request,
    block_hashes,
)

pytestmark = [
    pytest.mark.vllm,
    # Importing vLLM on a machine without an accelerator warns about what is missing there.
    pytest.mark.filterwarnings("ignore"),
]

_BLOCK = 16
_OFF = PolicySettings(hints=False, fingerprints=False)
_SECOND = LinearLatency(
    step_s_fixed=1.0, prefill_s_per_token=0, decode_s_per_sequence=0, decode_s_per_kv_token=0
)


class _Vllm:
    """vLLM's scheduler with a worker that says what the script says."""

    def __init__(
        self, folder: Path, blocks: int, settings: BatchSettings, *, ahead: bool = False
    ) -> None:
        torch = pytest.importorskip("torch")
        pytest.importorskip("vllm")
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        model = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 1000,
            "max_position_embeddings": 8192,
        }
        (folder / "config.json").write_text(json.dumps(model))
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=4096
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_batched_tokens,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=_BLOCK, enable_prefix_caching=True),
        )
        # One block of vLLM's pool is its null block.
        config.cache_config.num_gpu_blocks = blocks + 1
        spec = FullAttentionSpec(
            block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = (AsyncScheduler if ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(_BLOCK, sha256)
        self._scripts: dict[str, list[int]] = {}
        self._flying: deque[object] = deque()  # steps that were scheduled and have no output yet
        self.queried = self.hits = 0

    def submit(self, name: str, prompt: list[int], script: list[int]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        self._scripts[name] = script
        self.scheduler.add_request(
            VllmRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=len(script), ignore_eos=True),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> dict[str, int]:
        """Schedule a step; return the new tokens of each request in it."""
        scheduled = self.scheduler.schedule()
        requests = self.scheduler.requests
        ready = {
            name: not requests[name].is_prefill_chunk for name in scheduled.num_scheduled_tokens
        }
        self._flying.append((scheduled, ready))
        stats = self.scheduler.kv_cache_manager.make_prefix_cache_stats()
        self.queried += stats.queries
        self.hits += stats.hits
        return dict(scheduled.num_scheduled_tokens)

    def complete(self) -> None:
        """Give the oldest scheduled step its output."""
        from vllm.v1.outputs import ModelRunnerOutput

        if not self._flying:
            return
        scheduled, ready = self._flying.popleft()
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            at = request.num_output_tokens if request is not None else 0
            sampled.append([self._scripts[name][at]] if ready[name] and request else [])
        self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )

    def free(self) -> list[int]:
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id - 1 for block in queue.get_all_free_blocks()]

    def blocks(self, name: str) -> list[int]:
        return [b - 1 for b in self.scheduler.kv_cache_manager.get_block_ids(name)[0]]


def _prompt(rng: random.Random, anchors: list[list[int]]) -> list[int]:
    anchor = rng.choice(anchors)
    own = [rng.randrange(1000) for _ in range(rng.choice([0, 1, 15, 16, 17, rng.randrange(90)]))]
    return (anchor[: rng.choice([len(anchor), 16, 32, 40])] + own) or [1]


@pytest.mark.parametrize("seed", range(6))
def test_the_replica_does_block_for_block_what_vllm_does(seed, tmp_path):
    """
    The same requests give the same batches, preemptions, hits, blocks and order of eviction.
    """
    rng = random.Random(seed)
    blocks = rng.choice([14, 20, 40])
    settings = BatchSettings(
        block_tokens=_BLOCK,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_batched_tokens=rng.choice([32, 64, 256]),
    )
    vllm = _Vllm(tmp_path, blocks, settings)
    replica = Replica(settings, _SECOND, kv_blocks=blocks, policy=_OFF, runs=False)
    anchors = [[rng.randrange(1000) for _ in range(length)] for length in (50, 64, 97)]
    live: list[str] = []
    steps = preempted = 0
    names = iter(range(10**6))
    while steps < 700:
        now = max(replica.now, 0.0)  # everything arrives while a step is being computed
        if len(live) < 10 and (rng.random() < 0.35 or not replica.unfinished):
            name = f"r{next(names)}"
            prompt = _prompt(rng, anchors)
            script = [rng.randrange(1000) for _ in range(rng.choice([1, 2, 17, 40, 70]))]
            vllm.submit(name, prompt, script)
            replica.submit(
                Request(
                    name,
                    prompt_tokens=len(prompt),
                    output_tokens=len(script),
                    hashes=block_hashes(prompt + script, _BLOCK),
                ),
                now,
            )
            live.append(name)
        if live and rng.random() < 0.02:
            name = live.pop(rng.randrange(len(live)))
            vllm.abort(name)
            replica.abort(name, now)
        vllm.complete()
        result = replica.step(replica.next_event_time())
        batch = replica.scheduler.batch
        expected = vllm.schedule()
        steps += 1
        preempted += len(result.preempted)
        ours = (
            {}
            if replica.idle
            else {r.request_id: n for r, n in zip(batch.requests, batch.counts, strict=True)}
        )
        assert ours == expected
        assert [r.request_id for r in replica.running] == [
            r.request_id for r in vllm.scheduler.running
        ]
        assert [r.request_id for r in replica.scheduler.queue] == [
            r.request_id for r in vllm.scheduler.waiting
        ]
        for request in replica.running:
            assert request.blocks == vllm.blocks(request.request_id)
        assert list(replica.pool.order) == vllm.free()
        assert replica.counters.queried_tokens == vllm.queried
        assert replica.counters.hit_tokens == vllm.hits
        live = [name for name in live if replica.get(name) is not None]
    assert replica.pool.evicted > 100
    assert replica.counters.hit_tokens > 0
    if blocks < 40:
        assert preempted > 0


@pytest.mark.parametrize("seed", range(4))
def test_scheduling_ahead_is_vllms_asynchronous_scheduling(seed, tmp_path):
    """
    With room for all, the same requests are in the same steps, seats short and prompts chunked.
    """
    rng = random.Random(seed)
    settings = BatchSettings(
        block_tokens=_BLOCK,
        max_num_seqs=rng.choice([2, 3, 6]),
        max_batched_tokens=rng.choice([32, 64, 256]),
        schedule_ahead=True,
    )
    vllm = _Vllm(tmp_path, 2000, settings, ahead=True)
    replica = Replica(settings, _SECOND, kv_blocks=2000, policy=_OFF, runs=False)
    ours: list[dict[str, int]] = []
    theirs: list[dict[str, int]] = []
    for number in range(400):
        # A step is being computed, the next one is scheduled already; now requests arrive.
        for each in range(rng.choice([0, 0, 0, 1, 2])):
            name = f"r{number}-{each}"
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 90))]
            script = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            vllm.submit(name, prompt, script)
            replica.submit(
                Request(name, prompt_tokens=len(prompt), output_tokens=len(script)),
                max(replica.now, 0.0),
            )
        # vLLM keeps two steps in flight: the one that is computed and the one after it.
        while len(vllm._flying) < 2:
            step = vllm.schedule()
            if step:
                theirs.append(step)
            if not step:
                break
        vllm.complete()
        if replica.next_event_time() < 1e9:
            replica.step(replica.next_event_time())
        if not replica.idle:
            batch = replica.scheduler.batch
            ours.append(
                {r.request_id: n for r, n in zip(batch.requests, batch.counts, strict=True)}
            )
    common = min(len(ours), len(theirs))
    assert common > 300
    assert ours[:common] == theirs[:common]

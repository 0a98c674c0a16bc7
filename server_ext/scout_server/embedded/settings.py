"""Settings of the embedded engine."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from scout_server.replica.batch import BatchSettings
from scout_server.replica.latency import LinearLatency

__all__ = ["EmbeddedSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """
    Settings of the embedded engine.

    The latency profile is that of a small model made quick enough for a demo, not of a GPU: a long
    prompt that misses the cache costs most of a request's time, as it does on real hardware.
    """

    model: str = "scout-embedded"
    """Name under which the model is served; requests for any other are answered too."""
    policy: Literal["lru", "scout"] = "scout"
    """`scout`: retention by the policy core; `lru`: identity off, exactly the engine's LRU."""
    kv_blocks: Annotated[int, Ge(1), Le(1 << 22)] = 2048
    """Blocks of the KV cache."""
    block_tokens: Annotated[int, Ge(1), Le(1024)] = 16
    """Tokens in one block."""
    max_num_seqs: Annotated[int, Ge(1), Le(4096)] = 32
    """Most requests running at once."""
    max_batched_tokens: Annotated[int, Ge(1), Le(1 << 20)] = 2048
    """Most tokens computed in one step."""
    max_model_len: Annotated[int, Ge(0)] = 0
    """Most tokens of one request, prompt and output; 0: as many as the KV cache holds."""
    prefill_tokens_per_s: Annotated[float, Gt(0)] = 4000.0
    """Prompt tokens computed in a second."""
    step_s: Annotated[float, Ge(0)] = 0.005
    """Seconds that a step costs whatever is in it."""
    decode_s_per_sequence: Annotated[float, Ge(0)] = 0.0001
    """Seconds that each decoding request adds to a step."""
    decode_us_per_kv_token: Annotated[float, Ge(0)] = 0.1
    """Microseconds that each token of a decoding request's context adds to a step."""
    reply_tokens: Annotated[int, Ge(1), Le(1 << 20)] = 48
    """Length of a reply that no directive and no schema asks for."""
    max_body_bytes: Annotated[int, Ge(1024)] = 16 << 20
    """Larger request bodies are refused (413)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port to listen on; 0: a free one."""

    def batch(self) -> BatchSettings:
        """Return the limits of one engine step."""
        return BatchSettings(
            block_tokens=self.block_tokens,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
        )

    def latency(self) -> LinearLatency:
        """Return the latency model."""
        return LinearLatency(
            step_s_fixed=self.step_s,
            prefill_s_per_token=1.0 / self.prefill_tokens_per_s,
            decode_s_per_sequence=self.decode_s_per_sequence,
            decode_s_per_kv_token=self.decode_us_per_kv_token * 1e-6,
        )

    def limit_tokens(self) -> int:
        """Return the most tokens of one request."""
        pool = self.kv_blocks * self.block_tokens
        return min(self.max_model_len, pool) if self.max_model_len else pool

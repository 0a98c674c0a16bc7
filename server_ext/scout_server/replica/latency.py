"""How long one engine step takes."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["LatencyModel", "LinearLatency", "StepBatch"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one engine step computes."""

    prefill: tuple[tuple[int, int], ...]
    """(new tokens, tokens already computed) of every prefilling request."""
    decode: tuple[int, ...]
    """Context tokens of every decoding request."""


class LatencyModel(Protocol):
    """Answers: how long does this step take on this hardware with this model?"""

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step; deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLatency:
    """
    Fixed costs plus costs per token, sequence and KV token (SIMULATORS_AND_TRACES A3).

    Seconds; KV cost per token of context read by decoding sequences.
    """

    step_s_fixed: float
    prefill_s_per_token: float
    decode_s_per_sequence: float
    decode_s_per_kv_token: float
    prefill_s_fixed: float = 0.0

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step."""
        seconds = self.step_s_fixed
        if batch.prefill:
            seconds += self.prefill_s_fixed
            seconds += self.prefill_s_per_token * sum(new for new, _ in batch.prefill)
        seconds += self.decode_s_per_sequence * len(batch.decode)
        seconds += self.decode_s_per_kv_token * sum(batch.decode)
        return seconds

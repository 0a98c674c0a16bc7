"""How long one engine step takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["LatencyModel", "LinearLatency", "SpanLatency", "StepBatch"]


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


@runtime_checkable
class SpanLatency(Protocol):
    """A latency model that needs sums only, so that a run of decode steps is one question."""

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step; deterministic."""

    def mixed_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context_tokens: int
    ) -> float:
        """Return the seconds of one step: *prefill* as in StepBatch, *sequences* decoding."""

    def span_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """
        Return the seconds of *steps* decode steps of the same sequences, one after the other.

        *context_tokens* is the sum over the sequences in the first step; each step adds one token
        to each. It grows with *steps*, and `span_s(n, c, 1)` equals `mixed_s((), n, c)`.
        """


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

    def mixed_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context_tokens: int
    ) -> float:
        """Return the seconds of one step."""
        seconds = self.step_s_fixed
        if prefill:
            seconds += self.prefill_s_fixed
            seconds += self.prefill_s_per_token * sum(new for new, _ in prefill)
        seconds += self.decode_s_per_sequence * sequences
        return seconds + self.decode_s_per_kv_token * context_tokens

    def span_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Return the seconds of a run of decode steps."""
        kv_tokens = steps * context_tokens + sequences * (steps * (steps - 1) // 2)
        seconds = (self.step_s_fixed + self.decode_s_per_sequence * sequences) * steps
        return seconds + self.decode_s_per_kv_token * kv_tokens

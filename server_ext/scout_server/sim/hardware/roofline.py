"""Step times from published numbers alone: the larger of compute and memory time."""

from collections.abc import Sequence
from dataclasses import dataclass

from scout_server.replica.latency import StepBatch
from scout_server.sim.hardware.specs import GpuSpec, ModelSpec

__all__ = ["RooflineLatency", "all_reduce_s"]


def all_reduce_s(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, tokens: int) -> float:
    """
    Return the seconds of a step's all-reduces: two a layer, ring over the devices.

    A ring moves 2 (n - 1) / n of the data over each link; 8 us a call covers launch and
    synchronisation.
    """
    if tensor_parallel == 1:
        return 0.0
    size = tokens * model.hidden * model.weight_bytes
    ring = 2 * (tensor_parallel - 1) / tensor_parallel * size / (0.7 * gpu.link_gbps * 1e9)
    return 2 * model.layers * (8e-6 + ring)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineLatency:
    """
    Roofline of one model on one GPU (Williams et al. 2009), with fixed efficiencies.

    Nothing is fitted: *compute_efficiency* and *memory_efficiency* are what good kernels reach,
    *overhead_s* is the launch and host work that a step costs beyond its kernels.
    """

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel: int = 1
    compute_efficiency: float = 0.65
    memory_efficiency: float = 0.8
    overhead_s: float = 1e-3

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step."""
        return self.mixed_s(batch.prefill, len(batch.decode), sum(batch.decode))

    def mixed_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context_tokens: int
    ) -> float:
        """Return the seconds of one step; see SpanLatency."""
        model, split = self.model, self.tensor_parallel
        flops_s = self.gpu.tflops * 1e12 * self.compute_efficiency * split
        bytes_s = self.gpu.bandwidth_gbps * 1e9 * self.memory_efficiency * split
        tokens = sequences
        pairs = 0.0
        context = float(context_tokens)
        for new, old in prefill:
            tokens += new
            pairs += new * (old + new / 2)
            context += old + new
        matmul = max(
            2 * model.matmul_parameters * tokens / flops_s,
            model.matmul_parameters * model.weight_bytes / bytes_s,
        )
        attention_flops = 4 * model.layers * model.heads * model.head_dim * pairs
        attention = max(attention_flops / flops_s, context * model.kv_bytes_per_token / bytes_s)
        reduce = all_reduce_s(model, self.gpu, split, tokens)
        return self.overhead_s + matmul + attention + reduce

    def span_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Return the seconds of a run of decode steps: linear in the context."""
        first = self.mixed_s((), sequences, context_tokens)
        last = self.mixed_s((), sequences, context_tokens + sequences * (steps - 1))
        return steps * (first + last) / 2

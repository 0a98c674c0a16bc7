"""Step times from a few fitted coefficients, and the profiles that are shipped."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path

import pydantic

from scout_sdk._errors import ConfigError
from scout_server.replica.latency import StepBatch

__all__ = [
    "FittedLatency",
    "FrontLatency",
    "Profile",
    "find_profile",
    "load_profile",
    "shipped_profiles",
]


_UNITLESS = frozenset({"knee", "large_tokens"})
"""Fields of `FittedLatency` that are no seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLatency:
    """
    A step in a few coefficients, seconds.

    Dense kernels take the larger of reading the weights and computing the tokens, rounded where the
    two are close (a norm of degree *knee*). Prefill
    attention grows with token pairs, decode attention with sequences and context. What kernel sums
    miss is explicit: per step, and per step that holds a prefill (no captured graph).
    """

    weights_s: float
    """Dense kernels of a step with few tokens: the weights are read."""
    dense_s_fixed: float
    """Dense kernels of every step, beyond that: latency of each kernel."""
    dense_s_per_token: float
    knee: float
    pair_s: float
    """Prefill attention per (new token, token before it)."""
    sequence_s: float
    """Per decoding sequence: attention, sampling."""
    kv_token_s: float
    """Per token of context that decoding sequences read."""
    attention_s_fixed: float = 0.0
    """Attention kernels of a step with decodes, beyond the two before."""
    step_s_fixed: float = 0.0
    """Overhead of every step: host, launches that a graph does not hide."""
    prefill_s_fixed: float = 0.0
    """Overhead of a step that holds a prefill."""
    prefill_s_per_request: float = 0.0
    """Per prompt in a step, beyond its tokens: tables of its blocks, its first token's sampling."""
    prefill_s_beside: float = 0.0
    """Per prompt in a step with decodes, on top: taking it in delays the host that schedules."""
    large_tokens: float = 0.0
    """A step with more tokens than this is large: what passes between layers leaves the cache. 0:
    none is."""
    large_s_per_token: float = 0.0
    """Per token of a large step, on top."""
    elementwise_s_per_token: float = 0.0
    """Norms, activations, rotations."""
    reduce_s_fixed: float = 0.0
    """All-reduce of a tensor-parallel step: latency."""
    reduce_s_per_token: float = 0.0

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step."""
        return self.mixed_s(batch.prefill, len(batch.decode), sum(batch.decode))

    def mixed_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context_tokens: int
    ) -> float:
        """Return the seconds of one step; see SpanLatency."""
        tokens = sequences
        seconds = self.step_s_fixed + self.reduce_s_fixed
        if prefill:
            pairs = 0.0
            for new, old in prefill:
                tokens += new
                pairs += new * (old + 0.5 * new)
            seconds += self.prefill_s_fixed + self.pair_s * pairs
            seconds += self.prefill_s_per_request * len(prefill)
        if sequences:
            seconds += self.attention_s_fixed + self.sequence_s * sequences
            seconds += self.prefill_s_beside * len(prefill)
            seconds += self.kv_token_s * context_tokens
        compute = self.dense_s_per_token * tokens
        large = max(compute, self.weights_s)
        small = min(compute, self.weights_s)
        knee = self.knee
        # (large^q + small^q)^(1/q), without overflow.
        dense = large * (1.0 + (small / large) ** knee) ** (1.0 / knee) if large else 0.0
        seconds += self.dense_s_fixed + dense
        if 0.0 < self.large_tokens < tokens:
            seconds += self.large_s_per_token * tokens
        return seconds + (self.elementwise_s_per_token + self.reduce_s_per_token) * tokens

    def span_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Return the seconds of a run of decode steps: linear in the context."""
        first = self.mixed_s((), sequences, context_tokens)
        return steps * first + self.kv_token_s * sequences * (steps * (steps - 1) // 2)

    def paced(self, factor: float) -> "FittedLatency":
        """Return the model with every step *factor* times as long."""
        seconds = {
            f.name: factor * getattr(self, f.name) for f in fields(self) if f.name not in _UNITLESS
        }
        return replace(self, **seconds)

    def split(self, devices: int, *, latency_s: float, s_per_token: float) -> "FittedLatency":
        """
        Return the model on *devices* in tensor parallel.

        Kernels divide by the devices, overheads stay, all-reduces of *latency_s* a step and
        *s_per_token* come on top.
        """
        return FittedLatency(
            weights_s=self.weights_s / devices,
            dense_s_fixed=self.dense_s_fixed,
            dense_s_per_token=self.dense_s_per_token / devices,
            knee=self.knee,
            pair_s=self.pair_s / devices,
            sequence_s=self.sequence_s,
            kv_token_s=self.kv_token_s / devices,
            attention_s_fixed=self.attention_s_fixed,
            step_s_fixed=self.step_s_fixed,
            prefill_s_fixed=self.prefill_s_fixed,
            prefill_s_per_request=self.prefill_s_per_request,
            prefill_s_beside=self.prefill_s_beside,
            large_tokens=self.large_tokens,
            large_s_per_token=self.large_s_per_token / devices,
            elementwise_s_per_token=self.elementwise_s_per_token,
            reduce_s_fixed=latency_s,
            reduce_s_per_token=s_per_token,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLatency:
    """
    What passes outside the engine's steps: HTTP, tokenizer, queues between processes; seconds.

    It delays its own request only; the engine goes on meanwhile. What it takes from the engine,
    where both share a core, is in `FittedLatency.prefill_s_beside`.
    """

    request_s_fixed: float = 0.0
    """From the client's sending to the engine's waiting queue."""
    request_s_per_token: float = 0.0
    """The same, for every prompt token."""
    busy_s: float = 0.0
    """More while the engine computes for others: they share the host's cores."""
    reply_s: float = 0.0
    """From the end of a step to the token at the client."""

    def paced(self, factor: float) -> "FrontLatency":
        """Return the same with everything *factor* times as long."""
        return FrontLatency(**{f.name: factor * getattr(self, f.name) for f in fields(self)})

    def request_s(self, prompt_tokens: int, *, busy: bool = False) -> float:
        """Return the seconds until a request is in an engine that is idle or *busy*."""
        seconds = self.request_s_fixed + self.request_s_per_token * prompt_tokens
        return seconds + self.busy_s if busy else seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Coefficients for one model on one device, and where they come from."""

    gpu: str
    model: str
    latency: FittedLatency
    source: str
    """What the coefficients were fitted on, or derived from."""
    error: dict[str, float]
    """Mean absolute relative error by part: dense, prefill_attention, decode_attention, ..."""
    note: str = ""
    front: FrontLatency = field(default_factory=FrontLatency)

    def paced(self, factor: float) -> "Profile":
        """Return the profile with everything *factor* times as long."""
        return replace(self, latency=self.latency.paced(factor), front=self.front.paced(factor))


_ADAPTER = pydantic.TypeAdapter(Profile)
_SHIPPED = ("profiles.json", "calibrated.json")
"""Fitted on public tables by `scout sim fit-profiles`; measured by `scout sim calibrate`."""


@functools.cache
def shipped_profiles() -> Mapping[tuple[str, str], Profile]:
    """Return the profiles that come with the package, by (gpu, model)."""
    folder = resources.files(__package__)
    raw: list[object] = []
    for name in _SHIPPED:
        raw += json.loads(folder.joinpath(name).read_text(encoding="utf-8"))
    return {(p.gpu, p.model): p for p in map(_ADAPTER.validate_python, raw)}


def find_profile(gpu: str, model: str) -> Profile:
    """Return the shipped profile; ConfigError with the known pairs otherwise."""
    profiles = shipped_profiles()
    if (gpu, model) not in profiles:
        known = ", ".join(f"{m} on {g}" for g, m in sorted(profiles))
        msg = f"no profile of {model} on {gpu}; known: {known}; or use hardware.latency=roofline"
        raise ConfigError(msg)
    return profiles[gpu, model]


def load_profile(path: Path) -> Profile:
    """Read one profile from a JSON file; ConfigError names what is wrong."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _ADAPTER.validate_python(raw)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror or error}"
        raise ConfigError(msg) from error
    except (ValueError, pydantic.ValidationError) as error:
        msg = f"{path.name}: not a profile: {error}"
        raise ConfigError(msg) from error


def plain(profile: Profile) -> Mapping[str, object]:
    """Return *profile* as JSON would hold it."""
    found: Mapping[str, object] = _ADAPTER.dump_python(profile, mode="json")
    return found

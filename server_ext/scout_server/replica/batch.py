"""What one engine step may compute, and what it computes."""

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from scout_server.replica.request import Request

__all__ = ["Batch", "BatchSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Limits of one engine step; the defaults are vLLM's own for serving."""

    block_tokens: Annotated[int, Ge(1)] = 16
    """Tokens in one KV block."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Most requests running at once."""
    max_batched_tokens: Annotated[int, Ge(1)] = 2048
    """Most tokens computed in one step; a longer prompt is computed in chunks."""
    long_prefill_tokens: Annotated[int, Ge(0)] = 0
    """Most tokens of one chunk when several requests are there; 0: no limit of its own."""
    reserve_full_prompt: bool = True
    """Admit a request only when all of its tokens so far fit, not only the first chunk."""
    schedule_ahead: bool = False
    """A step is scheduled while the one before it runs, as vLLM does with asynchronous scheduling:
    what arrives or ends during a step is known one step later."""


class Batch:
    """What one engine step computes. One object, filled again for every step."""

    __slots__ = (
        "admitted",
        "context_tokens",
        "counts",
        "decodes",
        "missing_hash",
        "preempted",
        "prefill",
        "requests",
        "retry_at",
        "steady",
    )

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.counts: list[int] = []
        """New tokens of each of *requests*."""
        self.prefill: list[tuple[int, int]] = []
        """(new tokens, tokens already computed) of the requests that are not decoding."""
        self.decodes = 0
        self.context_tokens = 0
        """Sum of the context of decoding requests, the new token included."""
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self.steady = False
        """Whether the waiting requests would be refused again if all that changes is decoding."""
        self.missing_hash: int | None = None
        """The one hash that could let in the next waiting request earlier if it were cached."""
        self.retry_at = math.inf
        """When a refusal by the admission hook may end by itself."""

    def clear(self) -> None:
        """Forget everything."""
        self.requests = []
        self.counts = []
        self.prefill = []
        self.decodes = 0
        self.context_tokens = 0
        self.admitted = []
        self.preempted = []
        self.steady = False
        self.missing_hash = None
        self.retry_at = math.inf

    def add(self, request: Request, count: int) -> None:
        """Add *count* new tokens of *request*."""
        self.requests.append(request)
        self.counts.append(count)
        if count == 1 and request.generated:
            self.decodes += 1
            self.context_tokens += request.computed + 1
        else:
            self.prefill.append((count, request.computed))

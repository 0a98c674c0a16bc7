"""A scheduler whose policy breaks after some evictions; for the breaker drill only."""

import os
from typing import Any

from scout_server.vllm import ScoutScheduler


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return Scout's scheduler with a fault planted in its order of eviction."""
    built = ScoutScheduler(*args, **kwargs)
    order = built.scout.core.order
    honest = order.pop
    left = int(os.environ["FAULT_AFTER_POPS"])

    def pop(n: int, *, now: float) -> list[int]:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("planted fault")
        return list(honest(n, now=now))

    order.pop = pop
    return built

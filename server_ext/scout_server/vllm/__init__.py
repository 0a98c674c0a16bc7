"""
Scout inside vLLM: `_compat` is the only importer of vllm.

By hand: `--scheduler-cls scout_server.vllm.ScoutScheduler --middleware
scout_server.vllm.ScoutMiddleware`, with `VLLM_PLUGINS=scout`. `scout serve` does all of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scout_server.vllm.middleware import ScoutMiddleware
    from scout_server.vllm.scheduler import ScoutScheduler

__all__ = ["ScoutMiddleware", "ScoutScheduler", "register"]


def register() -> None:
    """Give vLLM's engine processes the method that our endpoints call; again is harmless."""
    from scout_server.vllm import _compat
    from scout_server.vllm.utility import answer

    _compat.add_utility(answer)


def __getattr__(name: str) -> object:
    # Imported when asked for: the middleware does not need vLLM, the scheduler does.
    if name == "ScoutScheduler":
        from scout_server.vllm.scheduler import ScoutScheduler

        return ScoutScheduler
    if name == "ScoutMiddleware":
        from scout_server.vllm.middleware import ScoutMiddleware

        return ScoutMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

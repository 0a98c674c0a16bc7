"""vLLM's scheduler with the retention policy in its block pool."""

import logging
from typing import Any

from scout_sdk import ConfigError
from scout_server.config import load
from scout_server.policy import PolicySettings
from scout_server.snapshot import SnapshotSettings
from scout_server.vllm import _compat
from scout_server.vllm.bridge import Bridge
from scout_server.vllm.settings import document_of
from scout_server.vllm.utility import answer

__all__ = ["ScoutScheduler"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

_Plain: Any = _compat.scheduler_class(asynchronous=False)
_Async: Any = _compat.scheduler_class(asynchronous=True)


class _Retention(_Plain):  # type: ignore[misc]
    """Over vLLM's scheduler: everything is its own but which cached block is evicted next."""

    scout: Bridge | None = None
    """None: the stock scheduler, for the reason in `scout_problems`."""
    scout_problems: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _compat.add_utility(answer)
        self.scout_problems = _compat.problems()
        if not self.scout_problems:
            settings = load(document_of(_compat.additional_config(self.vllm_config)))
            try:
                manager = self.kv_cache_manager
                self.scout = Bridge(
                    manager.block_pool, manager.coordinator, settings.of(PolicySettings)
                )
                rank = _compat.data_parallel_rank(self.vllm_config)
                self.scout.keep(settings.of(SnapshotSettings), rank=rank)
            except ConfigError:
                raise
            except Exception as error:
                self.scout_problems = (f"cannot attach: {type(error).__name__}: {error}",)
                _log.exception("scout: cannot attach")
        if self.scout_problems:
            _log.error(
                "scout: this vLLM is not supported, so the stock engine runs:\n%s",
                "\n".join(f"- {problem}" for problem in self.scout_problems),
            )
        elif self.scout is not None:
            _log.info("scout: retention policy attached, mode %s", self.scout.mode)

    def add_request(self, request: Any) -> None:
        """Queue a request, or the next input of a streaming one."""
        if self.scout is not None and request.request_id not in self.requests:
            self.scout.arrive(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan one engine step."""
        if self.scout is None:
            return super().schedule(*args, **kwargs)
        self.scout.tick()
        output = super().schedule(*args, **kwargs)
        if output.scheduled_new_reqs:
            self.scout.scheduled(
                {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            )
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop everything cached."""
        done = bool(super().reset_prefix_cache(*args, **kwargs))
        if done and self.scout is not None:
            self.scout.forget()
        return done

    def shutdown(self) -> None:
        """Write what was learnt, and end."""
        if self.scout is not None:
            self.scout.close()
        super().shutdown()

    def _free_request_blocks(self, request: Any) -> None:
        # Also where blocks are only queued to be freed after a step in flight: the owners are set.
        if self.scout is None:
            super()._free_request_blocks(request)
            return
        self.scout.release(request)
        super()._free_request_blocks(request)
        self.scout.released(request)


class ScoutScheduler(_Retention, _Async):  # type: ignore[misc]
    """
    vLLM's asynchronous scheduler; which cached block is evicted next is Scout's choice.

    Chosen by `--scheduler-cls scout_server.vllm.ScoutScheduler`. An engine that schedules
    synchronously (CPUs, `--no-async-scheduling`) gets the same over vLLM's plain scheduler. On a
    vLLM that is not supported it says so and is the stock scheduler. A wrong configuration is an
    error at start.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler that fits the engine's way of scheduling."""
        if cls is ScoutScheduler and _compat.schedules_synchronously(vllm_config):
            return _Retention(vllm_config, *args, **kwargs)
        return super().__new__(cls)

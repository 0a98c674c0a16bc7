"""vLLM's scheduler with the retention policy in its block pool."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from scout_sdk import ConfigError
from scout_server.config import load
from scout_server.policy import PolicySettings
from scout_server.policy.prefetch import PrefetchSettings
from scout_server.recording import RecordSettings, recorder_of
from scout_server.snapshot import SnapshotSettings
from scout_server.vllm import _compat
from scout_server.vllm.bridge import Bridge
from scout_server.vllm.prefetch import Prefetch, Template
from scout_server.vllm.settings import VllmSettings, document_of
from scout_server.vllm.tier import attach
from scout_server.vllm.utility import answer
from scout_server.vllm.waiting import ProgramQueue

__all__ = ["ScoutScheduler"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

_Plain: Any = _compat.scheduler_class(asynchronous=False)
_Async: Any = _compat.scheduler_class(asynchronous=True)


def _close(scheduler: Any) -> None:
    bridge = getattr(scheduler, "scout", None)
    if bridge is not None:
        bridge.close()


class _Retention(_Plain):  # type: ignore[misc]
    """Over vLLM's scheduler: everything is its own but which cached block is evicted next."""

    scout: Bridge | None = None
    """None: the stock scheduler, for the reason in `scout_problems`."""
    scout_problems: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _compat.add_utility(answer)
        _compat.before_shutdown(_close)
        self.scout_problems = _compat.problems()
        if not self.scout_problems:
            settings = load(document_of(_compat.additional_config(self.vllm_config)))
            try:
                manager = self.kv_cache_manager
                bridge = Bridge(
                    manager.block_pool, manager.coordinator, settings.of(PolicySettings)
                )
                self.scout = bridge
                rank = _compat.data_parallel_rank(self.vllm_config)
                self.scout.keep(settings.of(SnapshotSettings), rank=rank)
                bridge.recorder = recorder_of(
                    settings.of(RecordSettings),
                    source=f"vLLM {_compat.installed_version()}",
                    block_tokens=manager.block_pool.hash_block_size,
                    rank=rank,
                )
                bridge.prefetch = Prefetch(
                    _Engine(self),
                    bridge.core,
                    bridge.queue,
                    settings.of(PrefetchSettings),
                    clock=lambda: bridge.clock(),
                    retention=bridge.breaker,
                    off=_compat.warm_up_problem(self),
                )
                attach(self.scout.guide)
                self._order_waiting(settings.of(VllmSettings))
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

    def _order_waiting(self, settings: VllmSettings) -> None:
        """Replace the queue of waiting requests where the operator chose another order."""
        if settings.waiting_order == "fcfs":
            return
        if self.policy.value != "fcfs":
            msg = (
                f"vllm.waiting_order is {settings.waiting_order!r}, which needs "
                f"--scheduling-policy fcfs; it is {self.policy.value!r}"
            )
            raise ConfigError(msg)
        bridge = self.scout
        assert bridge is not None
        self.waiting: Any = ProgramQueue(
            settings.waiting_order,
            bridge.programs,
            bridge.breaker,
            type(self.waiting),
            max_wait_s=settings.waiting_max_s,
            clock=lambda: bridge.clock(),
        )

    def add_request(self, request: Any) -> None:
        """Queue a request, or the next input of a streaming one."""
        if self.scout is not None and request.request_id not in self.requests:
            if self.scout.prefetch is not None:
                self.scout.prefetch.arriving()
            self.scout.arrive(request)
        super().add_request(request)

    def add_warm_up(self, request: Any) -> None:
        """Queue a request of our own."""
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan one engine step."""
        if self.scout is None:
            return super().schedule(*args, **kwargs)
        if self.scout.breaker.open and isinstance(self.waiting, ProgramQueue):
            self.waiting = self.waiting.handed_back()
        self.scout.tick()
        prefetch = self.scout.prefetch
        if prefetch is not None and prefetch.request_id is not None:
            # It is alone in the engine. vLLM's hit counters are users' only.
            prefetch.contended += len(self.requests) > 1
            manager = self.kv_cache_manager
            users = manager.prefix_cache_stats
            manager.prefix_cache_stats = None if users is None else type(users)()
            try:
                return super().schedule(*args, **kwargs)
            finally:
                manager.prefix_cache_stats = users
        output = super().schedule(*args, **kwargs)
        if output.scheduled_new_reqs:
            self.scout.scheduled(
                {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            )
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Take in what one engine step computed; what our own requests generate ends here."""
        prefetch = self.scout.prefetch if self.scout is not None else None
        ours = prefetch.request_id if prefetch is not None else None
        outputs = super().update_from_output(*args, **kwargs)
        if prefetch is None or ours is None:
            return outputs
        for each in outputs.values():
            each.outputs = [output for output in each.outputs if output.request_id != ours]
            if each.finished_requests:
                each.finished_requests.discard(ours)
        prefetch.go_on()
        return outputs

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many users' requests run and wait."""
        running, waiting = super().get_request_counts()
        ours = self._warm_up()
        if ours is None:
            return running, waiting
        return (running - 1, waiting) if ours in self.running else (running, waiting - 1)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to compute, of ours too: without, the engine makes no steps."""
        if super().has_unfinished_requests():
            return True
        return self._warm_up() is not None and _compat.unpaused(self)

    def _warm_up(self) -> Any:
        """Return our request in the engine; None when there is none."""
        prefetch = self.scout.prefetch if self.scout is not None else None
        return self.requests.get(prefetch.request_id) if prefetch is not None else None

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop everything cached."""
        if self.scout is not None and self.scout.prefetch is not None:
            self.scout.prefetch.arriving()
        done = bool(super().reset_prefix_cache(*args, **kwargs))
        if done and self.scout is not None:
            self.scout.forget()
        return done

    def shutdown(self) -> None:
        """Write what was learnt, if that is not done yet, and end."""
        _close(self)
        super().shutdown()

    def _free_request_blocks(self, request: Any) -> None:
        # Also where blocks are only queued to be freed after a step in flight: the owners are set.
        if self.scout is None:
            super()._free_request_blocks(request)
            return
        self.scout.release(request)
        super()._free_request_blocks(request)
        self.scout.released(request)


class _Engine:
    """What prefetching may do with the scheduler."""

    def __init__(self, scheduler: _Retention) -> None:
        self._scheduler = scheduler
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self.block_tokens = math.lcm(*(manager.block_size for manager in managers))

    def live(self) -> int:
        """Return how many requests the engine has; -1 while it is paused."""
        return len(self._scheduler.requests) if _compat.unpaused(self._scheduler) else -1

    def cached_tokens(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Return how many leading tokens of a chain are cached."""
        coordinator = self._scheduler.kv_cache_manager.coordinator
        return int(coordinator.find_longest_cache_hit(list(hashes), tokens)[1])

    def build(self, template: Template, request_id: str, tokens: list[int]) -> Any:
        """Return a request that generates one token."""
        return _compat.warm_up_request(request_id, tokens, template.like)

    def add(self, request: Any) -> None:
        """Queue a request of ours."""
        self._scheduler.add_warm_up(request)

    def abort(self, request_id: str) -> None:
        """Take a request of ours out at once."""
        self._scheduler.finish_requests(request_id, _compat.aborted())


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

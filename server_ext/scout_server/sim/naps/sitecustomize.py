"""Python runs this at the start of every process of a measured server; see the package."""

import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

__all__: list[str] = []

_WAITS = "vllm.distributed.device_communicators.shm_broadcast"
_NAP_S = float(os.environ.get("SCOUT_MEASURED_NAP_S", "0"))


def _nap() -> None:
    time.sleep(_NAP_S)


class _Naps(MetaPathFinder):
    """Puts the nap into the module that waits, once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WAITS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if not hasattr(module, "sched_yield"):
                sys.stderr.write(f"scout: {_WAITS} has no sched_yield any more; it spins\n")
            vars(module)["sched_yield"] = _nap

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _other() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    own = os.path.dirname(os.path.abspath(__file__))
    path = [p for p in sys.path if os.path.abspath(p) != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _NAP_S > 0.0 and __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Naps())
    _other()

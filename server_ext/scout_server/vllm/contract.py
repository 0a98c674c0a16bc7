"""
Which names of vLLM the extension stands on, as data, and how to check them without running vLLM.

Scheduler and block pool are internal interfaces of vLLM and move between releases. The same list is
checked against the installed package at start and, in the tests, against the unpacked wheel of a
version that is not installed.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTRACT", "SUPPORTED", "Probe", "supported", "violations"]

SUPPORTED = ("0.32", "0.33")
"""Release series: 0.32 is run in our tests, 0.33 is checked against its wheel's sources."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One name that must exist in the sources of vLLM."""

    module: str
    """Dotted path below `vllm`."""
    owner: str
    """Class, or empty for a name of the module."""
    name: str
    parameters: tuple[str, ...] | None = None
    """Leading parameters of a function, `self` left out; None: any, or an attribute."""

    def __str__(self) -> str:
        place = ".".join(filter(None, ("vllm", self.module, self.owner, self.name)))
        return place if self.parameters is None else f"{place}({', '.join(self.parameters)})"


_QUEUE = ("v1.core.kv_cache_utils", "FreeKVCacheBlockQueue")
_BLOCK = ("v1.core.kv_cache_utils", "KVCacheBlock")
_POOL = ("v1.core.block_pool", "BlockPool")
_SCHEDULER = ("v1.core.sched.scheduler", "Scheduler")
_REQUEST = ("v1.request", "Request")
_WAITING = ("v1.core.sched.request_queue", "RequestQueue")
_STATUS = ("v1.request", "RequestStatus")

CONTRACT: tuple[Probe, ...] = (
    Probe(*_QUEUE, "__init__", ("blocks",)),
    Probe(*_QUEUE, "num_free_blocks"),
    Probe(*_QUEUE, "popleft", ()),
    Probe(*_QUEUE, "popleft_n", ("n",)),
    Probe(*_QUEUE, "remove", ("block",)),
    Probe(*_QUEUE, "append", ("block",)),
    Probe(*_QUEUE, "append_n", ("blocks",)),
    Probe(*_QUEUE, "prepend_n", ("blocks",)),
    Probe(*_QUEUE, "get_all_free_blocks", ()),
    Probe(*_QUEUE, "iter_blocks_after", ("cursor",)),
    Probe(*_BLOCK, "block_id"),
    Probe(*_BLOCK, "block_hash"),
    Probe(*_BLOCK, "is_null"),
    Probe(*_POOL, "free_block_queue"),
    Probe(*_POOL, "blocks"),
    Probe(*_POOL, "hash_block_size"),
    Probe(*_POOL, "get_new_blocks", ("num_blocks",)),
    Probe(*_POOL, "free_blocks", ("ordered_blocks",)),
    Probe(*_POOL, "touch", ("blocks",)),
    Probe("v1.core.kv_cache_manager", "KVCacheManager", "block_pool"),
    Probe("v1.core.kv_cache_manager", "KVCacheManager", "coordinator"),
    Probe("v1.core.kv_cache_coordinator", "KVCacheCoordinator", "get_blocks", ("request_id",)),
    Probe("v1.core.kv_cache_coordinator", "KVCacheCoordinator", "single_type_managers"),
    Probe("v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "block_size"),
    Probe("v1.core.sched.async_scheduler", "", "AsyncScheduler"),
    Probe(*_SCHEDULER, "add_request", ("request",)),
    Probe(*_SCHEDULER, "schedule"),
    Probe(*_SCHEDULER, "reset_prefix_cache"),
    Probe(*_SCHEDULER, "_free_request_blocks", ("request",)),
    Probe(*_SCHEDULER, "_preempt_request", ("request",)),
    Probe(*_SCHEDULER, "requests"),
    Probe(*_SCHEDULER, "kv_cache_manager"),
    Probe(*_SCHEDULER, "vllm_config"),
    Probe(*_SCHEDULER, "waiting"),
    Probe(*_SCHEDULER, "policy"),
    Probe(*_WAITING, "add_request", ("request",)),
    Probe(*_WAITING, "pop_request", ()),
    Probe(*_WAITING, "peek_request", ()),
    Probe(*_WAITING, "prepend_request", ("request",)),
    Probe(*_WAITING, "prepend_requests", ("requests",)),
    Probe(*_WAITING, "remove_request", ("request",)),
    Probe(*_WAITING, "remove_requests", ("requests",)),
    Probe(*_REQUEST, "request_id"),
    Probe(*_REQUEST, "arrival_time"),
    Probe(*_REQUEST, "block_hashes"),
    Probe(*_REQUEST, "num_prompt_tokens"),
    Probe(*_REQUEST, "num_output_tokens"),
    Probe(*_REQUEST, "sampling_params"),
    Probe(*_REQUEST, "session_id"),
    Probe(*_REQUEST, "status"),
    Probe(*_STATUS, "FINISHED_STOPPED"),
    Probe(*_STATUS, "FINISHED_LENGTH_CAPPED"),
    Probe(*_STATUS, "FINISHED_ABORTED"),
    Probe(*_STATUS, "is_finished", ("status",)),
    Probe("sampling_params", "SamplingParams", "extra_args"),
    Probe("v1.core.sched.output", "NewRequestData", "req_id"),
    Probe("v1.core.sched.output", "NewRequestData", "num_computed_tokens"),
    Probe("v1.core.sched.output", "SchedulerOutput", "scheduled_new_reqs"),
    Probe("v1.engine.core", "EngineCore", "scheduler"),
    Probe("v1.engine.core", "EngineCoreProc", "_handle_client_request"),
    Probe("v1.engine.core_client", "AsyncMPClient", "call_utility_all_async", ("method",)),
    Probe("v1.engine.async_llm", "AsyncLLM", "engine_core"),
    Probe("v1.metrics.prometheus", "", "get_prometheus_registry", ()),
    Probe("config.vllm", "VllmConfig", "additional_config"),
)
"""Everything that the extension reads, calls or overrides."""


def supported(version: str) -> bool:
    """Whether *version*, such as `0.32.0+cpu`, belongs to a supported release series."""
    return ".".join(version.split("+")[0].split(".")[:2]) in SUPPORTED


def violations(root: Path, contract: Sequence[Probe] = CONTRACT) -> list[str]:
    """
    Return what the sources of vLLM below *root* (the package's folder) lack of *contract*.

    Reads and parses files; runs nothing of them.
    """
    found: list[str] = []
    modules: dict[str, ast.Module | None] = {}
    for probe in contract:
        if probe.module not in modules:
            modules[probe.module] = _parse(root, probe.module)
        tree = modules[probe.module]
        if tree is None:
            found.append(f"vllm.{probe.module} is missing (needed: {probe})")
            continue
        problem = _check(tree, probe)
        if problem:
            found.append(problem)
    return found


def _parse(root: Path, module: str) -> ast.Module | None:
    path = root.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        try:
            return ast.parse(candidate.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
    return None


def _check(tree: ast.Module, probe: Probe) -> str | None:
    body: Sequence[ast.stmt] = tree.body
    if probe.owner:
        owner = next(
            (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == probe.owner),
            None,
        )
        if owner is None:
            return f"class vllm.{probe.module}.{probe.owner} is missing"
        body = owner.body
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == probe.name
    ]
    if probe.parameters is None:
        if functions or probe.name in _names(body):
            return None
        return f"{probe} is missing"
    if not functions:
        return f"{probe} is missing"
    # A property's setter or an overload shares the name: one match will do.
    if any(
        _parameters(f, bool(probe.owner))[: len(probe.parameters)] == probe.parameters
        for f in functions
    ):
        return None
    had = ", ".join(_parameters(functions[-1], bool(probe.owner)))
    return f"{probe} takes ({had}) instead"


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> tuple[str, ...]:
    names = tuple(a.arg for a in (*function.args.posonlyargs, *function.args.args))
    static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    return names[1:] if method and not static else names


def _names(body: Sequence[ast.stmt]) -> set[str]:
    """Names that a class or module defines: its own, and what its methods set on self."""
    return {name for node in body for name in _defined(node)}


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        yield from (part.id for part in _targets(node) if isinstance(part, ast.Name))
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign | ast.AnnAssign):
                for part in _targets(inner):
                    if isinstance(part, ast.Attribute) and _is_self(part.value):
                        yield part.attr


def _targets(node: ast.Assign | ast.AnnAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"

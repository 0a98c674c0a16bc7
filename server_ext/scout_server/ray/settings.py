"""Settings of the Ray Serve application."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from scout_sdk import ConfigError
from scout_server.policy.books import LedgerSettings
from scout_server.policy.engine import TaoSettings

__all__ = ["TENANT_HEADER", "RaySettings", "document_of"]

TENANT_HEADER = "x-scout-tenant"
"""Header by which the ingress tells replicas the tenant; a client's own is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Settings of the Ray Serve application; the decision's own are under *tao*."""

    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """`vllm`: `scout serve MODEL` beside each replica; `embedded`: the ASGI application
    *engine_app* inside it; `auto`: vLLM when *model* is set and vLLM is installed where the
    application is built."""
    model: str = ""
    """Model that vLLM serves: a name or a path on every machine."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments of vLLM."""
    engine_app: str = "scout_server.embedded.launch:configured"
    """`module:function` that takes the configuration document and returns an ASGI application."""
    start_timeout_s: Annotated[float, Gt(0)] = 1800.0
    """How long a replica's engine may take to start."""
    replicas: Annotated[int, Ge(1)] = 1
    """LLM replicas; a Serve YAML's `num_replicas` or `autoscaling_config` wins."""
    replica_cpus: Annotated[float, Ge(0)] = 1.0
    """CPUs that Ray sets aside for each LLM replica."""
    replica_gpus: Annotated[float, Ge(0)] = 0.0
    """GPUs that Ray gives each LLM replica."""
    ingresses: Annotated[int, Ge(1)] = 1
    """Ingress replicas: each parses, streams and holds; all ask one pool."""
    ingress_cpus: Annotated[float, Ge(0)] = 0.5
    """CPUs that Ray sets aside for each ingress."""
    slots: Annotated[int, Gt(0)] = 256
    """Turns that a replica may run at the same time."""
    capacity_tokens: Annotated[int, Gt(0)] = 262_144
    """KV room of a replica that does not tell it."""
    stats_period_s: Annotated[float, Gt(0)] = 2.0
    """Time between two looks of the controller at a replica's load."""
    hold_timeout_s: Annotated[float, Gt(0)] = 300.0
    """A request that waited this long for room is answered 429; the client's own timeout counts
    too, when it says one."""
    retry_after_s: Annotated[int, Ge(1)] = 5
    """What a 429 tells the client to wait."""
    retries: Annotated[int, Ge(0)] = 2
    """How often a request that failed before its first byte is tried on another replica."""
    renew_s: Annotated[float, Gt(0)] = 5.0
    """Time between two signs of life that an ingress gives of its running requests."""
    max_body_bytes: Annotated[int, Gt(0)] = 32 * 1024 * 1024
    """A larger request body is refused with 413."""
    growing_prompts: bool = True
    """Requests that name no session and begin with all of an earlier one go on with its session."""
    tool_calls: bool = True
    """Read the arguments of tool calls off responses: sleeps and time limits tell when a session
    comes back. Off: only the names of the tools."""
    output_tokens: Annotated[int, Ge(0)] = 512
    """Output to expect of a request that sets no limit, and the most expected of one that does."""
    admin_key: str = ""
    """Bearer key of the admin view; empty: there is no admin view."""
    worker: Literal["thread", "process"] = "thread"
    """Where decisions are made: never on the pool's event loop."""
    inline_cells: Annotated[int, Ge(0)] = 0
    """Decisions of at most so many sessions x replicas are made on the pool's event loop."""
    plan_floor_s: Annotated[float, Ge(0)] = 0.001
    """Shortest time between two decisions."""
    plan_recheck_s: Annotated[float, Gt(0)] = 0.25
    """Longest time between two decisions while something waits."""
    trace_events: Annotated[int, Ge(0)] = 0
    """Facts and decisions that the pool remembers, to be replayed; 0: none."""
    tao: TaoSettings = field(
        default_factory=lambda: TaoSettings(ledger=LedgerSettings(lease_s=60.0))
    )
    """The decision: evaluator, planner, credit, aging, readiness, leases."""


def document_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return *args* as a configuration document: `{"ray.slots": "4"}` is `{"ray": {"slots": 4}}`.

    Text values are JSON where they are; ConfigError names what has no section.
    """
    document: dict[str, Any] = {}
    wrong: list[str] = []
    for place, value in args.items():
        *groups, name = place.split(".")
        if not groups and not isinstance(value, Mapping):
            wrong.append(f"- {place!r}: the form is section.name=value, as in ray.replicas=3")
            continue
        at = document
        for group in groups:
            at = at.setdefault(group, {})
        at[name] = _value(value) if groups else value
    if wrong:
        raise ConfigError("\n".join(["arguments of the application:", *wrong]))
    return document


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value

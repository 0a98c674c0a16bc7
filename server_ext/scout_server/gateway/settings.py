"""Settings of the gateway."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Interval

from scout_sdk import ConfigError
from scout_server.policy.engine import TaoSettings

__all__ = ["GatewaySettings", "NodeAddress", "drained_names", "node_addresses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of the gateway; the decision's own are under *tao*."""

    nodes: tuple[str, ...] = ()
    """
    Servers: `http://HOST:PORT[/PATH]`, without `/v1`.

    `#ranks=N` at the end makes N nodes of one server's data-parallel ranks.
    `#kv_events=tcp://HOST:PORT` names its publisher of KV events (extra `kv-events`), and
    `&kv_replay=tcp://HOST:PORT` where lost ones are asked for; a rank adds itself to the port.
    """
    drain: tuple[str, ...] = ()
    """Servers of *nodes* that get nothing new while another is up; what runs there goes on. One
    without `#ranks=N` stands for all ranks of its server."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8080
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: Annotated[int, Gt(0)] = 32 * 1024 * 1024
    """A larger request body is refused with 413."""
    hold_timeout_s: Annotated[float, Gt(0)] = 300.0
    """A request that waited this long for room is answered 429; the client's own timeout counts
    too, when it says one."""
    keep_alive_s: Annotated[float, Ge(0)] = 0.0
    """While a request with `stream: true` is held: time between comments that keep its connection
    alive; 0 sends none. After the first one the status is 200, and a refusal is an event."""
    retry_after_s: Annotated[int, Ge(1)] = 5
    """What a 429 tells the client to wait."""
    retries: Annotated[int, Ge(0)] = 2
    """How often a request that failed before its first byte is tried on another node."""
    connect_timeout_s: Annotated[float, Gt(0)] = 5.0
    """How long a connection to a node may take to open."""
    poll_s: Annotated[float, Gt(0)] = 2.0
    """Time between two looks at a node's health, metrics and state."""
    poll_timeout_s: Annotated[float, Gt(0)] = 5.0
    """How long one look at a node may take; a longer one failed."""
    failures: Annotated[int, Ge(1)] = 2
    """Failed looks in a row that make a node count as down."""
    plan_floor_s: Annotated[float, Ge(0)] = 0.001
    """Shortest time between two decisions."""
    plan_recheck_s: Annotated[float, Gt(0)] = 0.25
    """Longest time between two decisions while something waits."""
    worker: Literal["thread", "process"] = "thread"
    """Where decisions over more than *inline_cells* sessions x nodes are made."""
    inline_cells: Annotated[int, Ge(0)] = 48
    """Smaller decisions take less time than the way to a worker and back."""
    capacity_tokens: Annotated[int, Gt(0)] = 262_144
    """KV room of a node that does not tell it."""
    slots: Annotated[int, Gt(0)] = 256
    """Requests that a node may run at the same time."""
    growing_prompts: bool = True
    """Requests that name no session and begin with all of an earlier one go on with its session."""
    tool_calls: bool = True
    """Read the arguments of tool calls off responses: sleeps and time limits tell when a session
    comes back. Off: only the names of the tools."""
    output_tokens: Annotated[int, Ge(0)] = 512
    """Output to expect of a request that sets no limit, and the most expected of one that does."""
    admin_key: str = ""
    """Bearer key of the admin view; empty: there is no admin view."""
    tenant_to_nodes: str = "x-scout-tenant"
    """Header that tells nodes the tenant; a client's own is removed. Empty: none is sent."""
    trust_env: bool = False
    """Use the proxies that the environment names."""
    tao: TaoSettings = field(default_factory=TaoSettings)
    """The decision: evaluator, planner, credit, aging, readiness, leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """One node: a server, or one data-parallel rank of it."""

    name: str
    url: str
    rank: int | None = None
    kv_events: str | None = None
    """Where it publishes its KV events."""
    kv_replay: str | None = None
    """Where it sends lost ones again."""


_RANKS = re.compile(r"[1-9][0-9]{0,2}")
_ENDPOINT = re.compile(r"(tcp://[^\s/&#]+:)([0-9]{1,5})|ipc://[^\s&#]+")
_OPTIONS = (
    "after # only ranks=1 to ranks=999, kv_events=tcp://HOST:PORT and kv_replay=tcp://HOST:PORT"
    " are known, with & between"
)


def node_addresses(nodes: tuple[str, ...]) -> dict[str, NodeAddress]:
    """Return the nodes by name; ConfigError lists every server that is none."""
    found: dict[str, NodeAddress] = {}
    wrong: list[str] = []
    for text in nodes:
        try:
            parts = urlsplit(text)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            valid = False
        if not valid or parts.query or parts.username:
            wrong.append(f"{text!r} is not http://HOST[:PORT][/PATH][#ranks=N]")
            continue
        path = parts.path.rstrip("/")
        url = f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1')}"
        options = _options(parts.fragment)
        if options is None:
            wrong.append(f"{text!r}: {_OPTIONS}")
            continue
        count = int(options.get("ranks", 0))
        names = [f"{url}#rank={r}" for r in range(count)] or [url]
        for rank, name in enumerate(names):
            if name in found:
                wrong.append(f"{text!r} is given twice")
                break
            found[name] = NodeAddress(
                name=name,
                url=url,
                rank=rank if count else None,
                kv_events=_beside(options.get("kv_events"), rank),
                kv_replay=_beside(options.get("kv_replay"), rank),
            )
    if wrong:
        raise ConfigError("gateway nodes:\n" + "\n".join(f"- {line}" for line in wrong))
    return found


def drained_names(settings: GatewaySettings) -> frozenset[str]:
    """Return the names of the nodes that drain; ConfigError lists what is no node of ours."""
    nodes = node_addresses(settings.nodes)
    found: set[str] = set()
    wrong: list[str] = []
    for text in settings.drain:
        given = node_addresses((text,))
        urls = {a.url for a in given.values() if a.rank is None}
        names = {n for n, a in nodes.items() if n in given or a.url in urls}
        if not names:
            wrong.append(f"- {text!r} is none of gateway.nodes")
        found |= names
    if wrong:
        raise ConfigError("\n".join(["gateway.drain:", *wrong]))
    return frozenset(found)


def _options(fragment: str) -> dict[str, str] | None:
    """Return what a node's address says after #; None when it is malformed."""
    found: dict[str, str] = {}
    for part in fragment.split("&") if fragment else ():
        name, _, value = part.partition("=")
        pattern = {"ranks": _RANKS, "kv_events": _ENDPOINT, "kv_replay": _ENDPOINT}.get(name)
        if pattern is None or name in found or pattern.fullmatch(value) is None:
            return None
        found[name] = value
    return None if "kv_replay" in found and "kv_events" not in found else found


def _beside(endpoint: str | None, rank: int) -> str | None:
    """Return a rank's endpoint: vLLM adds the rank to the port."""
    parts = _ENDPOINT.fullmatch(endpoint) if endpoint is not None else None
    if parts is None or parts.group(2) is None:
        return endpoint
    return f"{parts.group(1)}{int(parts.group(2)) + rank}"

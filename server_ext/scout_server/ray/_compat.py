"""
The only module that imports Ray: its request router, deployment actors and handles are alpha.

Written for and tested with `versions.SUPPORTED`. What was learnt of Ray 2.60, and is kept to here
and in the modules that this one joins:

1. An exception in `choose_replicas` leaves its request waiting for ever: nothing passes it.
2. Without `should_backoff` a router is asked again in a busy loop.
3. A router is asked several times for one request, and its `internal_request_id` is shared by all
   calls that one HTTP request makes: turns have a key of their own, placing is idempotent by it.
4. `max_ongoing_requests` is a second admission gate, 5 unless set; held requests count for
   `max_queued_requests`, for autoscaling, and for `HTTPOptions.request_timeout_s`.
5. Router and actor classes are pickled by value with their module; what they import must be
   installed on every machine, and state that threads share stands in other modules (`notes`).
6. One thread routes for the whole process: no `ray.get`, no decision in it.
7. Multiplexed model ids are no session ids: they wait to be matched, and live in the replicas.
8. Serve does not send a request again that a replica took: the ingress does, before its first
   byte.
9. Before 2.60 Serve could forget a request of a router that does not serve in order of arrival.
10. With the HAProxy bypass a router sees one header, is cut after 5 s, and hears of no end: it is
   not used, and nothing here needs `on_request_completed`.
11. HAProxy's statistics listen on all addresses, and `ray.init` replaces 127.0.0.1 by the
   machine's own address: see docs/ray.md for a cluster on loopback.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from scout_server.config import load
from scout_server.ray import calls, ingress, pool, replica, routes, routing
from scout_server.ray.settings import TENANT_HEADER, RaySettings
from scout_server.tao.asked import Asked
from scout_server.tenancy import TenancySettings

__all__ = ["Ingress", "Llm", "RayPool", "RemotePool", "TaoRouter", "application"]

logger = logging.getLogger(__name__)

_NAMESPACE = "serve"
_ACTOR_PREFIX = "SERVE_DEPLOYMENT_ACTOR::"
_POOL = "scout-pool"
_LLM = "LLM"
_SEARCH_S = 0.5
_TASKS = 1_000_000

RemotePool = ray.remote(num_cpus=0)(pool.PoolActor)
"""The pool as an actor that the controller keeps alive."""


class RayPool:
    """
    The way to the pool actor from a router or an ingress; searches a new one when it died.

    Serve has no getter for a deployment's actor outside of that deployment: the name is searched,
    as Serve's own routers do. While two versions of the application run, all take the same one.
    """

    def __init__(self, app_name: str) -> None:
        self._prefix = f"{_ACTOR_PREFIX}{app_name}::{_LLM}::"
        self._handle: Any = None
        self._found = 0
        self._searched = float("-inf")
        self._search: asyncio.Task[Any] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def found(self) -> int:
        """Return a number that changes with every new pool; PoolGoneError when there is none."""
        await self._get()
        return self._found

    async def place(
        self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
    ) -> calls.Placed | calls.Refusal:
        """Wait until a turn has room or is refused; PoolGoneError when the pool dies."""
        answer: calls.Placed | calls.Refusal = await self.ask(
            "place", asked, attempt, avoid, timeout_s
        )
        return answer

    async def ask(self, method: str, *args: object) -> Any:
        """Return what a method of the pool returns; PoolGoneError when there is no pool."""
        handle = await self._get()
        try:
            return await getattr(handle, method).remote(*args)
        except ray.exceptions.RayTaskError:
            raise
        except RayError as error:
            if self._handle is handle:
                self._handle = None
            raise calls.PoolGoneError(str(error)) from error

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the pool and forget it; never raises. Calls arrive in order."""
        try:
            handle, sent = self._handle, None
            if handle is not None:
                sent = getattr(handle, method).remote(*args)
            follow = self._follow(handle, sent, method, *args)
            task = asyncio.get_running_loop().create_task(follow)
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        except Exception:
            logger.exception("scout: the pool was not told %s", method)

    async def _follow(self, handle: Any, sent: Any, method: str, *args: object) -> None:
        """See whether a call arrived; a pool that came after a dead one is told again."""
        try:
            if sent is not None:
                await sent
                return
        except ray.exceptions.RayTaskError:
            logger.exception("scout: the pool failed to %s", method)
            return
        except RayError:
            if self._handle is handle:
                self._handle = None
        try:
            await self.ask(method, *args)
        except calls.PoolGoneError:
            logger.debug("scout: there is no pool to %s", method)
        except Exception:
            logger.exception("scout: the pool failed to %s", method)

    async def _get(self) -> Any:
        """Return the pool; one search at a time, and not more often than every `_SEARCH_S`."""
        if self._handle is not None:
            return self._handle
        if self._search is None or self._search.done():
            if time.monotonic() - self._searched < _SEARCH_S:
                raise calls.PoolGoneError
            self._searched = time.monotonic()
            self._search = asyncio.create_task(asyncio.to_thread(self._find))
        try:
            handle = await asyncio.shield(self._search)
        except RuntimeError as error:  # our process is ending: no thread is started any more
            raise calls.PoolGoneError from error
        if handle is None:
            raise calls.PoolGoneError
        if self._handle is None:
            self._handle = handle
            self._found += 1
        return self._handle

    def _find(self) -> Any:
        if not ray.is_initialized():  # it was shut down here: asking would start a new cluster
            return None
        names = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == _NAMESPACE
            and actor["name"].startswith(self._prefix)
            and actor["name"].endswith(f"::{_POOL}")
        ]
        for name in sorted(names, reverse=True):
            try:
                return ray.get_actor(name, namespace=_NAMESPACE)
            except ValueError:
                continue  # it is being replaced
        return None


class TaoRouter(RequestRouter):  # type: ignore[misc]
    """Holds turns in `choose_replicas` until the pool has placed them."""

    def initialize_state(self, period_s: float = 2.0) -> None:
        """Make the state; Serve calls it once."""
        self._routing = routing.Routing(RayPool(self.app_name))
        self._period_s = period_s
        self._repeating: asyncio.Task[None] | None = None

    @property
    def max_num_routing_tasks(self) -> int:
        """As many as there are requests: Serve's own limit would hide held turns from the pool."""
        return _TASKS

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over membership and load, which come together."""
        super().update_replicas(replicas)
        self._routing.update({r.replica_id.unique_id: _facts(r) for r in replicas})
        if self._repeating is None:
            repeat = self._routing.repeat(self._period_s)
            self._repeating = asyncio.get_running_loop().create_task(repeat)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica."""
        super().on_replica_actor_died(replica_id)
        self._routing.died(replica_id.unique_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Take note that a replica took a call."""
        ticket = _ticket(pending_request)
        if ticket is not None:
            self._routing.routed(ticket)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas; a placed turn has one rank of one replica."""
        try:
            if pending_request is None:
                return [list(candidate_replicas)]
            pending_request.routing_context.should_backoff = True
            names = [r.replica_id.unique_id for r in candidate_replicas]
            ranks = await self._routing.choose(_ticket(pending_request), names)
            present = {r.replica_id.unique_id: r for r in self.curr_replicas.values()}
            chosen = [[present[n] for n in rank if n in present] for rank in ranks]
            return [rank for rank in chosen if rank]
        except Exception:
            logger.exception("scout: the router failed; a request goes to any replica")
            return [list(candidate_replicas)]


def _ticket(pending_request: PendingRequest) -> calls.Ticket | None:
    for arg in pending_request.args:
        if isinstance(arg, calls.Ticket):
            return arg
    return None


def _facts(running: RunningReplica) -> calls.NodeFacts:
    said = {**(running.replica_metadata or {}), **(running.routing_stats or {})}
    numbers = {
        name: value
        for name in ("capacity_tokens", "waiting", "queried_tokens", "hit_tokens")
        if isinstance(value := said.get(name), int)
    }
    return calls.NodeFacts(name=running.replica_id.unique_id, **numbers)


class _Answer:
    """One streaming call of a replica."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def __anext__(self) -> calls.Head | bytes:
        try:
            part: calls.Head | bytes = await self._response.__anext__()
            return part
        except (RayError, RayServeException) as error:
            raise ingress.UnreachableError(str(error)) from error

    def cancel(self) -> None:
        """Abort; a finished call is left alone."""
        self._response.cancel()


class _Replicas:
    """The LLM deployment as a dispatcher."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    def send(self, call: calls.Call, ticket: calls.Ticket) -> _Answer:
        """Send a call on its way."""
        handle = self._handle
        if ticket.asked is not None:  # for whoever replaces our router: it sees no ticket
            handle = handle.options(session_id=ticket.asked.session)
        return _Answer(handle.serve.remote(call, ticket))


class Llm(replica.LlmReplica):
    """The LLM deployment."""

    async def __init__(self, document: Mapping[str, Any]) -> None:  # type: ignore[misc]
        super().__init__(document)
        await self.start()


class Ingress:
    """The ingress deployment."""

    def __init__(self, llm: Any, document: Mapping[str, Any]) -> None:
        loaded = load(document)
        self._pool = RayPool(serve.get_replica_context().app_name)
        self._replicas = _Replicas(llm)
        self._front = ingress.Front(
            loaded.of(RaySettings), loaded.of(TenancySettings), self._replicas, self._pool
        )

    def __serve_build_asgi_app__(self) -> Any:
        return routes.create_app(self._front, self._replicas, self._pool)


def application(document: Mapping[str, Any]) -> serve.Application:
    """Return the application that *document* configures; ConfigError lists everything wrong."""
    loaded = load(document)
    settings = loaded.of(RaySettings)
    kind = replica.engine_kind(settings)
    ours = loaded.as_dict()
    # Replicas take the tenant from the ingress, which told it from the client's own key.
    theirs = {**ours, "tenancy": {**ours["tenancy"], "tenant_header": TENANT_HEADER}}
    theirs["ray"] = {**ours["ray"], "engine": kind}
    gate = settings.slots + settings.slots // 4 + 64
    llm = serve.deployment(
        name=_LLM,
        num_replicas=settings.replicas,
        max_ongoing_requests=gate,
        ray_actor_options={"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
        deployment_actors=[
            DeploymentActorConfig(
                name=_POOL,
                actor_class=f"{__name__}:RemotePool",
                init_kwargs={"document": ours},
                actor_options={"num_cpus": 0, "max_concurrency": 100_000},
            )
        ],
        request_router_config=RequestRouterConfig(
            request_router_class=f"{__name__}:TaoRouter",
            request_router_kwargs={"period_s": settings.stats_period_s},
            request_routing_stats_period_s=settings.stats_period_s,
            max_backoff_s=0.05,
        ),
    )(Llm)
    front = serve.deployment(
        name="Ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=settings.tao.max_waiting + settings.slots * 64,
        ray_actor_options={"num_cpus": settings.ingress_cpus},
    )(serve.ingress()(Ingress))
    return front.bind(llm.bind(theirs), ours)

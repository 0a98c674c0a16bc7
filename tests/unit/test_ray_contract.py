"""What we rely on in Ray Serve, and our router inside Serve's own machinery; no cluster."""

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scout_sdk import ConfigError
from scout_server.config import load
from scout_server.ray.calls import NodeFacts, Placed, PoolGoneError, Refusal, Ticket
from scout_server.ray.routing import Routing
from scout_server.ray.settings import document_of
from scout_server.tao.asked import Asked

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"


@dataclass
class Link:
    """A pool that places when the test says so."""

    asked: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    fault: Exception | None = None
    told: list[str] = field(default_factory=list)

    async def found(self) -> int:
        return 1

    async def place(
        self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
    ) -> Placed | Refusal:
        self.attempts.append(asked.key)
        if self.fault is not None:
            raise self.fault
        self.asked[asked.key] = asyncio.get_running_loop().create_future()
        try:
            return Placed(node=await self.asked[asked.key], held_s=0.0)
        finally:
            del self.asked[asked.key]

    def tell(self, method: str, *args: object) -> None:
        self.told.append(method)


def turn(key: str) -> Ticket:
    return Ticket(
        asked=Asked(
            key=key,
            session=key,
            tenant="",
            hints=None,
            outcomes={},
            final=False,
            body_bytes=1,
            output_tokens=1,
            timeout_s=None,
        ),
        timeout_s=60,
    )


def request(key: str) -> Any:
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    metadata = RequestMetadata(request_id=key, internal_request_id=key)
    return PendingRequest(args=["call", turn(key)], kwargs={}, metadata=metadata)


def running(name: str, *, ongoing: int = 0, **said: Any) -> Any:
    """A replica as a router sees it."""
    from ray.serve._private.common import DeploymentID
    from ray.serve.request_router import ReplicaID

    async def get_queue_len(*, deadline_s: float) -> int:
        return ongoing

    return SimpleNamespace(
        replica_id=ReplicaID(name, DeploymentID("LLM", "scout")),
        max_ongoing_requests=10,
        replica_metadata=said,
        routing_stats={},
        get_queue_len=get_queue_len,
    )


def router(link: Link, *replicas: Any) -> Any:
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID

    from scout_server.ray._compat import TaoRouter

    made = TaoRouter(
        deployment_id=DeploymentID("LLM", "scout"),
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        max_backoff_s=0.01,
    )
    made.initialize_state(period_s=0.01)
    made._routing = Routing(link)
    made.update_replicas(list(replicas))
    return made


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def test_the_extension_points_are_as_we_use_them() -> None:
    """
    Names and parameters of everything alpha, in one place: a new Ray fails here first.
    """
    from ray.serve._private import constants
    from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

    from scout_server.ray import _compat

    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    choose = ["self", "candidate_replicas", "pending_request"]
    assert parameters(RequestRouter.choose_replicas) == choose
    routed = ["self", "pending_request", "replica_id", "result"]
    assert parameters(RequestRouter.on_request_routed) == routed
    assert parameters(RequestRouter.update_replicas) == ["self", "replicas"]
    assert parameters(RequestRouter.on_replica_actor_died) == ["self", "replica_id"]
    assert isinstance(inspect.getattr_static(RequestRouter, "max_num_routing_tasks"), property)
    assert isinstance(inspect.getattr_static(RequestRouter, "curr_replicas"), property)
    assert {"args", "metadata", "routing_context"} <= set(parameters(PendingRequest))
    for name in ("replica_metadata", "routing_stats", "replica_id"):
        assert hasattr(RunningReplica, name)
    assert {"name", "actor_class", "init_kwargs", "actor_options"} <= set(
        DeploymentActorConfig.model_fields
    )
    assert "request_routing_stats_period_s" in RequestRouterConfig.model_fields
    assert constants.SERVE_DEPLOYMENT_ACTOR_PREFIX == _compat._ACTOR_PREFIX
    assert constants.SERVE_NAMESPACE == _compat._NAMESPACE
    assert constants.RECORD_REPLICA_METADATA_METHOD == "record_replica_metadata"


def test_the_application_is_built_lazily_and_its_gates_stand_above_the_plan() -> None:
    """
    Serve's own admission gates (pitfall 4) are wider than the pool's slots; wrong settings fail
    before anything starts.
    """
    from ray.serve import Application

    import scout_server.ray

    built = scout_server.ray.build(
        {"ray.engine": "embedded", "ray.slots": "7", "ray.replicas": "3"}
    )
    assert isinstance(built, Application)
    front = built._bound_deployment
    (llm_app, document) = front.init_args
    llm = llm_app._bound_deployment
    assert (llm.name, llm.num_replicas, front.name) == ("LLM", 3, "Ingress")
    assert llm.max_ongoing_requests > 7
    assert front.max_ongoing_requests > 4096
    assert document["ray"]["slots"] == 7
    (theirs,) = llm.init_args
    assert theirs["tenancy"]["tenant_header"] == "x-scout-tenant"
    assert isinstance(scout_server.ray.app, Application)
    with pytest.raises(ConfigError, match=r"ray\.slots"):
        scout_server.ray.build({"ray": {"slots": 0}})


@pytest.mark.parametrize("name", ["embedded.yaml", "vllm.yaml"])
def test_the_examples_are_what_serve_takes(name: str) -> None:
    """
    Serve's own schema accepts them, and their arguments are a valid configuration of ours.
    """
    import yaml
    from ray.serve.schema import ServeDeploySchema

    document = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    (app,) = ServeDeploySchema.model_validate(document).applications
    assert app.import_path == "scout_server.ray:build"
    load(document_of(app.args))
    assert {d.name for d in app.deployments} <= {"LLM", "Ingress"}


async def test_serve_hands_every_held_turn_to_the_pool() -> None:
    """
    Serve would run two routing tasks a replica; 40 turns at one replica are all in the pool.
    """
    link = Link()
    serve = router(link, running("a"))
    calls = [
        asyncio.create_task(serve._choose_replica_for_request(request(f"k{i}"))) for i in range(40)
    ]
    await until(lambda: len(link.asked) == 40)
    for placed in link.asked.values():
        placed.set_result("a")
    chosen = await asyncio.gather(*calls)
    assert {r.replica_id.unique_id for r in chosen} == {"a"}


async def test_a_later_turn_may_be_placed_first() -> None:
    """
    Serve's order of arrival does not bind the pool, nor does anybody get another's replica.
    """
    link = Link()
    serve = router(link, running("a"), running("b"))
    first = asyncio.create_task(serve._choose_replica_for_request(request("1")))
    second = asyncio.create_task(serve._choose_replica_for_request(request("2")))
    await until(lambda: len(link.asked) == 2)
    link.asked["2"].set_result("b")
    assert (await second).replica_id.unique_id == "b"
    assert not first.done()
    link.asked["1"].set_result("a")
    assert (await first).replica_id.unique_id == "a"


async def test_cancelling_a_held_call_cancels_the_placement() -> None:
    """
    Nothing of a held request whose client left stays in the router.
    """
    link = Link()
    serve = router(link, running("a"))
    call = asyncio.create_task(serve._choose_replica_for_request(request("1")))
    await until(lambda: link.asked)
    call.cancel()
    await until(lambda: not link.asked)
    assert call.cancelled()


@pytest.mark.parametrize("fault", [PoolGoneError(), RuntimeError("ours")])
async def test_a_fault_does_not_leave_the_request_waiting(fault: Exception) -> None:
    """
    An exception in `choose_replicas` would (pitfall 1): the request goes to any replica.
    """
    serve = router(Link(fault=fault), running("a"))
    async with asyncio.timeout(5):
        chosen = await serve._choose_replica_for_request(request("1"))
    assert chosen.replica_id.unique_id == "a"


async def test_a_full_replica_makes_no_busy_loop() -> None:
    """
    Without `should_backoff` Serve would ask again without a pause (pitfall 2).
    """
    link = Link(fault=PoolGoneError())
    serve = router(link, running("a", ongoing=10))
    call = asyncio.create_task(serve._choose_replica_for_request(request("1")))
    await asyncio.sleep(0.3)
    assert not call.done()
    assert 1 < len(link.attempts) < 60
    call.cancel()


async def test_facts_of_replicas_reach_the_pool_and_deaths_do() -> None:
    """
    What a replica records is what the router tells; a dead one is named at once.
    """
    seen: list[Mapping[str, NodeFacts]] = []

    class Seeing(Routing):
        def update(self, replicas: Mapping[str, NodeFacts]) -> None:
            seen.append(replicas)
            super().update(replicas)

    link = Link()
    a = running("a", capacity_tokens=1600, waiting=None)
    serve = router(link, a)
    serve._routing = Seeing(link)
    serve.update_replicas([a])
    assert seen == [{"a": NodeFacts(name="a", capacity_tokens=1600)}]
    serve.on_replica_actor_died(a.replica_id)
    assert "lose_node" in link.told
    assert serve.curr_replicas == {}


async def test_routers_say_again_which_replicas_there_are() -> None:
    """
    Serve tells of changes only; a pool that comes later must learn of what is there.
    """
    link = Link()
    serve = router(link, running("a"))
    await until(lambda: link.told.count("set_nodes") >= 3)
    serve._repeating.cancel()


def test_what_is_pickled_by_value_shares_no_state() -> None:
    """
    Serve pickles the router's module by value (pitfall 5): a note made by the ingress is found by
    the copy, since it stands in another module.
    """
    from ray import cloudpickle

    from scout_server.ray import _compat

    cloudpickle.register_pickle_by_value(_compat)
    try:
        data = cloudpickle.dumps(_compat.TaoRouter)
    finally:
        cloudpickle.unregister_pickle_by_value(_compat)
    code = (
        "import sys\n"
        "from ray import cloudpickle\n"
        "from scout_server.ray import notes\n"
        "copy = cloudpickle.loads(sys.stdin.buffer.read())\n"
        "print('scout_server.ray._compat' in sys.modules)\n"
        "print(copy.initialize_state.__globals__['routing'].notes is notes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], input=data, capture_output=True, check=True
    )
    assert done.stdout.decode().split() == ["False", "True"]

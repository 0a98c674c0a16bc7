"""The Ray Serve application on a local cluster, with three embedded replicas."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from scout_sdk import HintOutcome, Hints, _wire
from scout_server.config import load
from scout_server.gateway.settings import GatewaySettings
from scout_server.ray.settings import RaySettings
from scout_server.tao.trace import Entry, TracedEngine, drive, placements, replay

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

DOCUMENT: dict[str, Any] = {
    "ray": {
        "engine": "embedded",
        "replicas": 3,
        "ingresses": 2,
        "replica_cpus": 0.1,
        "ingress_cpus": 0.1,
        "slots": 2,
        "stats_period_s": 0.5,
        "renew_s": 1.0,
        "trace_events": 1_000_000,
    },
    "embedded": {"step_s": 0.01},
}
EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
SERVE_COMMAND = """
import ray._private.services as services
services.resolve_ip_for_localhost = lambda host: host  # see the fixture
from ray.serve.scripts import cli
cli()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def replica_processes() -> list[int]:
    """The process ids of the LLM replicas."""
    done = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "ServeReplica:scout:LLM" in line]
    return [int(line.split()[0]) for line in lines]


def server_processes(model: Path) -> list[str]:
    """What serves *model*, but for the replica itself."""
    done = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if str(model) in line]


def tiny_model(folder: Path) -> None:
    """Make the tiny model by the project's own script."""
    script = Path(__file__).parents[2] / "scripts" / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_model", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.tiny(folder)


def serve_run(words: list[str], address: str) -> None:
    """`serve run` on the cluster at *address*; the application stays when this returns."""
    environ = {
        **os.environ,
        "RAY_ADDRESS": address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "SCOUT_CONFIG": str(EXAMPLES / "scout.yaml"),
    }
    command = [sys.executable, "-c", SERVE_COMMAND, "run", "--non-blocking", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@dataclass
class Cluster:
    """A cluster on loopback."""

    url: str
    address: str

    def deploy(self) -> None:
        from ray import serve

        from scout_server.ray import build

        serve.run(build(DOCUMENT), name="scout")

    def pool(self) -> Any:
        """The pool actor."""
        import ray

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].endswith("::scout-pool"):
                return ray.get_actor(actor["name"], namespace=actor["namespace"])
        raise LookupError


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        patch.setenv(name, "1")
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("RAY_worker_niceness", "0")  # else vLLM starts behind everything else
    import ray
    import ray._private.services as services
    from ray import serve
    from ray.serve.config import HTTPOptions

    # Ray 2.60 would replace 127.0.0.1 by the machine's own address (pitfall 11).
    patch.setattr(services, "resolve_ip_for_localhost", lambda host: host)
    port = free_port()
    # Sockets have short names: the folder must have one too.
    folder = Path(tempfile.gettempdir()) / f"scout-ray-{os.getpid()}"
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=120 * 2**20,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        made = Cluster(f"http://127.0.0.1:{port}", context.address_info["gcs_address"])
        made.deploy()
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@dataclass
class Reply:
    """An answer; *whole* says whether it came to its end."""

    status: int
    outcomes: dict[str, HintOutcome]
    body: bytes
    whole: bool


@dataclass
class Client:
    """A client of the application, and a view into it."""

    cluster: Cluster
    http: aiohttp.ClientSession

    async def ask(
        self, session: str, text: str, *, stream: bool = False, timeout_s: float = 60
    ) -> Reply:
        body = {"messages": [{"role": "user", "content": text}], "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        async with self.http.post(
            self.cluster.url + "/v1/chat/completions",
            json=body,
            headers={"x-session-id": session},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            outcomes = _wire.decode_outcome(response.headers.get("x-scout-outcome", ""))
            try:
                content = await response.read()
                whole = not stream or content.endswith(b"data: [DONE]\n\n")
            except aiohttp.ClientError:
                content, whole = b"", False
            return Reply(response.status, outcomes, content, whole)

    async def persist(self, session: str, text: str, *, stream: bool) -> Reply:
        """Ask as an agent does: an answer that was cut is asked for again."""
        while True:
            reply = await self.ask(session, text, stream=stream)
            if reply.whole or reply.status != 200:
                return reply

    async def state(self) -> dict[str, Any]:
        async with self.http.get(self.cluster.url + "/v1/scout/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def until(self, condition: Callable[[], Awaitable[object]], *, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def quiet(self) -> None:
        """Wait until three replicas are known and nothing waits or runs."""

        async def idle() -> bool:
            state = await self.state()
            nodes = state.get("nodes", {})
            return (
                len(nodes) == 3
                and state["waiting"] == 0
                and not any(n["running"] or n["draining"] for n in nodes.values())
            )

        await self.until(idle, within_s=90)

    async def trace(self) -> list[Entry]:
        lost, log = await self.cluster.pool().trace.remote()
        assert lost == 0
        entries: list[Entry] = log
        return entries


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = Client(cluster, http)
        await client.quiet()
        yield client


def settings() -> RaySettings:
    return load(DOCUMENT).of(RaySettings)


async def test_placements_follow_the_plan(client: Client) -> None:
    """
    Each replica computed exactly the prompts of the turns that plans put there, by its own count,
    and sessions that come back find their prompts cached at their origin.
    """
    cached: list[int] = []

    async def session(i: int) -> None:
        text = f"{i} " * 600
        for turn in range(3):
            reply = await client.ask(f"plan-{i}", text, stream=i % 2 == 1)
            assert (reply.status, reply.whole) == (200, True)
            usage = json.loads(
                next(
                    line.removeprefix("data: ")
                    for line in reversed(reply.body.decode().splitlines())
                    if '"usage":{' in line.replace(" ", "")
                )
            )["usage"]
            if turn:
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    await asyncio.gather(*(session(i) for i in range(6)))

    async def counted_as_planned() -> bool:
        log = await client.trace()
        node_of = {p.key: p.node for p in placements(log)}
        planned: Counter[str] = Counter()
        counted: Counter[str] = Counter()
        for entry in log:
            if entry.method == "finish" and entry.kwargs["prompt_tokens"]:
                planned[node_of[entry.args[0]]] += entry.kwargs["prompt_tokens"]
            elif entry.method == "observe_cache":
                counted[entry.args[0]] += entry.kwargs["queried_tokens"]
        return len(planned) == 3 and planned == counted

    await client.until(counted_as_planned, within_s=15)
    log = await client.trace()
    origins = defaultdict(set)
    for placement in placements(log):
        if placement.session.startswith("plan-"):
            origins[placement.session].add(placement.node)
    assert all(len(nodes) == 1 for nodes in origins.values())
    assert Counter(next(iter(nodes)) for nodes in origins.values()).most_common()[0][1] == 2
    assert min(cached) > 500


async def test_the_pool_sees_every_held_turn_of_both_ingresses(client: Client) -> None:
    """
    Serve's limit on routing tasks hides none: of 40 turns on 6 slots, 34 wait in one pool.
    """
    asked = [
        asyncio.create_task(client.ask(f"many-{i}", "[[tokens 30]]", stream=i % 2 == 1))
        for i in range(40)
    ]
    seen = 0

    async def all_waiting() -> bool:
        nonlocal seen
        seen = max(seen, (await client.state())["waiting"])
        return seen >= 30 or all(a.done() for a in asked)

    await client.until(all_waiting, within_s=30)
    replies = await asyncio.gather(*asked)
    assert {(r.status, r.whole) for r in replies} == {(200, True)}
    assert seen >= 30
    deferred = [r for r in replies if r.outcomes["admission"] is HintOutcome.DEFERRED]
    assert len(deferred) >= 30


async def test_held_clients_that_disconnect_are_dropped(client: Client) -> None:
    """
    Ten clients hang up while they are held: the pool forgets them, and none is ever placed.
    """
    running = [asyncio.create_task(client.ask(f"long-{i}", "[[tokens 200]]")) for i in range(6)]

    async def full() -> bool:
        return sum(n["running"] for n in (await client.state())["nodes"].values()) == 6

    await client.until(full, within_s=20)
    held = [asyncio.create_task(client.ask(f"left-{i}", "hello")) for i in range(10)]

    async def waiting() -> bool:
        return bool((await client.state())["waiting"] == 10)

    await client.until(waiting, within_s=20)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)

    async def dropped() -> bool:
        return bool((await client.state())["waiting"] == 0)

    await client.until(dropped, within_s=20)
    assert {r.status for r in await asyncio.gather(*running)} == {200}
    await client.quiet()
    assert not [p for p in placements(await client.trace()) if p.session.startswith("left-")]


async def test_what_a_client_says_reaches_the_replica_of_its_session(client: Client) -> None:
    """
    Hints, tools and the end of a session count at its replica, for the tenant of its key.
    """
    from ray import serve

    from scout_server.ray.calls import Call, Ticket

    handle = serve.get_deployment_handle("LLM", "scout").options(stream=True)

    async def said() -> dict[str, dict[str, Any]]:
        """What each replica knows, by name."""
        known = {}
        for name in (await client.state())["nodes"]:
            call = Call(method="GET", path="/v1/scout/state")
            parts = [part async for part in handle.serve.remote(call, Ticket(node=name))]
            known[name] = json.loads(b"".join(p for p in parts if isinstance(p, bytes)))
        return known

    async def post(path: str, body: dict[str, Any], key: str) -> int:
        headers = {"x-session-id": "told", "authorization": f"Bearer {key}"}
        async with client.http.post(
            client.cluster.url + path, json=body, headers=headers
        ) as response:
            return response.status

    def core(state: dict[str, Any], name: str) -> int:
        return int(state["core"][name])

    before = await said()
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    for key in ("one", "two"):
        assert await post("/v1/chat/completions", hello, key) == 200
    after = await said()
    homes = {n: core(after[n], "sessions_gap") - core(before[n], "sessions_gap") for n in after}
    assert sum(homes.values()) == 2
    end = {"version": 1, "events": [{"session": "told", "final": True}]}
    assert await post("/v1/scout/events", end, "one") == 202

    async def ended() -> bool:
        now = await said()
        return (
            sum(core(now[n], "sessions_ended") - core(after[n], "sessions_ended") for n in now) == 1
        )

    await client.until(ended, within_s=30)
    now = await said()
    assert sum(core(now[n], "sessions_gap") - core(before[n], "sessions_gap") for n in now) == 1
    async with client.http.get(client.cluster.url + "/v1/scout/capabilities") as response:
        assert {"events", "hints", "tool-calls"} <= set((await response.json())["features"])


async def test_a_replica_killed_under_load_loses_no_session(client: Client) -> None:
    """
    Twelve sessions of three turns each finish all their turns though a replica is killed; the
    pool forgets it at once, and takes the one that Ray starts instead.
    """
    before = set((await client.state())["nodes"])

    async def session(i: int) -> list[int]:
        statuses = []
        for _ in range(3):
            reply = await client.persist(f"load-{i}", "[[tokens 60]]", stream=i % 2 == 1)
            statuses.append(reply.status)
        return statuses

    sessions = [asyncio.create_task(session(i)) for i in range(12)]

    async def busy() -> bool:
        return sum(n["running"] for n in (await client.state())["nodes"].values()) == 6

    await client.until(busy, within_s=20)
    own = replica_processes()
    os.kill(own[0], signal.SIGKILL)
    assert await asyncio.gather(*sessions) == [[200, 200, 200]] * 12
    await client.quiet()
    after = set((await client.state())["nodes"])
    assert len(before & after) == 2
    assert len(after - before) == 1
    log = await client.trace()
    turns = Counter(p.session for p in placements(log) if p.session.startswith("load-"))
    assert len(turns) == 12
    assert min(turns.values()) >= 3


async def test_decisions_are_the_policy_engines_and_the_gateways(client: Client) -> None:
    """
    The facts of everything above, told again to a fresh engine and to the gateway's pool, give
    the same decisions, placement for placement.
    """
    log = await client.trace()
    placed = list(placements(log))
    assert len(placed) > 60
    assert replay(log, TracedEngine(settings().tao)) == []
    assert await drive(log, GatewaySettings(tao=settings().tao)) == placed


async def test_a_killed_pool_stops_nobody(client: Client) -> None:
    """
    Held and running turns are answered though the pool dies; a new one comes, and plans again.
    """
    import ray

    running = [asyncio.create_task(client.ask(f"run-{i}", "[[tokens 100]]")) for i in range(6)]

    async def busy() -> bool:
        return sum(n["running"] for n in (await client.state())["nodes"].values()) == 6

    await client.until(busy, within_s=20)
    held = [asyncio.create_task(client.ask(f"held-{i}", "hello")) for i in range(6)]

    async def waiting() -> bool:
        return bool((await client.state())["waiting"] == 6)

    await client.until(waiting, within_s=20)
    ray.kill(client.cluster.pool(), no_restart=True)
    replies = await asyncio.gather(*running, *held)
    assert {r.status for r in replies} == {200}
    meanwhile = await client.ask("meanwhile", "hello")
    assert meanwhile.status == 200
    await client.quiet()
    reply = await client.ask("again", "hello")
    assert (reply.status, reply.outcomes["admission"]) == (200, HintOutcome.ACCEPTED)
    assert "again" in {p.session for p in placements(await client.trace())}


async def test_the_example_runs_with_serve_run(client: Client) -> None:
    """
    `serve run` takes the YAML of the examples, and `scout_server.ray:app` with a configuration.
    """
    from ray import serve

    for words in (
        [str(EXAMPLES / "embedded.yaml")],
        ["scout_server.ray:app", "--name", "scout"],
    ):
        await asyncio.to_thread(serve.delete, "scout")
        await asyncio.to_thread(serve_run, words, client.cluster.address)

        async def up() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                return (await client.ask("yaml", "hello", timeout_s=5)).status == 200
            return False

        await client.until(up, within_s=90)
        reply = await client.ask("yaml", "[[reply hello]]")
        assert b"hello" in reply.body
        assert reply.outcomes["admission"] is HintOutcome.ACCEPTED


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_vllm_runs_beside_its_replica(client: Client, tmp_path: Path) -> None:
    """
    A replica starts `scout serve` with the extension inside, tells vLLM's own KV room, passes
    hints and streams, and takes the server with it when it goes.
    """
    from ray import serve

    from scout_server.ray import build

    tiny_model(tmp_path)
    vllm_args = ["--enforce-eager", "--max-model-len", "1024", "--block-size", "32"]
    vllm_args += ["--max-num-seqs", "8", "--load-format", "dummy"]
    vllm_args += ["--num-gpu-blocks-override", "64", "--served-model-name", "tiny"]
    vllm_args += ["--enable-prompt-tokens-details"]
    document = {
        "ray": {
            **DOCUMENT["ray"],
            "engine": "vllm",
            "model": str(tmp_path),
            "vllm_args": vllm_args,
            "replicas": 1,
            "ingresses": 1,
            "slots": 8,
        }
    }
    await asyncio.to_thread(serve.delete, "scout")
    await asyncio.to_thread(serve.run, build(document), name="scout")

    async def known() -> bool:
        nodes = (await client.state()).get("nodes", {})
        return [n["capacity_tokens"] for n in nodes.values()] == [64 * 32]

    await client.until(known, within_s=60)
    url = client.cluster.url
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi " * 99}]}
    hints = _wire.encode(Hints(session="v-1", agent="planner"))
    for stream in (False, True):
        async with client.http.post(
            url + "/v1/chat/completions", json={**body, "stream": stream}, headers=hints
        ) as response:
            content = await response.read()
            assert response.status == 200, content
            outcomes = _wire.decode_outcome(response.headers["x-scout-outcome"])
        assert (b"[DONE]" in content) == stream
        assert outcomes["agent"] is HintOutcome.ACCEPTED
        assert outcomes["admission"] is HintOutcome.ACCEPTED
    assert {p.session for p in placements(await client.trace())} == {"v-1"}
    assert server_processes(tmp_path)
    await asyncio.to_thread(serve.delete, "scout")

    async def gone() -> bool:
        return not server_processes(tmp_path)

    await client.until(gone, within_s=60)

"""What arrives at the embedded engine, over its HTTP side without a socket."""

import json

import httpx
import pytest

from scout_sdk import HintOutcome, Hints, SessionEvent, _wire
from scout_server import snapshot
from scout_server.embedded.api import make_app
from scout_server.embedded.engine import Engine
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.ingress import IngressSettings, ResponseObserver
from scout_server.policy.runtime import PolicySettings
from scout_server.snapshot import SnapshotSettings
from scout_server.tenancy import TenancySettings

QUICK = EmbeddedSettings(kv_blocks=512, step_s=0.0, prefill_tokens_per_s=1e9)
CALLS = '[[tool bash {"command": "sleep 7"}]] [[tool look {}]]'


class Server:
    """An application with its lifespan run, and a client for it."""

    def __init__(self, policy=None, tenancy=None, ingress=None, snapshots=None):
        self.engine = Engine(QUICK, policy)
        self.app = make_app(QUICK, policy, tenancy, ingress, snapshots, engine=self.engine)

    async def __aenter__(self):
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://scout")
        return self

    async def __aexit__(self, *error):
        await self.http.aclose()
        await self._lifespan.__aexit__(*error)

    async def chat(self, text="hello", headers=(), **more):
        body = {"messages": [{"role": "user", "content": text}], **more}
        return await self.http.post("/v1/chat/completions", json=body, headers=dict(headers))

    async def outcomes(self, *args, **more):
        answer = await self.chat(*args, **more)
        return _wire.decode_outcome(answer.headers.get("x-scout-outcome", ""))

    @property
    def sessions(self):
        core = self.engine.replica.core
        return {(t.name, s.key): s for t in core._tenants.values() for s in t.sessions}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": CALLS}]}),
        ("/v1/responses", {"input": CALLS}),
    ],
)
async def test_its_own_replies_read_like_any_servers(path, body, stream):
    """
    An observer of the response learns what the core is told directly: names and seconds.
    """
    found = []
    observer = ResponseObserver(found.append)
    async with Server() as server:
        told = []
        server.engine.on_finish = told.append
        answer = await server.http.post(path, json={**body, "stream": stream})
        observer.start(answer.status_code, answer.headers.raw)
        observer.feed(answer.content)
        observer.end()
        (session,) = server.sessions.values()

    assert found[0].tools == told[0].tools == (("bash", 7.0), ("look", None))
    assert found[0].finish is told[0].finish
    assert session.kind == "tool_calls:bash+look"
    assert session.promise.back - session.promise.said == 7.0


async def test_tool_calls_can_be_left_unread():
    """
    With the setting off, the core learns the finish reason and no tool.
    """
    async with Server(ingress=IngressSettings(tool_calls=False)) as server:
        await server.chat(CALLS)
        (session,) = server.sessions.values()

    assert (session.kind, session.promise) == ("tool_calls:", None)


async def test_equal_names_of_two_tenants_are_two_sessions():
    """
    The API key tells tenants apart, for requests and for events alike.
    """
    async with Server() as server:
        for key in ("one", "two"):
            headers = {**_wire.encode(Hints(session="s", agent="a")), "authorization": key}
            await server.chat("hi", headers)
        event = _wire.encode_events([SessionEvent(session="s", final=True)])
        await server.http.post(_wire.EVENTS_PATH, content=event, headers={"authorization": "two"})
        ended = [session.ended_said for session in server.sessions.values()]
        tenants = {tenant for tenant, _ in server.sessions}

    assert sorted(ended) == [False, True]
    assert len(tenants) == 2


async def test_the_trusted_header_names_the_tenant():
    """
    Behind a proxy that names tenants, one key may serve many of them.
    """
    async with Server(tenancy=TenancySettings(tenant_header="X-Tenant")) as server:
        for name in ("one", "two"):
            await server.chat("hi", {"x-tenant": name, "authorization": "shared"})

        assert len({tenant for tenant, _ in server.sessions}) == 2


@pytest.mark.parametrize("private", [False, True])
async def test_the_state_can_be_private(private):
    """
    A caller sees the agents of its own tenant only, where the operator wants that.
    """
    async with Server(tenancy=TenancySettings(private_state=private)) as server:
        for key in ("one", "two"):
            headers = {**_wire.encode(Hints(session="s", agent=f"agent {key}"))}
            await server.chat("hi", {**headers, "authorization": key})
        answer = await server.http.get("/v1/scout/state", headers={"authorization": "one"})
        names = {agent["name"] for agent in answer.json()["core"]["agents"]}

    assert ("agent one" in names, "agent two" in names) == (True, not private)


async def test_over_the_budget_is_clipped_and_said():
    """
    A second agent where there is room for one is served, and its outcome says clipped.
    """
    policy = PolicySettings(max_agents=2, max_sessions=1)
    async with Server(policy) as server:
        first = await server.outcomes(headers=_wire.encode(Hints(session="s", agent="a")))
        second = await server.outcomes(headers=_wire.encode(Hints(session="t", agent="a")))
        state = (await server.http.get("/v1/scout/capabilities")).json()["limits"]

        assert first["session"] is HintOutcome.ACCEPTED
        assert second["session"] is HintOutcome.CLIPPED
        assert second["agent"] is HintOutcome.ACCEPTED
        assert [key for _, key in server.sessions] == ["t"]
        assert (state["agents"], state["sessions"]) == (2, 1)


async def test_events_over_the_budget_are_counted():
    """
    The answer and the state say how many events were clipped.
    """
    events = [SessionEvent(session=f"s{i}", final=True) for i in range(15)]
    async with Server(ingress=IngressSettings(events_per_s=1)) as server:
        answer = await server.http.post(_wire.EVENTS_PATH, content=_wire.encode_events(events))
        state = (await server.http.get("/v1/scout/state")).json()

    assert answer.json() == {"accepted": 10, "rejected": 0, "clipped": 5}
    assert state["events"]["clipped"] == 5


async def test_a_server_without_hints_says_so():
    """
    Hints off: no feature that a client could send to, outcomes say ignored.
    """
    async with Server(PolicySettings(hints=False)) as server:
        features = (await server.http.get("/v1/scout/capabilities")).json()["features"]
        outcomes = await server.outcomes(headers={"thread-id": "t"})

    assert set(features) == {"outcome", "retention", "tool-calls"}
    assert outcomes == {"session": HintOutcome.IGNORED}


async def test_what_was_learnt_survives_a_restart(tmp_path):
    """
    A second server begins with the agents and transitions of the first.
    """
    kept = SnapshotSettings(state_file=str(tmp_path / "deep" / "state.json"))
    async with Server(snapshots=kept) as server:
        for agent in ("planner", "coder"):
            headers = _wire.encode(Hints(session="s", agent=agent))
            await server.chat("hi", headers)
        before = server.engine.replica.core.snapshot()
    async with Server(snapshots=kept) as server:
        after = server.engine.replica.core.snapshot()

    assert {row[0] for row in after["tenants"][""]["agents"]} >= {"planner", "coder"}
    assert json.loads(json.dumps(after)) == json.loads(json.dumps(before))


async def test_a_damaged_state_is_set_aside_and_the_server_starts(tmp_path, caplog):
    """
    Damage inside a well-formed file costs what was learnt, and nothing else.
    """
    path = tmp_path / "state.json"
    snapshot.save(path, {"version": 1, "tenants": {"": {"agents": 3}}})
    async with Server(snapshots=SnapshotSettings(state_file=str(path))) as server:
        assert (await server.chat()).status_code == 200

    assert (tmp_path / "state.json.damaged").exists()
    assert "set aside" in caplog.text
    assert snapshot.load(path)["version"] == 1


async def test_identity_off_keeps_the_file_as_it_is(tmp_path):
    """
    A server that learns nothing does not overwrite what another run has learnt.
    """
    path = tmp_path / "state.json"
    snapshot.save(path, {"version": 1, "tenants": {}, "mark": 1})
    policy = PolicySettings(hints=False, fingerprints=False)
    async with Server(policy, snapshots=SnapshotSettings(state_file=str(path))) as server:
        await server.chat()

    assert snapshot.load(path)["mark"] == 1


async def test_a_fault_of_the_policy_keeps_the_file_as_it_is(tmp_path):
    """
    After a fault the engine runs on with an empty core, which is not written.
    """
    path = tmp_path / "state.json"
    snapshot.save(path, {"version": 1, "tenants": {}, "mark": 1})
    async with Server(snapshots=SnapshotSettings(state_file=str(path))) as server:
        server.engine.replica.core.arrive = None
        await server.chat()
        assert server.engine.mode == "stock"
        await server.chat()

    assert snapshot.load(path)["mark"] == 1

"""The headers that arrive from AutoGen teams and agents."""

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from autogen_agentchat.agents import (
    ApprovalRequest,
    ApprovalResponse,
    AssistantAgent,
    CodeExecutorAgent,
    SocietyOfMindAgent,
    UserProxyAgent,
)
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.code_executor import CodeExecutor, CodeResult

import scout_sdk
from scout_integrations.autogen import instrument, uninstrument
from scout_sdk import Evidence, ToolState
from scout_sdk._sessions import SESSIONS
from scout_sdk.testing import RecordingServer

pytestmark = pytest.mark.filterwarnings("ignore:Resolved model mismatch")

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


@pytest.fixture
def client(server: RecordingServer) -> Callable[..., Any]:
    """Make AutoGen model clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from autogen_ext.models.openai import OpenAIChatCompletionClient

    def make(**options: Any) -> Any:
        return OpenAIChatCompletionClient(
            model="recorded",
            base_url=server.base_url,
            api_key="x",
            model_info=INFO,
            max_retries=3,
            default_headers={"connection": "close"},
            **options,
        )

    return make


async def shell(command: str) -> str:
    """Run a command."""
    await asyncio.sleep(0.005)
    return f"ran {command}"


async def boom(command: str) -> str:
    """Fail."""
    raise RuntimeError("boom")


def who(server: RecordingServer) -> list[Any]:
    return [r.hints and (r.hints.session, r.hints.agent, r.hints.turn) for r in server.llm_requests]


def round_robin(client: Any, *, turns: int, **options: Any) -> RoundRobinGroupChat:
    """planner with a tool, then coder, which streams."""
    return RoundRobinGroupChat(
        [
            AssistantAgent("planner", client, system_message="planner", tools=[shell]),
            AssistantAgent("coder", client, system_message="coder", model_client_stream=True),
        ],
        termination_condition=MaxMessageTermination(turns),
        **options,
    )


async def test_round_robin(server, client):
    """Each participant is an agent, and who speaks next is certain."""
    team = instrument(round_robin(client(), turns=3), session_id="S")
    await team.run(task="hello")

    assert who(server) == [("S", "planner", 1), ("S", "coder", 1)]
    assert [r.hints.next_agents for r in server.llm_requests] == [("coder",), ("planner",)]
    assert [r.hints.path for r in server.llm_requests] == [
        "RoundRobinGroupChat/planner",
        "RoundRobinGroupChat/coder",
    ]


async def test_run_stream(server, client):
    """Under run_stream the headers are the same."""
    team = instrument(round_robin(client(), turns=3), session_id="S")
    async for _ in team.run_stream(task="hello"):
        pass

    assert who(server) == [("S", "planner", 1), ("S", "coder", 1)]


async def test_selector(server, client):
    """The calls that select a speaker belong to the manager, not to a participant."""
    model = client()
    team = SelectorGroupChat(
        [
            AssistantAgent("planner", model, description="p"),
            AssistantAgent("coder", model, description="c"),
        ],
        model_client=model,
        termination_condition=MaxMessageTermination(2),
    )
    await instrument(team, session_id="S").run(task="[[say planner]]")

    assert who(server)[:2] == [("S", "SelectorGroupChatManager", 1), ("S", "planner", 1)]


async def test_swarm(server, client):
    """After a handoff the other agent is named."""
    model = client()
    team = Swarm(
        [
            AssistantAgent("alice", model, handoffs=["bob"]),
            AssistantAgent("bob", model),
        ],
        termination_condition=MaxMessageTermination(5),
    )
    await instrument(team, session_id="S").run(task="[[tool transfer_to_bob {}]]")

    agents = [agent for _, agent, _ in who(server)]
    assert agents[:2] == ["alice", "bob"]


async def test_nested_team(server, client):
    """A team inside a team keeps the session; its place is in the path."""
    model = client()
    inner = RoundRobinGroupChat(
        [AssistantAgent("worker", model)],
        termination_condition=MaxMessageTermination(2),
        name="inner",
    )
    team = RoundRobinGroupChat(
        [inner, AssistantAgent("boss", model)],
        termination_condition=MaxMessageTermination(3),
        name="outer",
    )
    await instrument(team, session_id="S").run(task="hello")

    assert who(server) == [("S", "worker", 1), ("S", "boss", 1)]
    assert [r.hints.path for r in server.llm_requests] == ["outer/inner/worker", "outer/boss"]
    assert server.llm_requests[1].hints.next_agents == ("worker",)


async def test_who_asks_next_in_a_round_robin(server, client):
    """People and executors ask nothing, so whoever speaks after them follows; a team first."""
    model = client()

    def helper(name: str) -> AssistantAgent:
        return AssistantAgent(name, model)

    async def typed(prompt: str, token: Any) -> str:
        return "[[say ok]]"

    def in_turn(*members: Any, turns: int) -> RoundRobinGroupChat:
        ends = MaxMessageTermination(turns)
        return RoundRobinGroupChat(list(members), termination_condition=ends)

    user = UserProxyAgent("user", input_func=typed)
    await instrument(in_turn(helper("alone"), user, turns=4)).run(task="a")
    mind = SocietyOfMindAgent("mind", team=in_turn(helper("worker"), turns=3), model_client=model)
    await instrument(in_turn(helper("boss"), mind, turns=3)).run(task="b")
    silent = in_turn(UserProxyAgent("someone", input_func=typed), turns=2)
    await instrument(in_turn(helper("a"), silent, helper("b"), turns=2)).run(task="c")

    assert [(r.hints.agent, r.hints.next_agents) for r in server.llm_requests] == [
        ("alone", ("alone",)),
        ("alone", ("alone",)),
        ("boss", ("worker",)),
        ("worker", ()),
        ("mind", ("boss",)),
        ("a", ("b",)),
    ]


async def test_people_are_waited_for(server, client):
    """While a UserProxyAgent waits for its input, the session waits for a person."""
    told: list[Any] = []

    async def typed(prompt: str, token: Any) -> str:
        assert await asyncio.to_thread(scout_sdk.flush)
        told.extend(server.events)
        return "fine"

    user = UserProxyAgent("user", input_func=typed)
    team = RoundRobinGroupChat(
        [AssistantAgent("helper", client()), user], termination_condition=MaxMessageTermination(4)
    )
    await instrument(team).run(task="a")

    first, second = (r.hints for r in server.llm_requests)
    assert [(e.session, e.tool.name, e.tool.state) for e in told] == [
        (first.session, "human", ToolState.STARTED)
    ]
    assert [(t.name, t.state) for t in second.tools] == [("human", ToolState.ENDED)]
    uninstrument(team)
    assert "_get_input" not in vars(user)


class Executor(CodeExecutor):
    """Runs nothing, and says that it failed."""

    async def execute_code_blocks(self, code_blocks: Any, cancellation_token: Any) -> Any:
        return CodeResult(exit_code=1, output="failed")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def restart(self) -> None: ...


async def test_code_that_is_executed_is_a_tool(server, client):
    """A CodeExecutorAgent's blocks are one call, with the time that they say they take."""

    async def allow(request: ApprovalRequest) -> ApprovalResponse:
        return ApprovalResponse(approved=True, reason="a test")

    runner = CodeExecutorAgent("runner", Executor(), approval_func=allow)
    team = RoundRobinGroupChat(
        [AssistantAgent("coder", client()), runner], termination_condition=MaxMessageTermination(4)
    )
    code = "```sh\nsleep 300\n```\n\n```sh\nsleep 500\n```"
    await instrument(team).run(task=f"[[say {code}]]")
    assert await asyncio.to_thread(scout_sdk.flush)

    first, second = (r.hints for r in server.llm_requests)
    start, end, last = server.events
    assert (start.session, start.agent, start.tool.name) == (
        first.session,
        "runner",
        "execute_code",
    )
    assert start.tool.evidence is Evidence.SLEEP
    assert 1500.0 < start.tool.remaining_s <= 1600.0  # the task has them too
    assert end.tool.state is ToolState.FAILED
    assert [t.call_id for t in second.tools] == [start.tool.call_id]
    assert first.next_agents == ("coder",)
    assert last.final


async def test_society_of_mind(server, client):
    """The team inside a SocietyOfMindAgent and the agent around it are both labelled."""
    model = client()
    inner = RoundRobinGroupChat(
        [AssistantAgent("worker", model)], termination_condition=MaxMessageTermination(2)
    )
    agent = SocietyOfMindAgent("mind", team=inner, model_client=model)
    await instrument(agent, session_id="S").run(task="hello")

    assert who(server) == [("S", "worker", 1), ("S", "mind", 1)]


@pytest.mark.parametrize("kind", ["agent", "team"])
async def test_agents_and_teams_as_tools(server, client, kind):
    """Who works inside a tool is named, and the tool is a tool call of its caller."""
    helper = AssistantAgent("helper", client(), description="helps")
    if kind == "agent":
        used, name = AgentTool(helper), "helper"
    else:
        team = RoundRobinGroupChat([helper], termination_condition=MaxMessageTermination(2))
        used, name = TeamTool(team, name="crew", description="helps"), "crew"
    boss = AssistantAgent("boss", client(parallel_tool_calls=False), tools=[used])
    instrument(boss, session_id="S")
    await boss.run(task=f'[[tool {name} {{"task": "q"}}]]')
    assert await asyncio.to_thread(scout_sdk.flush)

    assert who(server) == [("S", "boss", 1), ("S", "helper", 1)]
    assert [(e.agent, e.tool.name, e.tool.state) for e in server.events] == [
        ("boss", name, ToolState.STARTED),
        ("boss", name, ToolState.ENDED),
    ]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_single_agent(server, client, is_stream):
    """A single agent works as a team does; HTTP retries are the same turn."""
    agent = instrument(AssistantAgent("solo", client()), session_id="S")
    if is_stream:
        async for _ in agent.run_stream(task="[[fail 2 k]]"):
            pass
    else:
        await agent.run(task="[[fail 2 k]]")

    assert who(server) == [("S", "solo", 1)] * 3


async def test_tool_events(server, client):
    """Parallel tools start and end one by one; errors are failures."""
    agent = AssistantAgent("solo", client(), tools=[shell, boom])
    instrument(agent, base_url=server.base_url)
    await agent.run(task='[[tool shell {"command": "sleep 9"}]] [[tool boom {"command": "x"}]]')
    assert await asyncio.to_thread(scout_sdk.flush)
    tools = [e.tool for e in server.events if e.tool]
    start = next(t for t in tools if t.name == "shell" and t.state is ToolState.STARTED)

    assert start.evidence is Evidence.SLEEP
    assert 8.0 < start.remaining_s <= 9.0
    assert {t.name: t.state for t in tools} == {"shell": ToolState.ENDED, "boom": ToolState.FAILED}
    assert len({t.call_id for t in tools}) == 2
    assert server.events[-1].final


async def test_sessions_of_runs(server, client):
    """Without a name each run is a session of its own, and the server hears of its end."""
    team = instrument(round_robin(client(), turns=3), base_url=server.base_url)
    await team.run(task="one")
    await team.reset()
    await team.run(task="two")
    assert await asyncio.to_thread(scout_sdk.flush)
    sessions = [r.hints.session for r in server.llm_requests]

    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]
    assert [e.session for e in server.events if e.final] == [sessions[0], sessions[2]]


async def test_session_of_an_enclosing_context(server, client):
    """A run inside a context belongs to its session."""
    agent = instrument(AssistantAgent("solo", client()))
    with scout_sdk.context(session="X"):
        await agent.run(task="hello")

    assert who(server) == [("X", "solo", 1)]


async def test_runtime_started_before(server, client):
    """A runtime that was started elsewhere does not lose the session."""
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    team = instrument(round_robin(client(), turns=3, runtime=runtime), session_id="S")
    await team.run(task="hello")
    await runtime.stop()

    assert who(server) == [("S", "planner", 1), ("S", "coder", 1)]


async def test_sixty_teams_share_a_client(server, client):
    """Sixty teams at once over one model client: no request says what another one is."""
    model = client()

    async def one(i: int) -> None:
        team = instrument(round_robin(model, turns=5), session_id=f"S{i}")
        await team.run(task=f'[[id {i}]] [[tool shell {{"command": "x"}}]]')

    await asyncio.gather(*(one(i) for i in range(60)))
    got = server.llm_requests

    assert len(got) >= 180
    assert server.faults == []
    assert [
        r.hints
        for r in got
        if r.hints is None
        or (r.hints.session, r.hints.agent) != (f"S{r.mark}", r.json["messages"][0]["content"])
    ] == []


async def test_cancelled_run(server, client):
    """A task that is cancelled inside a tool ends its session, and nothing comes after that."""

    async def slow(command: str) -> str:
        """Take long."""
        await asyncio.sleep(30)
        return "late"

    agent = AssistantAgent("solo", client(), tools=[slow])
    instrument(agent, base_url=server.base_url)
    running = asyncio.create_task(agent.run(task='[[tool slow {"command": "x"}]]'))
    assert await asyncio.to_thread(server.wait_for, lambda s: s._events)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for left in others:  # AutoGen does not cancel the tool itself
        left.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert await asyncio.to_thread(scout_sdk.flush)
    first, *_, last = server.events

    assert first.tool.state is ToolState.STARTED
    assert last.final
    assert len(SESSIONS) == 0


async def test_components_are_dumped_as_before(server, client):
    """What is written down of an instrumented team is what it was before."""
    team = round_robin(client(), turns=3)
    before = team.dump_component().model_dump()
    instrument(team)

    assert team.dump_component().model_dump() == before


async def test_uninstrument(server, client):
    """Undone, nothing of ours is left; instrumenting twice is as once."""
    team = round_robin(client(), turns=3)
    before = [dict(vars(p)) for p in team._participants]
    instrument(instrument(team, session_id="A"), session_id="B")
    await team.run(task="hello")
    uninstrument(uninstrument(team))
    await team.reset()
    await team.run(task="hello")

    assert [hints and hints[0] for hints in who(server)] == ["B", "B", None, None]
    assert "run" not in vars(team)
    assert [vars(p)["_model_client"] for p in team._participants] == [
        b["_model_client"] for b in before
    ]


async def test_switched_off(server, client, monkeypatch):
    """With SCOUT_SDK_ENABLED=0 nothing is touched."""
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "0")
    agent = instrument(AssistantAgent("solo", client()), session_id="S")
    await agent.run(task="hello")

    assert who(server) == [None]


def test_not_a_team():
    """Anything else than a team or an agent is refused by name."""
    with pytest.raises(scout_sdk.ConfigError, match="not a str"):
        instrument("planner")

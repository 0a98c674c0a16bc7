"""The headers that arrive from the OpenAI Agents SDK."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import scout_sdk
from scout_sdk import ToolState
from scout_sdk.testing import RecordingServer, Reply, ToolCall

try:  # older releases of the SDK break on import with openai 2.x
    import agents
    from agents.tracing import set_trace_processors
except Exception:
    pytest.skip("no usable openai-agents here", allow_module_level=True)

from scout_integrations.openai_agents import ScoutHooks, input_filter, instrument, uninstrument


@pytest.fixture(autouse=True)
def processor() -> Iterator[Any]:
    import scout_integrations.openai_agents as module

    set_trace_processors([])  # the SDK's own would send traces to its maker
    module._processor = None
    yield instrument()
    uninstrument()
    set_trace_processors([])


@pytest.fixture
def model(server: RecordingServer) -> Any:
    client = openai.AsyncOpenAI(
        base_url=server.base_url,
        api_key="x",
        max_retries=3,
        default_headers={"connection": "close"},
    )
    return agents.OpenAIChatCompletionsModel("m", client)


@agents.function_tool
async def shell(command: str) -> str:
    """Run a command."""
    await asyncio.sleep(0.005)
    return f"ran {command}"


def who(server: RecordingServer) -> list[Any]:
    return [r.hints and (r.hints.agent, r.hints.turn) for r in server.llm_requests]


async def test_run_with_a_tool(server, model, processor):
    """Agent, session, turns, tools with their parsed time, and the end, without a change."""
    alice = agents.Agent("alice", instructions="alice", model=model, tools=[shell])
    await agents.Runner.run(alice, '[[fail 1 k]] [[tool shell {"command": "sleep 4"}]]')
    assert await asyncio.to_thread(scout_sdk.flush)

    assert who(server) == [("alice", 1), ("alice", 1), ("alice", 2)]
    assert len({r.hints.session for r in server.llm_requests}) == 1
    start, end, last = server.events
    assert (start.agent, start.tool.name, start.tool.state) == ("alice", "shell", ToolState.STARTED)
    assert 3.0 < start.tool.remaining_s <= 4.0
    assert (end.tool.state, end.tool.call_id) == (ToolState.ENDED, start.tool.call_id)
    assert last.final
    assert (processor.open_runs, len(processor._calls)) == (0, 0)


async def test_handoff(server, model):
    """After a handoff the other agent is named."""
    bob = agents.Agent("bob", instructions="bob", model=model)
    alice = agents.Agent("alice", instructions="alice", model=model, handoffs=[bob])
    await agents.Runner.run(alice, "[[tool transfer_to_bob {}]]")

    assert who(server) == [("alice", 1), ("bob", 1)]


async def test_streamed(server, model):
    """Under run_streamed the headers are the same."""
    alice = agents.Agent("alice", instructions="alice", model=model, tools=[shell])
    result = agents.Runner.run_streamed(alice, '[[tool shell {"command": "x"}]]')
    async for _ in result.stream_events():
        pass

    assert who(server) == [("alice", 1), ("alice", 2)]


async def test_agent_as_tool(server, model):
    """An agent used as a tool is named, in the session of its caller."""
    bob = agents.Agent("bob", instructions="bob", model=model)
    boss = agents.Agent(
        "boss", instructions="boss", model=model, tools=[bob.as_tool("ask_bob", "asks")]
    )
    await agents.Runner.run(boss, '[[tool ask_bob {"input": "q"}]]')

    assert who(server) == [("boss", 1), ("bob", 1), ("boss", 2)]
    assert len({r.hints.session for r in server.llm_requests}) == 1


async def test_session_names(server, model):
    """A group_id names the session; an enclosing context does so before it."""
    alice = agents.Agent("alice", instructions="alice", model=model)
    await agents.Runner.run(alice, "a", run_config=agents.RunConfig(group_id="G"))
    with scout_sdk.context(session="X"):
        await agents.Runner.run(alice, "b", run_config=agents.RunConfig(group_id="G"))

    assert [r.hints.session for r in server.llm_requests] == ["G", "X"]


async def test_the_sdks_own_sessions_go_on(server, model):
    """A run with `session=` is a part of that session, streamed or not; nothing ends it."""
    alice = agents.Agent("alice", instructions="alice", model=model)
    conversation = agents.SQLiteSession("C")
    await agents.Runner.run(alice, "a", session=conversation)
    async for _ in agents.Runner.run_streamed(alice, "b", session=conversation).stream_events():
        pass
    config = agents.RunConfig(group_id="G")
    await agents.Runner.run(alice, "c", session=conversation, run_config=config)
    assert await asyncio.to_thread(scout_sdk.flush)

    assert [(r.hints.session, r.hints.turn) for r in server.llm_requests] == [
        ("C", 1),
        ("C", 2),
        ("G", 1),
    ]
    assert server.events == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_approval(server, model, processor, streamed):
    """A run that stops for an approval waits for a person; resumed, it is the same session."""

    @agents.function_tool(needs_approval=True)
    async def deploy(command: str) -> None:
        """Deploy."""

    async def run(given: Any) -> Any:
        if not streamed:
            return await agents.Runner.run(alice, given)
        result = agents.Runner.run_streamed(alice, given)
        async for _ in result.stream_events():
            pass
        return result

    bob = agents.Agent("bob", instructions="bob", model=model)
    alice = agents.Agent("alice", instructions="alice", model=model, tools=[deploy], handoffs=[bob])
    result = await run('[[tool deploy {"command": "sleep 400"}]]')
    assert await asyncio.to_thread(scout_sdk.flush)
    waiting = list(server.events)
    assert processor.open_runs == 0
    state = result.to_state()
    state.approve(result.interruptions[0])
    await run(state)
    assert await asyncio.to_thread(scout_sdk.flush)

    assert who(server) == [("alice", 1), ("alice", 2)]
    (session,) = {r.hints.session for r in server.llm_requests}
    assert {event.session for event in server.events} == {session}
    tools = [(e.tool.name, e.tool.state.value) for e in waiting]
    assert tools == [("deploy", "started"), ("deploy", "ended"), ("human", "started")]
    rest = server.events[len(waiting) :]
    tools = [(e.tool.name, e.tool.state.value) for e in rest if e.tool]
    assert tools == [("human", "ended"), ("deploy", "started"), ("deploy", "ended")]
    assert 300.0 < rest[1].tool.remaining_s <= 400.0
    assert [e.final for e in server.events].count(True) == 1
    assert rest[-1].final
    assert (processor.open_runs, len(processor._calls)) == (0, 0)
    kept = (processor._unanswered, processor._handing, processor._waiting)
    assert [len(each) for each in kept] == [0, 0, 0]


async def test_a_resumed_run_may_hand_over(server, model, processor):
    """A resumed run ends with its last agent, not with its first."""

    @agents.function_tool(needs_approval=True)
    async def deploy(command: str) -> str:
        """Deploy."""
        return "[[tool transfer_to_bob {}]]"

    def answer(request: Any) -> Any:
        last = request.json["messages"][-1]
        if last["role"] == "tool" and "transfer_to_bob" in last["content"]:
            return Reply(tools=(ToolCall(name="transfer_to_bob"),))
        return None

    bob = agents.Agent("bob", instructions="bob", model=model)
    alice = agents.Agent("alice", instructions="alice", model=model, tools=[deploy], handoffs=[bob])
    server._reply = answer
    result = await agents.Runner.run(alice, '[[tool deploy {"command": "x"}]]')
    state = result.to_state()
    state.approve(result.interruptions[0])
    await agents.Runner.run(alice, state)
    assert await asyncio.to_thread(scout_sdk.flush)

    assert who(server) == [("alice", 1), ("alice", 2), ("bob", 1)]
    assert [e.final for e in server.events].index(True) == len(server.events) - 1
    assert processor.open_runs == 0


async def test_a_cancelled_tool_of_a_session_that_goes_on(server, model, processor):
    """A session with a name is told that its tool is gone; else it would wait for it."""
    begun = asyncio.Event()

    @agents.function_tool
    async def wait(command: str) -> None:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()

    alice = agents.Agent("alice", instructions="alice", model=model, tools=[wait])
    config = agents.RunConfig(group_id="G")
    run = asyncio.create_task(
        agents.Runner.run(alice, '[[tool wait {"command": "sleep 400"}]]', run_config=config)
    )
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await asyncio.to_thread(scout_sdk.flush)

    assert [e.tool.state for e in server.events] == [ToolState.STARTED, ToolState.FAILED]
    assert processor.open_runs == 0


async def test_without_tracing(server, model):
    """With tracing disabled, the filter and the hooks do the same inside a context."""
    alice = agents.Agent("alice", instructions="alice", model=model, tools=[shell])
    config = agents.RunConfig(tracing_disabled=True, call_model_input_filter=input_filter)
    with scout_sdk.context(session="S", base_url=server.base_url):
        await agents.Runner.run(
            alice, '[[tool shell {"command": "sleep 4"}]]', hooks=ScoutHooks(), run_config=config
        )
    assert await asyncio.to_thread(scout_sdk.flush)

    assert who(server) == [("alice", 1), ("alice", 2)]
    assert [(e.session, e.tool.state) for e in server.events] == [
        ("S", ToolState.STARTED),
        ("S", ToolState.ENDED),
    ]


async def test_sixty_runs_at_once(server, model, processor):
    """Sixty runs with injected 500s: no request says what another one is."""
    alice = agents.Agent("alice", instructions="alice", model=model, tools=[shell])

    async def one(i: int) -> None:
        await agents.Runner.run(
            alice,
            f'[[id {i}]] [[fail 1 k{i}]] [[tool shell {{"command": "x"}}]]',
            run_config=agents.RunConfig(group_id=f"S{i}"),
        )

    await asyncio.gather(*(one(i) for i in range(60)))
    got = server.llm_requests

    assert len(got) == 180
    assert [r.hints for r in got if r.hints is None or r.hints.session != f"S{r.mark}"] == []
    assert processor.open_runs == 0


async def test_uninstrument(server, model):
    """Undone, a request is as without us."""
    uninstrument()
    await agents.Runner.run(agents.Agent("alice", instructions="alice", model=model), "a")

    assert who(server) == [None]

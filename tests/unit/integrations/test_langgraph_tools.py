"""What a LangGraph run says of its tools, its ends and its broken parts."""

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.message import MessagesState
from langgraph.prebuilt import ToolNode, tools_condition

import scout_sdk
from scout_integrations.langgraph import ScoutCallback
from scout_sdk import Evidence, SessionEvent, ToolState, _guard, _strict
from scout_sdk._replies import last_role
from scout_sdk.testing import RecordingServer, Reply, ToolCall


@tool
def shell(command: str) -> str:
    """Run a command."""
    return f"ran {command}"


@tool
def boom(x: int) -> str:
    """Fail."""
    raise RuntimeError("boom")


def task(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def events_of(server: RecordingServer) -> list[SessionEvent]:
    assert scout_sdk.flush()
    return server.events


@pytest.mark.parametrize("is_async", [False, True])
def test_tool_events(server, chat_model, is_async):
    """Start, with the time its command says, and end go out at once, in the caller's name."""
    agent = create_agent(chat_model(), [shell], name="alice")
    given = task('[[tool shell {"command": "sleep 30 && make"}]]')
    config = {"callbacks": [ScoutCallback()]}
    if is_async:
        asyncio.run(agent.ainvoke(given, config))
    else:
        agent.invoke(given, config)
    start, end, last = events_of(server)

    assert (start.agent, start.tool.name, start.tool.state) == ("alice", "shell", ToolState.STARTED)
    assert start.tool.evidence is Evidence.SLEEP
    assert 29.0 < start.tool.remaining_s <= 30.0
    assert (end.tool.state, end.tool.call_id) == (ToolState.ENDED, start.tool.call_id)
    assert end.tool.elapsed_s is not None
    assert last.final
    assert last.tool is None


def test_tool_events_ride_on_the_next_request(server, chat_model):
    """The session's next request says which tools ended since the last one, and only once."""
    create_agent(chat_model(), [shell]).invoke(
        task('[[tool shell {"command": "a"}]] [[tool shell {"command": "b"}]]'),
        {"callbacks": [ScoutCallback(session_id="S")]},
    )
    first, second = (request.hints for request in server.llm_requests)

    assert first.tools == ()
    assert [(t.name, t.state) for t in second.tools] == [("shell", ToolState.ENDED)] * 2


def test_equal_call_ids_of_two_sessions(chat_model):
    """Models that count their calls (`functions.shell:0`) give them equal ids in every session."""
    asked = threading.Barrier(2)

    def answer(request):
        if last_role(request.json) == "tool":
            return None
        arguments = json.dumps({"command": "sleep 3"})
        call = ToolCall(name="shell", arguments=arguments, call_id="functions.shell:0")
        return Reply(tools=(call,))

    def model(state: MessagesState) -> dict[str, Any]:
        said = ChatOpenAI(model="m", base_url=server.base_url, api_key="x").invoke(
            state["messages"]
        )
        if said.tool_calls:
            asked.wait(5)  # both have asked before a tool starts
        return {"messages": [said]}

    callback = ScoutCallback()
    with RecordingServer(reply=answer) as server, ThreadPoolExecutor(2) as pool:
        for name in ("alice", "bob"):
            graph = StateGraph(MessagesState).add_node(name, model)
            graph.add_node("tools", ToolNode([shell])).add_edge(START, name)
            graph.add_conditional_edges(name, tools_condition).add_edge("tools", name)
            config = {"callbacks": [callback], "metadata": {"scout_session_id": name}}
            pool.submit(graph.compile().invoke, task("go"), config)
        pool.shutdown()
        told = {(event.session, event.agent) for event in events_of(server)}

    assert {("alice", "alice"), ("bob", "bob")} == told


def test_retries_carry_the_same_tools(server, chat_model):
    """A request whose first attempt failed says it again."""
    replies = iter([503, 200])

    def node(state: MessagesState) -> dict[str, Any]:
        shell.invoke({"command": "x"})
        text = f"[[fail 1 once {next(replies)}]]"
        return {"messages": [model.invoke(text)]}

    model = chat_model()
    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.compile().invoke(task("x"), {"callbacks": [ScoutCallback(session_id="S")]})
    first, retry = (request.hints for request in server.llm_requests)

    assert [t.name for t in first.tools] == ["shell"]
    assert first == retry


def test_failing_tool(server, chat_model):
    """A tool that raises has failed; the next request says so."""
    agent = create_agent(chat_model(), [boom])
    callback = ScoutCallback(session_id="S", base_url=server.base_url)
    with pytest.raises(RuntimeError):
        agent.invoke(task('[[tool boom {"x": 1}]]'), {"callbacks": [callback]})

    assert [e.tool.state for e in events_of(server)] == [ToolState.STARTED, ToolState.FAILED]
    assert callback.open_runs == 0


async def test_tools_left_running_by_a_failed_graph(server, chat_model):
    """A tool whose sibling made the graph fail does not stay started for ever."""

    @tool
    async def slow(x: int) -> str:
        """Take long."""
        await asyncio.sleep(30)
        return "late"

    @tool
    async def aboom(x: int) -> str:
        """Fail."""
        await asyncio.sleep(0.05)
        raise RuntimeError("boom")

    agent = create_agent(chat_model(), [slow, aboom])
    callback = ScoutCallback(session_id="S", base_url=server.base_url)
    with pytest.raises(RuntimeError):
        await agent.ainvoke(
            task('[[tool slow {"x": 1}]] [[tool aboom {"x": 1}]]'), {"callbacks": [callback]}
        )
    await asyncio.sleep(0)
    assert await asyncio.to_thread(scout_sdk.flush)
    last = {e.tool.call_id: e.tool.state for e in server.events}

    assert list(last.values()) == [ToolState.FAILED] * 2
    assert callback.open_runs == 0


def test_hand_made_tool_node(server, chat_model):
    """Parallel calls of one tool node keep their ids and belong to the agent that asked."""
    model = chat_model().bind_tools([shell])

    def coder(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("coder", coder)
    graph.add_node("tools", ToolNode([shell]))
    graph.add_edge(START, "coder")
    graph.add_conditional_edges("coder", tools_condition)
    graph.add_edge("tools", "coder")
    graph.compile().invoke(
        task('[[tool shell {"command": "sleep 1000"}]] [[tool shell {"command": "sleep 2000"}]]'),
        {"callbacks": [ScoutCallback()]},
    )
    tools = [e for e in events_of(server) if e.tool]

    assert {e.agent for e in tools} == {"coder"}
    assert len({e.tool.call_id for e in tools}) == 2
    started = sorted(e.tool.remaining_s for e in tools if e.tool.state is ToolState.STARTED)
    assert [round(s, -2) for s in started] == [1000, 2000]


def test_who_ends_a_session(server, chat_model):
    """An unnamed session ends with its run; a named one when the application says so."""
    agent = create_agent(chat_model(), [])
    agent.invoke(task("a"), {"callbacks": [ScoutCallback()]})
    named = ScoutCallback(session_id="S", base_url=server.base_url)
    agent.invoke(task("b"), {"callbacks": [named]})
    assert [e.session for e in events_of(server) if e.final] == [
        server.llm_requests[0].hints.session
    ]
    named.end_session()

    assert [e.session for e in events_of(server) if e.final][1:] == ["S"]


def test_nothing_is_kept(chat_model):
    """After a run neither the handler nor the process remembers its session."""
    from scout_sdk._sessions import SESSIONS

    callback = ScoutCallback()
    create_agent(chat_model(), [shell]).invoke(
        task('[[tool shell {"command": "a"}]]'), {"callbacks": [callback]}
    )

    assert (callback.open_runs, len(callback._calls), len(SESSIONS)) == (0, 0, 0)


def test_our_faults_stay_ours(server, chat_model, caplog, monkeypatch):
    """A fault in the handler is logged once and the run goes on."""
    monkeypatch.setattr(_strict, "_depth", 0)
    monkeypatch.setattr(_guard, "_seen", set())
    callback = ScoutCallback()
    monkeypatch.setattr(callback, "_start", lambda *a, **k: 1 / 0)
    agent = create_agent(chat_model(), [])
    with caplog.at_level(logging.ERROR, "scout_sdk"):
        for _ in range(3):
            answer = agent.invoke(task("[[say fine]]"), {"callbacks": [callback]})

    assert answer["messages"][-1].text.strip() == "fine"
    assert [r.hints for r in server.llm_requests] == [None] * 3
    ours = [r for r in caplog.records if "on_chain_start" in r.getMessage()]
    assert len(ours) == 1


def test_a_dead_side_channel_changes_nothing(server, chat_model, free_port):
    """With nobody at the side channel's address, a run ends as ever."""
    callback = ScoutCallback(base_url=f"http://127.0.0.1:{free_port}")
    answer = create_agent(chat_model(), [shell]).invoke(
        task('[[tool shell {"command": "a"}]]'), {"callbacks": [callback]}
    )

    assert answer["messages"][-1].text.strip() == "done"
    assert [r.hints.turn for r in server.llm_requests] == [1, 2]


@pytest.mark.parametrize("name", ["研究员", "a\nb", " pad ", "x" * 10_000, '"; drop'])
def test_hostile_names(server, chat_model, name):
    """No agent or session name breaks a call."""
    answer = create_agent(chat_model(), [], name="a").invoke(
        task("[[say fine]]"), {"callbacks": [ScoutCallback(agent=name, session_id=name)]}
    )

    assert answer["messages"][-1].text.strip() == "fine"
    assert server.llm_requests[0].hints.session


def test_wrong_options_are_named():
    """A wrong option fails at once and names the allowed values."""
    with pytest.raises(scout_sdk.ConfigError, match="'auto', 'off'"):
        ScoutCallback(install="never")
    for wrong in ("http://", "host:8000", "ftp://host"):
        with pytest.raises(scout_sdk.ConfigError, match="http://host:8000"):
            ScoutCallback(base_url=wrong)

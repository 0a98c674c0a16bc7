"""LangGraph and LangChain beyond graphs of nodes."""

import asyncio
import os
import threading
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import OpenAI
from langgraph.func import entrypoint
from langgraph.func import task as graph_task
from langgraph.graph import START, StateGraph
from langgraph.graph.message import MessagesState

import scout_sdk
from scout_integrations.langgraph import ScoutCallback
from scout_sdk import ToolState
from scout_sdk._hints import HUMAN
from scout_sdk.testing import RecordingServer


def who(server: RecordingServer) -> list[Any]:
    return [r.hints and (r.hints.session, r.hints.agent, r.hints.turn) for r in server.llm_requests]


def test_functional_api(server, chat_model):
    """Tasks of an entrypoint are agents too."""
    model = chat_model()

    @graph_task
    def write(topic: str) -> str:
        return str(model.invoke(topic).text)

    @entrypoint()
    def flow(topic: str) -> str:
        return write(topic).result()

    callback = ScoutCallback(session_id="S")
    flow.invoke("hello", {"callbacks": [callback]})

    assert who(server) == [("S", "write", 1)]
    assert callback.open_runs == 0


def test_chains_without_a_graph(server, chat_model):
    """A chain is one agent, called by its run_name if it has one."""
    chain = ChatPromptTemplate.from_template("say {x}") | chat_model()
    callback = ScoutCallback(session_id="S")
    chain.invoke({"x": "a"}, {"callbacks": [callback]})
    chain.invoke({"x": "a"}, {"callbacks": [callback], "run_name": "summariser"})

    assert who(server) == [("S", "default", 1), ("S", "summariser", 1)]
    assert callback.open_runs == 0


def test_model_retries_and_fallbacks(server, chat_model):
    """Attempts that LangChain makes are calls, and so turns, of their own."""
    model = chat_model(max_retries=0)
    callback = ScoutCallback(session_id="S", agent="a")
    model.with_retry(wait_exponential_jitter=False, stop_after_attempt=2).invoke(
        "[[fail 1 r]]", {"callbacks": [callback]}
    )
    model.with_fallbacks([chat_model()]).invoke("[[fail 1 f]]", {"callbacks": [callback]})

    assert who(server) == [("S", "a", turn) for turn in (1, 2, 3, 4)]
    assert callback.open_runs == 0


def test_answers_from_a_cache_are_no_turns(server, chat_model):
    """A call that LangChain answers from its cache makes no request and counts no turn."""
    model = chat_model(cache=InMemoryCache())
    callback = ScoutCallback(session_id="S", agent="a")
    for text in ("same", "same", "other"):
        model.invoke(text, {"callbacks": [callback]})

    assert who(server) == [("S", "a", 1), ("S", "a", 2)]
    assert callback.open_runs == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_text_models_in_nodes(server, is_async):
    """
    Text-completion models are labelled as chat models are.

    LangChain starts an async one's handlers in other tasks, so there it is the node that counts.
    """
    url = server.base_url
    model = OpenAI(
        model="m",
        base_url=url,
        api_key="x",
        default_headers={"connection": "close"},
        http_client=openai.DefaultHttpxClient(base_url=url),
        http_async_client=openai.DefaultAsyncHttpxClient(base_url=url),
    )

    def node(state: MessagesState) -> dict[str, Any]:
        model.invoke("hello")
        return {}

    async def async_node(state: MessagesState) -> dict[str, Any]:
        await model.ainvoke("hello")
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("writer", async_node if is_async else node)
    graph.add_edge(START, "writer")
    compiled, callback = graph.compile(), ScoutCallback(session_id="S")
    if is_async:
        asyncio.run(compiled.ainvoke({"messages": []}, {"callbacks": [callback]}))
    else:
        compiled.invoke({"messages": []}, {"callbacks": [callback]})

    assert who(server) == [("S", "writer", 1)]
    assert callback.open_runs == 0


def test_one_handler_at_two_levels_counts_once(server, chat_model):
    """The same handler, or another one, on the graph and on the call is no second turn."""
    model, callback = chat_model(), ScoutCallback(session_id="S")

    def node(state: MessagesState) -> dict[str, Any]:
        model.invoke("a", {"callbacks": [callback]})
        model.invoke("b")
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.compile().invoke(
        {"messages": []}, {"callbacks": [callback, ScoutCallback(session_id="S")]}
    )

    assert [(session, turn) for session, _, turn in who(server)] == [("S", 1), ("S", 2)]
    assert callback.open_runs == 0


def test_threads_with_and_without_config(server, chat_model):
    """A thread of a node is labelled when the config is passed on, else not at all."""
    model = chat_model()

    def node(state: MessagesState, config: Any) -> dict[str, Any]:
        for mark, given in (("with", config), ("without", None)):
            thread = threading.Thread(target=model.invoke, args=(f"[[id {mark}]]", given))
            thread.start()
            thread.join()
        return {}

    node.__annotations__["config"] = __import__(
        "langchain_core.runnables", fromlist=["RunnableConfig"]
    ).RunnableConfig
    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.compile().invoke({"messages": []}, {"callbacks": [ScoutCallback(session_id="S")]})

    assert {r.mark: r.hints and r.hints.agent for r in server.llm_requests} == {
        "with": "node",
        "without": None,
    }


async def test_a_stream_stepped_by_changing_tasks(server, chat_model):
    """Each step of an async stream may be made by another task."""
    graph = create_agent(chat_model(), [], name="alice")
    callback = ScoutCallback(session_id="S")
    stream = graph.astream(
        {"messages": [HumanMessage("[[say a b c]]")]},
        {"callbacks": [callback]},
        stream_mode="messages",
    )
    while True:
        try:
            await asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        except StopAsyncIteration:
            break

    assert who(server) == [("S", "alice", 1)]
    assert callback.open_runs == 0


async def test_abandoned_graph_stream(server, chat_model):
    """A graph whose stream is dropped midway leaves nothing open."""
    graph = create_agent(chat_model(), [], name="alice")
    callback = ScoutCallback(session_id="S")
    stream = graph.astream(
        {"messages": [HumanMessage("[[say a b c]]")]},
        {"callbacks": [callback]},
        stream_mode="messages",
    )
    await anext(stream)
    await stream.aclose()

    assert callback.open_runs == 0
    assert scout_sdk.current_hints() is None


async def test_cancelled_tool(server, chat_model):
    """A run that is cancelled inside a tool says that the tool failed, and ends."""

    @tool
    async def slow(x: int) -> str:
        """Take long."""
        await asyncio.sleep(30)
        return "late"

    callback = ScoutCallback(base_url=server.base_url)
    running = asyncio.create_task(
        create_agent(chat_model(), [slow]).ainvoke(
            {"messages": [HumanMessage('[[tool slow {"x": 1}]]')]}, {"callbacks": [callback]}
        )
    )
    assert await asyncio.to_thread(server.wait_for, lambda s: s._events)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(scout_sdk.flush)

    assert [e.tool and e.tool.state for e in server.events] == [
        ToolState.STARTED,
        ToolState.FAILED,
        None,
    ]
    assert server.events[-1].final
    assert callback.open_runs == 0


def test_an_interrupt_inside_a_tool_is_no_failure(server, chat_model):
    """A tool that asks a person has not failed; the session waits for the person."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command, interrupt

    @tool
    def approve(x: int) -> str:
        """Ask."""
        return f"approved {interrupt('sure?')}"

    agent = create_agent(chat_model(), [approve], name="alice", checkpointer=InMemorySaver())
    config = {
        "callbacks": [ScoutCallback(base_url=server.base_url)],
        "configurable": {"thread_id": "T"},
    }
    agent.invoke({"messages": [HumanMessage('[[tool approve {"x": 1}]]')]}, config)
    agent.invoke(Command(resume="yes"), config)
    assert scout_sdk.flush()
    tools = [(e.tool.name, e.tool.state.value) for e in server.events if e.tool]

    assert tools == [
        ("approve", "started"),
        ("approve", "ended"),
        (HUMAN, "started"),
        (HUMAN, "ended"),
        ("approve", "started"),
        ("approve", "ended"),
    ]
    assert not any(e.final for e in server.events)
    assert who(server) == [("T", "alice", 1), ("T", "alice", 2)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_goes_on(server, chat_model):
    """A child of fork labels its own requests."""
    import multiprocessing

    graph = create_agent(chat_model(), [], name="alice")
    config = {"callbacks": [ScoutCallback(session_id="S")]}
    graph.invoke({"messages": [HumanMessage("[[id parent]]")]}, config)
    child = multiprocessing.get_context("fork").Process(
        target=graph.invoke, args=({"messages": [HumanMessage("[[id child]]")]}, config)
    )
    child.start()
    child.join(20)

    assert child.exitcode == 0
    assert [(r.mark, r.hints.agent) for r in server.llm_requests] == [
        ("parent", "alice"),
        ("child", "alice"),
    ]

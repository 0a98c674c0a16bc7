"""A hundred runs at once: no request says what another one is."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.graph.message import MessagesState
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send

from scout_integrations.langgraph import ScoutCallback
from scout_sdk.testing import RecordingServer

RUNS = 100


@tool
async def awork(s: float) -> str:
    """Work."""
    await asyncio.sleep(s)
    return "ok"


@tool
def work(s: float) -> str:
    """Work."""
    time.sleep(s)
    return "ok"


def two_agents(model: Any, is_async: bool) -> Any:
    """planner -> coder -> tool -> coder: three LLM calls."""
    the_tool = awork if is_async else work

    def asks(agent: str, state: MessagesState) -> list[Any]:
        first, *rest = state["messages"]
        kept = [m for m in rest if m.type == "tool" or getattr(m, "tool_calls", None)]
        return [SystemMessage(agent), first, *(kept if agent == "coder" else ())]

    bound = model.bind_tools([the_tool])
    if is_async:

        async def planner(state: MessagesState) -> dict[str, Any]:
            await model.ainvoke(asks("planner", state))
            return {}

        async def coder(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await bound.ainvoke(asks("coder", state))]}

    else:

        def planner(state: MessagesState) -> dict[str, Any]:
            model.invoke(asks("planner", state))
            return {}

        def coder(state: MessagesState) -> dict[str, Any]:
            return {"messages": [bound.invoke(asks("coder", state))]}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", planner)
    graph.add_node("coder", coder)
    graph.add_node("tools", ToolNode([the_tool]))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    graph.add_conditional_edges("coder", tools_condition)
    graph.add_edge("tools", "coder")
    return graph.compile()


def given(i: int, is_async: bool, fail: bool) -> dict[str, Any]:
    name = "awork" if is_async else "work"
    failing = f"[[fail 1 f{i}]] " if fail else ""
    return {"messages": [HumanMessage(f'[[id {i}]] {failing}[[tool {name} {{"s": 0.01}}]]')]}


def check(server: RecordingServer, requests: int) -> None:
    """Every request is labelled, with its own session, agent and turn; retries alike."""
    assert server.faults == []
    got = server.llm_requests
    assert len(got) == requests
    wrong = []
    for request in got:
        hints = request.hints
        system = request.json["messages"][0]["content"]
        if hints is None or (hints.session, hints.agent) != (f"S{request.mark}", system):
            wrong.append((request.mark, system, hints))
    assert wrong == []
    turns: dict[Any, list[Any]] = {}
    for request in got:
        if request.retries == 0:
            key = (request.hints.session, request.hints.agent)
            turns.setdefault(key, []).append(request.hints.turn)
    assert all(sorted(t) == list(range(1, len(t) + 1)) for t in turns.values())


def options(i: int, shared: ScoutCallback | None) -> dict[str, Any]:
    if shared is None:
        return {"callbacks": [ScoutCallback(session_id=f"S{i}")]}
    return {"callbacks": [shared], "metadata": {"scout_session_id": f"S{i}"}}


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
async def test_async(server, chat_model, is_shared):
    """Under ainvoke; an injected 500 gives each run one more attempt."""
    graph = two_agents(chat_model(), True)
    shared = ScoutCallback() if is_shared else None
    await asyncio.gather(
        *(graph.ainvoke(given(i, True, True), options(i, shared)) for i in range(RUNS))
    )

    check(server, RUNS * 4)
    assert shared is None or shared.open_runs == 0


async def test_async_streaming(server, chat_model):
    """Under astream of tokens."""
    graph, shared = two_agents(chat_model(), True), ScoutCallback()

    async def one(i: int) -> None:
        async for _ in graph.astream(
            given(i, True, True), options(i, shared), stream_mode="messages"
        ):
            pass

    await asyncio.gather(*(one(i) for i in range(RUNS)))

    check(server, RUNS * 4)
    assert shared.open_runs == 0


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_threads(server, chat_model, is_shared):
    """Under invoke in as many threads, with injected 500s."""
    graph = two_agents(chat_model(), False)
    shared = ScoutCallback() if is_shared else None
    with ThreadPoolExecutor(32) as pool:
        list(
            pool.map(lambda i: graph.invoke(given(i, False, True), options(i, shared)), range(RUNS))
        )

    check(server, RUNS * 4)
    assert shared is None or shared.open_runs == 0


async def test_sync_nodes_under_ainvoke(server, chat_model):
    """Sync nodes of async runs go through an executor and keep their context."""
    graph = two_agents(chat_model(), False)
    await asyncio.gather(
        *(graph.ainvoke(given(i, False, False), options(i, None)) for i in range(RUNS // 4))
    )

    check(server, RUNS // 4 * 3)


async def test_branches(server, chat_model):
    """Parallel branches of parallel runs."""
    model, shared, width = chat_model(), ScoutCallback(), 4

    async def worker(state: MessagesState) -> dict[str, Any]:
        await model.ainvoke([SystemMessage("worker"), *state["messages"]])
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("worker", worker)
    graph.add_conditional_edges(START, lambda s: [Send("worker", s)] * width)
    compiled = graph.compile()
    await asyncio.gather(
        *(
            compiled.ainvoke({"messages": [HumanMessage(f"[[id {i}]]")]}, options(i, shared))
            for i in range(RUNS // 2)
        )
    )

    check(server, RUNS // 2 * width)

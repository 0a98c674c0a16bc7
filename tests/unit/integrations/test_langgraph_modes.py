"""The headers that arrive, for each way to run a LangGraph graph."""

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, SummarizationMiddleware
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import MessagesState
from langgraph.types import Command, RetryPolicy, Send, interrupt

import scout_sdk
from scout_integrations.langgraph import ScoutCallback, instrument, register, uninstrument
from scout_sdk import Hints, ToolState, _openai
from scout_sdk.testing import RecordingServer


def said(server: RecordingServer) -> list[Hints]:
    hints = [request.hints for request in server.llm_requests]
    assert None not in hints
    return hints  # type: ignore[return-value]


def who(server: RecordingServer) -> list[tuple[str | None, str | None, int | None]]:
    return [(h.session, h.agent, h.turn) for h in said(server)]


@tool
def shell(command: str) -> str:
    """Run a command."""
    return f"ran {command}"


def two_nodes(model: Any, *, name: str | None = None) -> Any:
    """planner -> coder, usable both sync and async."""

    def sync_node(agent: str) -> Any:
        def node(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke([SystemMessage(agent), state["messages"][0]])]}

        async def anode(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([SystemMessage(agent), state["messages"][0]])]}

        return RunnableLambda(node, anode)

    graph = StateGraph(MessagesState)
    graph.add_node("planner", sync_node("planner"))
    graph.add_node("coder", sync_node("coder"))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    return graph.compile(name=name)


def task(mark: str, extra: str = "") -> dict[str, Any]:
    return {"messages": [HumanMessage(f"[[id {mark}]] {extra}")]}


EXPECTED = [("S", "planner", 1), ("S", "coder", 1)]


def test_invoke(server, chat_model):
    """Each node is an agent, and each of its calls a turn."""
    callback = ScoutCallback(session_id="S")
    two_nodes(chat_model()).invoke(task("a"), {"callbacks": [callback]})

    assert who(server) == EXPECTED
    assert [h.path for h in said(server)] == ["planner", "coder"]
    assert callback.open_runs == 0


async def test_ainvoke(server, chat_model):
    """Under ainvoke the headers are the same."""
    callback = ScoutCallback(session_id="S")
    await two_nodes(chat_model()).ainvoke(task("a"), {"callbacks": [callback]})

    assert who(server) == EXPECTED
    assert callback.open_runs == 0


@pytest.mark.parametrize("mode", ["values", "messages", "updates"])
def test_stream(server, chat_model, mode):
    """Under stream the headers are the same, also where tokens are streamed."""
    callback = ScoutCallback(session_id="S")
    for _ in two_nodes(chat_model()).stream(task("a"), {"callbacks": [callback]}, stream_mode=mode):
        pass

    assert who(server) == EXPECTED
    assert callback.open_runs == 0


@pytest.mark.parametrize("mode", ["values", "messages", "updates"])
async def test_astream(server, chat_model, mode):
    """Under astream the headers are the same, also where tokens are streamed."""
    callback = ScoutCallback(session_id="S")
    async for _ in two_nodes(chat_model()).astream(
        task("a"), {"callbacks": [callback]}, stream_mode=mode
    ):
        pass

    assert who(server) == EXPECTED
    assert callback.open_runs == 0


async def test_astream_events(server, chat_model):
    """Under astream_events the headers are the same."""
    callback = ScoutCallback(session_id="S")
    async for _ in two_nodes(chat_model()).astream_events(
        task("a"), {"callbacks": [callback]}, version="v2"
    ):
        pass

    assert who(server) == EXPECTED


def test_batch_makes_a_session_of_each_input(server, chat_model):
    """Without a name, each root run of a batch is a session of its own."""
    two_nodes(chat_model()).batch(
        [task(str(i)) for i in range(4)], {"callbacks": [ScoutCallback()]}
    )
    by_mark: dict[Any, set[Any]] = {}
    for request in server.llm_requests:
        by_mark.setdefault(request.mark, set()).add(request.hints.session)

    assert len(by_mark) == 4
    assert all(len(sessions) == 1 for sessions in by_mark.values())
    assert len(set.union(*by_mark.values())) == 4


async def test_abatch_makes_a_session_of_each_input(server, chat_model):
    """Under abatch it is the same."""
    await two_nodes(chat_model()).abatch(
        [task(str(i)) for i in range(4)], {"callbacks": [ScoutCallback()]}
    )
    pairs = {(request.mark, request.hints.session) for request in server.llm_requests}

    assert len(pairs) == 4
    assert len({session for _, session in pairs}) == 4
    assert sorted(h.agent for h in said(server)) == ["coder"] * 4 + ["planner"] * 4


class Fan(TypedDict):
    mark: str
    done: Annotated[list[str], lambda a, b: a + b]


def fan_out(model: Any, width: int) -> Any:
    def worker(state: Fan) -> dict[str, Any]:
        model.invoke([HumanMessage(f"[[id {state['mark']}]]")])
        return {"done": [state["mark"]]}

    graph = StateGraph(Fan)
    graph.add_node("worker", worker)
    graph.add_conditional_edges(
        START, lambda s: [Send("worker", {"mark": s["mark"], "done": []}) for _ in range(width)]
    )
    return graph.compile()


@pytest.mark.parametrize("is_async", [False, True])
def test_send_fan_out(server, chat_model, is_async):
    """Parallel branches of one node share agent and session and have turns of their own."""
    graph = fan_out(chat_model(), 6)
    config = {"callbacks": [ScoutCallback(session_id="S")]}
    if is_async:
        asyncio.run(graph.ainvoke({"mark": "m", "done": []}, config))
    else:
        graph.invoke({"mark": "m", "done": []}, config)

    assert sorted(who(server)) == [("S", "worker", turn) for turn in range(1, 7)]


def team(model: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("n1", create_agent(model, [shell], name="alice"))
    graph.add_node("bob", create_agent(model, [shell]))
    graph.add_edge(START, "n1")
    graph.add_edge("n1", "bob")
    return graph.compile(name="team")


@pytest.mark.parametrize("is_async", [False, True])
def test_agents_as_subgraphs(server, chat_model, is_async):
    """A named agent is called by its name; an unnamed one by the node that holds it."""
    graph, config = team(chat_model()), {"callbacks": [ScoutCallback(session_id="S")]}
    given = task("a", '[[tool shell {"command": "sleep 3"}]]')
    if is_async:
        asyncio.run(graph.ainvoke(given, config))
    else:
        graph.invoke(given, config)

    assert who(server) == [
        ("S", "alice", 1),
        ("S", "alice", 2),
        ("S", "bob", 1),
        ("S", "bob", 2),
    ]
    assert [h.path for h in said(server)] == ["n1/model"] * 2 + ["bob/model"] * 2


def test_agent_inside_a_tool(server, chat_model):
    """An agent inside a tool keeps its own name in the session of the agent that called it."""
    helper = create_agent(chat_model(), [], name="helper")

    @tool
    def ask(question: str) -> str:
        """Ask the helper."""
        return helper.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text

    boss = create_agent(chat_model(), [ask], name="boss")
    boss.invoke(
        task("a", '[[tool ask {"question": "q"}]]'), {"callbacks": [ScoutCallback(session_id="S")]}
    )

    assert who(server) == [("S", "boss", 1), ("S", "helper", 1), ("S", "boss", 2)]


def test_a_graph_of_its_own_session_names_its_parent(server, chat_model):
    """A graph that is given a session of its own inside a node says who spawned it."""
    inner, model = two_nodes(chat_model()), chat_model()

    def node(state: MessagesState) -> dict[str, Any]:
        inner.invoke(task("inner"), {"metadata": {"scout_session_id": "T2"}})
        model.invoke("[[id outer]]")
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.compile(checkpointer=InMemorySaver()).invoke(
        task("x"), {"callbacks": [ScoutCallback()], "configurable": {"thread_id": "T1"}}
    )

    assert [(h.session, h.parent) for h in said(server)] == [
        ("T2", "T1"),
        ("T2", "T1"),
        ("T1", None),
    ]


def test_static_edges_travel_as_next_agents(server, chat_model):
    """Who certainly follows comes from the graph's own edges, found without an argument."""
    graph = StateGraph(MessagesState)
    model = chat_model()

    def last(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"][:1])]}

    graph.add_node("n1", create_agent(model, [shell], name="alice"))
    graph.add_node("bob", create_agent(model, [shell]))
    graph.add_node("last", last)
    graph.add_node("either", last)
    graph.add_edge(START, "n1")
    graph.add_edge("n1", "bob")
    graph.add_edge("bob", "last")
    graph.add_conditional_edges("last", lambda s: "either", ["either", "bob"])
    compiled = graph.compile()
    compiled.invoke(task("a"), {"callbacks": [ScoutCallback()]})
    asyncio.run(compiled.ainvoke(task("a"), {"callbacks": [ScoutCallback()]}))

    expected = [("alice", ("bob",)), ("bob", ("last",)), ("last", ()), ("either", ())]
    assert [(h.agent, h.next_agents) for h in said(server)] == expected * 2


def test_who_follows_is_who_asks(server, chat_model):
    """Nodes without a request are passed through, and agents go by the names they ask under."""
    model = chat_model()
    bot = create_agent(model, [], name="bot")

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"][:1])]}

    graph = StateGraph(MessagesState).add_node("rewrite", ask)
    graph.add_node("fetch", lambda state: {})
    graph.add_node("answer", lambda state: bot.invoke({"messages": state["messages"][:1]}))
    graph.add_edge(START, "rewrite").add_edge("rewrite", "fetch").add_edge("fetch", "answer")
    compiled = graph.compile()
    for _ in range(2):
        compiled.invoke(task("a"), {"callbacks": [ScoutCallback()]})

    assert [(h.agent, h.next_agents) for h in said(server)] == [
        ("rewrite", ("fetch",)),  # nobody knows yet
        ("bot", ()),
        ("rewrite", ("bot",)),
        ("bot", ()),
    ]


def test_middleware_is_no_follower_and_asks_in_its_own_name(server, chat_model):
    """Hooks of middleware are passed through; their requests have another prompt than the agent."""
    model = chat_model()
    middleware = [
        SummarizationMiddleware(model, trigger=("messages", 2), keep=("messages", 1)),
        ModelCallLimitMiddleware(run_limit=9),
    ]
    agent = create_agent(model, [shell], name="alice", middleware=middleware)
    messages = [*task("a")["messages"], *task("b")["messages"]]
    agent.invoke({"messages": messages}, {"callbacks": [ScoutCallback()]})

    assert [(h.agent, h.next_agents) for h in said(server)] == [
        ("SummarizationMiddleware", ()),  # the limit after it may end the run
        ("alice", ()),
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_followers_inside_and_after_a_subgraph(server, chat_model, is_async):
    """Inside a subgraph its own edges count; behind its last node, those of the outer graph."""
    model, config = chat_model(), {"callbacks": [ScoutCallback(session_id="S")]}

    def last(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"][:1])]}

    graph = StateGraph(MessagesState)
    graph.add_node("flow", two_nodes(model))
    graph.add_node("last", last)
    graph.add_edge(START, "flow")
    graph.add_edge("flow", "last")
    compiled = graph.compile()
    if is_async:
        asyncio.run(compiled.ainvoke(task("a"), config))
    else:
        compiled.invoke(task("a"), config)

    assert [(h.agent, h.path, h.next_agents) for h in said(server)] == [
        ("planner", "flow/planner", ("coder",)),
        ("coder", "flow/coder", ("last",)),
        ("last", "last", ()),
    ]


def test_bare_clients_in_a_node_belong_to_it(server, chat_model):
    """An openai client that knows no callbacks gets the agent and session of its node."""
    scout_sdk.install()
    with openai.OpenAI(base_url=server.base_url, api_key="x") as client:

        def node(state: MessagesState) -> dict[str, Any]:
            for _ in range(2):
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}]
                )
            return {}

        graph = StateGraph(MessagesState)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        graph.compile().invoke(task("a"), {"callbacks": [ScoutCallback(session_id="S")]})
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "after"}])

    inside, after = server.llm_requests[:2], server.llm_requests[2]
    assert [(r.hints.session, r.hints.agent, r.hints.turn) for r in inside] == [
        ("S", "node", 1),
        ("S", "node", 2),
    ]
    assert after.hints is None


def test_interrupt_and_resume(server, chat_model):
    """Waiting for a person is a tool call of the session, over two runs and two handlers."""
    model = chat_model()

    def ask(state: MessagesState) -> dict[str, Any]:
        answer = interrupt("go on?")
        model.invoke(f"[[id {answer}]]")
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    compiled = graph.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "T"}}
    compiled.invoke(task("a"), {"callbacks": [ScoutCallback(base_url=server.base_url)], **thread})
    assert scout_sdk.flush()
    compiled.invoke(
        Command(resume="yes"), {"callbacks": [ScoutCallback(base_url=server.base_url)], **thread}
    )
    assert scout_sdk.flush()

    events = server.events
    assert [(e.session, e.tool.name, e.tool.state) for e in events if e.tool] == [
        ("T", "human", ToolState.STARTED),
        ("T", "human", ToolState.ENDED),
    ]
    assert events[0].tool.call_id == events[1].tool.call_id
    assert not any(e.final for e in events)
    (hints,) = said(server)
    assert [(t.name, t.state) for t in hints.tools] == [("human", ToolState.ENDED)]


def test_http_retries_are_the_same_turn(server, chat_model):
    """Attempts that fail say the same as the one that succeeds."""
    two_nodes(chat_model()).invoke(
        task("a", "[[fail 2 k]]"), {"callbacks": [ScoutCallback(session_id="S")]}
    )

    assert who(server) == [("S", "planner", 1)] * 3 + [("S", "coder", 1)]
    assert [r.retries for r in server.llm_requests] == [0, 1, 2, 0]


def test_node_retries_are_new_turns(server, chat_model):
    """A node that LangGraph runs again makes new calls."""
    model = chat_model(max_retries=0)

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(
        "node", node, retry_policy=RetryPolicy(initial_interval=0.001, retry_on=Exception)
    )
    graph.add_edge(START, "node")
    callback = ScoutCallback(session_id="S")
    graph.compile().invoke(task("a", "[[fail 1 n]]"), {"callbacks": [callback]})

    assert who(server) == [("S", "node", 1), ("S", "node", 2)]
    assert callback.open_runs == 0


async def test_cancelled_graph(server, chat_model):
    """A cancelled run leaves neither state nor headers for what its task does next."""
    model, callback = chat_model(), ScoutCallback()
    graph = two_nodes(model)
    running = asyncio.create_task(
        graph.ainvoke(task("a", "[[sleep 5]]"), {"callbacks": [callback]})
    )
    assert await asyncio.to_thread(server.wait_for, lambda s: s._log)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await model.ainvoke("[[id bare]]")

    assert server.llm_requests[-1].hints is None
    assert callback.open_runs == 0


async def test_timed_out_call_leaves_no_headers(server, chat_model):
    """A call that is cancelled inside its task reports no end, yet the next one is clean."""
    model, callback = chat_model(), ScoutCallback()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await model.ainvoke("[[id a]] [[sleep 5]]", {"callbacks": [callback]})
    await model.ainvoke("[[id bare]]")

    assert [request.hints is None for request in server.llm_requests] == [False, True]
    assert callback.open_runs <= 1  # nothing tells of the end; the table forgets it by age


@pytest.mark.parametrize("how", ["call", "abandoned stream"])
async def test_bare_call_after_a_labelled_one(server, chat_model, how):
    """What a call said does not stick to the next call of the same task."""
    model, config = chat_model(), {"callbacks": [ScoutCallback()]}
    if how == "call":
        await model.ainvoke("[[id a]]", config)
    else:
        stream = model.astream("[[id a]] [[say a b c d]]", config)
        async for _ in stream:
            break
        await stream.aclose()
    await model.ainvoke("[[id bare]]")
    gc.collect()

    assert [request.hints is None for request in server.llm_requests] == [False, True]


def test_several_prompts_in_one_call(server, chat_model):
    """generate() with several prompts labels every request, each with a turn."""
    chat_model().generate(
        [[HumanMessage("[[id p1]]")], [HumanMessage("[[id p2]]")]],
        callbacks=[ScoutCallback(session_id="S", agent="A")],
    )

    assert who(server) == [("S", "A", 1), ("S", "A", 2)]


def test_interleaved_streams(server, chat_model):
    """Generators that take turns in one thread keep their own sessions."""
    model = chat_model()
    streams = [
        model.stream(f"[[id {mark}]]", {"callbacks": [ScoutCallback(session_id=mark)]})
        for mark in "abc"
    ]
    while streams:
        for stream in list(streams):
            if next(stream, None) is None:
                streams.remove(stream)

    assert sorted((r.mark, r.hints.session) for r in server.llm_requests) == [
        ("a", "a"),
        ("b", "b"),
        ("c", "c"),
    ]


def test_session_rules(server, chat_model):
    """Constructor, then metadata, then thread_id, then an enclosing context."""
    graph = two_nodes(chat_model())
    config = {"metadata": {"scout_session_id": "M"}, "configurable": {"thread_id": "T"}}
    graph.invoke(task("1"), {**config, "callbacks": [ScoutCallback(session_id="C")]})
    graph.invoke(task("2"), {**config, "callbacks": [ScoutCallback()]})
    graph.invoke(task("3"), {"configurable": {"thread_id": "T"}, "callbacks": [ScoutCallback()]})
    with scout_sdk.context(session="X"):
        graph.invoke(task("4"), {"callbacks": [ScoutCallback()]})

    assert [h.session for h in said(server)][::2] == ["C", "M", "T", "X"]


def test_agent_rules(server, chat_model):
    """Metadata scout_agent, then the constructor's agent; program leads the path."""
    graph = two_nodes(chat_model())
    callback = ScoutCallback(agent="C", program="p")
    graph.invoke(task("1"), {"metadata": {"scout_agent": "M"}, "callbacks": [callback]})
    graph.invoke(task("2"), {"callbacks": [callback]})

    assert [(h.agent, h.path) for h in said(server)] == [
        ("M", "p/planner"),
        ("M", "p/coder"),
        ("C", "p/planner"),
        ("C", "p/coder"),
    ]


def test_only_allowed_hosts_are_told(monkeypatch):
    """Requests to another host than loopback carry nothing, unless it is named."""
    assert not _openai.allowed("api.openai.com")
    monkeypatch.setenv("SCOUT_BASE_URL", "http://gpu.example:8000/v1")
    assert _openai.allowed("gpu.example")
    assert not _openai.allowed("api.openai.com")


def test_switched_off(server, chat_model, monkeypatch):
    """With SCOUT_SDK_ENABLED=0 a request is as without us."""
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "0")
    two_nodes(chat_model()).invoke(task("a"), {"callbacks": [ScoutCallback()]})

    assert [r.hints for r in server.llm_requests] == [None, None]


def test_identity_only(server, chat_model):
    """hints=False says who runs and nothing else."""
    team(chat_model()).invoke(
        task("a", '[[tool shell {"command": "sleep 3"}]]'),
        {"callbacks": [ScoutCallback(hints=False, base_url=server.base_url)]},
    )
    scout_sdk.flush()

    assert {(h.agent, h.tools, h.next_agents) for h in said(server)} == {
        ("alice", (), ()),
        ("bob", (), ()),
    }
    assert server.events == []


def test_instrument_reaches_every_run(server, chat_model):
    """instrument() needs no callbacks argument; uninstrument() ends it."""
    graph = two_nodes(chat_model())
    try:
        assert instrument(session_id="S") is instrument()
        graph.invoke(task("a"))
        graph.invoke(task("b"), {"callbacks": [ScoutCallback(session_id="own")]})
    finally:
        uninstrument()
    graph.invoke(task("c"))

    sessions = [r.hints and r.hints.session for r in server.llm_requests]
    assert sessions == ["S", "S", "own", "own", None, None]


def test_environment_reaches_every_run(server, chat_model, monkeypatch):
    """After register(), SCOUT_SDK_ENABLED=1 alone switches it on."""
    graph = two_nodes(chat_model())
    register()
    graph.invoke(task("a"))
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "1")
    asyncio.run(graph.ainvoke(task("b")))

    assert [r.hints and r.hints.agent for r in server.llm_requests] == [
        None,
        None,
        "planner",
        "coder",
    ]


def test_threads_that_copy_the_context(server, chat_model):
    """A thread pool without contexts gets no headers, never wrong ones; asyncio.to_thread does."""
    scout_sdk.install()
    model = chat_model()
    with scout_sdk.context(agent="A", session="S"), ThreadPoolExecutor(1) as pool:
        pool.submit(model.invoke, "[[id bare]]").result()

        async def inside() -> None:
            await asyncio.to_thread(model.invoke, "[[id copied]]")

        asyncio.run(inside())

    assert {r.mark: r.hints and r.hints.session for r in server.llm_requests} == {
        "bare": None,
        "copied": "S",
    }

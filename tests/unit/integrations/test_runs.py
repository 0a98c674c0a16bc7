"""The bookkeeping of the integrations."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import MessagesState
from langgraph.prebuilt import ToolNode

from scout_integrations._runs import Recent, Run, RunTable
from scout_integrations._topology import Topology, topology_of
from scout_sdk import Hints
from scout_sdk._context import Slot
from scout_sdk.testing import FakeClock

LIMIT = 12
TTL_S = 100.0


def make(run_id: int, parent: Run | None, clock: FakeClock) -> Run:
    return Run(
        run_id=run_id,
        kind="chain",
        name=None,
        agent="a",
        path=None,
        session="S",
        parent=parent,
        slot=Slot(Hints()),
        born=clock.now,
    )


class Table(RuleBasedStateMachine):
    """Open and close runs in any order, let time pass, and forget some of the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.table = RunTable(limit=LIMIT, ttl_s=TTL_S, clock=self.clock)
        self.made: list[Run] = []

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        live = [r for r in self.made if self.table.get(r.run_id) is r]
        parent = data.draw(st.sampled_from([None, *live])) if live else None
        run = make(len(self.made), parent, self.clock)
        self.made.append(run)
        self.table.add(run)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.made:
            return
        run = data.draw(st.sampled_from(self.made))
        known = self.table.get(run.run_id) is run
        popped = self.table.pop(run.run_id)
        assert (popped is not None) == known
        assert self.table.get(run.run_id) is None
        if popped is not None and run.parent is None:
            assert not any(self.table.get(r.run_id) for r in self.made if r.root is run)

    @rule(seconds=st.floats(0.0, 80.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def everything_is_forgotten_by_age(self) -> None:
        self.clock.advance(TTL_S + 1.0)
        run = make(len(self.made), None, self.clock)
        self.made.append(run)
        self.table.add(run)
        assert len(self.table) == 1

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.table) <= LIMIT

    @invariant()
    def only_open_runs_are_live(self) -> None:
        for run in self.made:
            assert run.slot.live == (self.table.get(run.run_id) is run)


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_recent_forgets_the_oldest():
    """A full table forgets what was put first, and gives each value away once."""
    recent: Recent[str, int] = Recent(2)
    for i, key in enumerate("abc"):
        recent.put(key, i)

    assert [recent.pop(key) for key in "abc"] == [None, 1, 2]
    assert recent.pop("c") is None
    assert len(recent) == 0


def test_recent_by_value():
    """Values are found oldest first, and dropped together."""
    recent: Recent[int, int] = Recent(10)
    for i in range(6):
        recent.put(i, i)
    recent.drop_where(lambda value: value < 2)

    assert recent.pop_where(lambda value: value % 2 == 0) == 2
    assert recent.pop_where(lambda value: value > 99) is None
    assert len(recent) == 3


def node(state: MessagesState) -> dict[str, Any]:
    return {}


def graph(nodes: dict[str, Any], edges: list[tuple[Any, str]], branches: dict[str, list[str]]):
    made = StateGraph(MessagesState)
    for name, runnable in nodes.items():
        made.add_node(name, runnable)
    for start, end in edges:
        made.add_edge(start, end)
    for start, ends in branches.items():
        made.add_conditional_edges(start, lambda s: END, ends)
    return made.compile()


def test_certain_followers():
    """A plain edge is certain, a conditional one is not, and the end is nobody."""
    topology = Topology(
        graph(
            {"a": node, "b": node, "c": node, "d": node},
            [(START, "a"), ("a", "b"), ("a", "c"), (["b", "c"], "d")],
            {"d": ["a", END]},
        )
    )

    assert topology.next_agents("a", "own") == ("b", "c")
    assert topology.next_agents("b", "own") == ("d",)
    assert topology.next_agents("d", "own") == ()
    assert topology.next_agents("unknown", "own") == ()


def test_tools_are_passed_through():
    """A node that runs tools is no agent; who follows it is."""
    topology = Topology(
        graph(
            {"a": node, "act": ToolNode([]), "b": node},
            [(START, "a"), ("a", "act"), ("act", "b"), ("b", END)],
            {},
        )
    )

    assert topology.next_agents("a", "own") == ("b",)


def test_loops_end():
    """Followers of a loop of tool nodes are found without end."""
    topology = Topology(
        graph(
            {"a": node, "t1": ToolNode([]), "t2": ToolNode([])},
            [(START, "a"), ("a", "t1"), ("t1", "t2"), ("t2", "t1")],
            {},
        )
    )

    assert topology.next_agents("a", "own") == ()


def test_followers_that_are_graphs():
    """Of a subgraph, its agent follows: by its name, its node, or its own first node."""
    model = FakeListChatModel(responses=["x"])
    inner = graph({"first": node, "second": node}, [(START, "first"), ("first", "second")], {})
    topology = Topology(
        graph(
            {
                "a": node,
                "n1": create_agent(model, [], name="alice"),
                "bob": create_agent(model, []),
                "flow": inner,
            },
            [(START, "a"), ("a", "n1"), ("n1", "bob"), ("bob", "flow")],
            {},
        )
    )

    assert topology.next_agents("a", "own") == ("alice",)
    assert topology.next_agents("n1", "own") == ("bob",)
    assert topology.next_agents("bob", "own") == ("first",)


def test_nodes_that_make_no_request_are_passed_through():
    """What ran without a request is nobody; once it makes one, it is whoever made it."""
    topology = Topology(
        graph(
            {"a": node, "fetch": node, "b": node, "act": ToolNode([])},
            [(START, "a"), ("a", "fetch"), ("fetch", "b"), ("b", "act"), ("act", "a")],
            {},
        )
    )
    assert topology.next_agents("a", "own") == ("fetch",)
    topology.learn("fetch", "own", None)
    assert topology.next_agents("a", "own") == ("b",)
    for agent in ("helper", None):  # it need not ask every time
        topology.learn("fetch", "own", agent)
        assert topology.next_agents("a", "own") == ("helper",)
    topology.learn("fetch", "own", "own")
    assert topology.next_agents("a", "other") == ("other",)
    topology.learn("act", "own", "helper")  # which tool asks whom is not certain
    topology.learn("unknown", "own", "helper")
    assert topology.next_agents("b", "own") == ("a",)


def test_a_topology_lives_as_long_as_its_graph():
    """Handlers come and go with each run; what was seen of a graph stays."""
    one, other = (graph({"a": node}, [(START, "a")], {}) for _ in range(2))
    assert topology_of(one) is topology_of(one)
    assert topology_of(one) is not topology_of(other)

"""Which agents are certain to follow a node of a compiled LangGraph graph."""

import weakref
from collections import OrderedDict
from typing import Any

from scout_sdk._locks import ProcessLock

__all__ = ["GENERIC", "Topology", "is_generic", "middleware_of", "topology_of"]

GENERIC = frozenset(
    {
        "agent",
        "model",
        "tools",
        "call_model",
        "should_continue",
        "LangGraph",
        "Prompt",
        "ChatPromptTemplate",
        "__start__",
        "__end__",
    }
)
"""Names that frameworks give to nodes and runs of every agent; they name nobody."""

_START = "__start__"
_END = "__end__"
_MAX_STEPS = 16
_MAX_GRAPHS = 256
_OWN = ""
"""Stands for the one agent of a graph."""
_HOOKS = ("before_agent", "before_model", "after_model", "after_agent")

_lock = ProcessLock()
_known: OrderedDict[int, tuple[weakref.ref[Any], "Topology"]] = OrderedDict()
"""By id of the graph; for the whole process, since many programs make a handler for each run."""


def is_generic(name: str | None) -> bool:
    """Whether *name* says nothing about who runs."""
    return not name or name in GENERIC or name.startswith("Runnable")


def middleware_of(node: str | None) -> str | None:
    """Return the middleware of a `create_agent` that *node* runs a hook of, or None."""
    name, _, hook = (node or "").rpartition(".")
    return name if name and hook in _HOOKS else None


def topology_of(graph: Any) -> "Topology":
    """Return the topology of the compiled *graph*, the same one as long as the graph lives."""
    with _lock:
        known = _known.get(id(graph))
        if known is not None and known[0]() is graph:
            _known.move_to_end(id(graph))
            return known[1]
    made = Topology(graph)
    with _lock:
        _known[id(graph)] = (weakref.ref(graph), made)
        if len(_known) > _MAX_GRAPHS:
            _known.popitem(last=False)
    return made


class Topology:
    """
    The static edges of one compiled graph (a `CompiledStateGraph`), and who was seen in its nodes.

    Only nodes without conditional edges have certain followers. Nodes that only run tools or
    middleware are passed through, and so are those that ran and made no request. A node may still
    end the graph early, by an error or an interrupt.
    """

    def __init__(self, graph: Any) -> None:
        builder = graph.builder
        self.name: str | None = None if is_generic(graph.name) else graph.name
        branching = {name for name, branches in builder.branches.items() if branches}
        edges: dict[str, list[str]] = {}
        for start, end in sorted(builder.edges):
            edges.setdefault(start, []).append(end)
        for starts, end in sorted(builder.waiting_edges):
            for start in starts:
                edges.setdefault(start, []).append(end)
        self._next = {node: ends for node, ends in edges.items() if node not in branching}
        # Kept are names only: a graph may be thrown away while its topology is known.
        self._inside = {
            node: _agents_of(node, getattr(spec, "runnable", None))
            for node, spec in builder.nodes.items()
        }
        self._passive = {node for node, agents in self._inside.items() if not agents}
        self._asking: set[str] = set()
        """Nodes in which a request was made."""
        self._answers: dict[tuple[str, str], tuple[str, ...]] = {}

    def learn(self, node: str, own: str, agent: str | None) -> None:
        """
        Learn that *agent* made the first request when *node* ran; None: it ran and made none.

        own: as for `next_agents`. A node that made requests once is not passed through again.
        """
        told = self._inside.get(node)
        if told is None or node in self._passive:
            return
        if agent is None:
            found = told if node in self._asking else ()
        else:
            self._asking.add(node)
            name = _OWN if agent == own else agent
            found = told if name in told else (name,)
        if found != told:
            self._inside[node] = found
            self._answers.clear()

    def next_agents(self, node: str, own: str) -> tuple[str, ...]:
        """
        Return the agents certain to follow *node*, in the order of their names.

        own: who runs the nodes with generic names here (the one agent of this graph).
        """
        answer = self._answers.get((node, own))
        if answer is None:
            found: dict[str, None] = {}
            self._follow(node, own, found, {node})
            if len(self._answers) >= 1024:
                self._answers.clear()
            answer = self._answers[node, own] = tuple(found)
        return answer

    def _follow(self, node: str, own: str, found: dict[str, None], seen: set[str]) -> None:
        for follower in self._next.get(node, ()):
            if follower == _END or len(seen) > _MAX_STEPS:
                continue
            agents = self._inside.get(follower, ())
            if agents:
                found.update(dict.fromkeys(own if agent == _OWN else agent for agent in agents))
            elif follower not in seen:
                seen.add(follower)
                self._follow(follower, own, found, seen)


def _agents_of(node: str, runnable: Any) -> tuple[str, ...]:
    """Return who runs first inside *node*; empty for one that only runs tools or middleware."""
    if node == "tools" or middleware_of(node) or hasattr(runnable, "tools_by_name"):
        return ()
    own = _OWN if is_generic(node) else node
    if hasattr(runnable, "builder"):
        inner = Topology(runnable)
        own = inner.name or own
        if {"model", "agent"} & set(runnable.builder.nodes):
            return (own,)
        return inner.next_agents(_START, own) or (own,)
    return (own,)

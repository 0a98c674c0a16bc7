"""Which agents are certain to follow a node of a compiled LangGraph graph."""

from typing import Any

__all__ = ["GENERIC", "Topology", "is_generic"]

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
_OWN = ""
"""Stands for the one agent of a graph."""


def is_generic(name: str | None) -> bool:
    """Whether *name* says nothing about who runs."""
    return not name or name in GENERIC or name.startswith("Runnable")


class Topology:
    """
    The static edges of one compiled graph (a `CompiledStateGraph`).

    Only nodes without conditional edges have certain followers. Nodes that only run tools are
    passed through. A node may still end the graph early, by an error or an interrupt.
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
        self._answers: dict[tuple[str, str], tuple[str, ...]] = {}

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
    """Return who runs first inside *node*; empty for a node that only runs tools."""
    if node == "tools" or hasattr(runnable, "tools_by_name"):
        return ()
    own = _OWN if is_generic(node) else node
    if hasattr(runnable, "builder"):
        inner = Topology(runnable)
        own = inner.name or own
        if {"model", "agent"} & set(runnable.builder.nodes):
            return (own,)
        return inner.next_agents(_START, own) or (own,)
    return (own,)

"""Who runs, where, and in which session: from what LangChain and LangGraph say of a run."""

import sys
from collections.abc import Mapping
from typing import Any

from langgraph.pregel import Pregel

from scout_integrations._runs import Run
from scout_integrations._topology import Topology, is_generic, middleware_of
from scout_sdk._context import enclosing

__all__ = ["agent_of", "node_path", "running_graph", "session_of"]

_MAX_FRAMES = 8


def agent_of(
    metadata: Mapping[str, Any],
    kind: str,
    name: str | None,
    parent: Run | None,
    topology: Topology | None,
    given: str | None,
) -> str:
    """
    Return who runs: what was named, else the node, else the nearest named run around it.

    given: the handler's own name for all agents. topology: that of a graph that starts.
    """
    node = metadata.get("langgraph_node")
    middleware = middleware_of(node)  # its prompt is its own, whatever agent it serves
    serves = metadata.get("lc_agent_name")
    named = metadata.get("scout_agent") or (serves and middleware) or serves or given
    if named:
        return str(named)
    if topology is not None and topology.name is not None:
        return topology.name
    if not is_generic(node):
        return str(middleware or node)
    if kind == "graph" and not is_generic(name):
        return str(name)
    ancestor = parent
    while ancestor is not None:
        if ancestor.kind in ("graph", "node", "tool") and not is_generic(ancestor.name):
            return str(ancestor.name)
        ancestor = ancestor.parent
    outer = enclosing()
    outside = outer.hints.agent if parent is None and outer is not None else None
    return str(outside or node or "default")


def session_of(
    metadata: Mapping[str, Any], parent: Run | None, given: str | None, default: str | None
) -> str | None:
    """Return the session of a run, or None for a root run that nobody named."""
    if given:
        return given
    for key in ("scout_session_id", "thread_id"):
        if metadata.get(key) not in (None, ""):
            return str(metadata[key])
    if parent is not None:
        return parent.session
    outer = enclosing()
    return (None if outer is None else outer.hints.session) or default


def node_path(namespace: str) -> str | None:
    """Drop the task ids of a checkpoint namespace: `n1:<uuid>|model:<uuid>` -> `n1/model`."""
    return "/".join(part.partition(":")[0] for part in namespace.split("|") if part) or None


def running_graph() -> Any:
    """
    Return the compiled graph whose start is being reported to a handler, or None.

    Nothing that LangChain hands to a handler leads to the graph. But a handler that runs inline
    is called by the graph itself, through LangChain's callback manager alone.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("scout_", "langchain_core.callbacks")):
            graph = frame.f_locals.get("self")
            return graph if isinstance(graph, Pregel) and hasattr(graph, "builder") else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None

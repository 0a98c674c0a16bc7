"""
LangGraph and LangChain: `graph.invoke(x, config={"callbacks": [ScoutCallback()]})`.

Every LLM request of the run then says which agent makes it, in which session, and which tools
ended before it; tools that start and end while no request is in flight are told on the side
channel.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent, GraphResumeEvent
from langgraph.errors import GraphBubbleUp

from scout_integrations._everywhere import Everywhere
from scout_integrations._guard import guarded
from scout_integrations._identity import agent_of, node_path, running_graph, session_of
from scout_integrations._runs import Recent, Run, RunTable
from scout_integrations._tools import Call, finished, started
from scout_integrations._topology import Topology, topology_of
from scout_sdk._context import close, open_slot
from scout_sdk._env import read_environment
from scout_sdk._hints import HUMAN, Hints
from scout_sdk._openai import allow, install_if_imported
from scout_sdk._sessions import SESSIONS
from scout_sdk._strict import enabled as is_strict

__all__ = ["ScoutCallback", "instrument", "register", "uninstrument"]

_NOT_GRAPHS = ("seq:step:", "map:key:", "condition:", "branch:")
_MAX_CALLS = 10_000

_waiting: Recent[str, tuple[str, float]] = Recent(_MAX_CALLS)
"""By session: the human it waits for and since when; the resuming handler may be another one."""


class ScoutCallback(GraphCallbackHandler):
    """
    Tells a serving engine what a LangGraph run is doing.

    One handler may serve any number of concurrent runs. It does no I/O, never raises into a run
    and keeps nothing when no run is open. Per-run values go into `config["metadata"]` as
    `scout_session_id` and `scout_agent`.

    session_id: names the session; else metadata `scout_session_id`, `thread_id`, an enclosing
      `scout_sdk.context`, SCOUT_SESSION_ID, and at last the run itself. Only that last kind ends
      with the run: the server is told so. A named one goes on; end it with `end_session`.
    base_url: the server; its host may then receive hints. Else SCOUT_BASE_URL, else loopback.
    agent: names all agents of the run; else `scout_agent`, `create_agent(name=)`, the node.
    program: first element of every path, for two graphs with equal node names.
    hints: False says who runs, but nothing about tools, followers and ends.
    install: "off" leaves the openai package alone; then use `scout_sdk.attach(llm)`.
    enabled: None means: unless SCOUT_SDK_ENABLED is 0, false, no or off.
    graph: the compiled graph, for its static edges, where it cannot be found by itself.
    """

    run_inline = True  # else async LangChain runs us in a copied context and headers are lost

    def __init__(
        self,
        *,
        session_id: str | None = None,
        base_url: str | None = None,
        agent: str | None = None,
        program: str | None = None,
        hints: bool = True,
        install: str = "auto",
        enabled: bool | None = None,
        graph: Any = None,
    ) -> None:
        super().__init__()
        if install not in ("auto", "off"):
            from scout_sdk import ConfigError

            raise ConfigError(f"install={install!r}; allowed: 'auto', 'off'")
        environment = read_environment()
        if enabled is None:
            enabled = environment.enabled
        if base_url is not None:
            allow(base_url)
        self.raise_error = is_strict()
        self.session_id = session_id
        self.agent = agent
        self.program = program
        self.enabled = enabled
        self.last_session_id: str | None = None
        self._endpoint = base_url
        self._default_session = environment.session
        self._hints = hints
        self._auto_install = install == "auto"
        self._runs = RunTable()
        self._calls: Recent[tuple[str, str], Call] = Recent(_MAX_CALLS)
        self._given = None if graph is None else topology_of(graph)

    @classmethod
    def for_graph(cls, graph: Any, **options: Any) -> Self:
        """Return a handler that takes the static edges from the compiled *graph*."""
        return cls(graph=graph, **options)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def ignore_chain(self) -> bool:
        """Whether to be left alone by chain events."""
        return not self.enabled

    @property
    def ignore_llm(self) -> bool:
        """Whether to be left alone by events of text models."""
        return not self.enabled

    @property
    def ignore_chat_model(self) -> bool:
        """Whether to be left alone by events of chat models."""
        return not self.enabled

    @property
    def ignore_agent(self) -> bool:
        """Whether to be left alone by tool events."""
        return not self.enabled

    @property
    def open_runs(self) -> int:
        """Number of runs that have started and not ended."""
        return len(self._runs)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait at most *timeout_s* seconds for the side channel; True when all is sent."""
        return SESSIONS.flush(timeout_s)

    def end_session(self, session_id: str | None = None) -> None:
        """Tell the server that *session_id* (the last one by default) sends nothing more."""
        session = session_id or self.last_session_id
        if session is not None:
            self._finish(session, None)

    @guarded
    def _finish(self, session: str, agent: str | None) -> None:
        SESSIONS.finish(session, agent=agent, endpoint=self._endpoint)

    # --- opening and closing runs -------------------------------------------------------------

    def _start(
        self,
        kind: str,
        run_id: uuid.UUID,
        parent_run_id: uuid.UUID | None,
        metadata: Mapping[str, Any] | None,
        name: str | None,
        *,
        agent: str | None = None,
        once: bool = False,
        topology: Topology | None = None,
    ) -> Run:
        metadata = metadata or {}
        parent = self._runs.get(parent_run_id) if parent_run_id is not None else None
        agent = agent or agent_of(metadata, kind, name, parent, topology, self.agent)
        named = session_of(metadata, parent, self.session_id, self._default_session)
        session, made_up = (named, False) if named is not None else (str(run_id), True)
        namespace = metadata.get("langgraph_checkpoint_ns") or metadata.get("checkpoint_ns") or ""
        path = node_path(str(namespace)) or (parent.path if parent is not None else None)
        if self.program and (path is None or not path.startswith(f"{self.program}/")):
            path = f"{self.program}/{path}" if path else self.program
        followers = self._followers(kind, metadata, parent)
        spawner = None
        if parent is not None:
            same = parent.session == session
            spawner = parent.slot.hints.parent if same else parent.session
        hints = Hints(
            session=session,
            agent=agent,
            path=path,
            parent=spawner,
            next_agents=followers if self._hints else (),
        )
        slot = open_slot(hints, once=once, endpoint=self._endpoint)
        run = Run(
            run_id=run_id,
            kind=kind,
            name=name,
            agent=agent,
            path=path,
            session=session,
            parent=parent,
            slot=slot,
            born=self._runs.clock(),
            made_up=made_up,
            next_agents=followers,
            topology=topology,
        )
        self._runs.add(run)
        if parent is None:
            self.last_session_id = session
        return run

    def _followers(
        self, kind: str, metadata: Mapping[str, Any], parent: Run | None
    ) -> tuple[str, ...]:
        if parent is None:
            return ()
        node = metadata.get("langgraph_node")
        if kind == "node" and parent.topology is not None and node:
            return parent.topology.next_agents(str(node), parent.agent) or parent.next_agents
        return parent.next_agents

    def _end(self, run_id: uuid.UUID, *, whole: bool = False) -> Run | None:
        """Close the run; *whole* says that it did all that it does."""
        popped = self._runs.pop(run_id)
        if popped is None:
            return None
        run, left = popped
        close(run.slot)
        if run.asked is None and (run.kind == "llm" or run.slot.calls):
            run.asked = run.agent
        parent = run.parent
        if parent is not None:
            parent.asked = parent.asked or run.asked
            if run.kind == "node" and parent.topology is not None and (whole or run.asked):
                parent.topology.learn(str(run.name), parent.agent, run.asked)
        if run.parent is None:
            self._root_ended(run, left)
        return run

    def _root_ended(self, root: Run, left: Sequence[Run]) -> None:
        sessions = {root.session, *(run.session for run in left)}
        self._calls.drop_where(lambda call: call.session in sessions)
        if root.made_up:
            if self._hints:
                SESSIONS.finish(root.session, agent=root.agent, endpoint=root.slot.endpoint)
            return
        for run in left:
            if run.kind == "tool":  # its graph failed before it returned
                self._tool_ended(run, failed=True)

    @guarded
    def _find_topology(self, parent_run_id: uuid.UUID | None) -> Topology | None:
        if parent_run_id is None and self._given is not None:
            return self._given
        graph = running_graph()
        return None if graph is None else topology_of(graph)

    # --- graphs, nodes, chains ----------------------------------------------------------------

    @guarded
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: uuid.UUID,
        parent_run_id: uuid.UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Open a graph, a node, or a chain inside one."""
        tags = tags or []
        name = kwargs.get("name")
        topology = None
        if any(tag.startswith("graph:step:") for tag in tags):
            kind, name = "node", (metadata or {}).get("langgraph_node") or name
        else:
            topology = self._find_topology(parent_run_id)
            # A graph that is a node of another comes as a step of a sequence, as chains do.
            is_step = any(tag.startswith(_NOT_GRAPHS) for tag in tags)
            kind = "chain" if is_step and topology is None else "graph"
        if self._auto_install:
            install_if_imported()
        self._start(kind, run_id, parent_run_id, metadata, name, topology=topology)

    @guarded
    def on_chain_end(self, outputs: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """Close it."""
        self._end(run_id, whole=True)

    @guarded
    def on_chain_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """Close it; interrupts come here too."""
        self._end(run_id)

    # --- LLM calls ----------------------------------------------------------------------------

    @guarded
    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: uuid.UUID,
        parent_run_id: uuid.UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Give the next request of this context its hints."""
        self._llm_started(run_id, parent_run_id, metadata, kwargs)

    @guarded
    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: list[str],
        *,
        run_id: uuid.UUID,
        parent_run_id: uuid.UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Give the next request of this context its hints."""
        self._llm_started(run_id, parent_run_id, metadata, kwargs)

    def _llm_started(
        self,
        run_id: uuid.UUID,
        parent_run_id: uuid.UUID | None,
        metadata: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        if self._auto_install:
            install_if_imported()
        # generate([p1, p2]) reports all starts first: the requests cannot be told apart, and
        # need not be, since all say the same and each counts its own turn.
        single = options.get("batch_size", 1) <= 1
        self._start("llm", run_id, parent_run_id, metadata, None, once=single)

    @guarded
    def on_llm_end(self, response: LLMResult, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """Close the call and note which tools it asked for, and for whom."""
        run = self._end(run_id)
        if run is None or run.parent is None:
            return
        for generations in response.generations:
            for generation in generations:
                message = getattr(generation, "message", None)
                for call in getattr(message, "tool_calls", None) or ():
                    if call.get("id"):
                        self._calls.put(
                            (run.session, call["id"]),
                            Call(
                                session=run.session,
                                agent=run.agent,
                                name=call["name"],
                                arguments=call["args"],
                                call_id=call["id"],
                            ),
                        )

    @guarded
    def on_llm_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """Close the call; abandoned streams come here too."""
        self._end(run_id)

    # --- tools --------------------------------------------------------------------------------

    @guarded
    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: uuid.UUID,
        parent_run_id: uuid.UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Tell that the agent that asked for this tool now waits for it."""
        name = str((serialized or {}).get("name") or kwargs.get("name") or "tool")
        call_id = kwargs.get("tool_call_id")
        call = self._asked(call_id, parent_run_id, name, inputs)
        run = self._start(
            "tool",
            run_id,
            parent_run_id,
            metadata,
            name,
            agent=call.agent if call is not None else None,
        )
        run.call_id = call.call_id if call is not None else str(call_id or run_id)
        if self._hints:
            SESSIONS.record_tool(
                run.session,
                run.agent,
                started(name, run.call_id, inputs if inputs else input_str),
                endpoint=run.slot.endpoint,
            )

    def _asked(
        self,
        call_id: str | None,
        parent_run_id: uuid.UUID | None,
        name: str,
        inputs: Mapping[str, Any] | None,
    ) -> Call | None:
        parent = self._runs.get(parent_run_id) if parent_run_id is not None else None
        if parent is None:
            return None
        if call_id is not None:
            return self._calls.pop((parent.session, call_id))
        return self._calls.pop_where(
            lambda call: (
                call.session == parent.session and call.name == name and call.arguments == inputs
            )
        )

    def _tool_ended(self, run: Run | None, *, failed: bool) -> None:
        if run is None or not self._hints:
            return
        elapsed_s = self._runs.clock() - run.born
        SESSIONS.record_tool(
            run.session,
            run.agent,
            finished(run.name or "tool", run.call_id, elapsed_s, failed=failed),
            endpoint=run.slot.endpoint,
        )

    @guarded
    def on_tool_end(self, output: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """Tell that the tool returned."""
        run = self._runs.get(run_id)
        self._tool_ended(run, failed=getattr(output, "status", None) == "error")
        self._end(run_id)

    @guarded
    def on_tool_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """Tell that the tool failed; an interrupt or a handoff inside a tool is no failure."""
        run = self._runs.get(run_id)
        self._tool_ended(run, failed=not isinstance(error, GraphBubbleUp))
        self._end(run_id)

    # --- humans -------------------------------------------------------------------------------

    @guarded
    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Tell that the session now waits for a person."""
        run = self._runs.get(event.run_id)
        if run is None or not self._hints:
            return
        call_id = f"{HUMAN}:{event.checkpoint_id}"
        _waiting.put(run.session, (call_id, self._runs.clock()))
        run.made_up = False  # a graph that can be interrupted can be resumed
        SESSIONS.record_tool(
            run.session, run.agent, started(HUMAN, call_id, None), endpoint=run.slot.endpoint
        )

    @guarded
    def on_resume(self, event: GraphResumeEvent) -> None:
        """Tell that the person answered."""
        run = self._runs.get(event.run_id)
        if run is None or not self._hints:
            return
        waited = _waiting.pop(run.session)
        if waited is not None:
            call_id, since = waited
            SESSIONS.record_tool(
                run.session,
                run.agent,
                finished(HUMAN, call_id, self._runs.clock() - since, failed=False),
                endpoint=run.slot.endpoint,
            )


# --- without touching code ------------------------------------------------------------------

_everywhere = Everywhere(ScoutCallback)


def register() -> None:
    """Let SCOUT_SDK_ENABLED=1 put a ScoutCallback under every run of this process; idempotent."""
    _everywhere.register()


def instrument(**options: Any) -> ScoutCallback:
    """
    Put one ScoutCallback under every LangChain and LangGraph run of this process; idempotent.

    Takes the options of ScoutCallback and returns the handler; while it is in place, further
    calls return it as it is. A run that was given a ScoutCallback of its own keeps that one.
    """
    return _everywhere.put(lambda: ScoutCallback(**options))


def uninstrument() -> None:
    """Take the handler of `instrument` away; idempotent. Runs that have begun keep it."""
    _everywhere.remove()

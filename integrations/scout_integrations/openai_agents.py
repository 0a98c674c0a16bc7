"""
OpenAI Agents SDK: `instrument()` once, and every LLM request says which agent makes it.

The SDK's own traces tell who runs: the request asks for the current span while it is built.
Hooks cannot: what they set in a ContextVar is lost, since the SDK gathers them. With tracing
disabled, use `ScoutHooks` and `input_filter` at each run.
"""

import json
import sys
import uuid
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from agents import RunHooks
from agents.run import CallModelData, ModelInputData
from agents.tracing import (
    Span,
    Trace,
    TracingProcessor,
    add_trace_processor,
    get_current_span,
    get_current_trace,
)

from scout_integrations._guard import guarded
from scout_integrations._runs import Recent, Run, RunTable
from scout_integrations._tools import Call, finished, started
from scout_sdk._context import Slot, add_source, enclosing, open_slot, remove_source
from scout_sdk._env import read_environment
from scout_sdk._hints import HUMAN, Hints
from scout_sdk._openai import allow, install
from scout_sdk._sessions import SESSIONS

__all__ = ["ScoutHooks", "ScoutProcessor", "input_filter", "instrument", "uninstrument"]

_MAX_CALLS = 10_000
_MAX_FRAMES = 24
_LLM = ("generation", "response")


class ScoutProcessor(TracingProcessor):
    """
    Follows traces and spans, and answers which agent makes the request being built.

    Session: that of an enclosing `scout_sdk.context`, else the trace's group_id, else the run's
    own (`Runner.run(session=)`), else SCOUT_SESSION_ID, else the trace, which ends it. A run that
    stops for an approval waits for a person; its session goes on when it is resumed.
    """

    def __init__(self, *, base_url: str | None = None) -> None:
        self.enabled = True
        self.endpoint = base_url
        self._runs = RunTable()
        self._calls: Recent[tuple[str, str], Call] = Recent(_MAX_CALLS)
        self._unanswered: dict[Hashable, list[Call]] = {}
        """By trace: calls since its last request that returned nothing, as those do that wait."""
        self._handing: set[Hashable] = set()
        """Resumed traces in which another agent follows."""
        self._waiting: Recent[str, tuple[str, float]] = Recent(_MAX_CALLS)
        """By session: the person it waits for, and since when."""

    @property
    def open_runs(self) -> int:
        """Number of traces and spans that have started and not ended."""
        return len(self._runs)

    def slot(self) -> Slot | None:
        """Return the slot of the current span, or None outside a trace."""
        span = get_current_span()
        if span is None or not self.enabled:
            return None
        run = self._runs.get(span.span_id)
        return None if run is None or run.parent is None else run.slot

    @guarded
    def on_trace_start(self, trace: Trace) -> None:
        """Open a session, or a part of one."""
        if self.enabled:
            self._open(trace, "trace")

    def _open(self, trace: Trace, kind: str) -> Run:
        outer = enclosing()
        named = None if outer is None else outer.hints.session
        named = named or getattr(trace, "group_id", None) or _session_of_the_run()
        named = named or read_environment().session
        session = str(named or trace.trace_id)
        root = Run(
            run_id=trace.trace_id,
            kind=kind,
            name=trace.name,
            agent="default",
            path=None,
            session=session,
            parent=None,
            slot=Slot(Hints(session=session), endpoint=self.endpoint),
            born=self._runs.clock(),
            made_up=named is None,
        )
        self._runs.add(root)
        waited = self._waiting.pop(session)
        if waited is not None:
            call_id, since = waited
            self._tell_end(root, HUMAN, call_id, since, failed=False)
        return root

    @guarded
    def on_trace_end(self, trace: Trace) -> None:
        """End it; a session that nobody named ends too."""
        self._close(trace.trace_id)

    def _close(self, trace_id: str) -> None:
        popped = self._runs.pop(trace_id)
        unanswered = self._unanswered.pop(trace_id, None)
        self._handing.discard(trace_id)
        if popped is None:
            return
        root, left = popped
        self._calls.drop_where(lambda call: call.session == root.session)
        if unanswered:
            asked = unanswered[-1]
            call_id = f"{HUMAN}:{asked.call_id}"
            self._waiting.put(root.session, (call_id, self._runs.clock()))
            waits = started(HUMAN, call_id, None)
            SESSIONS.record_tool(root.session, asked.agent, waits, endpoint=self.endpoint)
            for call in unanswered:  # they run when it is resumed
                self._calls.put((call.session, call.call_id), call)
        elif root.made_up:
            SESSIONS.finish(root.session, endpoint=self.endpoint)
        else:
            for run in left:
                if run.kind == "function":  # cancelled
                    self._tell_end(run, str(run.name), run.call_id, run.born, failed=True)

    def _tell_end(
        self, run: Run, name: str, call_id: str | None, since: float, *, failed: bool
    ) -> None:
        event = finished(name, call_id, self._runs.clock() - since, failed=failed)
        SESSIONS.record_tool(run.session, run.agent, event, endpoint=self.endpoint)

    @guarded
    def on_span_start(self, span: Span[Any]) -> None:
        """Open an agent, a model call, a tool call, or something inside one."""
        parent = self._runs.get(span.parent_id or span.trace_id) or self._resumed(span)
        if parent is None:
            return
        data = span.span_data
        kind: str = data.type
        name = getattr(data, "name", None)
        agent = parent.agent
        if isinstance(data_agent := getattr(data, "agent_name", None), str):
            agent = data_agent
        elif kind == "agent" and name:
            agent = name
        hints = Hints(
            session=parent.session, agent=agent, path=f"{parent.root.name or 'workflow'}/{agent}"
        )
        run = Run(
            run_id=span.span_id,
            kind=kind,
            name=name,
            agent=agent,
            path=hints.path,
            session=parent.session,
            parent=parent,
            slot=Slot(hints, parent=parent.slot, once=kind in _LLM, endpoint=self.endpoint),
            born=self._runs.clock(),
        )
        self._runs.add(run)
        if kind in _LLM:
            self._unanswered.pop(span.trace_id, None)
        elif kind == "function":
            call = self._calls.pop_where(
                lambda call: call.session == run.session and call.name == name
            )
            run.call_id = call.call_id if call is not None else span.span_id
            SESSIONS.record_tool(
                run.session,
                agent,
                started(str(name), run.call_id, None if call is None else call.arguments),
                endpoint=self.endpoint,
            )

    def _resumed(self, span: Span[Any]) -> Run | None:
        """Open again the trace of a run that is resumed: the SDK reports no second start of it."""
        trace = get_current_trace()
        if not self.enabled or span.parent_id is not None or trace is None:
            return None
        if type(trace).__name__ != "ReattachedTrace" or trace.trace_id != span.trace_id:
            return None
        return self._open(trace, "resumed")

    @guarded
    def on_span_end(self, span: Span[Any]) -> None:
        """Close it."""
        popped = self._runs.pop(span.span_id)
        if popped is None:
            return
        run, _ = popped
        data = span.span_data
        if run.kind == "function":
            failed = span.error is not None
            self._tell_end(run, str(run.name), run.call_id, run.born, failed=failed)
            if data.input is not None and data.output is None and not failed:
                call = Call(
                    session=run.session,
                    agent=run.agent,
                    name=str(run.name),
                    arguments=_parsed(data.input),
                    call_id=str(run.call_id),
                )
                self._unanswered.setdefault(span.trace_id, []).append(call)
        elif run.kind in _LLM:
            for call_id, name, arguments in _tool_calls(data):
                self._calls.put(
                    (run.session, call_id),
                    Call(
                        session=run.session,
                        agent=run.agent,
                        name=name,
                        arguments=_parsed(arguments),
                        call_id=call_id,
                    ),
                )
        elif run.kind == "handoff":
            self._handing.add(span.trace_id)
        if run.parent is run.root and run.root.kind == "resumed":
            if run.kind == "agent" and span.trace_id in self._handing:
                self._handing.discard(span.trace_id)
            else:  # nor does it report a second end
                self._close(span.trace_id)

    def force_flush(self) -> None:
        """Wait a little for the side channel."""
        SESSIONS.flush()

    def shutdown(self) -> None:
        """Stop answering."""
        self.enabled = False


def _session_of_the_run() -> str | None:
    """
    Return the id of the SDK's session (`Runner.run(session=)`) whose run starts a trace here.

    Nothing that a processor is told leads to it, but it is called by the run itself.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("agents."):
            named = getattr(frame.f_locals.get("session"), "session_id", None)
            if isinstance(named, str) and named.strip():
                return named.strip()
        elif not module.startswith("scout_"):
            return None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _parsed(arguments: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(arguments)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _tool_calls(data: Any) -> Iterator[tuple[str, str, str]]:
    """Yield call id, name and arguments of the calls in a model's answer."""
    response = getattr(data, "response", None)
    answers = [response.model_dump()] if response is not None else getattr(data, "output", None)
    for answer in answers or ():
        for call in answer.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("id") and function.get("name"):
                yield call["id"], function["name"], function.get("arguments") or ""
        for item in answer.get("output") or ():
            if item.get("type") == "function_call" and item.get("call_id"):
                yield item["call_id"], item["name"], item.get("arguments") or ""


_processor: ScoutProcessor | None = None


def instrument(*, base_url: str | None = None) -> ScoutProcessor:
    """
    Label the requests of every run of the Agents SDK in this process; idempotent.

    base_url: the server; its host may then receive hints. Else SCOUT_BASE_URL, else loopback.
    """
    global _processor
    if base_url is not None:
        allow(base_url)
    if _processor is None:
        _processor = ScoutProcessor(base_url=base_url)
        add_trace_processor(_processor)
    elif base_url is not None:
        _processor.endpoint = base_url
    _processor.enabled = read_environment().enabled
    install()
    add_source(_processor.slot)
    return _processor


def uninstrument() -> None:
    """Stop labelling; idempotent. The SDK cannot forget a processor, so it stays and sleeps."""
    if _processor is not None:
        _processor.enabled = False
        remove_source(_processor.slot)


@guarded
def _open_call(agent: str) -> None:
    if _processor is not None and _processor.slot() is not None:
        return  # the span says it, and more
    outer = enclosing()
    session = None if outer is None else outer.hints.session
    open_slot(Hints(session=session, agent=agent, path=agent), once=True)


def input_filter(data: CallModelData[Any]) -> ModelInputData:
    """
    Label the request that follows, with tracing disabled.

    For `RunConfig(call_model_input_filter=input_filter)`; the session is that of the enclosing
    `scout_sdk.context`.
    """
    _open_call(data.agent.name)
    return data.model_data


class ScoutHooks(RunHooks[Any]):
    """Tells of tool calls with tracing disabled: `Runner.run(..., hooks=ScoutHooks())`."""

    def __init__(self) -> None:
        self._begun: Recent[str, float] = Recent(_MAX_CALLS)

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        """Tell that *agent* waits for *tool*."""
        self._record(context, agent, tool, ended=False)

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        """Tell that *tool* returned."""
        self._record(context, agent, tool, ended=True)

    @guarded
    def _record(self, context: Any, agent: Any, tool: Any, *, ended: bool) -> None:
        outer = enclosing()
        if outer is None or outer.hints.session is None:
            return
        call_id = str(getattr(context, "tool_call_id", None) or uuid.uuid4().hex)
        if ended:
            now = SESSIONS.clock()
            begun = self._begun.pop(call_id)
            elapsed_s = now - (now if begun is None else begun)
            event = finished(tool.name, call_id, elapsed_s, failed=False)
        else:
            self._begun.put(call_id, SESSIONS.clock())
            event = started(tool.name, call_id, getattr(context, "tool_arguments", None))
        SESSIONS.record_tool(outer.hints.session, agent.name, event, endpoint=outer.endpoint)

"""OpenTelemetry GenAI spans (OTLP JSON): model calls, tools and agents of a trace."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scout_server.sim.traces.convert.source import BROKEN, SourceOptions, lines
from scout_server.sim.traces.jsonl import TraceError
from scout_server.sim.traces.records import HashScope, HashSource, Program, Runs, TraceInfo, Turn

__all__ = ["convert"]

_BLOCK = 16
_CHAT = {"chat", "text_completion", "generate_content"}
_AGENT = {"invoke_agent", "create_agent"}


@dataclass(slots=True)
class _Span:
    trace: str
    span: str
    parent: str
    start_s: float
    end_s: float
    values: dict[str, object]

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) and value else None

    def number(self, name: str) -> int | None:
        value = self.values.get(name)
        try:
            return int(str(value)) if value is not None else None
        except ValueError:
            return None


def convert(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the conversations of *path* (OTLP JSON, one export request a line), one program each.

    Model calls are spans with gen_ai.operation.name chat, text_completion or generate_content;
    their agent is gen_ai.agent.name, their own or of the nearest span above. Calls that began
    before another ended are parallel. The tool is the execute_tool span in the gap. Prompts are
    assumed to extend the agent's prompt before.
    """
    info = TraceInfo(
        source="opentelemetry gen_ai",
        block_tokens=_BLOCK,
        scope=HashScope.PROGRAM,
        hashes=HashSource.ASSUMED,
    )
    return info, _programs(path, options)


def _programs(path: Path, options: SourceOptions) -> Iterator[Program]:
    spans: dict[str, list[_Span]] = {}
    for line, raw in lines(path, options):
        try:
            for span in list(_spans(raw, path.name, line)):
                spans.setdefault(span.trace, []).append(span)
        except BROKEN as error:
            options.bad(error, path.name, line)
    by_program: dict[str, list[_Span]] = {}
    agents: dict[tuple[str, str], str] = {}
    for trace, members in spans.items():
        index = {span.span: span for span in members}
        conversation = next((c for s in members if (c := s.text("gen_ai.conversation.id"))), trace)
        for span in members:
            agent = _agent(span, index)
            if agent:
                agents[(trace, span.span)] = agent
        by_program.setdefault(conversation, []).extend(members)
    begin = min((s.start_s for each in by_program.values() for s in each), default=0.0)
    programs = []
    for name, members in by_program.items():
        program = _program(name, members, agents, begin)
        if program is not None:
            programs.append(program)
    yield from sorted(programs, key=lambda p: (p.arrival_s, p.program))


def _agent(span: _Span, index: dict[str, _Span]) -> str | None:
    seen = 0
    at: _Span | None = span
    while at is not None and seen < 64:
        name = at.text("gen_ai.agent.name")
        if name:
            return name
        at = index.get(at.parent)
        seen += 1
    return None


def _spans(raw: dict[str, object], file: str, line: int) -> Iterator[_Span]:
    resources = raw.get("resourceSpans", raw.get("resource_spans"))
    if not isinstance(resources, list):
        raise TraceError(file, line, "resourceSpans", "must be a list")
    for resource in resources:
        scopes = resource.get("scopeSpans", []) if isinstance(resource, dict) else []
        for scope in scopes:
            for span in scope.get("spans", []) if isinstance(scope, dict) else []:
                yield _span(span, file, line)


def _span(raw: object, file: str, line: int) -> _Span:
    if not isinstance(raw, dict):
        raise TraceError(file, line, "spans", "must be objects")
    try:
        start, end = int(raw["startTimeUnixNano"]), int(raw["endTimeUnixNano"])
        values = {str(a["key"]): _value(a.get("value")) for a in raw.get("attributes", [])}
        return _Span(
            trace=str(raw["traceId"]),
            span=str(raw["spanId"]),
            parent=str(raw.get("parentSpanId") or ""),
            start_s=start / 1e9,
            end_s=end / 1e9,
            values=values,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(file, line, "spans", f"is incomplete: {error!r}") from error


def _value(raw: object) -> object:
    if not isinstance(raw, dict):
        return None
    for kind in ("stringValue", "intValue", "doubleValue", "boolValue"):
        if kind in raw:
            return raw[kind]
    return json.dumps(raw)


def _program(
    name: str, members: list[_Span], agents: dict[tuple[str, str], str], begin: float
) -> Program | None:
    calls = [s for s in members if s.text("gen_ai.operation.name") in _CHAT]
    tools = [s for s in members if s.text("gen_ai.operation.name") == "execute_tool"]
    calls.sort(key=lambda s: (s.start_s, s.span))
    turns: list[Turn] = []
    ends: list[float] = []
    prompt: dict[str | None, int] = {}
    base: dict[str | None, int] = {}
    for call in calls:
        tokens = call.number("gen_ai.usage.input_tokens")
        output = call.number("gen_ai.usage.output_tokens")
        if tokens is None:
            continue
        agent = agents.get((call.trace, call.span))
        before = [i for i, end in enumerate(ends) if end <= call.start_s + 1e-6]
        # Those that ended and are not followed by another that ended: the last ones of each branch.
        followed = {p for i in before for p in turns[i].parents}
        parents = tuple(i for i in before if i not in followed)
        tool = next(
            (
                t.text("gen_ai.tool.name")
                for t in sorted(tools, key=lambda t: -t.end_s)
                if t.end_s <= call.start_s + 1e-6
                and all(t.start_s >= ends[p] - 1e-6 for p in parents)
            ),
            None,
        )
        base.setdefault(agent, len(base) << 20)
        blocks = -(-max(tokens, 1) // _BLOCK)
        if blocks < prompt.get(agent, 0):
            base[agent] += prompt[agent]
        prompt[agent] = blocks
        runs: Runs = ((base[agent], blocks),)
        # A call that overlaps the first waits for nobody, and begins when it did.
        last = max((ends[p] for p in parents), default=calls[0].start_s)
        turns.append(
            Turn(
                agent=agent,
                input_tokens=max(tokens, 1),
                output_tokens=output or 0,
                hash_runs=runs,
                parents=parents,
                gap_s=max(call.start_s - last, 0.0),
                tool=tool if parents else None,
                service_s=call.end_s - call.start_s,
                hit_tokens=call.number("gen_ai.usage.cache_read.input_tokens"),
            )
        )
        ends.append(call.end_s)
    if not turns:
        return None
    return Program(program=name, arrival_s=calls[0].start_s - begin, turns=tuple(turns))

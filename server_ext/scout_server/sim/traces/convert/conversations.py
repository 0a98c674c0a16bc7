"""Logs of multi-agent conversations without hashes: ChatDev, and Who&When."""

import re
from collections.abc import Iterator
from pathlib import Path

from scout_sdk._hints import HUMAN
from scout_server.sim.traces.convert.source import (
    BROKEN,
    Said,
    SourceOptions,
    assumed_program,
    documents,
    lines,
)
from scout_server.sim.traces.jsonl import TraceError
from scout_server.sim.traces.records import HashScope, HashSource, Program, TraceInfo

__all__ = ["chatdev", "who_and_when"]

_BLOCK = 16
_ANCHOR_BLOCKS = 40
"""Assumed fixed prefix of a role: 640 tokens."""
_FIRST_FREE = 1 << 20


def _info(source: str, licence: str, note: str) -> TraceInfo:
    return TraceInfo(
        source=source,
        block_tokens=_BLOCK,
        scope=HashScope.GLOBAL,
        hashes=HashSource.ASSUMED,
        licence=licence,
        note=note,
    )


def chatdev(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the logs of *path*, one program each.

    The source has the time of every message to one second and no tools: gaps are 0, the time
    between two messages is the model's. Outputs come from the usage rows where they match the
    messages one to one, from the length of the text otherwise.
    """
    note = "gaps are 0: the log does not separate tools from the model"
    return _info("chatdev", "Apache-2.0", note), _chatdev(path, options)


def _chatdev(path: Path, options: SourceOptions) -> Iterator[Program]:
    anchors: dict[str, int] = {}
    at = _FIRST_FREE
    number = 0
    for line, raw in lines(path, options):
        messages, calls = raw.get("messages"), raw.get("llm_calls") or []
        try:
            if not isinstance(messages, list) or not isinstance(calls, list):
                raise TraceError(path.name, line, "messages", "must be a list")
            said = _said(messages, calls, path.name, line)
            if not said:
                continue
            program, at = assumed_program(
                str(raw.get("path") or raw.get("session") or f"line-{line}"),
                options.arrival_s(number),
                said,
                first_id=at,
                anchors=anchors,
                anchor_blocks=_ANCHOR_BLOCKS,
                block_tokens=_BLOCK,
                workflow="chatdev",
            )
        except BROKEN as error:
            options.bad(error, path.name, line)
            continue
        number += 1
        yield program


def _said(messages: list[object], calls: list[object], file: str, line: int) -> list[Said]:
    said = []
    matched = len(messages) == len(calls)
    before: float | None = None
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise TraceError(file, line, where, "must be an object")
        role, chars, t = message.get("role"), message.get("chars"), message.get("t")
        if not isinstance(role, str) or not isinstance(chars, int):
            raise TraceError(file, line, f"{where}.role", "role and chars are required")
        usage = calls[index] if matched else None
        output = Said.tokens(chars)
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            output = max(usage["completion_tokens"], 1)
        took = None
        if isinstance(t, int | float):
            took = max(t - before, 0.0) if before is not None else None
            before = float(t)
        said.append(Said(agent=role, output_tokens=output, service_s=took))
    return said


def who_and_when(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the logs in a folder or tar archive, one program each.

    The source has texts and speakers only: lengths come from the text, gaps are 0. Messages of
    people and terminals are not model calls; they lengthen the conversation and are the gap before
    the next turn: the tool `terminal`, or a person.
    """
    note = "no clock: gaps are 0; tokens are characters / 4"
    return _info("who_and_when", "MIT", note), _who_and_when(path, options)


_PEOPLE = {"human", "user", "user_proxy"}
_TERMINALS = {"computer_terminal", "computerterminal"}


def _who_and_when(path: Path, options: SourceOptions) -> Iterator[Program]:
    anchors: dict[str, int] = {}
    at = _FIRST_FREE
    number = 0
    for name, raw in documents(path, options):
        history = raw.get("history")
        if not isinstance(history, list):
            options.bad(TraceError(name, 1, "history", "must be a list"), name, 1)
            continue
        said: list[Said] = []
        heard = 0
        tool: str | None = None
        captain = False
        for message in history:
            if not isinstance(message, dict):
                continue
            content = str(message.get("content") or "")
            speaker = message.get("name")
            captain = captain or isinstance(speaker, str)
            agent = str(speaker or message.get("role") or "agent")
            agent = re.sub(r"\s*\(.*\)$", "", agent)
            tokens = Said.tokens(len(content))
            if agent.lower() in _PEOPLE | _TERMINALS:
                heard += tokens
                tool = "terminal" if agent.lower() in _TERMINALS else HUMAN
                continue
            said.append(Said(agent=agent, output_tokens=tokens, tool=tool, heard_tokens=heard))
            tool, heard = None, 0
        if not said:
            continue
        try:
            program, at = assumed_program(
                name,
                options.arrival_s(number),
                said,
                first_id=at,
                anchors=anchors,
                anchor_blocks=_ANCHOR_BLOCKS,
                block_tokens=_BLOCK,
                workflow="captain-agent" if captain else "magentic-one",
            )
        except BROKEN as error:
            options.bad(error, name, 1)
            continue
        number += 1
        yield program

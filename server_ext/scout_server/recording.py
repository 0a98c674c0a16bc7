"""What a server does, written as a trace (docs/traces.md): counts and block numbers, no text."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from scout_sdk._hints import Hints, SessionEvent
from scout_sdk._trace import HashScope, Runs, TraceInfo, runs_of
from scout_sdk._trace_file import TraceFile
from scout_sdk._trace_programs import Programs, Started
from scout_server.policy.facts import Assignment, Finish

__all__ = ["BlockNumbers", "RecordSettings", "Recorder", "recorder_of"]

_log = logging.getLogger("scout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Settings of the trace that a server records of what it serves."""

    file: str = ""
    """Trace to write (JSON lines, docs/traces.md); empty: nothing is recorded. What was there is
    kept as NAME.1. Every data-parallel rank but the first adds its number to the name."""
    idle_s: Annotated[float, Ge(1), Le(86400)] = 600.0
    """A session of which nothing is heard for so many seconds is written as over."""
    max_bytes: Annotated[int, Ge(1 << 16), Le(1 << 40)] = 256 << 20
    """A file that would grow above this is kept as NAME.1, and a new one begins."""
    max_blocks: Annotated[int, Ge(1024), Le(1 << 24)] = 200_000
    """Blocks whose numbers are remembered, at least; a forgotten one that comes back is new."""


class BlockNumbers:
    """
    Numbers blocks in the order in which they are first seen, so that a chain is few runs.

    The numbers depend on the order of requests alone, not on the hashes' seed, and tell nothing of
    the content. Bounded: between *limit* and twice as many are remembered, those used last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[Hashable, int] = {}
        self._old: dict[Hashable, int] = {}
        self._next = 0

    def runs(self, blocks: Sequence[Hashable]) -> Runs:
        """Return the numbers of *blocks*, a chain, head first."""
        young, old = self._young, self._old
        numbers = []
        for block in blocks:
            number = young.get(block)
            if number is None:
                number = old.get(block)
                if number is None:
                    number = self._next
                    self._next += 1
                young[block] = number
            numbers.append(number)
        if len(young) >= self._limit:
            self._old, self._young = young, {}
        return runs_of(numbers)


class Recorder:
    """
    Writes the programs that a server serves to a trace, one a line when it is over.

    Belongs to the thread that owns the engine. Never raises: the first fault is logged and ends
    the recording; requests do not notice.
    """

    def __init__(self, file: TraceFile, *, idle_s: float, max_blocks: int) -> None:
        """Record to *file*; all times given are seconds on one clock that does not go back."""
        self.file = file
        self._programs = Programs(file.add, idle_s=idle_s)
        self._numbers = BlockNumbers(max_blocks)
        self._off = False

    def arrive(
        self,
        request_id: str,
        assignment: Assignment,
        hints: Hints | None,
        blocks: Sequence[Hashable],
        *,
        prompt_tokens: int,
        tenant: str,
        now: float,
    ) -> None:
        """Note that a request arrived; *blocks* are the hashes of its prompt's full blocks."""
        if self._off:
            return
        try:
            self._programs.start(
                request_id,
                Started(
                    prompt_tokens=prompt_tokens,
                    session=assignment.session,
                    agent=hints.agent if hints is not None and hints.agent else assignment.agent,
                    parent=hints.parent if hints is not None else None,
                    tenant=tenant,
                    runs=self._numbers.runs(blocks),
                    tools=hints.tools if hints is not None else (),
                    final=hints is not None and hints.final,
                ),
                now=now,
            )
        except Exception as error:
            self._fault(error)

    def finish(
        self,
        request_id: str,
        finish: Finish,
        *,
        output_tokens: int,
        cached_tokens: int | None,
        tools: tuple[tuple[str, float | None], ...] = (),
        now: float,
    ) -> None:
        """Note that a request ended; one that is preempted has not."""
        if self._off or finish is Finish.PREEMPTED:
            return
        try:
            calls = bool(tools) or finish is Finish.TOOL_CALLS
            aborted = finish is Finish.ABORT
            self._programs.end(
                request_id,
                now=now,
                output_tokens=output_tokens,
                aborted=aborted,
                calls_tool=None if aborted and not calls else calls,
                tools=tools,
                hit_tokens=cached_tokens,
            )
        except Exception as error:
            self._fault(error)

    def tools(self, request_id: str, tools: tuple[tuple[str, float | None], ...]) -> None:
        """Note which tools the response to a request calls."""
        if self._off:
            return
        try:
            self._programs.tools(request_id, tools)
        except Exception as error:
            self._fault(error)

    def event(self, event: SessionEvent, *, tenant: str, now: float) -> None:
        """Note what the side channel tells of a session."""
        if self._off:
            return
        try:
            self._programs.event(event, tenant=tenant, now=now)
        except Exception as error:
            self._fault(error)

    def tick(self, *, now: float) -> None:
        """Write the programs that have been idle for long."""
        if self._off:
            return
        try:
            self._programs.tick(now=now)
        except Exception as error:
            self._fault(error)

    def close(self) -> None:
        """Write what is under way, and end."""
        try:
            if not self._off:
                self._programs.close()
            self.file.close()
        except Exception as error:
            self._fault(error)
        self._off = True

    def _fault(self, error: Exception) -> None:
        if not self._off:
            self._off = True
            _log.error("scout: the recording to %s ends", self.file.path, exc_info=error)


def recorder_of(
    settings: RecordSettings, *, source: str, block_tokens: int, rank: int = 0
) -> Recorder | None:
    """
    Return what records for data-parallel rank *rank*, or None when nothing does.

    ConfigError when the file cannot be written.
    """
    if not settings.file:
        return None
    path = Path(settings.file)
    if rank:
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    info = TraceInfo(
        source=source,
        block_tokens=block_tokens,
        scope=HashScope.GLOBAL,
        note="recorded live; parents are inferred from times",
    )
    file = TraceFile(path, info, max_bytes=settings.max_bytes)
    return Recorder(file, idle_s=settings.idle_s, max_blocks=settings.max_blocks)

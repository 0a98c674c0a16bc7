"""
A trace of what this process's agents do, seen from the client (docs/traces.md).

    with scout_sdk.record("agents.jsonl"):
        ...                                  # run the agents
    $ scout trace advise agents.jsonl        # would Scout help them?

It sees the requests that the openai package sends (see `install`), or those of an attached client
or a HintTransport, to any server; contexts and callbacks say who runs. No text is kept: counts,
names of agents and tools, times.
"""

import atexit
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from scout_sdk import _openai
from scout_sdk._answers import Answer, watch
from scout_sdk._errors import ConfigError
from scout_sdk._guard import guarded
from scout_sdk._hints import Hints, SessionEvent
from scout_sdk._sessions import SESSIONS
from scout_sdk._trace import HashSource, Program, TraceInfo
from scout_sdk._trace_file import TraceFile
from scout_sdk._trace_programs import Programs, Started

__all__ = ["Recorder", "record"]

_BLOCK_TOKENS = 16
_BYTES_PER_TOKEN = 4
_MAX_CALLS = 1024


class Recorder:
    """
    Writes the agent programs of this process to a trace, one a line when it is over.

    A session that is over is written at once; the rest after *idle_s* seconds of silence, or at
    `close`. Never raises and never waits in a request's way; in a forked child it does nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        idle_s: float = 600.0,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the file, keeping an older one as NAME.1; ConfigError when that cannot be."""
        info = TraceInfo(
            source="scout_sdk",
            block_tokens=_BLOCK_TOKENS,
            hashes=HashSource.ASSUMED,
            note="recorded at the client; tokens as the server told, else by length",
        )
        self.file = TraceFile(Path(path), info, max_bytes=max_bytes)
        self._programs = Programs(self._over, idle_s=idle_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._calls: OrderedDict[str, str] = OrderedDict()

    def __enter__(self) -> Self:
        """Return the recorder; it runs already."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop recording."""
        self.close()

    def close(self) -> None:
        """Write what is under way and stop; idempotent."""
        _stop(self)
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._programs.close()
        self.file.close()

    def _over(self, program: Program) -> None:
        self.file.add(_assumed(program))

    def started(self, request: Any, hints: Hints | None, key: str) -> str:
        """Note a request that is about to be sent, and return its name here; key: of its call."""
        name = str(next(self._numbers))
        if os.getpid() != self._pid:
            return name
        hints = hints or Hints()
        length = request.headers.get("content-length", "0")
        facts = Started(
            prompt_tokens=int(length) // _BYTES_PER_TOKEN if length.isdigit() else 0,
            session=hints.session,
            parent=hints.parent,
            agent=hints.agent,
            tools=hints.tools,
            final=hints.final,
        )
        with self._lock:
            now = self._clock()
            if key:
                earlier = self._calls.pop(key, None)
                if earlier is not None:
                    self._programs.forget(earlier)
                self._calls[key] = name
                if len(self._calls) > _MAX_CALLS:
                    self._calls.popitem(last=False)
            self._programs.tick(now=now)
            self._programs.start(name, facts, now=now)
        return name

    def answered(self, name: str, response: Any) -> None:
        """Watch the answer to the request *name*; an error is taken for no turn at all."""
        if response.status_code >= 400:
            with self._lock:
                self._programs.forget(name)
            return
        headers = response.headers
        answer = Answer(headers.get("content-type", ""), headers.get("content-encoding", ""))
        read = guarded(answer.feed)
        ended = guarded(self._ended)
        watch(response, read, lambda: ended(name, answer))

    def _ended(self, name: str, answer: Answer) -> None:
        answer.close()
        with self._lock:
            self._programs.end(
                name,
                now=self._clock(),
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.output_tokens,
                aborted=not answer.ended,
                calls_tool=answer.calls_tool,
                tools=tuple((tool, None) for tool in answer.tools),
                hit_tokens=answer.cached_tokens,
            )

    @guarded
    def heard(self, event: SessionEvent) -> None:
        """Note what the application says of a session between its requests."""
        if os.getpid() == self._pid:
            with self._lock:
                self._programs.event(event, now=self._clock())


def record(
    path: str | os.PathLike[str], *, idle_s: float = 600.0, max_bytes: int = 256 << 20
) -> Recorder:
    """
    Record the agents of this process to *path* until `close`, the end of the block, or the exit.

    ConfigError when the file cannot be written, or when another recording is under way.
    """
    if _openai.recorder() is not None:
        raise ConfigError("this process records already; close the first recording")
    recorder = Recorder(path, idle_s=idle_s, max_bytes=max_bytes)
    SESSIONS.listener = recorder.heard
    _openai.set_recorder(recorder)
    _openai.install_if_imported()
    atexit.register(recorder.close)
    return recorder


def _stop(recorder: Recorder) -> None:
    if _openai.recorder() is recorder:
        _openai.set_recorder(None)
        SESSIONS.listener = None
        atexit.unregister(recorder.close)


def _assumed(program: Program) -> Program:
    """Return *program* with block ids as if each prompt of an agent extended its last one."""
    chains: dict[tuple[str, str | None], int] = {}
    last: dict[tuple[str, str | None], int] = {}
    place: list[tuple[int, int]] = []  # of each turn: its chain's number, its blocks
    lengths: list[int] = []
    for turn in program.turns:
        who = (turn.session, turn.agent)
        if who not in chains or turn.input_tokens < last[who]:
            chains[who] = len(lengths)
            lengths.append(0)
        last[who] = turn.input_tokens
        number = chains[who]
        blocks = -(-turn.input_tokens // _BLOCK_TOKENS)
        lengths[number] = max(lengths[number], blocks)
        place.append((number, blocks))
    starts = [0, *itertools.accumulate(lengths)]
    turns = zip(program.turns, place, strict=True)
    return replace(
        program,
        turns=tuple(replace(t, hash_runs=((starts[n], blocks),)) for t, (n, blocks) in turns),
    )

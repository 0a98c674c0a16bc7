"""A trace being written: one program a line, by a thread of its own, bounded on disk."""

import contextlib
import logging
import os
import queue
import threading
from pathlib import Path
from typing import IO

from scout_sdk._errors import ConfigError
from scout_sdk._trace import Program, TraceInfo, header_line, program_line

__all__ = ["TraceFile"]

_log = logging.getLogger("scout_sdk")

try:
    import fcntl
except ImportError:  # not on Windows: two writers of one file are not noticed there
    fcntl = None  # type: ignore[assignment]

_WAITING = 1024
"""Programs that may wait for the disk; more are dropped and counted."""


class TraceFile:
    """
    Appends programs to a trace file; never blocks on the disk and never raises after the start.

    What the file held before is kept as `NAME.1` (`t.jsonl` becomes `t.1.jsonl`), and so is a file
    that would grow past *max_bytes*: two files at most, each a trace of its own. One process, the
    one that made it, writes; in a forked child nothing happens. A file that another recording
    writes is refused, where the system has file locks.
    """

    def __init__(self, path: Path, info: TraceInfo, *, max_bytes: int = 256 << 20) -> None:
        """Begin the file; ConfigError when it cannot be written or is named `.gz`."""
        self.path = path
        self.info = info
        self.written = 0
        """Programs written."""
        self.dropped = 0
        """Programs lost: the disk was too slow, full or gone."""
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._queue: queue.Queue[Program | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._complained = False
        if path.suffix == ".gz":
            msg = f"a live trace is not compressed: {path} ends in .gz; compress it afterwards"
            raise ConfigError(msg)
        try:
            self._out = self._begin()
        except OSError as error:
            msg = f"cannot record to {path}: {error.strerror or error}"
            raise ConfigError(msg) from error

    def _begin(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file() and self.path.stat().st_size:
            with self.path.open("ab") as old:
                _claim(old)
            os.replace(self.path, self.path.with_name(f"{self.path.stem}.1{self.path.suffix}"))
        out = self.path.open("wb", buffering=0)
        _claim(out)
        head = header_line(self.info).encode() + b"\n"
        out.write(head)
        self._size = len(head)
        return out

    def add(self, program: Program) -> None:
        """Write *program* some time soon, or drop it."""
        if self._closed or os.getpid() != self._pid:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="scout-record", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(program)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for *timeout_s* seconds at most, and end; idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return  # the disk hangs; the thread is a daemon and ends with the process
        self._out.close()

    def _work(self) -> None:
        while (program := self._queue.get()) is not None:
            try:
                self._write(program)
            except Exception as error:
                self.dropped += 1
                if not self._complained:
                    self._complained = True
                    _log.warning("scout: cannot record to %s: %s", self.path, error)

    def _write(self, program: Program) -> None:
        line = program_line(program).encode() + b"\n"
        if self._size + len(line) > self._max_bytes and self.written:
            self._out.close()
            self._out = self._begin()
        if self._out.write(line) != len(line):
            raise OSError("the disk is full")
        self._size += len(line)
        self.written += 1


def _claim(file: IO[bytes]) -> None:
    """Make *file* this recording's own until it is closed; OSError when it is another's."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another recording writes this file") from error
    except OSError:
        return  # a file system without locks

"""The learnt state on disk: versioned, written atomically, damaged files set aside."""

import json
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from annotated_types import Ge, Le

__all__ = ["FORMAT", "Keeper", "Learner", "SnapshotSettings", "keeper_of", "load", "save"]

FORMAT = 1
"""Version of the file's envelope; the state inside carries its own."""

_MAX_BYTES = 64 * 1024 * 1024

_log = logging.getLogger("scout")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """Settings of what a server keeps of what it learnt when it restarts."""

    state_file: str = ""
    """File that keeps what was learnt over a restart; empty: nothing is kept. Every data-parallel
    rank but the first adds its number to the name."""
    interval_s: Annotated[float, Ge(1), Le(86400)] = 60.0
    """Seconds between two writings of the file; it is written at shutdown too."""


class Learner(Protocol):
    """What has learnt something, such as a PolicyCore."""

    def snapshot(self) -> dict[str, object]:
        """Return what was learnt as plain data that nobody else changes."""

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a snapshot; ValueError, and no change, when it is damaged."""


class Keeper:
    """
    Keeps one learner's state in one file: read at the start, written at intervals and at the end.

    Belongs to the thread that owns the learner; the file is written in another. Never raises: what
    cannot be written or read is said once in the log, and the server goes on.
    """

    def __init__(self, path: Path, learner: Learner, *, interval_s: float, now: float) -> None:
        """Read the file, if there is one; *now* is seconds on a clock that does not go back."""
        self._path = path
        self._learner = learner
        self._interval_s = interval_s
        self._due = now + interval_s
        self._writer: threading.Thread | None = None
        self._complained = False
        self.restored = False
        """Whether the learner began with what the file held."""
        state = load(path)
        if state is not None:
            try:
                learner.restore(state)
                self.restored = True
            except Exception as error:
                _set_aside(path, str(error))

    def tick(self, *, now: float) -> None:
        """Write the state if it is time; what is asked of the caller's thread is the copy."""
        if now < self._due or (self._writer is not None and self._writer.is_alive()):
            return
        self._due = now + self._interval_s
        try:
            state = self._learner.snapshot()
            self._writer = threading.Thread(
                target=self._write, args=(state,), name="scout-snapshot", daemon=True
            )
            self._writer.start()
        except Exception as error:
            self._complain(error)

    def close(self) -> None:
        """Write the state for the last time."""
        if self._writer is not None:
            self._writer.join(10.0)
        try:
            state = self._learner.snapshot()
        except Exception as error:
            self._complain(error)
            return
        self._write(state)

    def _write(self, state: Mapping[str, object]) -> None:
        try:
            save(self._path, state)
            self._complained = False
        except Exception as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("scout: cannot keep the state in %s: %s", self._path, error)


def keeper_of(
    settings: SnapshotSettings, learner: Learner, *, now: float, rank: int = 0
) -> Keeper | None:
    """Return what keeps *learner*'s state for data-parallel rank *rank*; None: nothing does."""
    if not settings.state_file:
        return None
    path = Path(settings.state_file)
    if rank:
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    return Keeper(path, learner, interval_s=settings.interval_s, now=now)


def save(path: Path, state: Mapping[str, object]) -> None:
    """
    Replace the file at *path* by *state*, or leave it as it is.

    Raises OSError when the file cannot be written, TypeError or ValueError when *state* is no JSON.
    """
    text = json.dumps({"scout_snapshot": FORMAT, "state": state}, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path) -> Mapping[str, object] | None:
    """
    Return the state at *path*, or None when there is none that can be used.

    A damaged or unknown file is renamed to `NAME.damaged` (the newest one is kept) with a warning;
    nothing else happens: a server starts without what it had learnt.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            _set_aside(path, "it is larger than 64 MiB")
            return None
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("scout: cannot read the state in %s (%s); starting without it", path, error)
        return None
    try:
        envelope = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _set_aside(path, str(error))
        return None
    state = envelope.get("state") if isinstance(envelope, dict) else None
    if not isinstance(state, dict) or envelope.get("scout_snapshot") != FORMAT:
        _set_aside(path, f"it is not a snapshot of format {FORMAT}")
        return None
    return state


def _set_aside(path: Path, reason: str) -> None:
    aside = path.with_name(path.name + ".damaged")
    try:
        os.replace(path, aside)
    except OSError as error:
        _log.warning("scout: cannot set %s aside (%s)", path, error)
        return
    _log.warning(
        "scout: the state in %s is damaged (%s); set aside as %s", path, reason, aside.name
    )

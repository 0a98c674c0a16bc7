"""The learnt state on disk: versioned, written atomically, damaged files set aside."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FORMAT", "load", "save"]

FORMAT = 1
"""Version of the file's envelope; the state inside carries its own."""

_MAX_BYTES = 64 * 1024 * 1024

_log = logging.getLogger("scout")


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

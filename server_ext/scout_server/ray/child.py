"""
Runs a command until standard input closes: `python -m scout_server.ray.child COMMAND...`.

A replica that is killed cannot end its server; the pipe that closes does. Ray kills the direct
children of a worker that ends, this process among them: so a second process watches the pipe. The
server's own children end with it, since they are one process group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]

_GRACE_S = 10.0
_WATCH = "--watch"


def main(words: Sequence[str]) -> int:
    """Run the command, end it when standard input closes or on SIGTERM; return its status."""
    if words[0] == _WATCH:
        return _watch(int(words[1]))
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    watch = [sys.executable, "-m", "scout_server.ray.child", _WATCH, str(server.pid)]
    watcher = subprocess.Popen(watch, start_new_session=True)

    def end(number: int, frame: FrameType | None) -> None:
        _send(server.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    status = server.wait()
    _send(server.pid, signal.SIGKILL)  # what a crash has left behind
    watcher.kill()
    watcher.wait()
    return status


def _watch(group: int) -> int:
    """End the process group when standard input closes: gently, then not."""
    while os.read(0, 4096):
        pass
    _send(group, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while _send(group, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    _send(group, signal.SIGKILL)
    return 0


def _send(group: int, number: int) -> bool:
    """Send a signal to a process group; False: there is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

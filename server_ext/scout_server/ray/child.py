"""
Runs a command until standard input closes: `python -m scout_server.ray.child COMMAND...`.

A replica that is killed cannot end its server; the closed pipe does. The server's own children
end with it, since they are one process group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]

_GRACE_S = 5.0


def main(command: Sequence[str]) -> int:
    """Run *command*, end it when standard input closes or on SIGTERM; return its status."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()
    status = server.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # what a crash has left behind
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

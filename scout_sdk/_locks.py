"""A lock that a forked child can take, whoever held it in the parent."""

import os
import threading

__all__ = ["ProcessLock"]


class ProcessLock:
    """
    A mutex of one process.

    Another thread may hold an ordinary lock at the moment of a fork; in the child it would stay
    held for ever. This one is new in every process.
    """

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        pid = os.getpid()
        if pid != self._pid:
            self._lock = threading.Lock()
            self._pid = pid
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

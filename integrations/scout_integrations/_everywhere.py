"""One handler under every LangChain run of a process, through LangChain's own hook."""

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from scout_sdk._locks import ProcessLock

__all__ = ["Everywhere"]

H = TypeVar("H", bound=BaseCallbackHandler)

_ON = ("1", "true", "yes", "on")


class Everywhere(Generic[H]):
    """
    What LangChain asks for the handler of a run; it needs no more of a ContextVar than get.

    A run that has a handler of the same class already keeps that one alone.
    """

    def __init__(self, handle_class: type[H]) -> None:
        self._class = handle_class
        self._lock = ProcessLock()
        self._registered = False
        self._handler: H | None = None
        self._by_environment: H | None = None

    def get(self) -> H | None:
        """Return the handler put in by hand, or the one that SCOUT_SDK_ENABLED asks for."""
        if self._handler is not None:
            return self._handler
        if os.environ.get("SCOUT_SDK_ENABLED", "").strip().lower() not in _ON:
            return None
        if self._by_environment is None:
            self._by_environment = self._class()
        return self._by_environment

    def register(self) -> None:
        """Make LangChain ask; idempotent."""
        with self._lock:
            if not self._registered:
                self._registered = True
                register_configure_hook(cast("ContextVar[Any]", self), True, self._class)

    def put(self, make: Callable[[], H]) -> H:
        """Put in what *make* returns, unless there is a handler; return the one that is in."""
        self.register()
        with self._lock:
            if self._handler is None:
                self._handler = make()
            return self._handler

    def remove(self) -> None:
        """Take the handler out; idempotent."""
        with self._lock:
            self._handler = None

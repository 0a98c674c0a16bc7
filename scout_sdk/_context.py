"""
Which hints the request being built belongs to.

One ContextVar holds a chain of mutable slots. A slot is opened where a run (a graph, a node, an
LLM call, a `context()`) starts and marked dead where it ends; it is never taken out with
ContextVar.reset, because the end is often seen in another context than the start (asyncio.gather,
executors, generators closed by the garbage collector), where a reset raises and a `set` is lost.
"""

import contextvars
import dataclasses
import functools
import inspect
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from scout_sdk._env import read_environment
from scout_sdk._guard import guarded
from scout_sdk._hints import Hints
from scout_sdk._sessions import SESSIONS, PendingTool, at, finish

__all__ = [
    "Slot",
    "add_source",
    "close",
    "context",
    "current_hints",
    "current_slot",
    "enclosing",
    "is_ours",
    "open_slot",
    "remove_source",
    "take",
    "use_hints",
]

F = TypeVar("F", bound=Callable[..., Any])

_MAX_CALLS = 64


@dataclasses.dataclass(slots=True)
class _Call:
    """What one call said; its retries say the same."""

    turn: int | None
    tools: tuple[PendingTool, ...]


class Slot:
    """
    One open run.

    once: True for one LLM call: only its first request (and that one's retries) is its own.
    numbered: True when its requests count as turns of (session, agent).
    """

    __slots__ = ("calls", "endpoint", "hints", "live", "numbered", "once", "parent")

    def __init__(
        self,
        hints: Hints,
        *,
        parent: "Slot | None" = None,
        once: bool = False,
        numbered: bool = True,
        endpoint: str | None = None,
    ) -> None:
        self.hints = hints
        self.parent = parent
        self.once = once
        self.numbered = numbered
        self.endpoint = endpoint
        self.live = True
        self.calls: OrderedDict[str, _Call] | None = None

    def owns(self, key: str, retries: int) -> bool:
        """Whether the request *key* may speak for this slot."""
        if not self.once or not self.calls:
            return True
        return key in self.calls if key else retries > 0

    def hints_for(self, key: str, retries: int) -> Hints:
        """Return the hints of request *key*; a retry says what its first attempt said."""
        if self.calls is None:
            self.calls = OrderedDict()
        call = self.calls.get(key)
        if call is None or not (key or retries):
            call = self.calls[key] = self._first_attempt()
            if len(self.calls) > _MAX_CALLS:
                self.calls.popitem(last=False)
        if call.turn is None and not call.tools:
            return self.hints
        now = SESSIONS.clock()
        return dataclasses.replace(
            self.hints,
            turn=self.hints.turn if call.turn is None else call.turn,
            tools=self.hints.tools + tuple(at(pending, now) for pending in call.tools),
        )

    def _first_attempt(self) -> _Call:
        session = self.hints.session
        if not self.numbered or session is None:
            return _Call(None, ())
        return _Call(
            SESSIONS.next_turn(session, self.hints.agent),
            SESSIONS.drain(session),
        )


_CURRENT: contextvars.ContextVar[Slot | None] = contextvars.ContextVar("scout_slot", default=None)
_sources: list[Callable[[], Slot | None]] = []
_nobodys: Slot | None = None
"""Of requests that belong to no session but that of SCOUT_SESSION_ID."""


def current_slot() -> Slot | None:
    """Return the innermost live slot, or None."""
    slot = _CURRENT.get()
    while slot is not None and not slot.live:
        slot = slot.parent
    return slot


def enclosing() -> Slot | None:
    """Return the slot that a new one is opened in: live, and not that of one LLM call."""
    slot = _CURRENT.get()
    # Without skipping, a loop of awaited calls would grow an endless chain of dead slots.
    while slot is not None and (slot.once or not slot.live):
        slot = slot.parent
    return slot


def open_slot(
    hints: Hints, *, once: bool = False, numbered: bool = True, endpoint: str | None = None
) -> Slot:
    """Open a slot in the current context; end it with `close`."""
    parent = enclosing()
    slot = Slot(
        hints,
        parent=parent,
        once=once,
        numbered=numbered,
        endpoint=endpoint or (parent.endpoint if parent is not None else None),
    )
    _CURRENT.set(slot)
    return slot


def close(slot: Slot) -> None:
    """End *slot*; may be called in any context, and twice."""
    slot.live = False
    if _CURRENT.get() is slot:
        _CURRENT.set(slot.parent)


def add_source(source: Callable[[], Slot | None]) -> None:
    """Ask *source* for a slot whenever the current context is in no LLM call; idempotent."""
    if source not in _sources:
        _sources.append(source)


def remove_source(source: Callable[[], Slot | None]) -> None:
    """Forget *source*; unknown ones are ignored."""
    if source in _sources:
        _sources.remove(source)


@guarded
def _find(key: str, retries: int) -> Slot | None:
    slot = _CURRENT.get()
    while slot is not None and not (slot.live and slot.owns(key, retries)):
        slot = slot.parent
    if slot is None or not slot.once:
        for source in _sources:
            found = source()
            if found is not None and found.owns(key, retries):
                return found
    return _of_the_environment() if slot is None else slot


def _of_the_environment() -> Slot | None:
    global _nobodys
    session = read_environment().session
    if session is None:
        return None
    slot = _nobodys
    if slot is None or slot.hints.session != session:
        slot = _nobodys = Slot(Hints(session=session))
    return slot


def take(key: str = "", retries: int = 0) -> tuple[Hints, Slot] | None:
    """
    Return the hints for the request being built and the slot they come from, or None.

    key: the same for all attempts of one call, unique otherwise; "" when unknown.
    retries: number of earlier attempts.
    """
    slot = _find(key, retries)
    return None if slot is None else (slot.hints_for(key, retries), slot)


def is_ours(key: str = "", retries: int = 0) -> bool:
    """Whether there are hints for the request being built; asking takes nothing."""
    return _find(key, retries) is not None


def current_hints() -> Hints | None:
    """Return the hints in force here, or None; consumes nothing, so without turn and tools."""
    slot = current_slot()
    return None if slot is None else slot.hints


class use_hints:  # noqa: N801 - read as a function
    """Send exactly *hints* with the requests made inside `with use_hints(hints):`."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._slots: list[Slot] = []

    def __enter__(self) -> Hints:
        self._slots.append(open_slot(self._hints, numbered=False))
        _auto_install()
        return self._hints

    def __exit__(self, *exc: object) -> None:
        close(self._slots.pop())

    async def __aenter__(self) -> Hints:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()


class context:  # noqa: N801 - read as a function
    """
    Name the agent and the session of the requests made inside.

    A (sync or async) context manager and a decorator of functions and coroutine functions. What
    is not given comes from the enclosing context, the session also from SCOUT_SESSION_ID. Without
    any session, one is made up, and the server is told when it ends; a session given by name may
    go on later, so nothing is said unless *final* is True. Requests are numbered by (session,
    agent).
    """

    def __init__(
        self,
        *,
        agent: str | None = None,
        session: str | None = None,
        path: str | None = None,
        anchor: str | None = None,
        parent: str | None = None,
        next_agents: tuple[str, ...] = (),
        base_url: str | None = None,
        final: bool | None = None,
    ) -> None:
        self._given = {
            name: value
            for name, value in (
                ("agent", agent),
                ("session", session),
                ("path", path),
                ("anchor", anchor),
                ("parent", parent),
                ("next_agents", tuple(next_agents)),
            )
            if value
        }
        self._base_url = base_url
        self._final = final
        self._open: list[tuple[Slot, bool]] = []

    def _copy(self) -> Self:
        twin = object.__new__(type(self))
        twin._given, twin._base_url, twin._final = self._given, self._base_url, self._final
        twin._open = []
        return twin

    def __enter__(self) -> Hints:
        outer = enclosing()
        base = Hints() if outer is None else outer.hints
        values: dict[str, Any] = dict(self._given)
        if "agent" in values:
            # Place, anchor and followers belong to the agent, not to the session.
            base = Hints(session=base.session, parent=base.parent)
        session = values.get("session")
        if session is not None and base.session not in (None, session):
            values.setdefault("parent", base.session)
        made_up = False
        if session is None and base.session is None:
            named = read_environment().session
            made_up = named is None
            values["session"] = named or uuid.uuid4().hex
        hints = dataclasses.replace(base, turn=None, tools=(), final=False, **values)
        if self._base_url is not None:
            _allow(self._base_url)
        slot = open_slot(hints, endpoint=self._base_url)
        self._open.append((slot, made_up if self._final is None else self._final))
        _auto_install()
        return hints

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        slot, final = self._open.pop()
        close(slot)
        if final and slot.hints.session is not None:
            finish(slot.hints.session, slot.hints.agent, slot.endpoint)

    async def __aenter__(self) -> Hints:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    def __call__(self, function: F) -> F:
        """Return *function* run in a context of its own at every call."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def async_inner(*args: Any, **kwargs: Any) -> Any:
                with self._copy():
                    return await cast("Callable[..., Awaitable[Any]]", function)(*args, **kwargs)

            return cast("F", async_inner)

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self._copy():
                return function(*args, **kwargs)

        return cast("F", inner)


def _auto_install() -> None:
    from scout_sdk import _openai

    _openai.install_if_imported()


def _allow(base_url: str) -> None:
    from scout_sdk import _openai

    _openai.allow(base_url)

"""What this process knows of its own sessions: turns, untold tool events, where to tell them."""

import functools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from scout_sdk._channel import later
from scout_sdk._env import read_environment
from scout_sdk._errors import ConfigError
from scout_sdk._guard import guarded
from scout_sdk._hints import SessionEvent, ToolEvent
from scout_sdk._locks import ProcessLock

__all__ = [
    "SESSIONS",
    "Credentials",
    "EventSink",
    "PendingTool",
    "Sessions",
    "at",
    "default_sink",
    "finish",
    "flush",
    "is_this_machine",
    "shutdown",
]

_MAX_SESSIONS = 8192
_MAX_AGENTS = 256
_MAX_PENDING = 32
_MAX_SINKS = 16


Credentials = tuple[str, str]
"""Name and value of the header that says who speaks."""


class EventSink(Protocol):
    """Takes session events; never blocks, never raises."""

    def emit(self, event: SessionEvent, credentials: Credentials | None = ...) -> None:
        """Send *event* some time soon, in the name of *credentials*, or drop it."""

    def flush(self, timeout_s: float = ...) -> bool:
        """Wait at most *timeout_s* seconds until everything is sent; True when it is."""

    def close(self) -> None:
        """Send what can be sent at once, then stop."""


@dataclass(frozen=True, slots=True)
class PendingTool:
    """A tool event and the local monotonic time when it was recorded."""

    event: ToolEvent
    recorded_at: float


@dataclass(slots=True)
class _Session:
    turns: OrderedDict[str | None, int] = field(default_factory=OrderedDict)
    pending: OrderedDict[str, PendingTool] = field(default_factory=OrderedDict)
    endpoint: str | None = None
    """Where its events go."""
    server: str | None = None
    """Where its requests go, in the name of `credentials`."""
    credentials: Credentials | None = field(default=None, repr=False)

    def credentials_for(self, endpoint: str) -> Credentials | None:
        """Return those of its requests where they went to *endpoint*, else none: no leaks."""
        if self.credentials is None or self.server is None:
            return None
        return self.credentials if _same_server(self.server, endpoint) else None


@functools.lru_cache(maxsize=256)
def _same_server(one: str, other: str) -> bool:
    """Whether two base URLs name one server; this machine has several names."""
    from scout_sdk._capabilities import Endpoint  # only for those who need it

    try:
        pair = [Endpoint.parse(url) for url in (one, other)]
    except ConfigError:
        return False
    first, second = (
        (each.secure, "localhost" if is_this_machine(each.host) else each.host, each.port)
        for each in pair
    )
    return first == second


def is_this_machine(host: str) -> bool:
    """Whether *host*, in lower case, names the machine that we run on."""
    return host in ("localhost", "::1") or host.startswith("127.")


def at(pending: PendingTool, now: float) -> ToolEvent:
    """Return the event with its relative times moved to *now*."""
    return later(pending.event, max(0.0, now - pending.recorded_at))


def default_sink(endpoint: str) -> EventSink:
    """Return a sender of the side channel at *endpoint*."""
    from scout_sdk.events import EventSender  # only for those who need it

    return EventSender(endpoint)


class Sessions:
    """
    The sessions of this process, bounded, least recently used first out.

    Tool events wait here for the session's next request (a server without a side channel still
    learns of them), and go to the side channel at once where one is known.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        make_sink: Callable[[str], EventSink] = default_sink,
        limit: int = _MAX_SESSIONS,
    ) -> None:
        self.clock = clock
        self._make_sink = make_sink
        self._limit = limit
        self._lock = ProcessLock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._sinks: OrderedDict[str, EventSink] = OrderedDict()
        self.listener: Callable[[SessionEvent], None] | None = None
        """Told of every event, wherever it is sent; it never raises."""

    def __len__(self) -> int:
        return len(self._sessions)

    def _get(self, session: str) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
            while len(self._sessions) > self._limit:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        return known

    def next_turn(self, session: str, agent: str | None) -> int:
        """Count one more call of *agent* in *session* and return its number, from 1."""
        with self._lock:
            turns = self._get(session).turns
            turns[agent] = number = turns.get(agent, 0) + 1
            turns.move_to_end(agent)
            if len(turns) > _MAX_AGENTS:
                turns.popitem(last=False)
            return number

    def drain(self, session: str) -> tuple[PendingTool, ...]:
        """Return the tool events since the last request, oldest first, and forget them."""
        with self._lock:
            known = self._sessions.get(session)
            if known is None or not known.pending:
                return ()
            events = tuple(known.pending.values())
            known.pending.clear()
            return events

    def record_tool(
        self, session: str, agent: str | None, event: ToolEvent, *, endpoint: str | None = None
    ) -> None:
        """
        Note *event*; of one call only the latest state waits for the next request.

        endpoint: the side channel; else SCOUT_BASE_URL, else where the session's requests go.
        """
        key = event.call_id or event.name
        with self._lock:
            known = self._get(session)
            known.pending.pop(key, None)
            known.pending[key] = PendingTool(event, self.clock())
            if len(known.pending) > _MAX_PENDING:
                known.pending.popitem(last=False)
        self._emit(endpoint, known, SessionEvent(session=session, agent=agent, tool=event))

    def finish(
        self, session: str, *, agent: str | None = None, endpoint: str | None = None
    ) -> None:
        """Forget *session* and tell the server that no further request will come."""
        with self._lock:
            known = self._sessions.pop(session, None)
        self._emit(endpoint, known, SessionEvent(session=session, agent=agent, final=True))

    def learn_endpoint(
        self,
        session: str,
        server: str,
        credentials: Credentials | None = None,
        *,
        endpoint: str | None = None,
    ) -> None:
        """
        Remember that requests of *session* go to *server* in the name of *credentials*.

        Its events follow them, or go to *endpoint*; only the same server gets the credentials.
        """
        known = self._sessions.get(session)
        endpoint = endpoint or server
        if known is not None and (known.endpoint, known.server) == (endpoint, server):
            if known.credentials != credentials:
                known.credentials = credentials
            return
        with self._lock:
            known = self._get(session)
            known.endpoint, known.server, known.credentials = endpoint, server, credentials

    def _emit(self, endpoint: str | None, known: _Session | None, event: SessionEvent) -> None:
        if self.listener is not None:
            self.listener(event)
        environment = read_environment()
        endpoint = endpoint or environment.base_url or (known.endpoint if known else None)
        if endpoint is None or not environment.enabled:
            return
        with self._lock:
            sink = self._sinks.get(endpoint)
            if sink is None:
                if len(self._sinks) >= _MAX_SINKS:
                    return
                sink = self._sinks[endpoint] = self._make_sink(endpoint)
        sink.emit(event, known.credentials_for(endpoint) if known else None)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait at most *timeout_s* seconds for the side channel; True when all is sent."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            sinks = list(self._sinks.values())
        results = [sink.flush(max(0.0, deadline - time.monotonic())) for sink in sinks]
        return all(results)

    def shutdown(self) -> None:
        """Close the side channel and forget every session; later use starts afresh."""
        with self._lock:
            sinks = list(self._sinks.values())
            self._sinks.clear()
            self._sessions.clear()
        for sink in sinks:
            sink.close()


SESSIONS = Sessions()
"""The sessions of this process."""


@guarded
def finish(session: str, agent: str | None = None, endpoint: str | None = None) -> None:
    """Tell the server that *session* sends no further request."""
    SESSIONS.finish(session, agent=agent, endpoint=endpoint)


def flush(timeout_s: float = 2.0) -> bool:
    """Wait at most *timeout_s* seconds for the side channel; True when everything is sent."""
    return bool(guarded(SESSIONS.flush)(timeout_s))


def shutdown() -> None:
    """Close the side channel and forget all sessions; what is used later starts afresh."""
    guarded(SESSIONS.shutdown)()

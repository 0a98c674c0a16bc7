"""
The side channel: tells a server what happens to a session while no request is in flight.

Fire and forget. Standard library only; nothing happens before the first event.
"""

import atexit
import contextlib
import http.client
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scout_sdk._capabilities import MAX_ANSWER_BYTES, Capabilities, Endpoint
from scout_sdk._env import announce, read_environment
from scout_sdk._hints import SessionEvent
from scout_sdk._limits import MAX_EVENTS
from scout_sdk._refusals import note_refusal
from scout_sdk._sessions import Credentials
from scout_sdk._wire import CAPABILITIES_PATH, EVENTS_PATH, VERSION, aged, encode_events

__all__ = ["EventSender", "SenderCounts"]

_OFF_S = 60.0
_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 30.0
_MAX_AGE_S = 60.0
_EXIT_S = 0.5
_MAX_REFUSED = 64
_KEY_REFUSED = frozenset({401, 403})
_NOT_TAKEN = frozenset({404, 405, 410, 501})
_HEADERS = {"content-type": "application/json", "user-agent": "scout-sdk"}

_logger = logging.getLogger("scout_sdk")
_senders: "weakref.WeakSet[EventSender]" = weakref.WeakSet()
_hooked = False
_hook_lock = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """An event, when it was emitted (local monotonic seconds), and in whose name."""

    event: SessionEvent
    emitted_at: float
    speaker: Credentials | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderCounts:
    """What became of the events of one sender in this process."""

    sent: int
    """Taken by the server."""
    dropped: int
    """Never sent: the queue was full, the server takes no events, or they had aged."""
    failed: int
    """Sent without success."""
    waiting: int
    """Still in the queue or on their way."""


class EventSender:
    """
    Posts session events to the server at *base_url* from one daemon thread.

    emit() neither blocks nor raises: a bounded queue drops its oldest event. The thread
    starts with the first event, sends what has gathered in one message, backs off from a
    server that fails (1 s, doubling to 30 s) and leaves one that takes no events alone for
    60 s. With SCOUT_SDK_ENABLED=0 it drops everything. At exit, all senders together get
    half a second. After a fork, the child's sender starts afresh with an empty queue; what
    waited is the parent's to send.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        max_waiting: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Raises ConfigError for a wrong URL.

        api_key: bearer token; None: SCOUT_API_KEY, else what `emit` is given. timeout_s: seconds
        for each step of a message; None: SCOUT_TIMEOUT, else 1. max_waiting: events that may
        wait.
        """
        environment = read_environment()
        announce(environment)
        self._enabled = environment.enabled
        self._endpoint = Endpoint.parse(base_url)
        self._timeout_s = environment.timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._queue: deque[_Waiting] = deque(maxlen=max(1, max_waiting))
        key = environment.api_key if api_key is None else api_key
        usable = key and key.isascii() and key.isprintable()
        self._own: Credentials | None = ("authorization", f"Bearer {key}") if usable else None
        self._sent = self._dropped = self._failed = self._lost = 0
        self._capabilities: Capabilities | None = None
        self._warned = False
        self._afresh()
        _senders.add(self)
        _hook()

    def _afresh(self) -> None:
        """Forget threads, locks and connections: they belong to another process, or to none."""
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._queue.clear()
        self._in_flight = 0
        self._asked = False
        self._hurry = False
        self._closed = False
        self._backoff_s = 0.0
        self._not_before = self._off_until = float("-inf")
        self._refused: dict[Credentials | None, float] = {}

    @property
    def counts(self) -> SenderCounts:
        """What became of the events so far."""
        with self._changed:
            return SenderCounts(
                sent=self._sent,
                dropped=self._dropped,
                failed=self._failed,
                waiting=len(self._queue) + self._in_flight,
            )

    @property
    def capabilities(self) -> Capabilities | None:
        """What the server said that it takes; None while it was not asked or did not say."""
        return self._capabilities

    def emit(self, event: SessionEvent, credentials: Credentials | None = None) -> None:
        """
        Send *event* soon, or drop it; never blocks, never raises.

        credentials: header that says who speaks, as on the session's requests; a server takes an
        event for the tenant that it came from. Not used where the sender has an API key.
        """
        try:
            with self._changed:
                now = self._clock()
                speaker = self._own or credentials
                if not self._takes(event, speaker, now):
                    self._dropped += 1
                    return
                if len(self._queue) == self._queue.maxlen:
                    self._dropped += 1
                self._queue.append(_Waiting(event, now, speaker))
                self._start()
                self._changed.notify_all()
        except Exception:  # no thread to be had: the interpreter ends, or resources have run out
            _logger.debug("scout: event not sent", exc_info=True)

    def _takes(self, event: object, speaker: Credentials | None, now: float) -> bool:
        """Tell whether *event* of *speaker* may be queued now."""
        if not self._enabled or self._closed or not isinstance(event, SessionEvent):
            return False
        return now >= self._off_until and now >= self._refused.get(speaker, now)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """
        Wait at most *timeout_s* seconds for what was emitted; True: nothing was lost.

        Lost since the last flush, that is. A server that the sender backs off from is
        tried once more, at once; if that fails, flush gives up.
        """
        try:
            deadline = time.monotonic() + timeout_s
            with self._changed:
                failed = self._failed
                self._hurry = bool(self._queue)
                self._changed.notify_all()
                while (self._queue or self._in_flight) and self._failed == failed:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._thread is None or not self._thread.is_alive():
                        break
                    self._changed.wait(left)
                known, self._lost = self._lost, self._failed + self._dropped
                return self._lost == known and not (self._queue or self._in_flight)
        except Exception:
            _logger.debug("scout: flush failed", exc_info=True)
            return False

    def close(self, timeout_s: float = _EXIT_S) -> None:
        """Send what can be sent within *timeout_s* seconds, then stop; later events are dropped."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            thread, connection = self._thread, self._connection
        if thread is None or thread is threading.current_thread():
            return
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # wakes a thread that waits for an answer
                connection.sock.shutdown(socket.SHUT_RDWR)
        thread.join(0.1)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="scout-events", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._deliver(batch)
        except Exception:
            _logger.debug("scout: the side channel's thread failed", exc_info=True)
        finally:
            self._disconnect()

    def _next_batch(self) -> list[_Waiting] | None:
        """Wait for events that may be sent now; may be empty; None: closed."""
        with self._changed:
            while not self._closed:
                wait = None
                if self._queue:
                    wait = 0.0 if self._hurry else self._not_before - self._clock()
                    if wait <= 0.0:
                        return self._take_batch()
                self._changed.wait(wait)
            return None

    def _take_batch(self) -> list[_Waiting]:
        """Take the oldest events that one message can carry: those of one speaker, in order."""
        self._hurry = False
        oldest = self._clock() - _MAX_AGE_S
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        while self._queue and len(batch) < MAX_EVENTS:
            waiting = self._queue.popleft()
            if waiting.emitted_at < oldest:
                self._dropped += 1
            elif not batch or waiting.speaker == batch[0].speaker:
                batch.append(waiting)
            else:
                others.append(waiting)
        self._queue.extendleft(reversed(others))
        self._in_flight = len(batch)
        return batch

    def _deliver(self, batch: list[_Waiting]) -> None:
        sent = dropped = failed = 0
        off = refused = False
        pause_s: float | None = None
        speaker = batch[0].speaker if batch else None
        try:
            if batch and not self._is_welcome(speaker):
                off, dropped = True, len(batch)
            elif batch:
                now = self._clock()
                events = [aged(each.event, max(0.0, now - each.emitted_at)) for each in batch]
                status, pause_s = self._post(encode_events(events), speaker)
                if 200 <= status < 300:
                    sent = len(batch)
                elif status in _KEY_REFUSED:
                    refused, dropped = True, len(batch)
                    self._say_refused(status)
                elif status in _NOT_TAKEN or 300 <= status < 400:
                    off, dropped = True, len(batch)
                else:
                    failed = len(batch)
                    _logger.debug("scout: side channel answered %d", status)
        except Exception as fault:
            failed = len(batch)
            _logger.debug("scout: side channel failed: %r", fault)
            self._disconnect()
        with self._changed:
            now = self._clock()
            if sent:
                _logger.debug("scout: %d events sent to %s", sent, self._endpoint.host)
            self._in_flight = 0
            self._sent += sent
            self._failed += failed
            self._dropped += dropped
            if off:
                self._off_until = now + _OFF_S
                self._drop(list(self._queue))
            if refused:
                if len(self._refused) >= _MAX_REFUSED:
                    self._refused.clear()
                self._refused[speaker] = now + _OFF_S
                self._drop([each for each in self._queue if each.speaker == speaker])
            if off or refused:
                self._asked = False
            if failed:
                self._backoff_s = min(max(2 * self._backoff_s, _FIRST_BACKOFF_S), _LAST_BACKOFF_S)
                self._not_before = now + max(self._backoff_s, pause_s or 0.0)
            elif sent:
                self._backoff_s, self._not_before = 0.0, float("-inf")
            self._changed.notify_all()

    def _drop(self, gone: list[_Waiting]) -> None:
        """Give up *gone*, which wait; the caller holds the lock."""
        self._dropped += len(gone)
        for each in gone:
            self._queue.remove(each)

    def _say_refused(self, status: int) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "scout: %s refuses events with %d; SCOUT_API_KEY holds its key",
                self._endpoint.host,
                status,
            )

    def _is_welcome(self, speaker: Credentials | None) -> bool:
        """Ask once, and again after each pause, whether the server takes events."""
        if self._asked:
            return True
        status, body, _ = self._exchange("GET", CAPABILITIES_PATH, None, speaker)
        self._asked = True
        known = self._capabilities = Capabilities.parse(body) if status == 200 else None
        # What did not say what it takes may still read hints: a proxy need not answer for it.
        refuses = known is not None and not (known.version == VERSION and "hints" in known.features)
        note_refusal(self._endpoint.host, self._endpoint.port, refuses)
        # Without an answer it may still take them: the first message tells.
        return known is None or (known.version == VERSION and "events" in known.features)

    def _post(self, body: bytes, speaker: Credentials | None) -> tuple[int, float | None]:
        status, _, pause_s = self._exchange("POST", EVENTS_PATH, body, speaker)
        return status, pause_s

    def _exchange(
        self, method: str, path: str, body: bytes | None, speaker: Credentials | None
    ) -> tuple[int, bytes, float | None]:
        """Return status, body and Retry-After; an idle connection may have died: try twice."""
        headers = _HEADERS if speaker is None else {**_HEADERS, speaker[0]: speaker[1]}
        for last in (False, True):
            connection = self._connection
            fresh = connection is None
            if connection is None:
                connection = self._connection = self._endpoint.connect(self._timeout_s)
            try:
                connection.request(method, self._endpoint.prefix + path, body, headers)
                answer = connection.getresponse()
                content = answer.read(MAX_ANSWER_BYTES)
                if not answer.isclosed():  # longer than anything we asked for
                    self._disconnect()
                return answer.status, content, _seconds(answer.getheader("retry-after"))
            except (OSError, http.client.HTTPException) as fault:
                self._disconnect()
                if fresh or last or isinstance(fault, TimeoutError):
                    raise
        raise AssertionError("the second attempt returns or raises")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def _seconds(value: str | None) -> float | None:
    """Return a Retry-After in seconds, at most 60; a date counts as none."""
    return min(float(value), _OFF_S) if value and value.isascii() and value.isdigit() else None


def _hook() -> None:
    """Ask once to be told of forks and of the interpreter's end."""
    global _hooked
    with _hook_lock:
        if not _hooked:
            _hooked = True
            atexit.register(_at_exit)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    deadline = time.monotonic() + _EXIT_S
    for sender in list(_senders):
        sender.flush(max(0.0, deadline - time.monotonic()))


def _after_fork() -> None:
    global _hook_lock
    _hook_lock = threading.Lock()
    for sender in list(_senders):
        connection = sender._connection
        sender._afresh()
        sender._sent = sender._dropped = sender._failed = sender._lost = 0
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # our copy only: the parent's stays open
                os.close(connection.sock.detach())

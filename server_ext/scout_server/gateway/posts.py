"""What nodes are told of their sessions between requests: in order, and best effort."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scout_sdk import SessionEvent, _wire
from scout_sdk._limits import MAX_EVENTS

__all__ = ["Posts", "Send"]

_MAX_WAITING = 4096


class Send(Protocol):
    """The way to a server."""

    async def __call__(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Post a message of the side channel; never raises, and ends in bounded time."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    event: SessionEvent
    came: float
    speaker: tuple[str, ...]
    headers: Mapping[str, str]


class Posts:
    """
    Tells servers of events, one message at a time each.

    Events overtake each other on two connections, and a tool that started after it ended is never
    seen to end. What comes while a message is on its way goes with the next one of its speaker.
    """

    def __init__(self, send: Send, *, clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def put(
        self, url: str, events: Sequence[SessionEvent], headers: Mapping[str, str], *, tenant: str
    ) -> None:
        """Tell the server at *url* soon, with *headers* of who spoke; drop it when it is slow."""
        speaker = (tenant, *(headers.get(name, "") for name in _wire.CREDENTIAL_HEADERS))
        waiting = self._waiting.setdefault(url, deque())
        came = self._clock()
        for event in events[: max(0, _MAX_WAITING - len(waiting))]:
            waiting.append(_Waiting(event, came, speaker, headers))
        if url not in self._tasks:
            self._tasks[url] = asyncio.create_task(self._post(url, waiting))

    async def stop(self) -> None:
        """Forget what was not sent yet."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, url: str, waiting: deque[_Waiting]) -> None:
        try:
            while waiting:
                first = waiting[0]
                same = [w for w in waiting if w.speaker == first.speaker]
                left = [w for w in waiting if w.speaker != first.speaker]
                taken, late = same[:MAX_EVENTS], same[MAX_EVENTS:]
                waiting.clear()
                waiting.extend(left + late)
                now = self._clock()
                events = [_wire.aged(w.event, now - w.came) for w in taken]
                await self._send(url, _wire.encode_events(events), first.headers)
        finally:
            del self._tasks[url], self._waiting[url]

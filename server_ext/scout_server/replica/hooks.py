"""Where a scheduling policy plugs into the batch scheduler; the defaults are vLLM's own rules."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from scout_server.replica.request import Request

__all__ = [
    "Admission",
    "AdmitAll",
    "FcfsQueue",
    "KeyedQueue",
    "LastVictim",
    "SchedulerView",
    "VictimChoice",
    "WaitingQueue",
]


class SchedulerView(Protocol):
    """What a hook may see of its replica; never a request's future."""

    @property
    def running(self) -> Sequence[Request]:
        """Running requests, in the order of their scheduling."""

    @property
    def waiting_count(self) -> int:
        """Number of waiting requests."""

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks in all."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""


class WaitingQueue(Protocol):
    """Answers: which waiting request comes next?"""

    def push(self, request: Request, now: float) -> None:
        """Add a request that arrived."""

    def push_back(self, request: Request, now: float) -> None:
        """Add a request that was preempted: FCFS puts it first."""

    def peek(self, now: float) -> Request | None:
        """Return the next request, or None when there is none; ties in order of submission."""

    def remove(self, request: Request) -> None:
        """Take *request* out; it waits here."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, in any order."""


class Admission(Protocol):
    """Answers: may this request, which is next, start now?"""

    def admit(self, request: Request, view: SchedulerView, now: float) -> bool:
        """Return False to hold back *request*, and with it everything behind it."""

    def horizon(self, now: float) -> float:
        """Return until when a refusal stands if nothing arrives, ends or is preempted."""


class VictimChoice(Protocol):
    """Answers: whose blocks are taken when the pool is full?"""

    def choose(self, running: Sequence[Request], needy: Request, now: float) -> int:
        """Return an index of *running*; *needy* itself is in it and may be chosen."""


class FcfsQueue:
    """First come, first served; preempted requests first: vLLM's default."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: deque[Request] = deque()

    def push(self, request: Request, now: float) -> None:
        """Add at the end."""
        self._items.append(request)

    def push_back(self, request: Request, now: float) -> None:
        """Add at the front."""
        self._items.appendleft(request)

    def peek(self, now: float) -> Request | None:
        """Return the first."""
        return self._items[0] if self._items else None

    def remove(self, request: Request) -> None:
        """Take *request* out; O(1) for the first."""
        if self._items[0] is request:
            self._items.popleft()
        else:
            self._items.remove(request)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order."""
        return iter(self._items)


class KeyedQueue:
    """
    Smallest key first, ties in order of submission.

    The key is computed when a request is pushed; call `rekey` when keys of waiting ones changed.
    """

    __slots__ = ("_heap", "_key", "_live", "_pushes")

    def __init__(self, key: Callable[[Request, float], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, int, Request]] = []
        self._live: dict[int, tuple[int, Request]] = {}
        self._pushes = 0

    def push(self, request: Request, now: float) -> None:
        """Add by key."""
        self._pushes += 1
        self._live[request.sequence] = (self._pushes, request)
        heapq.heappush(
            self._heap, (self._key(request, now), request.sequence, self._pushes, request)
        )

    def push_back(self, request: Request, now: float) -> None:
        """Add by key: a preempted request has no privilege beyond its key."""
        self.push(request, now)

    def peek(self, now: float) -> Request | None:
        """Return the request of the smallest key."""
        heap, live = self._heap, self._live
        while heap:
            _, sequence, push, request = heap[0]
            entry = live.get(sequence)
            if entry is not None and entry[0] == push:
                return request
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Take *request* out; KeyError when it does not wait here."""
        del self._live[request.sequence]
        if self._heap[0][3] is request:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._live) + 16:
            live = self._live
            self._heap = [e for e in self._heap if e[1] in live and live[e[1]][0] == e[2]]
            heapq.heapify(self._heap)

    def rekey(self, now: float) -> None:
        """Compute every key again."""
        self._heap = [(self._key(r, now), s, p, r) for s, (p, r) in self._live.items()]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order of pushing."""
        return (request for _, request in self._live.values())


class AdmitAll:
    """Admits whoever fits: vLLM's default."""

    __slots__ = ()

    def admit(self, request: Request, view: SchedulerView, now: float) -> bool:
        """Return True."""
        return True

    def horizon(self, now: float) -> float:
        """Return infinity: it never refuses."""
        return math.inf


class LastVictim:
    """Preempts the request that was scheduled last: vLLM's default."""

    __slots__ = ()

    def choose(self, running: Sequence[Request], needy: Request, now: float) -> int:
        """Return the last index."""
        return len(running) - 1

"""vLLM's queue of waiting requests in an order that looks at programs, not only at requests."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from scout_server.policy.waiting import AgedQueue, WaitingView, order_named
from scout_server.vllm.breaker import Breaker

__all__ = ["ProgramQueue", "Programs", "Waiter", "WaiterQueue"]


class Waiter(Protocol):
    """What the queue asks of a request."""

    request_id: str
    num_prompt_tokens: int
    arrival_time: float
    """When the API server got it; used only where our order is out."""
    status: Any


class WaiterQueue(Protocol):
    """vLLM's interface of a queue of requests."""

    def add_request(self, request: Any) -> None:
        """Add a request that arrived."""

    def pop_request(self) -> Any:
        """Take out the request that comes next; IndexError when nobody waits."""

    def peek_request(self) -> Any:
        """Return the request that comes next; IndexError when nobody waits."""

    def prepend_request(self, request: Any) -> None:
        """Put a request before all others."""

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put requests before all others, each before the one named before it."""

    def remove_request(self, request: Any) -> None:
        """Take a request out; ValueError when it does not wait here."""

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take requests out; those that do not wait here are passed over."""

    def __len__(self) -> int:
        """Return how many wait."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Iterate in the order of service as it stands."""
        ...


@dataclass(slots=True)
class _Program:
    arrival: float
    attained: int = 0
    served: bool = False


class Programs:
    """When each session came and what it got so far; the sessions used last, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[tuple[str, str], _Program] = OrderedDict()
        self._views: dict[str, WaitingView] = {}
        self._of: dict[str, _Program] = {}

    def arrived(
        self, request_id: str, tenant: str, session: str | None, prompt_tokens: int, now: float
    ) -> None:
        """Note a request, before it waits; without a session it is a program of its own."""
        program = None if session is None else self._sessions.get((tenant, session))
        if program is None:
            program = _Program(now)
        if session is not None:
            self._sessions[tenant, session] = program
            self._sessions.move_to_end((tenant, session))
            if len(self._sessions) > self._limit:
                self._sessions.popitem(last=False)
        self._of[request_id] = program
        self._views[request_id] = WaitingView(
            arrival=now,
            program_arrival=program.arrival,
            prompt_tokens=prompt_tokens,
            attained_tokens=program.attained,
            returning=program.served,
        )

    def view(self, request_id: str) -> WaitingView | None:
        """Return what an order may know of a request that has not ended."""
        return self._views.get(request_id)

    def ended(self, request_id: str, computed_tokens: int) -> None:
        """Note that a request ended and how many tokens were computed for it; 0: never served."""
        self._views.pop(request_id, None)
        program = self._of.pop(request_id, None)
        if program is not None:
            program.attained += max(0, computed_tokens)
            program.served = program.served or computed_tokens > 0


class ProgramQueue:
    """
    Waiting requests by one of the policy core's orders, with vLLM's interface.

    A request that has waited *max_wait_s* since it came to the engine goes before all that came
    after it; preempted requests go before all others, as in vLLM. A request that was skipped comes
    back to its old place. What waits is kept in plain dicts, so that after a fault of ours, here or
    elsewhere, vLLM's own queue has all of it, in order of arrival.
    """

    def __init__(
        self,
        order: str,
        programs: Programs,
        breaker: Breaker,
        stock: Callable[[], WaiterQueue],
        *,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order = order
        self.max_wait_s = max_wait_s
        self._programs = programs
        self._breaker = breaker
        self._make_stock = stock
        self._clock = clock
        self._aged: AgedQueue[str] = AgedQueue(order_named(order), max_wait_s=max_wait_s)
        self._front: dict[str, Waiter] = {}
        """Preempted requests; the last one goes first."""
        self._rest: dict[str, Waiter] = {}
        self._head: str | None = None
        """Who was shown last as the next: vLLM prepares it before it takes it out."""
        self._stock: WaiterQueue | None = None

    def add_request(self, request: Waiter) -> None:
        """Add a request that arrived."""
        if (stock := self._out()) is not None:
            stock.add_request(request)
            return
        self._rest[request.request_id] = request
        try:
            self._aged.push(request.request_id, self._view(request))
        except Exception as error:
            self._fault("add", error)

    def peek_request(self) -> Waiter:
        """Return the request that comes next; IndexError when nobody waits."""
        if (stock := self._out()) is None:
            if not len(self):
                raise IndexError("peek from an empty queue")
            try:
                head = self._aged.peek(now=self._clock())
                if head is not None and (found := self._find(head)) is not None:
                    self._head = head
                    return found
                raise RuntimeError(f"the order named {head!r}, who does not wait")
            except Exception as error:
                stock = self._fault("peek", error)
        request: Waiter = stock.peek_request()
        return request

    def pop_request(self) -> Waiter:
        """Take out the request that was shown last, or comes next; IndexError if nobody waits."""
        if self._stock is None and not self._breaker.open and self._head is None:
            self.peek_request()
        if (stock := self._out()) is not None:
            popped: Waiter = stock.pop_request()
            return popped
        assert self._head is not None
        request = self._find(self._head)
        assert request is not None
        self._take([request])
        return request

    def prepend_request(self, request: Waiter) -> None:
        """Put back a preempted request before all others, or a skipped one where it stood."""
        if getattr(request.status, "name", "") != "PREEMPTED":
            self.add_request(request)
            return
        if (stock := self._out()) is not None:
            stock.prepend_request(request)
            return
        self._front[request.request_id] = request
        try:
            self._aged.push_back(request.request_id)
        except Exception as error:
            self._fault("prepend", error)

    def prepend_requests(self, requests: Iterable[Waiter]) -> None:
        """Put back requests, each preempted one before the one named before it."""
        if (stock := self._out()) is not None:
            stock.prepend_requests(requests)
            return
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Waiter) -> None:
        """Take *request* out; ValueError when it does not wait here."""
        if (stock := self._out()) is not None:
            stock.remove_request(request)
        elif self._find(request.request_id) is None:
            raise ValueError(f"request {request.request_id} does not wait here")
        else:
            self._take([request])

    def remove_requests(self, requests: Iterable[Waiter]) -> None:
        """Take requests out; those that do not wait here are passed over."""
        if (stock := self._out()) is not None:
            stock.remove_requests(requests)
        else:
            self._take(r for r in requests if self._find(r.request_id) is not None)

    def __len__(self) -> int:
        """Return how many wait."""
        stock = self._stock
        return len(self._front) + len(self._rest) if stock is None else len(stock)

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return len(self) > 0

    def __iter__(self) -> Iterator[Waiter]:
        """Iterate in the order of service, ageing left out."""
        if (stock := self._out()) is None:
            try:
                return iter([{**self._rest, **self._front}[key] for key in self._aged])
            except Exception as error:
                stock = self._fault("iterate", error)
        return iter(stock)

    def handed_back(self) -> WaiterQueue:
        """Return vLLM's own queue with everybody who waits; ours must not be used any more."""
        if self._stock is None:
            stock = self._make_stock()
            rest = sorted(self._rest.values(), key=lambda request: request.arrival_time)
            waiting = [*reversed(self._front.values()), *rest]
            head = None if self._head is None else self._find(self._head)
            if head is not None:  # it was shown, so it is what must be taken out next
                waiting.remove(head)
                waiting.insert(0, head)
            for request in waiting:
                stock.add_request(request)
            self._stock = stock
            self._front.clear()
            self._rest.clear()
        return self._stock

    def _out(self) -> WaiterQueue | None:
        """Return vLLM's own queue if it has taken over."""
        if self._stock is None and self._breaker.open:
            return self.handed_back()
        return self._stock

    def _fault(self, place: str, error: Exception) -> WaiterQueue:
        self._breaker.trip(f"waiting {place}", error)
        return self.handed_back()

    def _find(self, request_id: str) -> Waiter | None:
        return self._front.get(request_id) or self._rest.get(request_id)

    def _take(self, requests: Iterable[Waiter]) -> None:
        gone = [request.request_id for request in requests]
        for request_id in gone:
            if self._front.pop(request_id, None) is None:
                self._rest.pop(request_id, None)
            if self._head == request_id:
                self._head = None
        try:
            for request_id in gone:
                self._aged.remove(request_id)
        except Exception as error:
            self._fault("remove", error)

    def _view(self, request: Waiter) -> WaitingView:
        view = self._programs.view(request.request_id)
        if view is None:
            now = self._clock()
            tokens = request.num_prompt_tokens
            view = WaitingView(arrival=now, program_arrival=now, prompt_tokens=tokens)
        return view

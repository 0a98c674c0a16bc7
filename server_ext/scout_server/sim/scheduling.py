"""In which order a replica admits waiting turns: the policy core's orders, behind its hook."""

from collections.abc import Callable
from typing import Protocol

from scout_sdk._errors import ConfigError
from scout_server.policy.waiting import ORDERS, WaitingView, order_named
from scout_server.replica import FcfsQueue, KeyedQueue, Request, WaitingQueue
from scout_server.sim.views import TurnView

__all__ = ["SCHEDULERS", "ScheduledTurn", "make_queue"]


class ScheduledTurn(Protocol):
    """What the caller attaches to a request, so that the order can see its program's past."""

    @property
    def view(self) -> TurnView:
        """The turn as it was released."""

    @property
    def attained_tokens(self) -> int:
        """Tokens computed for its program so far."""


SCHEDULERS = tuple(sorted(ORDERS))
"""Names of the orders; fcfs is the engine's own."""


def make_queue(name: str, turn_of: Callable[[Request], ScheduledTurn]) -> WaitingQueue:
    """Return the waiting queue called *name*; ConfigError with the known names otherwise."""
    if name == "fcfs":
        return FcfsQueue()
    if name not in ORDERS:
        msg = f"unknown scheduler {name!r}; known: {', '.join(SCHEDULERS)}"
        raise ConfigError(msg)
    order = order_named(name)

    def key(request: Request, now: float) -> float:
        turn = turn_of(request)
        return order(
            WaitingView(
                arrival=request.arrival,
                program_arrival=turn.view.program_arrival,
                prompt_tokens=turn.view.prompt_tokens,
                attained_tokens=turn.attained_tokens,
                returning=turn.view.turn > 1,
            )
        )

    return KeyedQueue(key)

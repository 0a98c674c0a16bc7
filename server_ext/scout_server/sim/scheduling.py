"""In which order a replica admits waiting turns: policies behind the batch scheduler's hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scout_sdk._errors import ConfigError
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


@dataclass(frozen=True, slots=True)
class _Order:
    """A queue order by key; smaller goes first."""

    key: Callable[[TurnView, int, float], float]


def _program_fcfs(turn: TurnView, attained: int, now: float) -> float:
    return turn.program_arrival


def _attained_service(turn: TurnView, attained: int, now: float) -> float:
    # Autellix (2502.13965) orders by the program's attained service, in discrete levels so that
    # programs of about equal service are first come, first served.
    return float((attained + 1).bit_length())


def _shortest_first(turn: TurnView, attained: int, now: float) -> float:
    return float(turn.prompt_tokens)


def _ready_first(turn: TurnView, attained: int, now: float) -> float:
    # Programs that come back from a tool before new ones, then few tokens first (ThunderAgent).
    return (0.0 if turn.turn > 1 else 1e12) + turn.prompt_tokens


_ORDERS = {
    "program-fcfs": _Order(_program_fcfs),
    "attained-service": _Order(_attained_service),
    "shortest-first": _Order(_shortest_first),
    "ready-first": _Order(_ready_first),
}

SCHEDULERS = ("fcfs", *sorted(_ORDERS))
"""Names of the orders; fcfs is vLLM's own."""


def make_queue(name: str, turn_of: Callable[[Request], ScheduledTurn]) -> WaitingQueue:
    """Return the waiting queue called *name*; ConfigError with the known names otherwise."""
    if name == "fcfs":
        return FcfsQueue()
    if name not in _ORDERS:
        msg = f"unknown scheduler {name!r}; known: {', '.join(SCHEDULERS)}"
        raise ConfigError(msg)
    order = _ORDERS[name].key

    def key(request: Request, now: float) -> float:
        turn = turn_of(request)
        return order(turn.view, turn.attained_tokens, now)

    return KeyedQueue(key)

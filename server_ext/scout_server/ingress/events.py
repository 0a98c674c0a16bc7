"""Messages of the side channel, within what their tenant may send."""

from dataclasses import dataclass

from scout_sdk import _wire
from scout_sdk._hints import SessionEvent
from scout_server.ingress.settings import IngressSettings
from scout_server.policy.budgets import Budget, EventBudget

__all__ = ["EventDesk", "Taken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What becomes of one message."""

    events: tuple[SessionEvent, ...]
    """What the core is told, in the message's order."""
    rejected: int
    """Entries that are no event."""
    clipped: int
    """Events that are over the tenant's budget, and are not told."""

    @property
    def status(self) -> int:
        """HTTP status of the answer: 202, or 400 where nothing was understood."""
        return 202 if self.events or self.clipped else 400

    def answer(self) -> dict[str, int]:
        """Return the body of the answer; `clipped` is in it where there are any."""
        answer = {"accepted": len(self.events), "rejected": self.rejected}
        return answer | {"clipped": self.clipped} if self.clipped else answer


class EventDesk:
    """Takes messages of the side channel; keeps each tenant's budget of events a second."""

    def __init__(self, settings: IngressSettings) -> None:
        self._budget = EventBudget(Budget(events_per_s=settings.events_per_s))

    def take(self, body: bytes, tenant: str, *, now: float) -> Taken:
        """
        Read *body*; *now* is seconds on any clock that does not go back. Never raises.

        Of a message over the budget the newest events are kept: they say what holds now.
        """
        events, rejected = _wire.decode_events(body)
        granted = self._budget.take(tenant, len(events), now=now) if events else 0
        kept = tuple(events[len(events) - granted :])
        return Taken(events=kept, rejected=rejected, clipped=len(events) - granted)

"""TAO before the replicas: turns are held until the engine of the policy core lets them in."""

from collections.abc import Sequence
from dataclasses import dataclass

from scout_sdk._hints import Hints, SessionEvent
from scout_server.policy.engine import TaoEngine, TaoSettings, Turn
from scout_server.replica import Request
from scout_server.sim.views import TurnView

__all__ = ["Gate", "Placed"]


@dataclass(frozen=True, slots=True)
class Placed:
    """One held turn that may run now."""

    key: str
    replica: int


class Gate:
    """
    The same TAO engine that the gateway drives, on simulated time.

    A turn's size is its prompt and the mean output so far: nobody tells it the true one.
    """

    def __init__(
        self, settings: TaoSettings, *, replicas: int, capacity_tokens: int, slots: int
    ) -> None:
        self._engine = TaoEngine(settings)
        for index in range(replicas):
            self._engine.set_node(str(index), capacity=capacity_tokens, slots=slots)
        self._outputs = 0
        self._finished = 0

    @property
    def held(self) -> int:
        """Number of turns that wait here."""
        return len(self._engine.waiting)

    def submit(self, key: str, view: TurnView, hints: Hints | None, now: float) -> None:
        """Hold one turn."""
        mean = self._outputs // self._finished if self._finished else 256
        self._engine.submit(
            Turn(
                key=key,
                session=view.session,
                tokens=view.prompt_tokens + mean,
                tenant=view.tenant,
                hints=hints,
            ),
            now=now,
        )

    def decide(self, now: float) -> Sequence[Placed]:
        """Return who may run now, and where."""
        applied = self._engine.step(now=now)
        return [Placed(p.key, int(p.node)) for p in applied.placements]

    def finish(self, request: Request, now: float) -> None:
        """Say that a turn that was let in has ended."""
        self._outputs += request.generated
        self._finished += 1
        self._engine.finish(
            request.request_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.generated,
            cached_tokens=request.cached_tokens,
            tools=request.tools,
            now=now,
        )

    def cancel(self, keys: Sequence[str], now: float) -> None:
        """Forget turns that will never end: a replica refused one, and its program with it."""
        for key in keys:
            self._engine.cancel(key, now=now)

    def event(self, event: SessionEvent, tenant: str, now: float) -> None:
        """Pass on what a client says between turns."""
        self._engine.event(event, tenant=tenant, now=now)

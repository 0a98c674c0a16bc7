"""What the simulated clients say of their programs."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from scout_sdk._hints import Hints, ToolEvent, ToolState
from scout_server.sim.programs import ProgramRun
from scout_server.sim.views import TurnView

__all__ = ["Clients", "HintSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintSettings:
    """What the simulated clients say."""

    identity: bool = True
    """Session, agent and turn."""
    tools: bool = True
    """Start and end of tools, with the announced duration where the trace has one."""
    final: bool = True
    """The end of a session."""
    share: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Share of the programs that send hints at all."""


class Clients:
    """Says what clients say: which programs send hints, and which hints a turn has."""

    def __init__(self, settings: HintSettings) -> None:
        self.settings = settings

    def says(self, run: ProgramRun) -> bool:
        """Return whether a program sends hints; which ones do depends on its number only."""
        if not self.settings.identity or not self.settings.share:
            return False
        # A multiplicative hash spreads the hinted programs evenly.
        return (run.number * 2654435761 % 4096) < self.settings.share * 4096

    def hints(self, run: ProgramRun, index: int, view: TurnView) -> Hints | None:
        """Return the hints of one turn, or None."""
        if not self.says(run):
            return None
        turn = run.program.turns[index]
        events: tuple[ToolEvent, ...] = ()
        if self.settings.tools and turn.tool is not None and turn.parents:
            events = (ToolEvent(name=turn.tool, state=ToolState.ENDED),)
        return Hints(
            session=view.session,
            agent=turn.agent,
            turn=view.turn,
            parent=run.program.program if turn.session else None,
            tools=events,
        )

"""What a replica reports: what a step brought, what it counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from scout_server.replica.request import Request

__all__ = ["Counters", "StepResult"]


@dataclass(slots=True)
class Counters:
    """What a replica counted since its start; take differences."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    queried_tokens: int = 0
    """Prompt tokens looked up in the cache, without resumed and warm-up requests."""
    hit_tokens: int = 0
    """Those of them that were found."""
    prompt_tokens: int = 0
    """Prompt tokens computed or found, warm-ups included, resumptions not."""
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens found missing when a preempted request started again."""
    busy_s: float = 0.0


class StepResult:
    """What the end of a step brought; valid until the replica's next call."""

    __slots__ = ("advanced", "finished", "preempted", "steps", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self.steps = 0
        """Engine steps that ended; more than 1 after a run of decode steps."""
        self.advanced: Sequence[Request] = ()
        """Requests that took part in the step; those with a new token have more `generated`."""
        self.finished: list[Request] = []
        self.preempted: Sequence[Request] = ()
        """Requests that lost their blocks when the next step was scheduled."""

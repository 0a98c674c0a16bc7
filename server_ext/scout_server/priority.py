"""Request priorities whose direction is part of the type: vLLM serves low first, Dynamo high."""

import enum
from dataclasses import dataclass

__all__ = ["Polarity", "Priority"]


class Polarity(enum.Enum):
    """Which end of the scale is served first."""

    LOW_FIRST = "low-first"
    """vLLM's `priority` and `X-Vllm-Priority`."""
    HIGH_FIRST = "high-first"
    """Dynamo's `nvext.agent_hints.priority`, SGLang's `priority`."""


@dataclass(frozen=True, slots=True)
class Priority:
    """A priority as its sender meant it; 0 is the neutral value in either direction."""

    value: int
    polarity: Polarity

    def as_(self, polarity: Polarity) -> int:
        """Return the number that says the same on a scale of *polarity*."""
        return self.value if polarity is self.polarity else -self.value

"""Prompt tokens and hits by agent, in a bounded number of names that fit a metric's labels."""

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["OTHER", "AgentTokens", "AgentUsage"]

OTHER = "other"
"""Name under which everything is counted that has no name of its own."""
_DECAY_EVERY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUsage:
    """Totals of one agent, over all tenants, since it got a name of its own."""

    name: str
    requests: int
    prompt_tokens: int
    """Prompt tokens of requests that ended after they had been scheduled; each request once."""
    cached_tokens: int
    """Of those, tokens found in the cache when the request was first scheduled."""


class AgentTokens:
    """
    Counts by agent for the *limit* agents that lately asked for most; the rest counts as `other`.

    Who asks for more than the least of the named takes its place: that one's totals end, and begin
    at zero if it comes back, as Prometheus expects of a counter. `other` only grows.
    """

    def __init__(self, limit: int = 24) -> None:
        self._limit = limit
        self._named: dict[str, list[int]] = {}
        self._weights: OrderedDict[str, float] = OrderedDict()
        """Prompt tokens lately, of the named and of as many candidates as there are names."""
        self._other = [0, 0, 0]
        self._records = 0

    def record(self, name: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one request."""
        self._records += 1
        if self._records % _DECAY_EVERY == 0:
            for each in self._weights:
                self._weights[each] /= 2
        self._weigh(name, prompt_tokens)
        if name not in self._named and name != OTHER:
            self._promote(name)
        row = self._named.get(name, self._other)
        row[0] += 1
        row[1] += prompt_tokens
        row[2] += cached_tokens

    def totals(self) -> tuple[AgentUsage, ...]:
        """Return the totals by name, `other` last."""
        rows = [*sorted(self._named.items()), (OTHER, self._other)]
        return tuple(
            AgentUsage(name=name, requests=n, prompt_tokens=prompt, cached_tokens=cached)
            for name, (n, prompt, cached) in rows
        )

    def _weigh(self, name: str, tokens: int) -> None:
        self._weights[name] = self._weights.get(name, 0.0) + tokens
        self._weights.move_to_end(name)
        if len(self._weights) > 2 * self._limit:
            oldest = next(each for each in self._weights if each not in self._named)
            del self._weights[oldest]

    def _promote(self, name: str) -> None:
        if len(self._named) >= self._limit:
            least = min(self._named, key=lambda each: (self._weights[each], each))
            if self._weights[name] <= self._weights[least]:
                return
            del self._named[least]
        self._named[name] = [0, 0, 0]

"""What a server reads off the traffic of clients that may know nothing of Scout."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from scout_server.policy.runtime import PolicySettings

__all__ = ["IngressSettings", "features"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """Settings of what is read off requests, responses and events."""

    foreign_hints: bool = True
    """Read the session headers and hints of other clients; docs/foreign-hints.md lists them."""
    tool_calls: bool = True
    """Read tool calls off responses, to know when their sessions come back."""
    events_per_s: Annotated[float, Ge(0), Le(1e6)] = 200.0
    """Side-channel events a second that one tenant may send on average; ten seconds' worth may
    come at once."""


def features(policy: PolicySettings, ingress: IngressSettings) -> list[str]:
    """Return what a server with these settings takes, for its capabilities."""
    found = ["outcome", "retention"]
    if policy.hints:
        found += ["events", "hints"]
        if ingress.foreign_hints:
            found.append("foreign-hints")
    if ingress.tool_calls:
        found.append("tool-calls")
    return sorted(found)

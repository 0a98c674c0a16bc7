"""The pure core: told facts and the time, returns values. No I/O, clock, randomness or engine."""

from scout_server.policy.facts import (
    UNHASHED,
    UNOWNED,
    Assignment,
    Finish,
    FinishFacts,
    RequestFacts,
    Segment,
)
from scout_server.policy.readout import AgentState, CoreState
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.runtime import PolicyCore, PolicySettings

__all__ = [
    "UNHASHED",
    "UNOWNED",
    "AgentState",
    "Assignment",
    "CoreState",
    "Finish",
    "FinishFacts",
    "PolicyCore",
    "PolicySettings",
    "RequestFacts",
    "RetentionOrder",
    "Segment",
]

"""What one API server keeps for reading what arrives: settings, budgets, the key of its seals."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from scout_server.config import load
from scout_server.ingress import EventDesk, IngressSettings, RequestReader
from scout_server.ingress.settings import features
from scout_server.policy.runtime import PolicySettings
from scout_server.tenancy import TenancySettings
from scout_server.vllm.settings import VllmSettings, document_of

__all__ = ["FrontDoor", "front_door"]


class FrontDoor:
    """One for each API server; belongs to its event loop."""

    def __init__(self, document: Mapping[str, object], *, prioritises: bool) -> None:
        """Raises ConfigError, which lists all that is wrong with *document*."""
        settings = load(document)
        policy = settings.of(PolicySettings)
        self.ingress = settings.of(IngressSettings)
        self.vllm = settings.of(VllmSettings)
        self.policy = policy
        self.prioritises = prioritises
        """Whether the engine has an order of priorities; vLLM refuses them otherwise."""
        self.key = secrets.token_bytes(32)
        self.reader = RequestReader(
            self.ingress,
            settings.of(TenancySettings),
            max_agents=policy.max_agents,
            max_sessions=policy.max_sessions,
            uses=frozenset({"priority"}) if prioritises else frozenset(),
        )
        self.desk = EventDesk(self.ingress)

    @property
    def identifies(self) -> bool:
        """Whether the engine wants to know whose requests are whose."""
        return self.policy.hints or self.policy.fingerprints

    def features(self) -> list[str]:
        """Return what this server takes."""
        return features(self.policy, self.ingress)

    @staticmethod
    def now() -> float:
        """Return the time by which budgets are kept, in seconds."""
        return time.monotonic()


def front_door(state: Any, args: Any = None) -> FrontDoor:
    """Return the front door of the server whose app has *state*, made when new."""
    kept = getattr(state, "scout_front_door", None)
    if isinstance(kept, FrontDoor):
        return kept
    if args is None:
        args = getattr(state, "args", None)
    policy = str(getattr(args, "scheduling_policy", "fcfs"))
    door = FrontDoor(
        document_of(getattr(args, "additional_config", None)),
        prioritises=policy.rpartition(".")[2].lower() == "priority",
    )
    if state is not None:
        state.scout_front_door = door
    return door

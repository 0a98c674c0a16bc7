"""Which tenants name more agents and sessions than their budget has room for."""

from collections import OrderedDict
from dataclasses import dataclass, field

from scout_sdk._hints import Hints

__all__ = ["Crowding"]

_MAX_REMEMBERED = 65_536
"""Names of all tenants together; the tenant seen least recently is forgotten."""


@dataclass(slots=True)
class _Names:
    agents: OrderedDict[int, None] = field(default_factory=OrderedDict)
    sessions: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.agents) + len(self.sessions)


class Crowding:
    """
    Counts the distinct agents and sessions of each tenant as the policy core does.

    A server whose core runs in another process cannot ask it what it forgot; both forget by the
    same rule, so counting here tells. Only hashes are kept, a bounded number of them.
    """

    def __init__(self, *, max_agents: int, max_sessions: int) -> None:
        self._max_agents = max_agents
        self._max_sessions = max_sessions
        self._tenants: OrderedDict[str, _Names] = OrderedDict()
        self._size = 0

    def note(self, tenant: str, hints: Hints) -> list[str]:
        """Note a request; return the fields whose table was full, so that another was forgotten."""
        names = self._tenants.get(tenant)
        if names is None:
            names = self._tenants[tenant] = _Names()
        else:
            self._tenants.move_to_end(tenant)
        before = len(names)
        full = []
        agent = hints.agent or hints.path
        if agent and _full(names.agents, agent, self._max_agents):
            full.append("agent" if hints.agent else "path")
        if hints.session and _full(names.sessions, hints.session, self._max_sessions):
            full.append("session")
        self._size += len(names) - before
        while self._size > _MAX_REMEMBERED and len(self._tenants) > 1:
            _, gone = self._tenants.popitem(last=False)
            self._size -= len(gone)
        return full


def _full(table: OrderedDict[int, None], name: str, limit: int) -> bool:
    key = hash(name)
    if key in table:
        table.move_to_end(key)
        return False
    table[key] = None
    if len(table) <= limit:
        return False
    table.popitem(last=False)
    return True

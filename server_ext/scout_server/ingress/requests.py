"""A request's headers and body become what Scout knows of it before it runs."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scout_sdk import _wire
from scout_sdk._hints import HintOutcome, Hints
from scout_sdk._limits import MAX_HEADER_LINES
from scout_server import foreign
from scout_server.ingress.crowding import Crowding
from scout_server.ingress.settings import IngressSettings
from scout_server.priority import Priority
from scout_server.tenancy import TenancySettings, tenant_of

__all__ = ["Arrival", "RequestReader"]

_log = logging.getLogger("scout")

Headers = Mapping[str, str] | Iterable[tuple[bytes, bytes]]

_USED = (HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.DEFERRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What is known of a request before it runs."""

    tenant: str = ""
    """Opaque id of whom it belongs to; empty: everybody without credentials."""
    hints: Hints | None = None
    """Our own headers, completed by what others say; None: neither says anything."""
    outcomes: Mapping[str, HintOutcome] = field(default_factory=dict)
    """What becomes of each field that was sent; the X-Scout-Outcome header."""
    priority: Priority | None = None
    expected_output_tokens: int | None = None

    def ignored(self) -> "Arrival":
        """Return the same request at an engine that uses no hints."""
        outcomes = {
            name: HintOutcome.IGNORED if outcome in _USED else outcome
            for name, outcome in self.outcomes.items()
        }
        return Arrival(tenant=self.tenant, outcomes=outcomes)


class RequestReader:
    """
    Reads requests: one for each server, because it remembers which tenants are over their budget.

    *uses* names what the server does with a request beyond its identity: `priority`,
    `expected_output_tokens`; what is not used is reported as ignored. Never raises.
    """

    def __init__(
        self,
        settings: IngressSettings,
        tenancy: TenancySettings,
        *,
        max_agents: int,
        max_sessions: int,
        uses: frozenset[str] = frozenset(),
    ) -> None:
        self._settings = settings
        self._tenancy = tenancy
        self._unused = frozenset({"priority", "expected_output_tokens"}) - uses
        self._crowding = Crowding(max_agents=max_agents, max_sessions=max_sessions)
        self._failed = False

    def tenant(self, headers: Headers) -> str:
        """Return whom a message with these headers belongs to."""
        return tenant_of(names_and_values(headers), self._tenancy)

    def shown(self, core: object, headers: Headers) -> object:
        """Return what the sender of *headers* may see of a core's state, given as plain values."""
        if not self._tenancy.private_state or not isinstance(core, dict):
            return core
        tenant = self.tenant(headers)
        agents = core.get("agents")
        own = [
            agent
            for agent in (agents if isinstance(agents, list | tuple) else ())
            if isinstance(agent, dict) and agent.get("tenant") == tenant
        ]
        return {**core, "agents": own}

    def read(self, headers: Headers, body: Mapping[str, object] | None = None) -> Arrival:
        """
        Return what *headers* and *body* (the parsed JSON object, where there is one) say.

        Our own headers win field by field. An identity beyond the tenant's budget is taken and
        reported as clipped: the one least recently used is forgotten for it.
        """
        named = names_and_values(headers)
        tenant = tenant_of(named, self._tenancy)
        own = _wire.decode(headers.items() if isinstance(headers, Mapping) else headers)
        outcomes = dict(own.outcomes)
        other = foreign.Foreign()
        hints = own.hints
        try:
            if self._settings.foreign_hints:
                other = foreign.read(named, body)
                hints = foreign.merge(own.hints, other)
                outcomes = {**other.outcomes, **outcomes}
            for name in self._unused & outcomes.keys():
                outcomes[name] = HintOutcome.IGNORED
            if hints is not None:
                for name in self._crowding.note(tenant, hints):
                    if outcomes.get(name) is HintOutcome.ACCEPTED:
                        outcomes[name] = HintOutcome.CLIPPED
        except Exception:  # a hint never fails a request
            hints = own.hints
            if not self._failed:
                self._failed = True
                _log.exception("scout: the hints of another client could not be read")
        return Arrival(
            tenant=tenant,
            hints=hints,
            outcomes=outcomes,
            priority=other.priority,
            expected_output_tokens=other.expected_output_tokens,
        )


def names_and_values(headers: Headers) -> dict[str, str]:
    """
    Return headers by lower-case name; the values of repeated ones are joined, as HTTP says.

    A value that a client put beside a trusted proxy's therefore names neither's tenant.
    """
    found: dict[str, str] = {}
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    for count, (raw_name, raw_value) in enumerate(pairs):
        if count >= MAX_HEADER_LINES:
            break
        name = raw_name if isinstance(raw_name, str) else raw_name.decode("latin-1")
        value = raw_value if isinstance(raw_value, str) else raw_value.decode("latin-1")
        name = name.lower()
        if name in found and found[name] != value:
            value = f"{found[name]}, {value}"
        found[name] = value
    return found

"""How a router chooses a replica: by asking the pool, and without it when the pool is gone."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from scout_server.ray import notes
from scout_server.ray.calls import NodeFacts, Placed, PoolGoneError, Refusal, Ticket
from scout_server.tao.asked import Asked

__all__ = ["PoolLink", "Routing"]

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 65536
_TRIES = 3
_GRACE_S = 10.0


class PoolLink(Protocol):
    """The way to the pool; on a router's own event loop."""

    async def found(self) -> int:
        """Return a number that changes with every new pool; PoolGoneError when there is none."""

    async def place(
        self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
    ) -> Placed | Refusal:
        """Wait until a turn has room or is refused; PoolGoneError when the pool dies."""

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the pool and forget it; never raises."""


class Routing:
    """
    The decisions of one router, by names of replicas.

    Placing is idempotent by the turn's own key: Serve may ask again for the same request when a
    replica was full or unreachable (and its request ids are shared by all calls that one HTTP
    request makes, so they are no keys). Nothing here raises, but for cancellation: a fault in a
    router would leave its request waiting for ever.
    """

    def __init__(self, link: PoolLink, *, grace_s: float = _GRACE_S) -> None:
        self._link = link
        self._grace_s = grace_s
        self._facts: tuple[NodeFacts, ...] = ()
        self._told = 0
        self._sent: OrderedDict[tuple[str, int], str] = OrderedDict()

    def update(self, replicas: Mapping[str, NodeFacts]) -> None:
        """Membership or load changed."""
        self._facts = tuple(replicas[name] for name in sorted(replicas))
        self._link.tell("set_nodes", self._facts)

    async def repeat(self, period_s: float) -> None:
        """
        Say again and again which replicas there are; never ends.

        Serve tells a router of changes only: a pool that came after a dead one would know no
        replica until the next request, which may wait for the pool to be well.
        """
        while True:
            await asyncio.sleep(period_s)
            self._link.tell("set_nodes", self._facts)

    def died(self, name: str) -> None:
        """A replica's process is gone."""
        self._facts = tuple(f for f in self._facts if f.name != name)
        self._link.tell("lose_node", name)

    def routed(self, ticket: Ticket) -> None:
        """A replica took the call."""
        if ticket.asked is not None:
            self._sent.pop((ticket.asked.key, ticket.attempt), None)

    async def choose(self, ticket: Ticket | None, names: Sequence[str]) -> list[list[str]]:
        """Return *names* in ranks, the first first. A placed turn goes nowhere else."""
        everywhere = [list(names)]
        if ticket is None or not names:
            return everywhere
        if ticket.asked is None:
            if ticket.node is not None and ticket.node in names:
                return [[ticket.node], [n for n in names if n != ticket.node]]
            return everywhere
        try:
            node = await self._place(ticket, ticket.asked, names)
        except PoolGoneError:
            notes.placed(ticket.asked.key, None)
            return everywhere
        except Exception:
            logger.exception("scout: the router failed; a request goes to any replica")
            return everywhere
        return everywhere if node is None else [[node]]

    async def _place(self, ticket: Ticket, asked: Asked, names: Sequence[str]) -> str | None:
        await self._introduce()
        key, avoid = (asked.key, ticket.attempt), ticket.avoid
        for _ in range(_TRIES):
            if (before := self._sent.get(key)) is not None:
                avoid |= {before}  # asked again: that replica was full, or is not there
            answer = await self._ask(asked, ticket, avoid)
            if isinstance(answer, Refusal):
                await self._refuse(asked, answer)
                return None
            self._sent[key] = answer.node
            if len(self._sent) > _MAX_REMEMBERED:
                self._sent.popitem(last=False)
            if answer.node in names:
                notes.placed(asked.key, answer)
                return answer.node
        raise PoolGoneError  # it knows other replicas than we do

    async def _introduce(self) -> None:
        """Tell a pool that is new to us which replicas there are."""
        pool = await self._link.found()
        if pool != self._told:
            self._told = pool
            self._link.tell("set_nodes", self._facts)

    async def _ask(self, asked: Asked, ticket: Ticket, avoid: frozenset[str]) -> Placed | Refusal:
        try:
            async with asyncio.timeout(ticket.timeout_s + self._grace_s):
                return await self._link.place(asked, ticket.attempt, avoid, ticket.timeout_s)
        except TimeoutError as error:
            raise PoolGoneError from error  # it hangs

    async def _refuse(self, asked: Asked, refusal: Refusal) -> None:
        """Let the ingress end the request; it cancels this very call."""
        if notes.refused(asked.key, refusal):
            await asyncio.sleep(self._grace_s)

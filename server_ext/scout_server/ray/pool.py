"""The one session pool and ledger of an application: what its deployment actor does."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from scout_sdk import SessionEvent
from scout_server.config import load
from scout_server.policy.admission import Plan
from scout_server.policy.placement import Placement
from scout_server.ray.calls import NodeFacts, Placed, Refusal
from scout_server.ray.settings import RaySettings
from scout_server.tao.asked import Asked, linked
from scout_server.tao.chains import Chains
from scout_server.tao.estimates import Estimates
from scout_server.tao.pool import Pool, PoolFullError
from scout_server.tao.trace import Entry, TracedEngine

__all__ = ["PoolActor"]

logger = logging.getLogger(__name__)

_MAX_ENDED = 16384
_MAX_DEAD = 1024


class PoolActor:
    """
    Holds turns until a plan gives them room; every router and ingress talks to this one object.

    All methods run on one event loop; decisions run off it, in a worker. Order of calls for a
    turn: place, then finish, cancel, or failed and place again, each with the number of the
    ingress's attempt; what comes twice, late or for unknown turns does nothing. An ingress that
    dies leaves turns behind, which their leases end.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.settings = load(document).of(RaySettings)
        self.engine = TracedEngine(self.settings.tao, entries=self.settings.trace_events)
        self.pool = Pool(self.settings, engine=self.engine)
        self._estimates = Estimates()
        self._chains = Chains()
        self._start: asyncio.Task[None] | None = None
        self._tick: asyncio.Task[None] | None = None
        self._waits: dict[str, asyncio.Task[str]] = {}
        self._asked: dict[str, tuple[Asked, int]] = {}
        """Turns on their way, each with the attempt that is."""
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Turn -> its last attempt that ended: a placement asked for later comes too late."""
        self._facts: dict[str, NodeFacts] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()

    # ---- turns -----------------------------------------------------------------------------

    async def place(
        self, asked: Asked, attempt: int, avoid: frozenset[str], timeout_s: float
    ) -> Placed | Refusal:
        """Wait until a turn has room; asked again for it, join the wait or place it anew."""
        await self._ready()
        if self._ended.get(asked.key, -1) >= attempt:
            return Refusal.GONE
        began = self.pool.clock()
        wait = self._waits.get(asked.key)
        if wait is None or wait.done():
            for outcome in asked.outcomes.values() if attempt == 0 else ():
                self.pool.meters.hints.labels(outcome.value).inc()
            if attempt:
                self.pool.meters.retries.inc()
            asked = linked(asked, self._chains)
            turn = self._estimates.turn(asked, avoid=avoid)
            wait = asyncio.create_task(self.pool.acquire(turn, timeout_s=timeout_s))
            self._waits[asked.key] = wait
            self._asked[asked.key] = (asked, attempt)
            wait.add_done_callback(lambda done: self._waited(asked.key, done))
        try:
            await asyncio.wait({wait})
        except asyncio.CancelledError:
            wait.cancel()
            raise
        if wait.cancelled():
            return Refusal.GONE
        fault = wait.exception()
        if fault is None:
            return Placed(node=wait.result(), held_s=self.pool.clock() - began)
        self._asked.pop(asked.key, None)
        if isinstance(fault, PoolFullError):
            return Refusal.FULL
        if isinstance(fault, TimeoutError):
            return Refusal.LATE
        raise fault

    async def finish(
        self,
        key: str,
        attempt: int,
        prompt_tokens: int | None,
        output_tokens: int | None,
        cached_tokens: int | None,
        tools: Sequence[tuple[str, float | None]],
    ) -> None:
        """A turn was answered whole."""
        known = self._end(key, attempt)
        self.pool.meters.requests.labels("served").inc()
        if known is None:
            return  # placed by a pool before this one, or by none
        asked, _ = known
        session = self.engine.ledger.sessions.get((asked.tenant, asked.session))
        self._estimates.learn(
            asked,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            first=session is not None and session.turns == 0,
        )
        self.pool.finish(
            key,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            tools=tools,
            final=asked.final or (asked.tentative and not tools),
        )

    async def cancel(self, key: str, attempt: int, outcome: str) -> None:
        """A turn ended otherwise, waiting or running; *outcome*, if any, labels the metric."""
        if outcome:
            self.pool.meters.requests.labels(outcome).inc()
        if self._asked.get(key, (None, attempt))[1] > attempt:
            return  # it is tried again already
        self._end(key, attempt)
        wait = self._waits.get(key)
        if wait is not None and not wait.done():
            wait.cancel()
        self.pool.cancel(key)  # in any case: a wait that has not begun gives nothing back

    async def failed(self, key: str, attempt: int) -> None:
        """An attempt ended before its first byte: the turn keeps its place for the next one."""
        if self._asked.get(key, (None, attempt))[1] > attempt:
            return
        self._note_end(key, attempt)
        wait = self._waits.get(key)
        if wait is not None and not wait.done():
            wait.cancel()

    async def count(self, outcome: str) -> None:
        """A request that needed no room ended."""
        self.pool.meters.requests.labels(outcome).inc()

    async def renew(self, running: Sequence[tuple[Asked, int, str]]) -> None:
        """
        Turns (with attempt and replica) that still run at one ingress.

        A pool that does not know one, since it is younger, books it: so a new pool soon knows
        what runs.
        """
        await self._ready()
        for asked, attempt, node in running:
            if asked.key in self.engine.ledger.bookings:
                self.pool.renew(asked.key)
            elif (
                self._ended.get(asked.key, -1) < attempt
                and asked.key not in self._waits
                and node in self.engine.ledger.nodes
            ):
                self._found(asked, attempt, node)

    def _found(self, asked: Asked, attempt: int, node: str) -> None:
        now = self.pool.clock()
        asked = linked(asked, self._chains)
        if not self.engine.submit(self._estimates.turn(asked), now=now):
            return
        placement = Placement(key=asked.key, session=asked.session, node=node, credit=0)
        plan = Plan(
            placements=(placement,),
            kept=(),
            deferred=(),
            reserved=dict(self.engine.reserved),
            exact=False,
            method="found",
            states=0,
            rounding_tokens=0,
        )
        if self.engine.apply(plan, now=now).placements:
            self._asked[asked.key] = (asked, attempt)
        else:
            self.engine.cancel(asked.key, now=now)

    def _waited(self, key: str, wait: asyncio.Task[str]) -> None:
        if self._waits.get(key) is wait:
            del self._waits[key]

    def _end(self, key: str, attempt: int) -> tuple[Asked, int] | None:
        self._note_end(key, attempt)
        return self._asked.pop(key, None)

    def _note_end(self, key: str, attempt: int) -> None:
        self._ended[key] = max(attempt, self._ended.get(key, -1))
        self._ended.move_to_end(key)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    # ---- replicas --------------------------------------------------------------------------

    async def set_nodes(self, facts: Sequence[NodeFacts]) -> None:
        """
        Replicas as a router sees them; the latest word counts, whoever says it.

        Not of one that is dead: other routers hear of that later, and its name never comes back.
        One that is missing takes no new turns, and is forgotten when nothing runs there.
        """
        await self._ready()
        given = {f.name: f for f in facts if f.name not in self._dead}
        for name, fact in given.items():
            self._size(fact)
            self._observe(fact)
            self._facts[name] = fact
        for name in [n for n in self.engine.ledger.nodes if n not in given]:
            if not self.engine.ledger.nodes[name].draining:
                self.engine.drain_node(name)
        self._forget_drained()
        self.pool.kick()

    async def lose_node(self, name: str) -> None:
        """A replica's process is gone, and with it what was cached and what ran there."""
        await self._ready()
        self._dead[name] = None
        if len(self._dead) > _MAX_DEAD:
            self._dead.popitem(last=False)
        if name in self.engine.ledger.nodes:
            self.engine.lose_node(name, forget=True)
        self._facts.pop(name, None)
        self.pool.kick()

    def _size(self, fact: NodeFacts) -> None:
        capacity = fact.capacity_tokens or self.settings.capacity_tokens
        node = self.engine.ledger.nodes.get(fact.name)
        if node is None or (node.capacity, node.slots) != (capacity, self.settings.slots):
            self.engine.set_node(fact.name, capacity=capacity, slots=self.settings.slots)
        elif node.draining:
            self.engine.drain_node(fact.name, draining=False)
        if fact.waiting is not None:
            pressed = fact.waiting > 0
            if self.engine.ledger.nodes[fact.name].pressed != pressed:
                self.engine.press_node(fact.name, pressed=pressed)

    def _observe(self, fact: NodeFacts) -> None:
        before = self._facts.get(fact.name)
        if fact.queried_tokens is None or fact.hit_tokens is None:
            return
        queried = (before.queried_tokens if before else None) or 0
        hit = (before.hit_tokens if before else None) or 0
        if fact.queried_tokens > queried and fact.hit_tokens >= hit:
            self.engine.observe_cache(
                fact.name,
                hit_tokens=fact.hit_tokens - hit,
                queried_tokens=fact.queried_tokens - queried,
            )

    def _forget_drained(self) -> None:
        for node in list(self.engine.ledger.nodes.values()):
            if node.draining and self.engine.ledger.used(node.name)[1] == 0:
                self.engine.lose_node(node.name, forget=True)
                self._facts.pop(node.name, None)

    # ---- side channel and views ------------------------------------------------------------

    async def events(self, events: Sequence[SessionEvent], tenant: str) -> dict[str, list[int]]:
        """Learn from the side channel; return which events each replica should be told."""
        await self._ready()
        return self.pool.events(events, tenant=tenant)

    async def metrics(self) -> bytes:
        """Return the metrics, named as the gateway's."""
        return self.pool.meters.text()

    async def state(self) -> dict[str, Any]:
        """Return the condition of the pool, without names of sessions."""
        ledger = self.engine.ledger
        nodes = {}
        for node in ledger.nodes.values():
            tokens, requests = ledger.used(node.name)
            nodes[node.name] = {
                "up": node.up,
                "draining": node.draining,
                "pressed": node.pressed,
                "capacity_tokens": node.capacity,
                "booked_tokens": tokens,
                "running": requests,
                "cache_rate": node.rate.value,
            }
        return {
            "nodes": nodes,
            "waiting": len(self.engine.waiting),
            "sessions": len(ledger.sessions),
        }

    async def sessions(self) -> list[dict[str, object]]:
        """Return every session."""
        return self.engine.view(now=self.pool.clock())

    async def trace(self) -> tuple[int, list[Entry]]:
        """Return how many entries the trace lost, and those it has."""
        return self.engine.lost, list(self.engine.log)

    # ---- life ------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop to decide; whoever waits is refused. For owners that are no actor."""
        if self._tick is not None:
            self._tick.cancel()
        for wait in list(self._waits.values()):
            wait.cancel()
        await self.pool.stop()

    async def _ready(self) -> None:
        """Start at the first call: an actor is made before its event loop runs."""
        if self._start is None:
            self._start = asyncio.create_task(self.pool.start())
            self._tick = asyncio.create_task(self._watch(), name="scout-leases")
        if not self._start.done():
            await asyncio.wait({self._start})
        self._start.result()

    async def _watch(self) -> None:
        """End what outlived its lease."""
        while True:
            await asyncio.sleep(self.settings.stats_period_s)
            try:
                for key in self.pool.expire():
                    self._asked.pop(key, None)
                self._forget_drained()
            except Exception:
                logger.exception("scout: a look at leases failed; they are looked at again")

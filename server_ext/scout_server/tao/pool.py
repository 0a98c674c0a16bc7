"""Drives the TAO engine in real time: requests wait here until a plan gives them room."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from multiprocessing import get_context
from typing import Protocol

from scout_sdk import SessionEvent
from scout_server.policy.admission import Plan
from scout_server.policy.engine import Snapshot, TaoEngine, TaoSettings, Turn, make_plan
from scout_server.tao.meters import Meters

__all__ = ["Pool", "PoolFullError", "PoolSettings"]

logger = logging.getLogger(__name__)


class PoolFullError(Exception):
    """As many requests wait as may."""


class PoolSettings(Protocol):
    """What a pool reads of its owner's settings."""

    @property
    def tao(self) -> TaoSettings:
        """The decision."""

    @property
    def worker(self) -> str:
        """Where large decisions are made: `thread` or `process`."""

    @property
    def inline_cells(self) -> int:
        """Decisions of at most so many sessions x nodes are made on the event loop."""

    @property
    def plan_floor_s(self) -> float:
        """Shortest time between two decisions."""

    @property
    def plan_recheck_s(self) -> float:
        """Longest time between two decisions while something waits."""


class Pool:
    """
    The waiting pool of one gateway or one Ray Serve application, on one event loop.

    Decisions over many sessions are made in a worker on a frozen snapshot; what the present no
    longer allows is dropped when they come back. A decision follows every event that may let a
    request in, at most once per `plan_floor_s`, at least once per `plan_recheck_s` while any waits.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        engine: TaoEngine | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.engine = engine or TaoEngine(settings.tao)
        self.meters = Meters(self.engine, clock)
        self._placed: dict[str, asyncio.Future[str]] = {}
        self._kick = asyncio.Event()
        self._executor: Executor | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to decide; the worker is warm when this returns."""
        self._executor = self._worker()
        empty = Snapshot(now=0, candidates=(), rooms=(), reserved=(), settings=self.settings.tao)
        await asyncio.get_running_loop().run_in_executor(self._executor, make_plan, empty)
        self._task = asyncio.create_task(self._run(), name="scout-plan")

    def _worker(self) -> Executor:
        if self.settings.worker == "process":
            return ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        return ThreadPoolExecutor(1, thread_name_prefix="scout-plan")

    async def stop(self) -> None:
        """Stop to decide; requests that wait are cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        for future in self._placed.values():
            future.cancel()

    # ---- requests --------------------------------------------------------------------------

    async def acquire(self, turn: Turn, *, timeout_s: float) -> str:
        """
        Wait for room and return the node; the caller must finish() or cancel() afterwards.

        Raises PoolFullError at once when too many wait, TimeoutError after *timeout_s*. Who
        is cancelled, or times out, has given the place up.
        """
        now = self.clock()
        if not self.engine.submit(turn, now=now):
            raise PoolFullError
        session = self.engine.ledger.sessions[turn.tenant, turn.session]
        moves = session.moves
        placement = self.engine.resume(turn.key, now=now)
        if placement is not None:  # nobody has to be weighed against it
            self.meters.hold.observe(0.0)
            self.meters.plans.labels("at-once", "true").inc()
            self.meters.moves.inc(session.moves - moves)
            return placement.node
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._placed[turn.key] = future
        self._kick.set()
        try:
            async with asyncio.timeout(timeout_s):
                node = await future
        except BaseException:
            self._placed.pop(turn.key, None)
            self.engine.cancel(turn.key, now=self.clock())
            self._kick.set()
            raise
        self.meters.hold.observe(self.clock() - now)
        return node

    def finish(
        self,
        key: str,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        held_tokens: int | None = None,
        tools: Sequence[tuple[str, float | None]] = (),
        final: bool = False,
    ) -> None:
        """A request ran to its end."""
        if prompt_tokens is not None:
            self.meters.prompt.inc(prompt_tokens)
            self.meters.cached.inc(min(cached_tokens or 0, prompt_tokens))
        self.engine.finish(
            key,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            held_tokens=held_tokens,
            tools=tools,
            final=final,
            now=self.clock(),
        )
        self._kick.set()

    def cancel(self, key: str) -> None:
        """A request ended early."""
        self.engine.cancel(key, now=self.clock())
        self._kick.set()

    def renew(self, key: str) -> None:
        """A running request shows life."""
        self.engine.renew(key, now=self.clock())

    def expire(self) -> list[str]:
        """End what outlived its lease; return the requests that were taken for lost."""
        late = self.engine.expire(now=self.clock())
        self.meters.expired.inc(len(late))
        self._kick.set()
        return late

    def events(self, events: Sequence[SessionEvent], *, tenant: str) -> dict[str, list[int]]:
        """Learn from the side channel; return which events each node should be told."""
        told: dict[str, list[int]] = {}
        for index, event in enumerate(events):
            for node in self.engine.concerned(event, tenant=tenant):
                told.setdefault(node, []).append(index)
            self.event(event, tenant=tenant)
        return told

    def event(self, event: SessionEvent, *, tenant: str) -> None:
        """Learn from the side channel."""
        self.engine.event(event, tenant=tenant, now=self.clock())
        self._kick.set()

    def observe_held(
        self, session: str, node: str, tokens: int, *, tenant: str, used: bool
    ) -> None:
        """A node said what it holds for a session."""
        self.engine.observe_held(session, node, tokens, tenant=tenant, used=used, now=self.clock())
        self._kick.set()

    def kick(self) -> None:
        """Decide again soon: a node changed."""
        self._kick.set()

    # ---- decisions -------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._wait()
                await self.decide()
                if self.settings.plan_floor_s:
                    await asyncio.sleep(self.settings.plan_floor_s)
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("scout: a decision failed; waiting requests are spread instead")
                self._admit_all()
                await asyncio.sleep(self.settings.plan_recheck_s)

    async def _wait(self) -> None:
        timeout = self.settings.plan_recheck_s if self.engine.waiting else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._kick.wait()
        self._kick.clear()

    async def decide(self) -> None:
        """Make one decision and apply it."""
        snapshot = self.engine.snapshot(now=self.clock())
        if snapshot is None:
            return
        began = time.perf_counter()
        cells = len(snapshot.candidates) * len(snapshot.rooms)
        if cells <= self.settings.inline_cells or self._executor is None:
            plan = make_plan(snapshot)
        else:
            loop = asyncio.get_running_loop()
            try:
                plan = await loop.run_in_executor(self._executor, make_plan, snapshot)
            except BrokenExecutor:  # the worker died: this one decision here, then a new worker
                logger.warning("scout: the planner's process died; it is started again")
                self._executor.shutdown(wait=False)
                self._executor = self._worker()
                plan = make_plan(snapshot)
        self.meters.plan.observe(time.perf_counter() - began)
        self.meters.plans.labels(plan.method, str(plan.exact).lower()).inc()
        self.apply(plan)

    def apply(self, plan: Plan) -> None:
        """Let the requests go that *plan* places and the present allows."""
        engine = self.engine
        before = {p.key: engine.waiting.get(p.key) for p in plan.placements}
        origins = {}
        for key, held in before.items():
            if held is not None:
                session = engine.ledger.sessions.get((held.turn.tenant, held.turn.session))
                origins[key] = session.origin if session is not None else None
        applied = engine.apply(plan, now=self.clock())
        for placement in applied.placements:
            origin = origins.get(placement.key)
            if origin is not None and origin != placement.node:
                self.meters.moves.inc()
            self._let_go(placement.key, placement.node)
        for _, reason in applied.dropped:
            self.meters.dropped.labels(reason).inc()
        if engine.changed:
            self._kick.set()

    def _let_go(self, key: str, node: str) -> None:
        future = self._placed.pop(key, None)
        if future is not None and not future.done():
            future.set_result(node)
        else:  # its client left in this very moment
            self.engine.cancel(key, now=self.clock())

    def _admit_all(self) -> None:
        """A fault of ours must not hold anybody: send what waits to the emptiest nodes."""
        engine, now = self.engine, self.clock()
        for key in list(engine.waiting):
            held = engine.waiting[key]
            taking = [n for n in engine.ledger.nodes.values() if n.up and not n.draining]
            if not taking:
                return
            node = min(taking, key=lambda n: (engine.ledger.used(n.name)[1], n.name))
            del engine.waiting[key]
            session = engine.ledger.session((held.turn.tenant, held.turn.session), now=now)
            engine.ledger.book(key, session, node.name, tokens=held.turn.tokens, now=now)
            self._let_go(key, node.name)

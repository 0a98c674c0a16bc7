"""A TAO engine that remembers what it was told and what it decided, and the replay of that."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scout_sdk._hints import SessionEvent
from scout_server.policy.admission import Plan
from scout_server.policy.engine import (
    Applied,
    Snapshot,
    TaoEngine,
    TaoSettings,
    Turn,
    make_plan,
)
from scout_server.policy.placement import Placement
from scout_server.tao.pool import Pool, PoolSettings

__all__ = ["Entry", "TracedEngine", "drive", "placements", "replay"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of the engine."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class TracedEngine(TaoEngine):
    """
    The engine, with a bounded log of its calls in order; *entries* 0 keeps none.

    A log that lost its beginning cannot be replayed: `lost` counts what fell out.
    """

    def __init__(self, settings: TaoSettings | None = None, *, entries: int = 0) -> None:
        super().__init__(settings)
        self.log: deque[Entry] = deque(maxlen=entries)
        self.lost = 0

    def _note(self, method: str, *args: Any, result: Any = None, **kwargs: Any) -> None:
        if self.log.maxlen:
            self.lost += len(self.log) == self.log.maxlen
            self.log.append(Entry(method, args, kwargs, result))

    def configure(self, settings: TaoSettings) -> None:
        """Take new settings."""
        super().configure(settings)
        self._note("configure", settings)

    def observe_cache(self, name: str, *, hit_tokens: int, queried_tokens: int) -> None:
        """A node said how many of its prompt tokens it found cached lately."""
        self._note("observe_cache", name, hit_tokens=hit_tokens, queried_tokens=queried_tokens)
        node = self.ledger.nodes.get(name)
        if node is not None:
            node.rate.observe(hit_tokens, queried_tokens)

    def set_node(self, name: str, *, capacity: int, slots: int) -> None:
        """Add a node, change its size, or take it back after it was down."""
        super().set_node(name, capacity=capacity, slots=slots)
        self._note("set_node", name, capacity=capacity, slots=slots)

    def drain_node(self, name: str, *, draining: bool = True) -> None:
        """Stop (or resume) sending new turns to a node."""
        super().drain_node(name, draining=draining)
        self._note("drain_node", name, draining=draining)

    def press_node(self, name: str, *, pressed: bool) -> None:
        """Say whether the engine makes requests wait by itself."""
        super().press_node(name, pressed=pressed)
        self._note("press_node", name, pressed=pressed)

    def lose_node(self, name: str, *, forget: bool = False) -> list[str]:
        """A node died, or was taken out; return the requests that ran there."""
        lost = super().lose_node(name, forget=forget)
        self._note("lose_node", name, forget=forget, result=lost)
        return lost

    def submit(self, turn: Turn, *, now: float) -> bool:
        """Put a request into the pool."""
        taken = super().submit(turn, now=now)
        self._note("submit", turn, now=now, result=taken)
        return taken

    def cancel(self, key: str, *, now: float) -> bool:
        """A request's client left."""
        known = super().cancel(key, now=now)
        self._note("cancel", key, now=now, result=known)
        return known

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
        now: float,
    ) -> None:
        """A request ended."""
        told: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "cached_tokens": cached_tokens,
            "held_tokens": held_tokens,
            "tools": tuple(tools),
            "final": final,
            "now": now,
        }
        super().finish(key, **told)
        self._note("finish", key, **told)

    def observe_held(
        self, session: str, node: str, tokens: int, *, tenant: str = "", used: bool, now: float
    ) -> None:
        """A node said what it holds for a session."""
        super().observe_held(session, node, tokens, tenant=tenant, used=used, now=now)
        self._note("observe_held", session, node, tokens, tenant=tenant, used=used, now=now)

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Learn from the side channel."""
        super().event(event, tenant=tenant, now=now)
        self._note("event", event, tenant=tenant, now=now)

    def renew(self, key: str, *, now: float) -> None:
        """A running request shows life."""
        super().renew(key, now=now)
        self._note("renew", key, now=now)

    def expire(self, *, now: float) -> list[str]:
        """Drop what outlived its lease."""
        late = super().expire(now=now)
        self._note("expire", now=now, result=late)
        return late

    def snapshot(self, *, now: float) -> Snapshot | None:
        """Return what a decision needs."""
        taken = super().snapshot(now=now)
        self._note("snapshot", now=now, result=taken is not None)
        return taken

    def apply(self, plan: Plan, *, now: float) -> Applied:
        """Start what the plan places and the present still allows."""
        applied = super().apply(plan, now=now)
        self._note("apply", plan, now=now, result=applied)
        return applied

    def resume(self, key: str, *, now: float) -> Placement | None:
        """Start a request at once where no decision is needed."""
        placement = super().resume(key, now=now)
        self._note("resume", key, now=now, result=placement)
        return placement


def replay(log: Iterable[Entry], engine: TaoEngine) -> list[str]:
    """
    Tell a fresh *engine* the facts of *log* again, decide anew, and return every difference.

    Plans are made from the engine's own snapshots, not taken from the log, but for those that no
    snapshot preceded (requests that were found running).
    """
    differences: list[str] = []
    snapshot: Snapshot | None = None
    for at, entry in enumerate(log):
        if entry.method == "apply":
            (plan,) = entry.args
            if plan.method != "found":
                plan = make_plan(snapshot) if snapshot is not None else None
                snapshot = None
                if plan != entry.args[0]:
                    differences.append(f"{at}: the plan is {plan}, was {entry.args[0]}")
                    continue
            result: Any = engine.apply(plan, **entry.kwargs)
        elif entry.method == "observe_cache" and not isinstance(engine, TracedEngine):
            result = None
            node = engine.ledger.nodes.get(entry.args[0])
            if node is not None:
                node.rate.observe(entry.kwargs["hit_tokens"], entry.kwargs["queried_tokens"])
        else:
            result = getattr(engine, entry.method)(*entry.args, **entry.kwargs)
        if entry.method == "snapshot":
            snapshot, result = result, result is not None
        if result != entry.result:
            differences.append(f"{at}: {entry.method} gives {result}, gave {entry.result}")
    return differences


def placements(log: Iterable[Entry]) -> Iterator[Placement]:
    """Yield what was placed, by plans and without one, in order."""
    for entry in log:
        if entry.method == "apply":
            yield from entry.result.placements
        elif entry.method == "resume" and entry.result is not None:
            yield entry.result


async def drive(log: Iterable[Entry], settings: PoolSettings) -> list[Placement]:
    """
    Tell a fresh pool (the gateway's, or that of Ray) the facts of *log* at their times.

    Requests are held and let go by the pool's own code, but for those that were found running;
    return what was placed, in order.
    ValueError when a held request was told another node than its placement says.
    """
    now = 0.0
    engine = TracedEngine(settings.tao, entries=1_000_000)
    pool = Pool(settings, clock=lambda: now, engine=engine)
    held: dict[str, asyncio.Task[str]] = {}
    snapshot: Snapshot | None = None
    entries = list(log)
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        now = entry.kwargs.get("now", now)
        told = {name: value for name, value in entry.kwargs.items() if name != "now"}
        match entry.method:
            case "submit" if following is not None and following.method == "resume":
                (turn,) = entry.args
                held[turn.key] = asyncio.create_task(pool.acquire(turn, timeout_s=86_400))
                await asyncio.sleep(0)
            case "cancel" if (key := entry.args[0]) in held and not held[key].done():
                held[key].cancel()
                await asyncio.wait({held[key]})
            case "cancel":
                pool.cancel(*entry.args)
            case "finish":
                told.pop("held_tokens")
                pool.finish(*entry.args, **told)
            case "event":
                pool.event(*entry.args, **told)
            case "snapshot":
                snapshot = engine.snapshot(now=now)
            case "apply" if entry.args[0].method == "found":
                engine.apply(*entry.args, now=now)
            case "apply":
                if snapshot is not None:
                    pool.apply(make_plan(snapshot))
                snapshot = None
                await asyncio.sleep(0)
            case "resume":
                pass  # submitting has tried it
            case _:
                getattr(engine, entry.method)(*entry.args, **entry.kwargs)
    placed = list(placements(engine.log))
    planned = (e for e in engine.log if e.method != "apply" or e.args[0].method != "found")
    last = {p.key: p.node for p in placements(planned)}
    wrong = [
        key
        for key, task in held.items()
        if task.done() and not task.cancelled() and task.result() != last.get(key)
    ]
    for task in held.values():
        task.cancel()
    await asyncio.gather(*held.values(), return_exceptions=True)
    if wrong:
        msg = f"told another node than placed: {', '.join(wrong)}"
        raise ValueError(msg)
    return placed

"""State of running graphs, calls and tools: bounded, locked, and empty when nothing runs."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scout_integrations._topology import Topology
from scout_sdk._context import Slot
from scout_sdk._locks import ProcessLock

__all__ = ["Recent", "Run", "RunTable"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_TTL_S = 7200.0
_SWEEP_EVERY_S = 60.0
_MAX_RUNS = 65536


@dataclass(slots=True, eq=False)
class Run:
    """One open run of a framework."""

    run_id: Hashable
    kind: str
    """graph, node, chain, llm or tool."""
    name: str | None
    agent: str
    path: str | None
    session: str
    parent: "Run | None"
    slot: Slot
    born: float
    root: "Run" = None  # type: ignore[assignment]  # itself for a root; set below
    made_up: bool = False
    """True when the session is this run alone: it ends with it."""
    call_id: str | None = None
    next_agents: tuple[str, ...] = ()
    topology: Topology | None = None
    asked: str | None = None
    """Who made the first request of those inside it that have ended."""
    touched: float = 0.0
    family: "set[Hashable]" = field(default_factory=set)
    """Run ids of all open descendants; kept on roots only."""

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root
        self.touched = self.born


class RunTable:
    """
    Open runs by id.

    A cancelled call may never be reported as ended. So a root takes its leftovers along, a root
    that nobody touched for *ttl_s* seconds is forgotten, and so is the oldest one past *limit*.
    """

    def __init__(
        self,
        *,
        limit: int = _MAX_RUNS,
        ttl_s: float = _TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._limit = limit
        self._ttl_s = ttl_s
        self._lock = ProcessLock()
        self._runs: OrderedDict[Hashable, Run] = OrderedDict()
        self._swept = clock()

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run_id: Hashable) -> Run | None:
        """Return the open run *run_id*, or None."""
        return self._runs.get(run_id)

    def add(self, run: Run) -> None:
        """Add *run* and forget what is stale."""
        now = self.clock()
        with self._lock:
            self._runs[run.run_id] = run
            run.root.touched = now
            if run.root is not run:
                run.root.family.add(run.run_id)
            if now - self._swept >= _SWEEP_EVERY_S:
                self._swept = now
                for stale in [r for r in self._runs.values() if now - r.root.touched > self._ttl_s]:
                    self._drop(stale)
            while len(self._runs) > self._limit:
                self._drop(next(iter(self._runs.values())))

    def pop(self, run_id: Hashable) -> tuple[Run, list[Run]] | None:
        """Forget the run *run_id*; return it and, for a root, its descendants still open."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                return None
            self._drop(run)
            left: list[Run] = []
            for child in list(run.family):
                leftover = self._runs.get(child)
                if leftover is not None:
                    self._drop(leftover)
                    left.append(leftover)
            return run, left

    def _drop(self, run: Run) -> None:
        self._runs.pop(run.run_id, None)
        run.root.family.discard(run.run_id)
        run.slot.live = False


class Recent(Generic[K, V]):
    """A locked mapping of the *limit* newest entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = ProcessLock()
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V) -> None:
        """Set *key*; forget the oldest entry past the limit."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)

    def pop(self, key: K) -> V | None:
        """Return and forget the value of *key*, or None."""
        with self._lock:
            return self._entries.pop(key, None)

    def pop_where(self, wanted: Callable[[V], bool]) -> V | None:
        """Return and forget the oldest value that is *wanted*, or None."""
        with self._lock:
            for key, value in self._entries.items():
                if wanted(value):
                    del self._entries[key]
                    return value
            return None

    def drop_where(self, unwanted: Callable[[V], bool]) -> None:
        """Forget every value that is *unwanted*."""
        with self._lock:
            for key in [k for k, v in self._entries.items() if unwanted(v)]:
                del self._entries[key]

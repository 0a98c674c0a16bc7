"""Between vLLM's scheduler and the policy core: facts in, owners of blocks out."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from scout_sdk import _wire
from scout_sdk._hints import Hints, SessionEvent
from scout_server.policy import (
    Assignment,
    Finish,
    FinishFacts,
    PolicyCore,
    PolicySettings,
    RequestFacts,
    Segment,
)
from scout_server.recording import Recorder
from scout_server.snapshot import Keeper, SnapshotSettings, keeper_of
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.engine import Coordinator, Pool, PromptRequest
from scout_server.vllm.prefetch import Prefetch
from scout_server.vllm.queue import DECISION_BUCKETS_S, RetentionQueue
from scout_server.vllm.seal import Seals
from scout_server.vllm.tier import Guide
from scout_server.vllm.waiting import Programs

__all__ = ["MAX_SHOWN_AGENTS", "Bridge"]

MAX_SHOWN_AGENTS = 32
"""Agents in the state that is shown, most used first."""
_MAX_CALLS = 8192

_FINISH = {
    "FINISHED_STOPPED": Finish.STOP,
    "FINISHED_REPETITION": Finish.STOP,
    "FINISHED_LENGTH_CAPPED": Finish.LENGTH,
    "FINISHED_IGNORED": Finish.LENGTH,
    "FINISHED_ABORTED": Finish.ABORT,
    "FINISHED_ERROR": Finish.ABORT,
    "RUNNING": Finish.PREEMPTED,
}
"""What vLLM calls the end of a request. It still calls a request that it preempts running."""


class Bridge:
    """
    Puts the policy's queue into a block pool and keeps the policy core told.

    Every method may be called at any time and never raises: the first fault opens the breaker, the
    pool gets its own queue back, and from then on the methods do nothing.
    """

    def __init__(
        self,
        pool: Pool,
        coordinator: Coordinator,
        settings: PolicySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._coordinator = coordinator
        self.clock = clock
        """Seconds on a clock that never goes back; a replay puts its own here."""
        stock = pool.free_block_queue

        def hand_back() -> None:
            pool.free_block_queue = stock

        self.breaker = Breaker(hand_back)
        self.core = PolicyCore(
            settings, capacity_blocks=len(pool.blocks), block_tokens=pool.hash_block_size
        )
        self.queue = RetentionQueue(
            stock, pool.blocks, self.core.order, self.breaker, clock=lambda: self.clock()
        )
        self.guide = Guide(self.core, self.breaker)
        """What a tier behind the pool asks."""
        self._cached: dict[str, int] = {}
        self._arrived: set[str] = set()
        self.arrivals: Counter[str] = Counter()
        """Requests by how their agent was found: hint, fingerprint, unknown."""
        self.finishes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        """Responses whose tool calls were told: `used`, or `late` for those of sessions gone on."""
        self.seals = Seals()
        self._calls: OrderedDict[str, str] = OrderedDict()
        self._keeper: Keeper | None = None
        self.tokens = Counter({"prompt": 0, "cached": 0})
        """Prompt tokens of users' requests that ended, and how many of them were in the cache."""
        self.prefetch: Prefetch | None = None
        """Set by the scheduler that can run warm-ups."""
        self.recorder: Recorder | None = None
        """Told of every user's request, if there is one; it never raises."""
        self.programs = Programs(settings.max_sessions)
        """What an order of the waiting queue may know."""
        pool.free_block_queue = self.queue

    def arrive(self, request: PromptRequest) -> None:
        """Tell the core of a new request, before the scheduler queues it."""
        if self.breaker.open:
            return
        try:
            origin = self.seals.origin(_extra(request))
            assignment = self.core.arrive(
                RequestFacts(
                    request_id=request.request_id,
                    hints=_hints(request),
                    block_hashes=tuple(request.block_hashes),
                    prompt_tokens=request.num_prompt_tokens,
                    tenant=origin.tenant,
                ),
                now=self.clock(),
            )
            self._arrived.add(request.request_id)
            if origin.call:
                self._calls[origin.call] = request.request_id
                if len(self._calls) > _MAX_CALLS:
                    self._calls.popitem(last=False)
            self.arrivals[_origin(assignment)] += 1
            self.programs.arrived(
                request.request_id,
                origin.tenant,
                assignment.session,
                request.num_prompt_tokens,
                self.clock(),
            )
            if self.recorder is not None:
                self.recorder.arrive(
                    request.request_id,
                    assignment,
                    _hints(request),
                    request.block_hashes,
                    prompt_tokens=request.num_prompt_tokens,
                    tenant=origin.tenant,
                    now=self.clock(),
                )
            if self.prefetch is not None:
                self.prefetch.arrived(request, assignment, origin.tenant)
        except Exception as error:
            self.breaker.trip("arrive", error)

    def scheduled(self, computed: Mapping[str, int]) -> None:
        """Note how many prompt tokens of each newly scheduled request were in the cache."""
        if computed and not self.breaker.open:
            for request_id, tokens in computed.items():
                if request_id in self._arrived:
                    self._cached.setdefault(request_id, tokens)

    def tick(self) -> None:
        """Let the core do its work that belongs to no request; once per engine step."""
        if self.breaker.open:
            return
        try:
            self.core.tick(now=self.clock())
            if self._keeper is not None:
                self._keeper.tick(now=self.clock())
            if self.recorder is not None:
                self.recorder.tick(now=self.clock())
        except Exception as error:
            self.breaker.trip("tick", error)

    def release(self, request: PromptRequest) -> None:
        """Name the owners of a request's blocks, before the scheduler gives them back."""
        if self.breaker.open:
            return
        try:
            if self.prefetch is not None and self.prefetch.owns(request.request_id):
                segments = self.prefetch.segments(len(request.block_hashes))
            else:
                segments = self.core.segments(request.request_id, request.block_hashes)
            self.guide.released(request.request_id, segments)
            groups = self._coordinator.get_blocks(request.request_id)
            for blocks, manager in zip(groups, self._coordinator.single_type_managers, strict=True):
                self._own(
                    [block.block_id for block in blocks],
                    segments,
                    max(1, manager.block_size // self._pool.hash_block_size),
                )
        except Exception as error:
            self.breaker.trip("release", error)

    def released(self, request: PromptRequest) -> None:
        """Tell the core that a request ended or was preempted, after its blocks went back."""
        if self.breaker.open:
            return
        try:
            finish = _finish(request)
            if self.prefetch is not None:
                if self.prefetch.owns(request.request_id):
                    self.prefetch.leaves(finish)
                    return
                self.prefetch.ended()
            if finish is Finish.PREEMPTED:
                cached = self._cached.get(request.request_id)
            else:
                cached = self._cached.pop(request.request_id, None)
                self._arrived.discard(request.request_id)
                if cached is not None:
                    self.tokens["prompt"] += request.num_prompt_tokens
                    self.tokens["cached"] += cached
                computed = request.num_prompt_tokens + request.num_output_tokens - (cached or 0)
                self.programs.ended(request.request_id, 0 if cached is None else computed)
            if self.recorder is not None:
                self.recorder.finish(
                    request.request_id,
                    finish,
                    output_tokens=request.num_output_tokens,
                    cached_tokens=cached,
                    now=self.clock(),
                )
            self.finishes[finish.value] += 1
            self.core.finish(
                FinishFacts(
                    request_id=request.request_id,
                    finish=finish,
                    output_tokens=request.num_output_tokens,
                    cached_tokens=cached,
                ),
                now=self.clock(),
            )
        except Exception as error:
            self.breaker.trip("finish", error)

    def event(self, event: SessionEvent, *, tenant: str = "") -> None:
        """Tell the core of a side-channel event, where its session is: all engines hear of it."""
        if self.breaker.open:
            return
        try:
            if self.recorder is not None:
                self.recorder.event(event, tenant=tenant, now=self.clock())
            if self.core.knows(event.session, tenant=tenant):
                self.core.event(event, tenant=tenant, now=self.clock())
                self.events["accepted"] += 1
            else:
                self.events["unknown"] += 1
        except Exception as error:
            self.breaker.trip("event", error)

    def ending(
        self, call: str, finish: Finish, tools: tuple[tuple[str, float | None], ...]
    ) -> None:
        """Tell the core which tools a response calls; a call of another engine is ignored."""
        request_id = self._calls.pop(call, None)
        if request_id is None or self.breaker.open:
            return
        try:
            if self.recorder is not None:
                self.recorder.tools(request_id, tools)
            used = self.core.tools(request_id, finish, tools, now=self.clock())
            self.endings["used" if used else "late"] += 1
        except Exception as error:
            self.breaker.trip("ending", error)

    def keep(self, settings: SnapshotSettings, *, rank: int = 0) -> None:
        """Go on with what was learnt before, and keep what is learnt; identity off keeps none."""
        if self.core.settings.hints or self.core.settings.fingerprints:
            self._keeper = keeper_of(settings, self.core, now=self.clock(), rank=rank)

    def close(self) -> None:
        """Write what was learnt, unless a fault has put our code out."""
        if self._keeper is not None and not self.breaker.open:
            self._keeper.close()
        self._keeper = None
        if self.recorder is not None:
            self.recorder.close()

    def forget(self) -> None:
        """The engine dropped everything it had cached."""
        self.queue.forget()

    def state(self) -> dict[str, object]:
        """Return counters and condition as plain values; cumulative since the start."""
        counts = self.queue.counts
        return {
            "mode": self.mode,
            "breaker": {
                "open": self.breaker.open,
                "faults": self.breaker.faults,
                "reason": self.breaker.reason,
            },
            "blocks": {"total": len(self._pool.blocks), "free": self.queue.num_free_blocks},
            "evictions": {
                "pops": counts.pops,
                "popped": counts.popped,
                "evicted": counts.evicted,
            },
            "decision": {
                "bounds_s": list(DECISION_BUCKETS_S),
                "buckets": list(counts.decision_buckets),
                "sum_s": counts.decision_sum_s,
            },
            "arrivals": dict(self.arrivals),
            "finishes": dict(self.finishes),
            "events": dict(self.events),
            "endings": dict(self.endings),
            "live_requests": len(self._arrived),
            "tokens": dict(self.tokens),
            "prefetch": self.prefetch.state() if self.prefetch is not None else {},
            "offload": {"used": self.guide.used, "evicted": dict(self.guide.evicted)},
            "core": self._core_state(),
        }

    def _core_state(self) -> dict[str, object]:
        if self.breaker.open:
            return {}
        try:
            now = self.clock()
            if self._keeper is not None:
                self._keeper.tick(now=now)  # an idle engine makes no steps
            state = self.core.state(now=now)
            return asdict(replace(state, agents=state.agents[:MAX_SHOWN_AGENTS]))
        except Exception as error:
            self.breaker.trip("state", error)
            return {}

    @property
    def mode(self) -> str:
        """`stock`: our code is out; `lru`: it follows the engine's order; `scout`: its own."""
        if self.breaker.open:
            return "stock"
        return "scout" if self.core.order.scout else "lru"

    def _own(self, block_ids: Sequence[int], segments: Sequence[Segment], factor: int) -> None:
        """Give each block the group of the last hash block in it; the last segment has the rest."""
        owners = self.queue.owners
        start = 0
        for segment in segments[:-1]:
            end = min(segment.end_block // factor, len(block_ids))
            for block_id in block_ids[start:end]:
                owners[block_id] = segment.group
            start = max(start, end)
        for block_id in block_ids[start:]:
            owners[block_id] = segments[-1].group


def _finish(request: PromptRequest) -> Finish:
    status = getattr(request.status, "name", str(request.status))
    return _FINISH.get(status, Finish.ABORT)


def _hints(request: PromptRequest) -> Hints | None:
    """The hints that the middleware put beside the request; vLLM's own session id without any."""
    extra = _extra(request)
    hints = _wire.from_xargs(extra) if extra else None
    if hints is None and request.session_id:
        # Not through our middleware: vLLM itself read X-Session-ID or the body's session_id.
        hints = _wire.decode({_wire.SESSION_ID_HEADER: request.session_id}).hints
    return hints


def _extra(request: PromptRequest) -> Mapping[str, object] | None:
    sampling = request.sampling_params
    return sampling.extra_args if sampling is not None else None


def _origin(assignment: Assignment) -> str:
    if assignment.agent is None and assignment.session is None:
        return "unknown"
    return "hint" if assignment.from_hint else "fingerprint"

"""The replica in real time: one event loop, one timer, one writer of the policy core."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace

import xxhash

from scout_sdk._hints import Hints, SessionEvent
from scout_server.embedded.errors import ApiError
from scout_server.embedded.script import Reply
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy.facts import Finish
from scout_server.policy.runtime import PolicySettings
from scout_server.recording import Recorder
from scout_server.replica.hashing import block_hashes
from scout_server.replica.replica import Replica, RequestTooLargeError
from scout_server.replica.request import Request
from scout_server.replica.results import Counters, StepResult
from scout_server.snapshot import Keeper, SnapshotSettings, keeper_of

__all__ = ["Engine", "Generation"]

_log = logging.getLogger("scout")

_MAX_SHOWN_AGENTS = 64
_STEPS_AT_ONCE = 64
"""Overdue steps worked off before the event loop gets its turn."""


class Generation:
    """A request as its client sees it: how many tokens are out, whether it has ended."""

    __slots__ = ("_changed", "error", "finish", "produced", "reply", "request")

    def __init__(self, request: Request, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.produced = 0
        self.finish: Finish | None = None
        """None while it runs."""
        self.error: ApiError | None = None
        """Why it ended without a reply; the finish is ABORT then."""
        self._changed = asyncio.Event()

    def notify(self, produced: int, finish: Finish | None = None) -> None:
        """Say that tokens came out, or that it ended."""
        self.produced = produced
        if finish is not None:
            self.finish = finish
        self._changed.set()

    async def more(self) -> None:
        """Wait until something has happened since the last call."""
        await self._changed.wait()
        self._changed.clear()

    async def done(self) -> None:
        """Wait for the end; ApiError when there is no reply."""
        while self.finish is None:
            await self.more()
        if self.error is not None:
            raise self.error


class Engine:
    """
    Steps a replica when its time has come, on the running loop's clock.

    The replica keeps its own time: when the process wakes up late, the steps that were due are made
    up at the times at which they were due, so a busy machine does not make the model slow. A fault
    in the policy fails the requests of the moment and goes on with plain LRU and an empty cache.
    """

    def __init__(
        self,
        settings: EmbeddedSettings,
        policy: PolicySettings | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        policy = PolicySettings() if policy is None else policy
        if settings.policy == "lru":
            policy = replace(policy, hints=False, fingerprints=False)
        self.settings = settings
        self.policy = policy
        self.faults = 0
        self.faulted: str | None = None
        """What the fault was that switched the policy off; None: none was."""
        self.finishes: Counter[str] = Counter()
        self.arrivals: Counter[str] = Counter()
        """Requests by how their agent was found: hint, fingerprint, unknown."""
        self.events: Counter[str] = Counter()
        self.on_first_token: Callable[[float], None] = _nobody
        """Told the seconds from a request's arrival to its first token."""
        self.on_finish: Callable[[Request], None] = _nobody_
        """Told of every request that ended with a reply."""
        self.recorder: Recorder | None = None
        """Told of every request, if there is one."""
        self._keeper: Keeper | None = None
        self._before: list[Counters] = []
        self.replica = self._replica(policy)
        self._clock = clock
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._numbers = 0

    def _replica(self, policy: PolicySettings) -> Replica:
        return Replica(
            self.settings.batch(),
            self.settings.latency(),
            kv_blocks=self.settings.kv_blocks,
            policy=policy,
            runs=False,
        )

    @property
    def mode(self) -> str:
        """`stock`: the policy is out; `lru`: it follows the engine's order; `scout`: its own."""
        if self.faulted is not None:
            return "stock"
        return "scout" if self.replica.core.order.scout else "lru"

    def core_state(self) -> dict[str, object]:
        """Return what the policy core knows, as plain values; empty after a fault."""
        if self.faulted is not None:
            return {}
        try:
            now = self._catch_up()
            if self.recorder is not None:
                self.recorder.tick(now=now)
            if self._keeper is not None:
                self._keeper.tick(now=now)  # an idle engine makes no steps
            state = self.replica.core.state(now=now)
            return asdict(replace(state, agents=state.agents[:_MAX_SHOWN_AGENTS]))
        except Exception as error:
            self._fault(error)
            return {}

    def counters(self) -> Counters:
        """Return what was counted since the start, faults survived."""
        total = Counters()
        for field in fields(Counters):
            values = (getattr(c, field.name) for c in (*self._before, self.replica.counters))
            setattr(total, field.name, sum(values))
        return total

    def now(self) -> float:
        """Return the time on the engine's clock, in seconds."""
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    def submit(
        self,
        prompt: Sequence[int],
        reply: Reply,
        *,
        hints: Hints | None = None,
        tenant: str = "",
        salt: str = "",
        tools: tuple[tuple[str, float | None], ...] = (),
    ) -> Generation:
        """Let a request arrive now; ApiError when it can never be served."""
        self._numbers += 1
        request = Request(
            f"req-{self._numbers:08d}",
            prompt_tokens=len(prompt),
            output_tokens=len(reply.tokens),
            hashes=block_hashes(
                [*prompt, *reply.tokens],
                self.settings.block_tokens,
                xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0,
            ),
            hints=hints,
            tenant=tenant,
            finish=reply.finish,
            tools=tools,
        )
        generation = Generation(request, reply)
        request.payload = generation
        try:
            now = self._catch_up()
            assignment = self.replica.submit(request, now)
        except RequestTooLargeError as error:
            raise ApiError(str(error), code="context_length_exceeded") from error
        except Exception as error:
            self._fault(error)
            raise ApiError("the engine had a fault; try again", status=503) from error
        if self.recorder is not None:
            self.recorder.arrive(
                request.request_id,
                assignment,
                hints,
                request.hashes[: request.prompt_tokens // self.settings.block_tokens],
                prompt_tokens=request.prompt_tokens,
                tenant=tenant,
                now=now,
            )
        known = assignment.agent is not None or assignment.session is not None
        self.arrivals[
            ("hint" if assignment.from_hint else "fingerprint") if known else "unknown"
        ] += 1
        self.pump()
        return generation

    def abort(self, generation: Generation) -> None:
        """End a request whose client is gone; nothing happens when it has ended already."""
        if generation.finish is not None:
            return
        try:
            now = self._catch_up()
            if generation.finish is None:
                self.replica.abort(generation.request.request_id, now)
                self._end(generation, Finish.ABORT)
        except Exception as error:
            self._fault(error)
        self.pump()

    def event(self, event: SessionEvent, *, tenant: str = "") -> None:
        """Take an event of the side channel; it never fails."""
        if self.recorder is not None:
            self.recorder.event(event, tenant=tenant, now=self.now())
        try:
            self.replica.event(event, self._catch_up(), tenant=tenant)
            self.events["accepted"] += 1
        except Exception as error:
            self._fault(error)

    def keep(self, settings: SnapshotSettings) -> None:
        """Go on with what was learnt before, and keep what is learnt; identity off keeps none."""
        if self.policy.hints or self.policy.fingerprints:
            self._keeper = keeper_of(settings, self.replica.core, now=self.now())

    def close(self) -> None:
        """Stop the timer, end every request, and write what was learnt."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_all(ApiError("the server is shutting down", status=503))
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def _catch_up(self) -> float:
        """Make every step that is due, so that the replica may be told something; return now."""
        now = self.now()
        replica = self.replica
        while replica.next_event_time() <= now:
            self._deliver(replica.step(replica.next_event_time()))
        return now

    def pump(self) -> None:
        """Make the steps that are due, a bounded number, and set the timer for the next."""
        try:
            now = self.now()
            replica = self.replica
            due = replica.next_event_time()
            for _ in range(_STEPS_AT_ONCE):
                if due > now:
                    break
                self._deliver(replica.step(due))
                due = replica.next_event_time()
        except Exception as error:
            self._fault(error)
            due = self.replica.next_event_time()
        if self._keeper is not None:
            self._keeper.tick(now=self.now())
        if self.recorder is not None:
            self.recorder.tick(now=self.now())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < math.inf and self._clock is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_soon(self.pump) if due <= now else loop.call_at(due, self.pump)

    def _deliver(self, result: StepResult) -> None:
        for request in result.advanced:
            generation = request.payload
            if isinstance(generation, Generation) and request.generated > generation.produced:
                if not generation.produced:
                    self.on_first_token(result.time - request.arrival)
                ended = request.finished_at is not None
                generation.notify(request.generated, request.finish if ended else None)
        for request in result.finished:
            self.finishes[request.finish.value] += 1
            self.on_finish(request)
            self._recorded(request, request.finish, result.time)

    def _end(self, generation: Generation, finish: Finish) -> None:
        self.finishes[finish.value] += 1
        generation.notify(generation.produced, finish)
        self._recorded(generation.request, finish, self.now())

    def _recorded(self, request: Request, finish: Finish, now: float) -> None:
        if self.recorder is not None:
            self.recorder.finish(
                request.request_id,
                finish,
                output_tokens=request.generated,
                cached_tokens=request.cached_tokens,
                tools=() if finish is Finish.ABORT else request.tools,
                now=now,
            )

    def _end_all(self, error: ApiError) -> None:
        for request in list(self.replica.requests):
            generation = request.payload
            if isinstance(generation, Generation) and generation.finish is None:
                generation.error = error
                self._end(generation, Finish.ABORT)

    def _fault(self, error: Exception) -> None:
        """Go on without the policy: fail what runs, start again with LRU and an empty cache."""
        self.faults += 1
        if self.faulted is None:
            _log.error("scout: the policy failed; plain LRU from now on", exc_info=error)
            self.faulted = f"{type(error).__name__}: {error}"
        self._end_all(ApiError("the engine had a fault; try again", status=503))
        self._before = [self.counters()]
        self._keeper = None  # the file keeps what was learnt before the fault
        self.replica = self._replica(replace(self.policy, hints=False, fingerprints=False))


def _nobody(seconds: float) -> None:
    pass


def _nobody_(request: Request) -> None:
    pass

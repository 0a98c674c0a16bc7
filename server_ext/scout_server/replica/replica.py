"""One engine replica: pool, batch scheduler, policy core and latency model on a given clock."""

import math
from collections.abc import Iterable, Sequence

from scout_sdk._errors import ScoutError
from scout_sdk._hints import SessionEvent
from scout_server.policy.facts import Assignment, Finish, FinishFacts, RequestFacts, Segment
from scout_server.policy.runtime import PolicyCore, PolicySettings
from scout_server.replica.batch import BatchSettings
from scout_server.replica.hooks import Admission, VictimChoice, WaitingQueue
from scout_server.replica.latency import LatencyModel, SpanLatency, StepBatch
from scout_server.replica.pool import BlockPool, EvictionHook
from scout_server.replica.request import Request, State
from scout_server.replica.results import Counters, StepResult
from scout_server.replica.scheduler import BatchScheduler

__all__ = ["Replica", "RequestTooLargeError"]


class RequestTooLargeError(ScoutError, ValueError):
    """A request can never fit into the pool, even alone."""


class Replica:
    """
    One model of one engine replica, on any clock: the caller says what time it is.

    A step starts as soon as the one before has ended and there is work; requests that arrive
    meanwhile wait for its end. `next_event_time` says when to call `step`. With *runs*, decode
    steps in which nothing can be decided are one event; the result is that of single steps, up to
    the rounding of floats. Times never go back; calls with an earlier time are an error.
    """

    def __init__(
        self,
        batch: BatchSettings,
        latency: LatencyModel,
        *,
        kv_blocks: int,
        policy: PolicySettings | None = None,
        core: PolicyCore | None = None,
        queue: WaitingQueue | None = None,
        admission: Admission | None = None,
        victims: VictimChoice | None = None,
        on_evict: EvictionHook | None = None,
        runs: bool = True,
    ) -> None:
        if core is None:
            core = PolicyCore(
                PolicySettings() if policy is None else policy,
                capacity_blocks=kv_blocks,
                block_tokens=batch.block_tokens,
            )
        self.core = core
        self.settings = batch
        self.latency = latency
        self._spans: SpanLatency | None = latency if isinstance(latency, SpanLatency) else None
        self._runs = runs and self._spans is not None
        self.pool = BlockPool(kv_blocks, core.order, on_evict=on_evict)
        self.scheduler = BatchScheduler(
            batch, self.pool, owners=self._owners, queue=queue, admission=admission, victims=victims
        )
        self.counters = Counters()
        # The core without identity has nothing to do at a tick; it need not be told each step.
        off = type(core) is PolicyCore and not (core.settings.hints or core.settings.fingerprints)
        self._tick = None if off else self._tell_time
        self._requests: dict[str, Request] = {}
        self._result = StepResult()
        self._sequence = 0
        self._now = -math.inf
        self._start = 0.0
        self._end: float | None = None
        """End of the run of steps being computed; None: idle."""
        self._left = 0
        """Steps of that run that have not ended, the current one included."""
        self._late: list[Request] = []
        """Requests that arrived after the next step was scheduled (schedule_ahead)."""
        self._wake = math.inf
        """When an idle replica that has work should try again."""

    def retime(self, latency: LatencyModel) -> None:
        """Compute later steps with *latency*; ValueError while one is being computed."""
        if self._end is not None:
            msg = "a step is being computed"
            raise ValueError(msg)
        self.latency = latency
        self._spans = latency if isinstance(latency, SpanLatency) else None
        self._runs = self._runs and self._spans is not None

    # -- asking ---------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Request]:
        """Running requests in the order of their scheduling."""
        return self.scheduler.running

    @property
    def waiting_count(self) -> int:
        """Number of waiting requests."""
        return len(self.scheduler.queue) + len(self._late)

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def now(self) -> float:
        """The latest time it was told; minus infinity at first."""
        return self._now

    @property
    def requests(self) -> Iterable[Request]:
        """Requests that have not ended, in order of submission."""
        return self._requests.values()

    @property
    def idle(self) -> bool:
        """Whether no step is being computed."""
        return self._end is None

    def get(self, request_id: str) -> Request | None:
        """Return the unfinished request of that id, or None."""
        return self._requests.get(request_id)

    def next_event_time(self) -> float:
        """Return when `step` has something to do; infinity when only a new request can tell."""
        return self._wake if self._end is None else self._end

    # -- telling --------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> Assignment:
        """Let *request* arrive; RequestTooLargeError when it can never fit."""
        bt = self.settings.block_tokens
        total = request.prompt_tokens + request.output_tokens - 1
        if (total + bt - 1) // bt > self.pool.capacity:
            msg = (
                f"request {request.request_id!r} needs {(total + bt - 1) // bt} blocks of {bt} "
                f"tokens ({request.prompt_tokens} prompt + {request.output_tokens} output tokens); "
                f"the pool has {self.pool.capacity}"
            )
            raise RequestTooLargeError(msg)
        if request.request_id in self._requests:
            msg = f"request id {request.request_id!r} is in use"
            raise ValueError(msg)
        self._interrupt(now)
        self._sequence += 1
        request.sequence = self._sequence
        request.arrival = now
        self._requests[request.request_id] = request
        self.counters.requests += 1
        assignment = self.core.arrive(
            RequestFacts(
                request_id=request.request_id,
                hints=request.hints,
                block_hashes=request.hashes[: request.prompt_tokens // bt],
                prompt_tokens=request.prompt_tokens,
                tenant=request.tenant,
                warmup=request.warmup,
            ),
            now=now,
        )
        if self._end is None:
            self.scheduler.add(request, now)
            self._wake = now
        elif self.settings.schedule_ahead:
            request.state = State.WAITING
            self._late.append(request)
        else:
            self.scheduler.add(request, now)
        return assignment

    def event(self, event: SessionEvent, now: float, *, tenant: str = "") -> None:
        """Pass an event of the side channel to the policy core."""
        self.settle(now)
        self.core.event(event, tenant=tenant, now=now)

    def abort(self, request_id: str, now: float) -> Request | None:
        """End a request now and free its blocks; None when it is not there (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._interrupt(now)
        if request in self._late:
            self._late.remove(request)
            request.state = State.FINISHED
        else:
            self.scheduler.remove(request, now)
        request.finish = Finish.ABORT
        self.counters.aborted += 1
        self._forget(request, now)
        if self._end is None:
            self._wake = now if len(self.scheduler.queue) else math.inf
        return request

    def poke(self, now: float) -> None:
        """Say that a hook's answer may have changed."""
        self._interrupt(now)
        if self._end is None and len(self.scheduler.queue):
            self._wake = now

    def settle(self, now: float) -> None:
        """Apply the steps of a run that have ended by *now*; decides nothing."""
        if now < self._now:
            msg = f"time goes back: {now} after {self._now}"
            raise ValueError(msg)
        if self._end is not None and now > self._end:
            msg = f"a step ended at {self._end}, before {now}: call step first"
            raise ValueError(msg)
        self._now = now
        if self._left < 2:
            return
        batch, spans, start = self.scheduler.batch, self._spans, self._start
        assert spans is not None
        n, ctx = len(batch.requests), batch.context_tokens
        low, high = 0, self._left - 1
        while low < high:
            middle = (low + high + 1) // 2
            if start + spans.span_s(n, ctx, middle) <= now:
                low = middle
            else:
                high = middle - 1
        if low:
            self._skip(low)

    def _tell_time(self, now: float) -> None:
        self.core.tick(now=now)

    def _skip(self, steps: int) -> None:
        batch, spans, start = self.scheduler.batch, self._spans, self._start
        assert spans is not None
        n, ctx = len(batch.requests), batch.context_tokens
        self.scheduler.run(steps, lambda i: start + spans.span_s(n, ctx, i), self._tick)
        self._start = start + spans.span_s(n, ctx, steps)
        self._left -= steps
        self.counters.steps += steps
        self.counters.generated_tokens += steps * n

    def _interrupt(self, now: float) -> None:
        """Make the current run end with the step that is being computed at *now*."""
        self.settle(now)
        if self._left > 1:
            batch, spans = self.scheduler.batch, self._spans
            assert spans is not None
            seconds = spans.span_s(len(batch.requests), batch.context_tokens, 1)
            self._left = 1
            assert self._end is not None
            self.counters.busy_s -= self._end - (self._start + seconds)
            self._end = self._start + seconds

    # -- stepping -------------------------------------------------------------------------------

    def step(self, now: float) -> StepResult:
        """
        End the step (or run) that is due by *now*, if any, and start the next, if any.

        One event a call, at its own time: a late caller steps until `next_event_time` is past.
        """
        if now < self._now:
            msg = f"time goes back: {now} after {self._now}"
            raise ValueError(msg)
        result = self._result
        result.time = now
        result.steps = 0
        result.advanced = result.preempted = ()
        result.finished = []
        if self._end is not None:
            if now < self._end:
                self.settle(now)
                return result
            now = self._end
            self._complete(now, result)
        self._now = now
        ahead = self.settings.schedule_ahead
        if not ahead:
            self._part(result.finished, now)
        if self.scheduler.running or len(self.scheduler.queue) or self._late:
            self._begin(now)
            result.preempted = self.scheduler.batch.preempted
        if ahead and result.finished:
            self._part(result.finished, now)
            if self._end is None and (self.scheduler.running or len(self.scheduler.queue)):
                self._wake = now  # what was in the way is gone
        return result

    def advance(self, until: float) -> StepResult | None:
        """
        Step until requests end, at the latest at *until*; None when none ended by then.

        The result's time is when they ended; call again to go on.
        """
        while self.next_event_time() <= until:
            result = self.step(self.next_event_time())
            if result.finished:
                return result
        self.settle(until)
        return None

    def _complete(self, end: float, result: StepResult) -> None:
        steps = self._left
        if steps > 1:
            self._skip(steps - 1)
        scheduler = self.scheduler
        batch = scheduler.batch
        before = self.counters.generated_tokens
        finished = result.finished
        scheduler.complete(end, finished)
        produced = sum(1 for r in batch.requests if r.computed == r.prompt_tokens + r.generated - 1)
        self.counters.generated_tokens = before + produced
        self.counters.steps += 1
        self._end = None
        self._left = 0
        self._wake = math.inf
        result.time = end
        result.steps = steps
        result.advanced = batch.requests
        for request in finished:
            request.finished_at = end

    def _part(self, finished: Sequence[Request], now: float) -> None:
        """Let those that have ended go."""
        self.scheduler.drop(finished)
        self.counters.finished += len(finished)
        for request in finished:
            self.scheduler.release(request)
            self._forget(request, now)

    def _begin(self, now: float) -> None:
        self.core.tick(now=now)
        scheduler = self.scheduler
        if self._late and not scheduler.running and not len(scheduler.queue):
            # Nothing was scheduled ahead, so nothing is in the way.
            self._join(now)
        batch = scheduler.schedule(now)
        if batch.preempted:
            self.counters.preemptions += len(batch.preempted)
            for request in batch.preempted:
                self.core.finish(self._facts(request, Finish.PREEMPTED), now=now)
        for request in batch.admitted:
            self._count(request)
        joined = bool(self._late)
        if joined:
            self._join(now)
            batch.steady = False
        if not batch.requests:
            # Nothing fits or the admission hook refuses; the latter may change its mind.
            again = batch.preempted or joined
            self._wake = now if again else batch.retry_at
            return
        spans = self._spans
        steps = 1
        if spans is None:
            seconds = self.latency.step_s(self._step_batch())
        elif batch.prefill:
            seconds = spans.mixed_s(batch.prefill, batch.decodes, batch.context_tokens)
        else:
            if self._runs and batch.steady:
                steps = scheduler.run_length()
            seconds = spans.span_s(batch.decodes, batch.context_tokens, steps)
        self._start = now
        self._left = steps
        self._end = now + seconds
        self.counters.busy_s += seconds

    def _join(self, now: float) -> None:
        """Let the requests wait that came too late for the step that is scheduled."""
        for request in self._late:
            self.scheduler.add(request, now)
        self._late.clear()

    def _step_batch(self) -> StepBatch:
        batch = self.scheduler.batch
        decode = tuple(
            r.computed + 1
            for r, count in zip(batch.requests, batch.counts, strict=True)
            if count == 1 and r.generated
        )
        return StepBatch(tuple(batch.prefill), decode)

    def _count(self, request: Request) -> None:
        counters = self.counters
        if request.preemptions:
            counters.recomputed_tokens += request.tokens - request.computed
            return
        counters.prompt_tokens += request.prompt_tokens
        if not request.warmup:
            counters.queried_tokens += request.prompt_tokens
            counters.hit_tokens += request.cached_tokens

    def _owners(self, request: Request) -> Sequence[Segment]:
        full = request.hashes[: request.tokens // self.settings.block_tokens]
        return self.core.segments(request.request_id, full)

    def _forget(self, request: Request, now: float) -> None:
        del self._requests[request.request_id]
        self.core.finish(self._facts(request, request.finish), now=now)

    def _facts(self, request: Request, finish: Finish) -> FinishFacts:
        scheduled = request.first_scheduled_at is not None
        return FinishFacts(
            request_id=request.request_id,
            finish=finish,
            output_tokens=request.generated,
            cached_tokens=request.cached_tokens if scheduled else None,
            tools=request.tools if finish is Finish.TOOL_CALLS else (),
        )

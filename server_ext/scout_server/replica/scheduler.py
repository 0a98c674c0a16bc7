"""Which requests compute how many tokens in the next engine step: vLLM V1's rules."""

import math
from collections.abc import Callable, Sequence

from scout_server.policy.facts import Segment
from scout_server.replica.batch import Batch, BatchSettings
from scout_server.replica.hooks import (
    Admission,
    AdmitAll,
    FcfsQueue,
    LastVictim,
    VictimChoice,
    WaitingQueue,
)
from scout_server.replica.pool import BlockPool
from scout_server.replica.request import Request, State

__all__ = ["BatchScheduler"]


class BatchScheduler:
    """
    Waiting and running requests of one replica, and the step that comes next.

    Running requests first, in order, then waiting ones, under a token budget; when a running one
    finds no block, another loses its blocks and starts again later (recomputation).
    """

    __slots__ = (
        "_blocked",
        "_bt",
        "admission",
        "batch",
        "owners",
        "pool",
        "queue",
        "running",
        "settings",
        "victims",
    )

    def __init__(
        self,
        settings: BatchSettings,
        pool: BlockPool,
        *,
        owners: Callable[[Request], Sequence[Segment]],
        queue: WaitingQueue | None = None,
        admission: Admission | None = None,
        victims: VictimChoice | None = None,
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.owners = owners
        """Asked for the owners of a chain before its blocks are freed."""
        self.queue: WaitingQueue = FcfsQueue() if queue is None else queue
        self.admission: Admission = AdmitAll() if admission is None else admission
        self.victims: VictimChoice = LastVictim() if victims is None else victims
        self.running: list[Request] = []
        self.batch = Batch()
        self._bt = settings.block_tokens
        self._blocked: tuple[Request, int, int | None] | None = None
        """Who was refused for want of blocks, how many it needed, the hash that it missed first."""

    @property
    def waiting_count(self) -> int:
        """Number of waiting requests."""
        return len(self.queue)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses."""
        return self.pool.free_blocks

    @property
    def capacity_blocks(self) -> int:
        """Blocks in all."""
        return self.pool.capacity

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""
        return self._bt

    def add(self, request: Request, now: float) -> None:
        """Let *request* wait for its turn."""
        request.state = State.WAITING
        self.queue.push(request, now)

    def remove(self, request: Request, now: float) -> None:
        """Take *request* out, wherever it stands, and free its blocks."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self.release(request)
        else:
            self.queue.remove(request)
        request.state = State.FINISHED

    def schedule(self, now: float) -> Batch:
        """Fill and return the batch of the step that starts at *now*; allocate its blocks."""
        batch = self.batch
        batch.clear()
        budget = self._schedule_running(batch, now)
        if batch.preempted:
            return batch
        self._schedule_waiting(batch, budget, now)
        return batch

    def _schedule_running(self, batch: Batch, now: float) -> int:
        settings, pool, running, bt = self.settings, self.pool, self.running, self._bt
        budget = settings.max_batched_tokens
        chunk = settings.long_prefill_tokens if len(running) + len(self.queue) > 1 else 0
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            if request.state is not State.RUNNING:
                index += 1  # it has ended, and keeps its seat while this step is scheduled
                continue
            computed = request.computed
            count = request.prompt_tokens + request.generated - computed
            if 0 < chunk < count:
                count = chunk
            if count > budget:
                count = budget
            need = (computed + count + bt - 1) // bt - len(request.blocks)
            if need > 0:
                while need > pool.free_blocks:
                    at = self.victims.choose(running, request, now)
                    victim = running[at]
                    if victim.state is not State.RUNNING:
                        return budget  # its blocks come back as soon as this step is scheduled
                    del running[at]
                    if at < index:
                        index -= 1
                        budget += self._withdraw(batch, victim)
                    self._preempt(batch, victim, now)
                    if victim is request:
                        return budget
                request.blocks += pool.allocate(need, now)
            if request.hashed_blocks < (computed + count) // bt:
                self._insert(request, computed + count)
            batch.add(request, count)
            budget -= count
            index += 1
        return budget

    def _schedule_waiting(self, batch: Batch, budget: int, now: float) -> None:
        settings, pool, queue, bt = self.settings, self.pool, self.queue, self._bt
        chunk = settings.long_prefill_tokens if len(self.running) + len(queue) > 1 else 0
        while len(queue) and budget > 0 and len(self.running) < settings.max_num_seqs:
            request = queue.peek(now)
            if request is None:
                break
            if not self.admission.admit(request, self, now):
                batch.retry_at = self.admission.horizon(now)
                break
            if self._still_blocked(request):
                assert self._blocked is not None
                batch.missing_hash = self._blocked[2]
                break
            tokens = request.prompt_tokens + request.generated
            hits = pool.lookup(request.hashes, (tokens - 1) // bt)
            cached = len(hits) * bt
            count = tokens - cached
            if 0 < chunk < count:
                count = chunk
            if count > budget:
                count = budget
            free = pool.free_blocks - pool.idle(hits)
            end = tokens if settings.reserve_full_prompt else cached + count
            if (end + bt - 1) // bt - len(hits) > free:
                if len(hits) < len(request.hashes):
                    batch.missing_hash = request.hashes[len(hits)]
                needed = (end + bt - 1) // bt - len(hits)
                self._blocked = (request, needed, batch.missing_hash)
                break
            self._blocked = None
            queue.remove(request)
            pool.touch(hits)
            need = (cached + count + bt - 1) // bt - len(hits)
            request.blocks = hits + pool.allocate(need, now) if need else hits
            request.computed = cached
            request.hashed_blocks = len(hits)
            request.state = State.RUNNING
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
                request.cached_tokens = cached
            self._insert(request, cached + count)
            self.running.append(request)
            batch.admitted.append(request)
            batch.add(request, count)
            budget -= count
        batch.steady = not batch.admitted

    def _still_blocked(self, request: Request) -> bool:
        """
        Whether *request* was refused before and must be again, found out without a lookup.

        Without the hash that it missed, it can only find less than then, and so need more.
        """
        if self._blocked is None:
            return False
        who, needed, missing = self._blocked
        return (
            who is request
            and needed > self.pool.free_blocks
            and (missing is None or self.pool.find(missing) is None)
        )

    def _insert(self, request: Request, tokens: int) -> None:
        """Make the blocks of *request* that *tokens* fill findable."""
        full = min(tokens // self._bt, len(request.hashes))
        if full > request.hashed_blocks:
            self.pool.insert_chain(request.blocks, request.hashes, request.hashed_blocks, full)
            request.hashed_blocks = full

    def _withdraw(self, batch: Batch, request: Request) -> int:
        """Take *request* out of *batch*; return the tokens that it gives back."""
        entries = [
            (r, c) for r, c in zip(batch.requests, batch.counts, strict=True) if r is not request
        ]
        given_back = sum(batch.counts) - sum(count for _, count in entries)
        preempted, admitted = batch.preempted, batch.admitted
        batch.clear()
        batch.preempted, batch.admitted = preempted, admitted
        for other, count in entries:
            batch.add(other, count)
        return given_back

    def _preempt(self, batch: Batch, victim: Request, now: float) -> None:
        self.release(victim)
        victim.preemptions += 1
        victim.state = State.WAITING
        self._blocked = None
        self.queue.push_back(victim, now)
        batch.preempted.append(victim)

    def release(self, request: Request) -> None:
        """Give back the blocks of *request*, the tail first."""
        self.pool.free(request.blocks, self.owners(request))
        request.blocks = []
        request.computed = 0
        request.hashed_blocks = 0

    def complete(self, now: float, finished: list[Request]) -> None:
        """Apply the step in `batch`, which ends at *now*; append those that end to *finished*."""
        for request, count in zip(self.batch.requests, self.batch.counts, strict=True):
            if request.state is not State.RUNNING:
                continue
            request.attained_tokens += count
            request.computed += count
            if request.computed == request.prompt_tokens + request.generated:
                request.generated += 1
                if request.first_token_at is None:
                    request.first_token_at = now
                if request.generated >= request.output_tokens:
                    request.state = State.FINISHED
                    finished.append(request)

    def drop(self, finished: Sequence[Request]) -> None:
        """Let the requests that `complete` ended give up their seats; `release` their blocks."""
        if finished:
            self.running = [r for r in self.running if r.state is State.RUNNING]

    def run_length(self) -> int:
        """
        Return how many steps like the one in `batch` (itself included) can follow one another.

        Only steps in which every request decodes one token, none ends before the last, every block
        needed is free and no waiting request could be let in: nothing is decided in them.
        """
        batch, bt = self.batch, self._bt
        if not batch.steady or batch.prefill or not batch.requests or batch.retry_at < math.inf:
            return 1
        if len(batch.requests) < len(self.running):
            return 1
        steps = min(r.output_tokens - r.generated for r in batch.requests)
        if steps <= 1:
            return 1
        if batch.missing_hash is not None and self._would_cache(batch.missing_hash, steps):
            return 1
        free = self.pool.free_blocks
        # Upper bound first: nobody can need more than this.
        if len(batch.requests) * (steps // bt + 1) <= free:
            return steps
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            need = sum((r.computed + middle + bt - 1) // bt - len(r.blocks) for r in batch.requests)
            if need <= free:
                low = middle
            else:
                high = middle - 1
        return low

    def _would_cache(self, block_hash: int, steps: int) -> bool:
        return any(
            block_hash in r.hashes[r.hashed_blocks : (r.computed + steps) // self._bt]
            for r in self.batch.requests
        )

    def run(
        self,
        steps: int,
        start_of: Callable[[int], float],
        tick: Callable[[float], None] | None = None,
    ) -> None:
        """
        Apply *steps* pure decode steps and schedule the one after them.

        *start_of(i)* is when the i-th step after the current one starts, i from 1 to *steps*; the
        blocks that it needs are taken at that time, in the order in which single steps would.
        *tick* is told the start of every step, before its blocks are taken.
        """
        bt = self._bt
        crossings: list[tuple[int, int]] = []
        fills: list[tuple[int, int]] = []
        requests = self.batch.requests
        for index, request in enumerate(requests):
            end = len(request.blocks) * bt - request.computed
            crossings += [(ahead, index) for ahead in range(end, steps + 1, bt)]
            if request.hashed_blocks < len(request.hashes):
                # The current step may have filled its last block already: then end - 1 is 0.
                fills += [(ahead, index) for ahead in range(end - 1 or bt, steps + 1, bt)]
        crossings.sort()
        at = 0
        if tick is not None:
            for ahead in range(1, steps + 1):
                now = start_of(ahead)
                tick(now)
                while at < len(crossings) and crossings[at][0] == ahead:
                    requests[crossings[at][1]].blocks += self.pool.allocate(1, now)
                    at += 1
        for ahead, index in crossings[at:]:
            requests[index].blocks += self.pool.allocate(1, start_of(ahead))
        for request in requests:
            request.computed += steps
            request.generated += steps
            request.attained_tokens += steps
        fills.sort()
        for ahead, index in fills:
            request = requests[index]
            self._insert(request, request.computed + 1 - steps + ahead)
        self.batch.context_tokens += steps * len(requests)

"""
Warm-up requests: in idle time an engine rebuilds the anchor that is most probably asked for next.

Everything happens inside one engine process, between its steps: each data-parallel rank looks after
its own pool, and no two API servers can start two warm-ups. What they do is ask, a few times a
second (`keep_warm`), because an idle engine sleeps on its input queue and has no clock of its own.
"""

import asyncio
import logging
import math
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Protocol

from scout_server.policy import UNHASHED, Assignment, Finish, PolicyCore, Segment
from scout_server.policy.prefetch import (
    AnchorView,
    PrefetchPlanner,
    PrefetchSettings,
    Refusal,
    WarmUp,
)
from scout_server.policy.warmth import Candidate, Warmth
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.engine import PromptRequest, Request
from scout_server.vllm.queue import RetentionQueue

__all__ = ["Engine", "Prefetch", "keep_warm"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

_MAX_TOKENS = 4_000_000  # token ids of anchors kept, all agents together
_SOON_S, _LATER_S, _ASLEEP_S = 0.05, 0.1, 0.5  # when to ask again: idle soon, refused, in vain


class Engine(Protocol):
    """What prefetching asks of the scheduler that it lives in."""

    block_tokens: int
    """Tokens that are cached together: the least common multiple of all KV groups' blocks."""

    def live(self) -> int:
        """Return how many requests the engine has; -1 while it is paused."""
        ...

    def cached_tokens(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Return how many leading tokens of a chain are cached."""
        ...

    def build(self, template: "Template", request_id: str, tokens: list[int]) -> Request:
        """Return a request that generates one token, for the lowest priority."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request of ours."""
        ...

    def abort(self, request_id: str) -> None:
        """Take a request of ours out at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """An agent's anchor as one of its requests had it."""

    tokens: "array[int]"
    last: object
    """Hash of the anchor's last block."""
    like: tuple[object, ...]
    """What else goes into the hashes, as the engine wants it."""


@dataclass(slots=True)
class _Running:
    warm: WarmUp
    candidate: Candidate
    template: Template
    tokens: int
    """Length of the whole anchor in tokens, cut to what can be cached."""
    request_id: str = ""
    step: int = 0
    """Tokens of the anchor that are cached when the request in the engine is done."""
    over: bool = False
    """The request in the engine has ended."""


class Prefetch:
    """
    Plans, runs, cancels and counts the warm-ups of one engine.

    A warm-up is a row of requests, each of which computes at most `chunk_tokens`, so that no user
    waits for more than one such step; only when the engine has nothing else is the next one queued.
    No method raises: the first fault ends prefetching until the server is restarted, and nothing
    else.
    """

    def __init__(
        self,
        engine: Engine,
        core: PolicyCore,
        queue: RetentionQueue,
        settings: PrefetchSettings,
        *,
        clock: Callable[[], float],
        retention: Breaker,
        off: str | None = None,
    ) -> None:
        self._engine = engine
        self._core = core
        self._queue = queue
        self._clock = clock
        self.settings = settings
        self.off = off
        """Why this engine can have no warm-ups; None: it can."""
        self.planner = PrefetchPlanner(settings)
        self.warmth = Warmth(core, horizon_s=settings.horizon_s)
        self.breaker = Breaker(lambda: None, what="prefetching ends")
        self._retention = retention
        self._templates: OrderedDict[tuple[str, str], Template] = OrderedDict()
        self._kept = 0
        self._running: _Running | None = None
        self._count = 0
        self._busy_until = -math.inf
        self._vain = False
        """Whether the last plan was refused for a reason that only more requests can change."""
        self.requests = 0
        """Requests of ours that the engine ran, all warm-ups together."""
        self.contended = 0
        """Steps planned with a request of ours beside a user's; none unless something is wrong."""

    @property
    def active(self) -> bool:
        """Whether warm-ups are possible at all."""
        out = self.breaker.open or self._retention.open
        return self.settings.enabled and self.off is None and not out

    @property
    def request_id(self) -> str | None:
        """Id of our request in the engine; None when there is none."""
        running = self._running
        if running is None or running.over or not self.active:
            return None
        return running.request_id

    # ---- what users do ---------------------------------------------------------------------

    def arriving(self) -> None:
        """Make way for a user's request."""
        if self.active:
            self._guard("cancel", self._cancel)

    def arrived(self, request: PromptRequest, assignment: Assignment, tenant: str) -> None:
        """Learn whose anchor a user's request has, and whether a warm-up has served it."""
        if self.active:
            self._guard("arrive", lambda: self._arrived(request, assignment, tenant))

    def ended(self) -> None:
        """Note that the engine gave back a user's request."""
        self._busy_until = self._clock() + self.settings.idle_after_s

    # ---- what our own requests do ----------------------------------------------------------

    def owns(self, request_id: str) -> bool:
        """Whether *request_id* is of ours and in the engine or just leaving it."""
        return self._running is not None and self._running.request_id == request_id

    def segments(self, blocks: int) -> list[Segment]:
        """Return the owners of the first *blocks* hash blocks of the running warm-up's anchor."""
        assert self._running is not None
        candidate = self._running.candidate
        tenant = self._core.tenant(candidate.tenant)
        found: list[Segment] = []
        for end, group in tenant.agents.segments(candidate.agent):
            found.append(Segment(min(end, blocks), group))
            if end >= blocks:
                break
        return found or [Segment(blocks, UNHASHED)]

    def leaves(self, finish: Finish) -> None:
        """Note that our request left the engine; `go_on` queues what follows."""
        running = self._running
        if running is None:
            return
        running.over = True
        if finish not in (Finish.LENGTH, Finish.STOP):
            self._running = None
            self.planner.cancel()

    def go_on(self) -> None:
        """Queue the next part of a warm-up, or the next warm-up; after each step of the engine."""
        running = self._running
        if running is None or not running.over or not self.active:
            return
        self._guard("continue", lambda: self._go_on(running))

    def poke(self) -> float:
        """Start a warm-up if one is worth it; return when to ask again, in seconds."""
        if not self.active:
            return _ASLEEP_S * 10
        return self._guard("plan", self._poke) or _ASLEEP_S

    def state(self) -> dict[str, object]:
        """Return counters and condition as plain values."""
        reason = self.breaker.reason or self.off
        return {
            "enabled": self.settings.enabled,
            "off": reason,
            "confidence": self.planner.confidence,
            "requests": self.requests,
            "contended": self.contended,
            **asdict(self.planner.counters),
            "refused": {why.value: n for why, n in self.planner.refused.items()},
        }

    # ---- inside ----------------------------------------------------------------------------

    def _guard(self, place: str, action: Callable[[], float | None]) -> float | None:
        try:
            return action()
        except Exception as error:
            self.breaker.trip(f"prefetch {place}", error)
            running, self._running = self._running, None
            self.planner.cancel()
            if running is not None and not running.over:
                self._engine.abort(running.request_id)
            return None

    def _cancel(self) -> None:
        running = self._running
        if running is None:
            return
        if not running.over:
            self._engine.abort(running.request_id)  # comes back as `leaves`
        if self._running is not None:
            self._running = None
            self.planner.cancel()

    def _arrived(self, request: PromptRequest, assignment: Assignment, tenant: str) -> None:
        name = assignment.agent
        agent = self._core.tenant(tenant).agents.find(name) if name is not None else None
        if name is None or agent is None or not agent.anchor:
            return
        blocks = len(agent.anchor)
        hashes = request.block_hashes
        if len(hashes) < blocks or hashes[blocks - 1] != agent.anchor[-1]:
            return
        now = self._clock()
        tokens = self._cut(blocks)
        missing = tokens - self._engine.cached_tokens(hashes[:blocks], tokens)
        self.planner.asked(tenant, name, now=now, cached=missing < self.settings.min_tokens)
        known = self._templates.get((tenant, name))
        if known is not None and known.last == agent.anchor[-1]:
            self._templates.move_to_end((tenant, name))
            return
        like = request_like(request)
        if like is None:
            return
        prompt = request.prompt_token_ids
        assert prompt is not None
        if known is not None:
            self._kept -= len(known.tokens)
        template = Template(tokens=array("l", prompt[:tokens]), last=agent.anchor[-1], like=like)
        self._templates[(tenant, name)] = template
        self._templates.move_to_end((tenant, name))
        self._kept += tokens
        while self._kept > _MAX_TOKENS and self._templates:
            _, old = self._templates.popitem(last=False)
            self._kept -= len(old.tokens)

    def _poke(self) -> float:
        now = self._clock()
        live = self._engine.live()
        if live or now < self._busy_until:
            self.planner.expire(now=now)
            if self._vain:
                return _ASLEEP_S
            return _LATER_S if live < 0 else _SOON_S
        if self._running is not None:
            self._go_on(self._running)  # its last request ended when the engine was not yet empty
            return _SOON_S
        return self._start(now)

    def _start(self, now: float) -> float:
        candidates = self.warmth.candidates(now=now)
        predictability = max((each.predictability for each in candidates), default=0.0)
        least = min(self.settings.min_predictability, predictability)
        views: list[AnchorView] = []
        known: dict[tuple[str, str], tuple[Candidate, Template, int]] = {}
        for candidate in candidates:
            agent = candidate.agent
            key = (candidate.tenant, agent.name)
            template = self._templates.get(key)
            if template is None or template.last != agent.anchor[-1]:
                continue
            if candidate.predictability < least:
                continue
            tokens = self._cut(len(agent.anchor))
            cached = self._engine.cached_tokens(agent.anchor, tokens)  # type: ignore[arg-type]
            known[key] = (candidate, template, tokens)
            views.append(
                AnchorView(
                    tenant=candidate.tenant,
                    agent=agent.name,
                    missing_tokens=tokens - cached,
                    missing_blocks=math.ceil((tokens - cached) / self._engine.block_tokens),
                    probability=candidate.probability,
                    worth=candidate.worth,
                )
            )

        def worth(view: AnchorView) -> float:
            return self._worth(view, known[view.tenant, str(view.agent)][0])

        plan = self.planner.plan(
            views,
            idle=True,
            predictability=predictability,
            worth_of_blocks=worth,
            now=now,
        )
        if candidates:
            self._vain = plan is Refusal.UNPREDICTABLE
        if not isinstance(plan, WarmUp):
            return _LATER_S if candidates and not self._vain else _ASLEEP_S
        candidate, template, tokens = known[plan.tenant, str(plan.agent)]
        self._running = _Running(plan, candidate, template, tokens)
        self._queue_part(self._running)
        return _SOON_S

    def _worth(self, view: AnchorView, candidate: Candidate) -> float:
        """Return the highest score among the blocks that go next, the anchor's own left out."""
        own = {group for _, group in candidate.agent.segments}
        owners = self._queue.owners
        if view.missing_blocks > self._queue.num_free_blocks:
            return math.inf
        highest = 0.0
        left = view.missing_blocks
        for block in self._queue.iter_blocks_after(None):
            if left == 0:
                break
            if block.block_hash is not None:
                group = owners[block.block_id]
                if group in own:
                    continue
                highest = max(highest, self.warmth.worth(group))
            left -= 1
        return highest if left == 0 else math.inf

    def _queue_part(self, running: _Running) -> None:
        hashes = running.candidate.agent.anchor
        tokens = running.tokens
        cached = self._engine.cached_tokens(hashes, tokens)  # type: ignore[arg-type]
        if cached >= tokens or cached < running.step:
            # Done; or the pool took back what the last part computed, so the bet is off.
            self._running = None
            if cached >= tokens:
                self.planner.done(now=self._clock())
            else:
                self.planner.cancel()
            return
        block = self._engine.block_tokens
        step = max(block, self.settings.chunk_tokens // block * block)
        running.step = min(tokens, cached + step)
        self._count += 1
        running.request_id = f"scout-warm-up-{self._count}"
        prompt = list(islice(running.template.tokens, running.step))
        request = self._engine.build(running.template, running.request_id, prompt)
        last = running.step // self._core.block_tokens - 1
        if request.block_hashes[last] != hashes[last]:
            self._templates.pop((running.candidate.tenant, running.candidate.agent.name), None)
            self._kept -= len(running.template.tokens)
            self._running = None
            self.planner.cancel()
            return
        running.over = False
        self.requests += 1
        self._engine.add(request)

    def _go_on(self, running: _Running) -> None:
        if self._engine.live():
            return
        self._queue_part(running)
        if self._running is None:
            self._start(self._clock())

    def _cut(self, blocks: int) -> int:
        tokens = blocks * self._core.block_tokens
        return tokens - tokens % self._engine.block_tokens


def request_like(request: PromptRequest) -> tuple[object, ...] | None:
    """Return what a warm-up must copy of *request* to get its hashes; None where it cannot."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    if request.mm_features:
        return None
    return (request.lora_request, request.cache_salt, request._block_hasher)


async def keep_warm(
    ask: Callable[[], Awaitable[float | None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """
    Ask the engines again and again whether a warm-up is worth it, when they want to be asked.

    *ask* returns the seconds until then, or None when there was no answer. Runs until cancelled.
    """
    pause = _ASLEEP_S
    while True:
        await sleep(pause)
        seconds = await ask()
        pause = 10 * _ASLEEP_S if seconds is None else min(max(seconds, 0.02), 60.0)

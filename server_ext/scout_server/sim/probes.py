"""Asks a running server for single steps: prompts alone, beside others, and decoding together."""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from scout_sdk import _wire
from scout_sdk._errors import ConfigError
from scout_sdk._hints import Hints, SessionEvent, ToolEvent, ToolState
from scout_server.sim.live import LIMITS, ask, read_counters

__all__ = ["Calibration", "FrontProbe", "Probe", "Probes", "probe_server"]

_PREFILL = "request_prefill_time_seconds_sum"
_DECODE = "request_decode_time_seconds_sum"
_QUEUE = "request_queue_time_seconds_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What to ask a server."""

    prompt_tokens: tuple[int, ...] = (16, 48, 96, 192, 384, 512, 640, 896, 1280, 1900)
    """Prompts alone; each fits into one step."""
    history_tokens: tuple[int, ...] = (512, 1280)
    """Cached tokens before the new ones."""
    new_tokens: tuple[int, ...] = (32, 128, 512)
    """Tokens that follow a cached history."""
    concurrency: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Requests that decode together; their prompts have each of *context_tokens*."""
    context_tokens: tuple[int, ...] = (96, 512, 1280)
    mixed_tokens: tuple[int, ...] = (64, 256)
    """New prompts beside decoding requests."""
    mixed_prompts: int = 6
    """How many of them, one after the other, while the others decode."""
    decode_s: float = 1.0
    """How long requests decode together, about, so that their starts do not count."""
    mixed_s: float = 3.5
    """How long others decode while new prompts come, about."""
    output_tokens: tuple[int, int] = (32, 1000)
    """Least and most that a request generates."""
    repeats: int = 3
    vocabulary: tuple[int, int] = (256, 8000)
    """Token ids to draw from."""
    seed: int = 1

    def up_to(self, tokens: int) -> "Calibration":
        """Return the same without prompts of more than *tokens*."""
        most_new = max(self.new_tokens)
        return replace(
            self,
            prompt_tokens=tuple(n for n in self.prompt_tokens if n <= tokens),
            history_tokens=tuple(n for n in self.history_tokens if n + most_new <= tokens),
            context_tokens=tuple(
                n for n in self.context_tokens if n + self.output_tokens[1] <= tokens
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One kind of step and its measured seconds (median of the repeats)."""

    prefill: tuple[tuple[int, int], ...]
    """(new tokens, tokens before) of every prompt."""
    sequences: int
    """Requests that decode."""
    context_tokens: float
    """Their context, all together."""
    seconds: float
    spread: float
    """Mean distance of a repeat from the median, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontProbe:
    """What one request alone spent outside the engine's steps."""

    prompt_tokens: int
    seconds: float
    busy: bool = False
    """Whether others were decoding."""


@dataclass(slots=True)
class Probes:
    """Everything that was measured."""

    model: str
    steps: list[Probe]
    front: list[FrontProbe]
    inside: bool
    """Whether the server says how long requests are in the engine; else the client's times are
    all there is."""


class _Prober:
    def __init__(
        self, client: httpx.AsyncClient, model: str, settings: Calibration, hints: bool
    ) -> None:
        self.client = client
        self.model = model
        self.settings = settings
        self.hints = hints
        self.turn = 0
        self.step_s: float = 0.01
        """Seconds of a step in which one request decodes."""
        self.told: set[asyncio.Task[httpx.Response]] = set()
        self.dice = random.Random(f"calibrate {settings.seed}")
        self.found = Probes(model=model, steps=[], front=[], inside=False)

    def text(self, count: int) -> list[int]:
        low, high = self.settings.vocabulary
        return [self.dice.randrange(low, high) for _ in range(count)]

    def headers(self) -> dict[str, str] | None:
        """Return what a turn of an agent says of itself; each is of a session of its own."""
        if not self.hints:
            return None
        self.turn += 1
        tools = (ToolEvent(name="tool", state=ToolState.ENDED),)
        session = f"calibrate.{self.turn}"
        return _wire.encode(Hints(session=session, agent="calibrate", turn=2, tools=tools))

    def tell(self) -> None:
        """Send what an agent's client says when its tool begins, and do not wait."""
        if self.hints:
            tool = ToolEvent(name="tool", state=ToolState.STARTED)
            event = SessionEvent(session=f"calibrate.{self.turn}", agent="calibrate", tool=tool)
            task = asyncio.create_task(
                self.client.post(_wire.EVENTS_PATH, content=_wire.encode_events([event]))
            )
            self.told.add(task)
            task.add_done_callback(self.told.discard)

    async def alone(self, prompt: Sequence[int]) -> float:
        """Return the seconds of the step that computes *prompt*; note what was outside of it."""
        before = await read_counters(self.client)
        got = await ask(self.client, self.model, prompt, 1, self.headers())
        after = await read_counters(self.client)
        whole = got.last_s - got.sent_s
        if _PREFILL not in before or _PREFILL not in after:
            return whole
        self.found.inside = True
        step = after[_PREFILL] - before[_PREFILL]
        queued = after.get(_QUEUE, 0.0) - before.get(_QUEUE, 0.0)
        self.found.front.append(
            FrontProbe(prompt_tokens=len(prompt), seconds=max(whole - step - queued, 0.0))
        )
        return step

    def add(
        self,
        prefill: tuple[tuple[int, int], ...],
        sequences: int,
        context: float,
        seconds: Sequence[float],
    ) -> None:
        middle = statistics.median(seconds)
        self.found.steps.append(
            Probe(
                prefill=prefill,
                sequences=sequences,
                context_tokens=context,
                seconds=middle,
                spread=statistics.fmean(abs(s / middle - 1.0) for s in seconds),
            )
        )

    async def prompts(self) -> None:
        repeats = self.settings.repeats
        for tokens in self.settings.prompt_tokens:
            seconds = [await self.alone(self.text(tokens)) for _ in range(repeats)]
            self.add(((tokens, 0),), 0, 0.0, seconds)
        for history in self.settings.history_tokens:
            for tokens in self.settings.new_tokens:
                seconds = []
                for _ in range(repeats):
                    known = self.text(history)
                    await ask(self.client, self.model, known, 1)
                    seconds.append(await self.alone([*known, *self.text(tokens)]))
                self.add(((tokens, history),), 0, 0.0, seconds)

    async def _known(self, count: int, context: int) -> list[list[int]]:
        """Return prompts that are cached, so that requests with them decode almost at once."""
        prompts = [self.text(context) for _ in range(count)]
        for prompt in prompts:
            await ask(self.client, self.model, prompt, 1)
        return prompts

    def tokens_in(self, seconds: float) -> int:
        """Return how many tokens one request generates in that time, within limits."""
        least, most = self.settings.output_tokens
        return min(max(round(seconds / self.step_s), least), most)

    async def decodes(self) -> None:
        made = self.settings.output_tokens[0]
        one = await ask(self.client, self.model, self.text(100), made)
        self.step_s = max((one.last_s - one.sent_s) / made, 1e-4)
        made = self.tokens_in(self.settings.decode_s)
        for context in self.settings.context_tokens:
            prompts = await self._known(max(self.settings.concurrency), context)
            for count in self.settings.concurrency:
                seconds = []
                for _ in range(self.settings.repeats):
                    before = await read_counters(self.client)
                    got = await asyncio.gather(
                        *(
                            ask(self.client, self.model, p, made, self.headers())
                            for p in prompts[:count]
                        )
                    )
                    after = await read_counters(self.client)
                    whole = sum(g.last_s - g.first_s for g in got)
                    if self.found.inside:
                        whole = after[_DECODE] - before[_DECODE]
                    seconds.append(whole / count / (made - 1))
                self.add((), count, count * (context + made / 2), seconds)

    async def mixed(self) -> None:
        """
        New prompts while others decode: by how much each of them holds up the others.

        Only where the server says how long requests decode.
        """
        settings = self.settings
        if not self.found.inside or not settings.mixed_tokens:
            return
        context, made = settings.context_tokens[-1] // 2, self.tokens_in(settings.mixed_s)
        most = max(settings.concurrency) - 1
        prompts = await self._known(most, context)
        for count in sorted({1, most // 2, most} - {0}):
            bare = [await self._decoding(prompts[:count], 0) for _ in range(settings.repeats)]
            alone = statistics.median(run.decode_s for run in bare)
            prefill = statistics.median(run.prefill_s for run in bare)
            step = alone / (made - 1)
            for tokens in settings.mixed_tokens:
                seconds = []
                for _ in range(settings.repeats):
                    run = await self._decoding(prompts[:count], tokens)
                    if run.early:  # the prompts were not all beside all of the others
                        continue
                    seconds.append((run.decode_s - alone) / settings.mixed_prompts + step)
                    # what is neither its own step nor the rest of the step that it came in
                    inside = (run.prefill_s - prefill) / settings.mixed_prompts + step / 2
                    front = max(statistics.median(run.waits_s) - inside, 0.0)
                    self.found.front.append(
                        FrontProbe(prompt_tokens=tokens, seconds=front, busy=True)
                    )
                if len(seconds) > settings.repeats // 2:
                    self.add(((tokens, 0),), count, count * (context + made / 4), seconds)

    async def _decoding(self, prompts: Sequence[Sequence[int]], tokens: int) -> "_Decoding":
        """Let requests decode together, while prompts of *tokens* come if it is not 0."""
        made = self.tokens_in(self.settings.mixed_s)
        before = await read_counters(self.client)
        tasks = [
            asyncio.create_task(ask(self.client, self.model, p, made, self.headers()))
            for p in prompts
        ]
        early = False
        waits: list[float] = []
        if tokens:
            await asyncio.sleep(0.1)
            for _ in range(self.settings.mixed_prompts):
                self.tell()
                got = await ask(self.client, self.model, self.text(tokens), 1, self.headers())
                waits.append(got.last_s - got.sent_s)
            early = any(task.done() for task in tasks)
        await asyncio.gather(*tasks)
        after = await read_counters(self.client)
        return _Decoding(
            decode_s=(after[_DECODE] - before[_DECODE]) / len(prompts),
            prefill_s=after[_PREFILL] - before[_PREFILL],
            waits_s=waits,
            early=early,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoding:
    """Requests that decoded together, and the prompts that came meanwhile."""

    decode_s: float
    """Mean of the former, between first and last token."""
    prefill_s: float
    """Of all, together."""
    waits_s: list[float]
    """Of each of the latter, at the client."""
    early: bool
    """Whether some of the former had ended before the last of the latter."""


async def probe_server(
    url: str,
    settings: Calibration | None = None,
    *,
    hints: bool = False,
    transport: httpx.AsyncBaseTransport | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Probes:
    """
    Measure the server at *url*, which should serve nobody else meanwhile; *hints* as in calibrate.

    ConfigError when it cannot be asked.
    """
    asked = settings or Calibration()
    async with httpx.AsyncClient(
        base_url=url, timeout=300.0, limits=LIMITS, transport=transport
    ) as client:
        try:
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            model = str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            msg = f"{url} does not list a model: {error!r}"
            raise ConfigError(msg) from error
        prober = _Prober(client, model, asked, hints)
        try:
            for _ in range(3):  # warm-up, not counted
                await ask(client, model, prober.text(200), 8)
            for name, part in (
                ("prompts", prober.prompts),
                ("decoding", prober.decodes),
                ("both", prober.mixed),
            ):
                progress(name)
                await part()
            if prober.told:
                await asyncio.gather(*prober.told)
        except httpx.HTTPError as error:
            msg = f"{url}: {error!r}"
            raise ConfigError(msg) from error
    return prober.found

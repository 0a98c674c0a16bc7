"""Asks a running server for single steps: prompts alone, beside others, and decoding together."""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from scout_sdk._errors import ConfigError
from scout_server.sim.live import ask, read_counters

__all__ = ["Calibration", "FrontProbe", "Probe", "Probes", "probe_server"]

_PREFILL = "request_prefill_time_seconds_sum"
_QUEUE = "request_queue_time_seconds_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What to ask a server."""

    prompt_tokens: tuple[int, ...] = (16, 48, 96, 192, 384, 768, 1280, 1900)
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
    output_tokens: int = 32
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
                n for n in self.context_tokens if n + 4 * self.output_tokens <= tokens
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
    def __init__(self, client: httpx.AsyncClient, model: str, settings: Calibration) -> None:
        self.client = client
        self.model = model
        self.settings = settings
        self.dice = random.Random(f"calibrate {settings.seed}")
        self.found = Probes(model=model, steps=[], front=[], inside=False)

    def text(self, count: int) -> list[int]:
        low, high = self.settings.vocabulary
        return [self.dice.randrange(low, high) for _ in range(count)]

    async def alone(self, prompt: Sequence[int]) -> float:
        """Return the seconds of the step that computes *prompt*; note what was outside of it."""
        before = await read_counters(self.client)
        got = await ask(self.client, self.model, prompt, 1)
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

    async def decodes(self) -> None:
        made = self.settings.output_tokens
        for count in self.settings.concurrency:
            for context in self.settings.context_tokens:
                seconds = []
                for _ in range(self.settings.repeats):
                    prompts = [self.text(context) for _ in range(count)]
                    for prompt in prompts:  # cached, so that they begin together
                        await ask(self.client, self.model, prompt, 1)
                    got = await asyncio.gather(
                        *(ask(self.client, self.model, p, made) for p in prompts)
                    )
                    # from when the last began to when the first ended, all decode
                    seconds.append(
                        statistics.median((g.last_s - g.first_s) / (made - 1) for g in got)
                    )
                self.add((), count, count * (context + made / 2), seconds)

    async def mixed(self) -> None:
        """New prompts while others decode: only where the server says what happens inside."""
        if not self.found.inside:
            return
        context, made = self.settings.context_tokens[1], 4 * self.settings.output_tokens
        for count in (1, max(self.settings.concurrency) - 1):
            for tokens in self.settings.mixed_tokens:
                seconds = []
                for _ in range(self.settings.repeats):
                    prompts = [self.text(context) for _ in range(count)]
                    for prompt in prompts:
                        await ask(self.client, self.model, prompt, 1)
                    others = [
                        asyncio.create_task(ask(self.client, self.model, p, made)) for p in prompts
                    ]
                    await asyncio.sleep(0.25)
                    before = await read_counters(self.client)
                    await ask(self.client, self.model, self.text(tokens), 1)
                    after = await read_counters(self.client)
                    busy = not any(task.done() for task in others)
                    await asyncio.gather(*others)
                    if busy:  # else it was not beside all of them
                        seconds.append(after[_PREFILL] - before[_PREFILL])
                if seconds:
                    self.add(((tokens, 0),), count, count * (context + made / 4), seconds)


async def probe_server(
    url: str,
    settings: Calibration | None = None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Probes:
    """
    Measure the server at *url*, which should serve nobody else meanwhile.

    ConfigError when it cannot be asked.
    """
    asked = settings or Calibration()
    async with httpx.AsyncClient(base_url=url, timeout=300.0, transport=transport) as client:
        try:
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            model = str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            msg = f"{url} does not list a model: {error!r}"
            raise ConfigError(msg) from error
        prober = _Prober(client, model, asked)
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
        except httpx.HTTPError as error:
            msg = f"{url}: {error!r}"
            raise ConfigError(msg) from error
    return prober.found

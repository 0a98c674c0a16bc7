"""Asks a running server for single steps: prompts alone, beside others, and decoding together."""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pydantic

from scout_sdk import _wire
from scout_sdk._errors import ConfigError
from scout_sdk._hints import Hints, ToolEvent, ToolState
from scout_server.sim.live import LIMITS, ask, read_counters
from scout_server.sim.loops import Loop

__all__ = [
    "Calibration",
    "FrontProbe",
    "Probe",
    "Probes",
    "load_probes",
    "probe_server",
    "probes_text",
]

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
    decode_s: float = 0.6
    """How long requests decode together, about, so that their starts do not count."""
    output_tokens: tuple[int, int] = (32, 1000)
    """Least and most that a request generates."""
    repeats: int = 3
    loops: tuple[int, ...] = (1, 2, 4, 8)
    """Programs at once of closed loops, which tell what requests take from one another."""
    loops_s: float = 60.0
    """Loops are run again until about this time is over."""
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


@dataclass(slots=True)
class Probes:
    """Everything that was measured."""

    model: str
    steps: list[Probe]
    front: list[FrontProbe]
    inside: bool
    """Whether the server says how long requests are in the engine; else the client's times are
    all there is."""
    loops: list[Loop] = field(default_factory=list)
    """Programs on the same server."""


_ADAPTER = pydantic.TypeAdapter(Probes)


def probes_text(probes: Probes) -> str:
    """Return *probes* as JSON."""
    return _ADAPTER.dump_json(probes, indent=1).decode() + "\n"


def load_probes(path: Path) -> Probes:
    """Read what `probes_text` gave; ConfigError names what is wrong."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        msg = f"{path.name}: {error}"
        raise ConfigError(msg) from error


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
        settings = self.settings
        kinds = [(tokens, 0) for tokens in settings.prompt_tokens]
        kinds += [(n, h) for h in settings.history_tokens for n in settings.new_tokens]
        found: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
        # in rounds, so that a machine that changes its speed does so for all of them
        for _ in range(settings.repeats):
            for tokens, history in kinds:
                known = self.text(history)
                if known:
                    await ask(self.client, self.model, known, 1)
                found[tokens, history].append(await self.alone([*known, *self.text(tokens)]))
        for kind, seconds in found.items():
            self.add((kind,), 0, 0.0, seconds)

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
        most = max(self.settings.concurrency)
        prompts = {n: await self._known(most, n) for n in self.settings.context_tokens}
        kinds = [(n, count) for n in prompts for count in self.settings.concurrency]
        found: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
        for _ in range(self.settings.repeats):
            for context, count in kinds:
                found[context, count].append(await self._together(prompts[context][:count], made))
        for (context, count), seconds in found.items():
            self.add((), count, count * (context + made / 2), seconds)

    async def _together(self, prompts: Sequence[Sequence[int]], made: int) -> float:
        """Return the seconds of a step in which requests with these cached prompts decode."""
        before = await read_counters(self.client)
        got = await asyncio.gather(
            *(ask(self.client, self.model, p, made, self.headers()) for p in prompts)
        )
        after = await read_counters(self.client)
        whole = sum(g.last_s - g.first_s for g in got)
        if self.found.inside:
            whole = after[_DECODE] - before[_DECODE]
        return whole / len(prompts) / (made - 1)


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
            ):
                progress(name)
                await part()
        except httpx.HTTPError as error:
            msg = f"{url}: {error!r}"
            raise ConfigError(msg) from error
    return prober.found

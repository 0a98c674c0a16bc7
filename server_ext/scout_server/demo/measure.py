"""What the demo measures: time to first token at the client, cache counters at the server."""

import importlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from scout_sdk import ScoutError

__all__ = ["Counters", "Recorder", "read_counters", "recording_client", "replay"]

_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """Prefix-cache counters of a server, in prompt tokens, since its start."""

    queried: float
    """Prompt tokens that were looked up."""
    hit: float
    """Prompt tokens that were found."""

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Return what was counted since *earlier*."""
        return Counters(self.queried - earlier.queried, self.hit - earlier.hit)

    def __add__(self, other: "Counters") -> "Counters":
        """Return the sum of two differences."""
        return Counters(self.queried + other.queried, self.hit + other.hit)

    @property
    def hit_rate(self) -> float:
        """Found tokens by tokens looked up; NaN when none were."""
        return self.hit / self.queried if self.queried else float("nan")

    @property
    def recomputed(self) -> float:
        """Prompt tokens that were not found and had to be computed."""
        return self.queried - self.hit


async def read_counters(root: str) -> Counters:
    """Return the counters that the server at *root* shows on /metrics, summed over its engines."""
    async with httpx.AsyncClient(base_url=root, timeout=30.0) as client:
        text = (await client.get("/metrics")).raise_for_status().text
    return Counters(_total(text, _QUERIES), _total(text, _HITS))


def _total(text: str, name: str) -> float:
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((name + "{", name + " "))
    ]
    if not values:
        msg = f"the server's /metrics has no {name}"
        raise ScoutError(msg)
    return sum(values)


@dataclass(slots=True)
class Recorder:
    """What went over the wire: each chat request as it was sent, and its seconds to first byte."""

    sent: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    """Headers that carry hints, and the body, in the order of sending."""
    ttft_s: list[float] = field(default_factory=list)
    """Seconds to the first byte of every streamed answer."""


def recording_client(recorder: Recorder) -> Any:
    """
    Return an HTTP client for openai that fills *recorder*; close it with `aclose`.

    It is a client of whichever HTTP library the installed openai package uses.
    """
    openai = importlib.import_module("openai")
    base: Any = openai.DefaultAsyncHttpxClient

    class Recording(base):  # type: ignore[misc]
        async def send(self, request: Any, **options: Any) -> Any:
            chat = request.url.path.endswith("/chat/completions")
            if chat:
                recorder.sent.append((_hints(request.headers), request.content))
            started = time.perf_counter()
            response = await super().send(request, **options)
            if chat and options.get("stream"):
                response.stream = _timed(response, started, recorder.ttft_s)
            return response

    return Recording(timeout=600.0)


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.lower().startswith(("x-scout-", "x-session-"))}


async def replay(
    root: str, sent: Sequence[tuple[dict[str, str], bytes]], done: Callable[[], None]
) -> Counters:
    """
    Send *sent* again to the server at *root*, one at a time and with one token of answer each.

    Returns what was counted meanwhile. Nothing is left to timing: two servers with equal orders of
    eviction count equally.
    """
    before = await read_counters(root)
    async with httpx.AsyncClient(base_url=root, timeout=600.0) as client:
        for headers, body in sent:
            document = {**json.loads(body), "max_tokens": 1, "stream": False}
            for extra in ("max_completion_tokens", "stream_options", "response_format"):
                document.pop(extra, None)
            answer = await client.post("/v1/chat/completions", json=document, headers=headers)
            answer.raise_for_status()
            done()
    return await read_counters(root) - before


def _timed(response: Any, started: float, ttft_s: list[float]) -> Any:
    library = importlib.import_module(type(response).__module__.split(".")[0])
    base: Any = library.AsyncByteStream
    inner = response.stream

    class Timed(base):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            first = True
            async for chunk in inner:
                if first:
                    ttft_s.append(time.perf_counter() - started)
                    first = False
                yield chunk

        async def aclose(self) -> None:
            await inner.aclose()

    return Timed()

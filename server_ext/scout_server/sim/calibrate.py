"""Measures a running server and writes a latency profile of it."""

import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import numpy as np

from scout_sdk._errors import ConfigError
from scout_server.sim.hardware.fitted import FittedLatency, Profile

__all__ = ["Answer", "Calibration", "calibrate", "fit_answers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One measured request."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    first_s: float
    """Seconds to the first token."""
    step_s: float
    """Mean seconds between tokens; 0 with one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What to ask a server."""

    prompt_tokens: tuple[int, ...] = (64, 256, 768, 1536)
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    output_tokens: int = 48
    repeats: int = 3
    seed: int = 1


def _words(count: int, rng: random.Random) -> str:
    # Random letters: no two prompts share a prefix, so nothing is found in the cache.
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(count))


def _ask(
    client: httpx.Client, model: str, prompt: str, output_tokens: int, concurrency: int
) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first = last = 0.0
    pieces = 0
    usage: dict[str, int] = {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = response.read().decode(errors="replace")[:300]
            msg = f"the server answered {response.status_code}: {text}"
            raise ConfigError(msg)
        for data in _events(response.iter_lines()):
            now = time.perf_counter()
            if data.get("choices"):
                pieces += 1
                first = first or now
                last = now
            found = data.get("usage")
            if isinstance(found, dict):
                usage = found
    if not pieces:
        msg = "the server sent no token"
        raise ConfigError(msg)
    made = int(usage.get("completion_tokens") or pieces)
    return Answer(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        output_tokens=made,
        concurrency=concurrency,
        first_s=first - begin,
        step_s=(last - first) / (made - 1) if made > 1 else 0.0,
    )


def _events(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            raw = json.loads(line[5:])
            if isinstance(raw, dict):
                yield raw


def _model(client: httpx.Client) -> str:
    try:
        answer = client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        msg = f"{client.base_url} does not list a model: {error!r}"
        raise ConfigError(msg) from error


def calibrate(
    url: str, settings: Calibration | None = None, *, client: httpx.Client | None = None
) -> tuple[Profile, list[Answer]]:
    """
    Measure the server at *url*; return its profile and what was measured.

    The server should serve nobody else meanwhile. ConfigError when it cannot be asked.
    """
    asked = settings or Calibration()
    rng = random.Random(f"calibrate {asked.seed}")
    answers: list[Answer] = []
    with client or httpx.Client(base_url=url, timeout=120.0) as http:
        model = _model(http)
        try:
            _ask(http, model, _words(20, rng), 4, 1)  # warm-up, not counted
            for tokens in asked.prompt_tokens:
                answers.extend(
                    _ask(http, model, _words(tokens, rng), 1, 1) for _ in range(asked.repeats)
                )
            for concurrency in asked.concurrency:
                for tokens in (asked.prompt_tokens[0], asked.prompt_tokens[-1]):
                    prompts = [_words(tokens, rng) for _ in range(concurrency)]
                    with ThreadPoolExecutor(concurrency) as pool:
                        answers.extend(
                            pool.map(
                                lambda p, c=concurrency: _ask(
                                    http, model, p, asked.output_tokens, c
                                ),
                                prompts,
                            )
                        )
        except httpx.HTTPError as error:
            msg = f"{url}: {error!r}"
            raise ConfigError(msg) from error
    return fit_answers(answers, model=model, source=f"measured at {url}"), answers


def fit_answers(answers: Sequence[Answer], *, model: str, source: str) -> Profile:
    """
    Fit prefill (fixed, per token, per pair) and decode (fixed, per sequence, per KV token).

    Non-negative least squares on medians; ConfigError when there is too little to fit.
    """
    from scipy.optimize import nnls

    single = [a for a in answers if a.output_tokens == 1]
    many = [a for a in answers if a.output_tokens > 1 and a.step_s > 0]
    lengths = sorted({a.prompt_tokens for a in single})
    if len(lengths) < 3 or len({a.concurrency for a in many}) < 2:
        msg = "too little was measured: 3 prompt lengths and 2 concurrencies are needed"
        raise ConfigError(msg)
    tokens = np.array([a.prompt_tokens for a in single], dtype=float)
    firsts = np.array([a.first_s for a in single])
    prefill = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
    (fixed, per_token, pair), _ = nnls(prefill / firsts[:, None], np.ones_like(firsts))
    groups: dict[tuple[int, int], list[Answer]] = {}
    for answer in many:
        bucket = round(math.log2(max(answer.prompt_tokens, 1)))
        groups.setdefault((answer.concurrency, bucket), []).append(answer)
    rows, steps = [], []
    for (concurrency, _), found in sorted(groups.items()):
        context = statistics.fmean(a.prompt_tokens + a.output_tokens / 2 for a in found)
        rows.append((1.0, float(concurrency), concurrency * context))
        steps.append(statistics.median(a.step_s for a in found))
    decode, measured = np.array(rows), np.array(steps)
    (base, per_sequence, kv), _ = nnls(decode / measured[:, None], np.ones_like(measured))
    # A decoded token may cost less than a prefilled one: then its own cost is negative.
    latency = FittedLatency(
        weights_s=0.0,
        dense_s_fixed=float(min(base, fixed)),
        dense_s_per_token=float(per_token),
        knee=1.0,
        pair_s=float(pair),
        sequence_s=float(per_sequence - per_token),
        kv_token_s=float(kv),
        attention_s_fixed=float(max(base - fixed, 0.0)),
        prefill_s_fixed=float(max(fixed - base, 0.0)),
    )
    predicted = [latency.mixed_s([(int(t), 0)], 0, 0) for t in tokens]
    errors = [abs(p / m - 1) for p, m in zip(predicted, firsts, strict=True)]
    again = [latency.mixed_s((), int(r[1]), int(r[2])) for r in rows]
    decode_errors = [abs(p / m - 1) for p, m in zip(again, steps, strict=True)]
    return Profile(
        gpu="this machine",
        model=model,
        latency=latency,
        source=source,
        error={
            "prefill": round(statistics.fmean(errors), 4),
            "decode": round(statistics.fmean(decode_errors), 4),
        },
        note="times include the server's HTTP front end",
    )

"""Step times from measured layer tables (LLMServingSim's profile format)."""

import csv
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from scout_sdk._errors import ConfigError
from scout_server.replica.latency import StepBatch

__all__ = ["AttentionTable", "Curve", "SpanTableLatency", "TableLatency", "load_llmservingsim"]

_PER_LAYER = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


class Curve:
    """A measured curve: linear between its points, straight on beyond the last one."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        if not ordered:
            msg = "a curve needs at least one point"
            raise ConfigError(msg)
        self._x = [x for x, _ in ordered]
        self._y = [y for _, y in ordered]

    @property
    def places(self) -> Sequence[float]:
        """Return where it was measured."""
        return self._x

    def __call__(self, x: float) -> float:
        """Return the value at *x*; below the first point, the first value."""
        xs, ys = self._x, self._y
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + share * (ys[i] - ys[i - 1])


class AttentionTable:
    """
    Attention of one layer over (prefill chunk, decoding sequences, chunk's history, their context).

    Linear in each axis between the nearest measured places. The places need not be a grid: each
    chunk has its own sequence counts, each of those its own histories, each of those its own
    contexts, so that a union of several grids is used whole. Beyond the last place it goes straight
    on.
    """

    def __init__(self, rows: Iterable[tuple[float, float, float, float, float]]) -> None:
        tree: dict[float, dict[float, dict[float, dict[float, float]]]] = {}
        for chunk, history, sequences, context, time_us in rows:
            by_history = tree.setdefault(chunk, {}).setdefault(sequences, {})
            by_context = by_history.setdefault(history if chunk else 0.0, {})
            by_context[context if sequences else 0.0] = time_us
        if not tree:
            msg = "an attention table needs rows"
            raise ConfigError(msg)
        # A step without anything takes no attention.
        tree.setdefault(0.0, {}).setdefault(0.0, {})[0.0] = {0.0: 0.0}
        self._chunks = _Level(
            {
                chunk: _Level(
                    {
                        sequences: _Level(
                            {h: _Level(contexts) for h, contexts in histories.items()}
                        )
                        for sequences, histories in by_sequences.items()
                    }
                )
                for chunk, by_sequences in tree.items()
            }
        )
        self._contexts = sorted(
            {c for histories in tree[0.0].values() for ctx in histories.values() for c in ctx}
        )

    def next_context(self, context: float) -> float:
        """Return the next context measured without a prefill above *context*, or infinity."""
        at = bisect_right(self._contexts, context)
        return self._contexts[at] if at < len(self._contexts) - 1 else math.inf

    def __call__(self, chunk: float, history: float, sequences: float, context: float) -> float:
        """Return the microseconds of one layer."""
        return max(self._chunks.value((chunk, sequences, history, context), 0), 0.0)


class _Level:
    """One axis of the table: places, and at each a value or the next axis."""

    __slots__ = ("_below", "_places")

    def __init__(self, below: "Mapping[float, _Level] | Mapping[float, float]") -> None:
        self._places = sorted(below)
        self._below: list[_Level | float] = [below[place] for place in self._places]

    def value(self, at: tuple[float, float, float, float], axis: int) -> float:
        """Return the value at *at*, of which this level has the coordinate *axis*."""
        places = self._places
        x = at[axis]
        if x <= places[0] or len(places) == 1:
            return self._at(0, at, axis)
        right = min(bisect_left(places, x), len(places) - 1)
        share = (x - places[right - 1]) / (places[right] - places[right - 1])
        high = self._at(right, at, axis)
        if share == 1.0:
            return high
        return high * share + self._at(right - 1, at, axis) * (1.0 - share)

    def _at(self, index: int, at: tuple[float, float, float, float], axis: int) -> float:
        below = self._below[index]
        return below.value(at, axis + 1) if isinstance(below, _Level) else below


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLatency:
    """
    Sum of the measured kernels of one step, plus what the kernel sums miss.

    *captured_sizes*: batch sizes with a captured graph; a decode-only step runs at the next one.
    *skew*: share of the way from the mean to the longest context that decode attention takes when
    contexts differ (one long sequence holds up its wave).
    """

    layers: int
    per_token: Curve
    """Microseconds of all dense kernels of a step, over its tokens."""
    attention: AttentionTable
    per_sequence: Curve
    """Microseconds of output matrix and sampler, over the sequences that yield a token."""
    overhead_us: float = 0.0
    captured_sizes: tuple[int, ...] = ()
    skew: float = 0.0

    def step_s(self, batch: StepBatch) -> float:
        """Return the seconds of one step."""
        decode = batch.decode
        longest = max(decode) if self.skew and len(decode) > 1 else 0
        return self._step_s(batch.prefill, len(decode), sum(decode), longest)

    def _step_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context: float, longest: int
    ) -> float:
        tokens = outputs = sequences
        work = 0.0
        for new, old in prefill:
            tokens += new
            work += new * (old + new / 2)
            outputs += 1
        if not tokens:
            return 0.0
        chunk = tokens - sequences
        # One chunk with the same work as all chunks together.
        history = max(work / chunk - chunk / 2, 0.0) if chunk else 0.0
        mean = context / sequences if sequences else 0.0
        attention = self.attention(chunk, history, sequences, mean)
        if longest:
            held_up = self.attention(chunk, history, sequences, longest)
            attention += self.skew * (held_up - attention)
        sizes = self.captured_sizes
        padded = tokens
        if sizes and tokens <= sizes[-1]:
            padded = sizes[bisect_left(sizes, tokens)]
        total = self.per_token(padded) + self.layers * attention + self.per_sequence(outputs)
        return (total + self.overhead_us) * 1e-6


class SpanTableLatency(TableLatency):
    """The same tables without the skew term, so that a run of decode steps is one question."""

    def mixed_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int, context_tokens: int
    ) -> float:
        """Return the seconds of one step; see SpanLatency."""
        return self._step_s(prefill, sequences, context_tokens, 0)

    def span_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Return the seconds of a run: linear between the contexts that were measured."""
        total = 0.0
        done = 0
        while done < steps:
            mean = context_tokens / sequences + done
            edge = self.attention.next_context(mean)
            # Steps up to the next measured context; at least the two ends of a straight piece.
            length = steps - done
            if edge < math.inf:
                length = min(max(int(edge - mean) + 1, 1), length)
            first = self.mixed_s((), sequences, context_tokens + done * sequences)
            if length == 1:
                total += first
            else:
                last_tokens = context_tokens + (done + length - 1) * sequences
                last = self.mixed_s((), sequences, last_tokens)
                total += length * (first + last) / 2
            done += length
        return total


def _rows(path: Path, names: Sequence[str]) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        if missing:
            msg = f"{path.name}: columns {', '.join(missing)} are missing"
            raise ConfigError(msg)
        return [[row[name] for name in names] for row in reader]


def _numbers(path: Path, names: Sequence[str]) -> list[tuple[float, ...]]:
    numbers = []
    for line, row in enumerate(_rows(path, names), start=2):
        try:
            numbers.append(tuple(float(value) for value in row))
        except ValueError as error:
            msg = f"{path.name}:{line}: {error}"
            raise ConfigError(msg) from error
    return numbers


def _curves(path: Path, size: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for line, (layer, at, time_us) in enumerate(_rows(path, ("layer", size, "time_us")), start=2):
        try:
            points.setdefault(layer, []).append((float(at), float(time_us)))
        except ValueError as error:
            msg = f"{path.name}:{line}: {error}"
            raise ConfigError(msg) from error
    return {layer: Curve(values) for layer, values in points.items()}


def _measured_skew(described: Mapping[str, object], degree: int) -> float:
    fit = described.get("skew_fit")
    if isinstance(fit, Mapping) and fit.get("enabled"):
        degrees = fit.get("per_tp")
        one = degrees.get(degree) if isinstance(degrees, Mapping) else None
        alpha = one.get("alpha_default") if isinstance(one, Mapping) else None
        if isinstance(alpha, int | float):
            return float(alpha)
    return 0.0


def find_tables(folder: Path) -> None:
    """Raise ConfigError unless *folder* has the three tables."""
    wanted = ("dense.csv", "attention.csv", "per_sequence.csv")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        msg = f"{folder} has no {', '.join(missing)}; needed: {', '.join(wanted)}"
        raise ConfigError(msg)


def load_llmservingsim(
    folder: Path,
    *,
    layers: int,
    captured_sizes: tuple[int, ...] = (),
    skew: float | None = None,
    overhead_us: float = 0.0,
    spans: bool = False,
    degree: int = 1,
) -> TableLatency:
    """
    Load dense.csv, attention.csv, per_sequence.csv of *folder*; ConfigError names what is wrong.

    *layers*: the model's; the tables hold the kernels of one. *skew*: None takes what the profiler
    measured (meta.yaml), 0 when it did not. *spans*: without skew, for long simulations.
    *degree*: the tensor-parallel degree that the tables were measured at.
    """
    find_tables(folder)
    meta = folder / "meta.yaml"
    if meta.is_file():
        described = yaml.safe_load(meta.read_text(encoding="utf-8"))
        if degree not in described.get("tp_degrees", [1]):
            msg = f"{meta.name}: tp_degrees is {described['tp_degrees']}; {degree} is needed"
            raise ConfigError(msg)
        if skew is None:
            skew = _measured_skew(described, degree)
    dense = _curves(folder / "dense.csv", "tokens")
    ends = _curves(folder / "per_sequence.csv", "sequences")
    lacking = [name for name in (*_PER_LAYER, "layernorm") if name not in dense]
    if lacking:
        msg = f"dense.csv: layers {', '.join(lacking)} are missing"
        raise ConfigError(msg)

    def whole_step(tokens: float) -> float:
        once = sum(
            dense[name](tokens) for name in ("embedding", "final_layernorm") if name in dense
        )
        block = 2 * dense["layernorm"](tokens) + sum(dense[name](tokens) for name in _PER_LAYER)
        return layers * block + once

    sizes = sorted({x for curve in dense.values() for x in curve.places})
    counts = sorted({x for curve in ends.values() for x in curve.places})
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    attention = [
        (row[0], row[1], row[2], row[3], row[4])
        for row in _numbers(folder / "attention.csv", names)
    ]
    kind = SpanTableLatency if spans else TableLatency
    return kind(
        layers=layers,
        per_token=Curve((size, whole_step(size)) for size in sizes),
        attention=AttentionTable(attention),
        per_sequence=Curve(
            (count, sum(curve(count) for curve in ends.values())) for count in counts
        ),
        captured_sizes=captured_sizes,
        skew=skew or 0.0,
        overhead_us=overhead_us,
    )

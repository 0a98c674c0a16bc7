"""The simulator against a running vLLM: the same programs on both, cell by cell."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pydantic

from scout_sdk._errors import ConfigError
from scout_server.sim.live import LiveRun
from scout_server.sim.livecells import LiveCell

__all__ = [
    "CellError",
    "CellFigures",
    "Measured",
    "compare",
    "load_measured",
    "measured_line",
    "measured_of",
    "median_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """What is compared of one run of one cell."""

    jct_s: float
    """Mean seconds of a program."""
    tokens_per_s: float
    """Generated tokens by the seconds from the first request to the last reply."""
    hit_rate: float
    ttft_s: float
    queue_s: float
    """Mean seconds in the engine's waiting queue; vLLM does not count the step that runs then."""
    preemptions: float
    turn_s: float = 0.0
    """Mean seconds from the sending of a turn to its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured repetition, as a line of the file says it."""

    cell: str
    repetition: int
    server_at: float
    """When its server was started, seconds since 1970."""
    begun_s: float
    """When the run began, seconds after that."""
    wall_s: float
    figures: CellFigures
    requests: list[tuple[int, int, float, float, float, int, int]]
    """Program, turn, sent, first, last, prompt tokens, output tokens: to look into errors."""


def measured_of(
    cell: LiveCell, repetition: int, run: LiveRun, *, server_at: float = 0.0, begun_s: float = 0.0
) -> Measured:
    """Return the figures of a run."""
    requests = run.requests
    output = sum(r.output_tokens for r in requests)
    return Measured(
        cell=cell.name,
        repetition=repetition,
        server_at=round(server_at, 3),
        begun_s=round(begun_s, 3),
        wall_s=round(run.wall_s, 5),
        figures=CellFigures(
            jct_s=statistics.fmean(run.jct_s),
            tokens_per_s=output / run.wall_s,
            hit_rate=run.hit_rate,
            ttft_s=statistics.fmean(r.first_s - r.sent_s for r in requests),
            queue_s=run.counted["request_queue_time_seconds_sum"] / len(requests),
            preemptions=run.counted["num_preemptions"],
            turn_s=statistics.fmean(r.last_s - r.sent_s for r in requests),
        ),
        requests=[
            (
                r.program, r.turn, round(r.sent_s, 5), round(r.first_s, 5), round(r.last_s, 5),
                r.prompt_tokens, r.output_tokens,
            )
            for r in requests
        ],
    )  # fmt: skip


_ADAPTER = pydantic.TypeAdapter(Measured)


def measured_line(measured: Measured) -> str:
    """Return the line of one repetition."""
    return json.dumps(asdict(measured), separators=(",", ":")) + "\n"


def load_measured(path: Path) -> list[Measured]:
    """Return what was measured so far; nothing without a file; ConfigError for a broken line."""
    if not path.is_file():
        return []
    return list(_lines(path))


def _lines(path: Path) -> Iterator[Measured]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield _ADAPTER.validate_json(line)
        except pydantic.ValidationError as error:
            msg = f"{path.name}:{number}: {error}"
            raise ConfigError(msg) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CellError:
    """One cell: measured (median of the repetitions), simulated, and how far they are apart."""

    cell: str
    repetitions: int
    measured: CellFigures
    simulated: CellFigures
    spread: CellFigures
    """Mean distance of a repetition from the median, as the errors are given."""

    @property
    def jct(self) -> float:
        """Relative error of the mean completion time."""
        return self.simulated.jct_s / self.measured.jct_s - 1.0

    @property
    def throughput(self) -> float:
        """Relative error of the throughput."""
        return self.simulated.tokens_per_s / self.measured.tokens_per_s - 1.0

    @property
    def hit_points(self) -> float:
        """Error of the hit rate in points."""
        return 100.0 * (self.simulated.hit_rate - self.measured.hit_rate)


_FIELDS = tuple(f.name for f in fields(CellFigures))


def median_of(runs: Sequence[CellFigures]) -> CellFigures:
    """Return the median of every figure."""
    return CellFigures(**{f: statistics.median(getattr(r, f) for r in runs) for f in _FIELDS})


def compare(
    cells: Sequence[LiveCell],
    measured: Sequence[Measured],
    simulated: Mapping[str, CellFigures],
) -> list[CellError]:
    """Return the errors of every cell that was measured."""
    found = []
    for cell in cells:
        runs = [m.figures for m in measured if m.cell == cell.name]
        if not runs:
            continue
        median = median_of(runs)
        spread = {
            f: statistics.fmean(abs(getattr(r, f) - getattr(median, f)) for r in runs)
            for f in _FIELDS
        }
        spread["jct_s"] /= median.jct_s
        spread["tokens_per_s"] /= median.tokens_per_s
        spread["hit_rate"] *= 100.0
        found.append(
            CellError(
                cell=cell.name,
                repetitions=len(runs),
                measured=median,
                simulated=simulated[cell.name],
                spread=CellFigures(**spread),
            )
        )
    return found

"""Runs of `scout bench tao`: every (cell, arm, seed) once, in parallel, resumable from a file."""

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import scout_server
from scout_server.bench.taoarms import BASELINES, CALM, CELLS, cell_name, run_arm
from scout_server.bench.taogain import PlannerGain

__all__ = ["Run", "code_of", "load", "perform"]

_ROOT = Path(scout_server.__file__).parent
_ENGINE = ("replica", "bench/taosim.py", "bench/taoarms.py", "policy/runtime.py")
_POLICY = (
    "policy/admission.py",
    "policy/beam.py",
    "policy/blocks.py",
    "policy/books.py",
    "policy/capacity_dp.py",
    "policy/claims.py",
    "policy/contested.py",
    "policy/credit.py",
    "policy/decouple.py",
    "policy/discretise.py",
    "policy/durations.py",
    "policy/engine.py",
    "policy/evaluators.py",
    "policy/ledger.py",
    "policy/offers.py",
    "policy/pace.py",
    "policy/placement.py",
    "policy/planners.py",
    "policy/readiness.py",
    "policy/shelf.py",
    "policy/turns.py",
)
_ROUTED = frozenset(n for n in BASELINES if not n.startswith("ThunderAgent"))


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One simulation."""

    cell: int
    """Index into CELLS and then CALM."""
    arm: str
    seed: int


def code_of(arm: str) -> str:
    """
    Return a digest of the code that decides what *arm* reaches.

    Routers depend on the replicas and on the simulation; the other arms on the policy as well.
    """
    names = _ENGINE if arm in _ROUTED else _ENGINE + _POLICY
    digest = hashlib.sha256()
    for name in names:
        path = _ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def load(file: Path | None) -> dict[Run, dict[str, Any]]:
    """Return the runs in *file* that today's code would repeat; the last one of each counts."""
    found: dict[Run, dict[str, Any]] = {}
    if file is None or not file.exists():
        return found
    codes: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        run = Run(row["cell"], row["arm"], row["seed"])
        if run.arm not in codes:
            codes[run.arm] = code_of(run.arm)
        if row["code"] == codes[run.arm]:
            found[run] = row
    return found


def perform(
    runs: Iterable[Run],
    *,
    jobs: int,
    file: Path | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[Run, dict[str, Any]]:
    """
    Return the rows of *runs*: from *file* where it has them, else simulated, *jobs* at a time.

    Every finished run is appended to *file* at once, so that a stopped command goes on from there.
    """
    wanted = list(dict.fromkeys(runs))
    known = load(file)
    rows = {run: known[run] for run in wanted if run in known}
    for _ in rows:
        done()
    missing = [run for run in wanted if run not in rows]

    def keep(run: Run, row: dict[str, Any]) -> None:
        rows[run] = row
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        done()

    if jobs == 1:
        for run in missing:
            keep(run, _simulate(run))
        return rows
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_simulate, run): run for run in missing}
        for future in as_completed(futures):
            keep(futures[future], future.result())
    return rows


def _simulate(run: Run) -> dict[str, Any]:
    cell = (*CELLS, *CALM)[run.cell]
    gain = PlannerGain() if run.arm == "TAO" else None
    outcome = run_arm(run.arm, cell, run.seed, watch=gain)
    return {
        **asdict(run),
        "name": cell_name(cell),
        "code": code_of(run.arm),
        "outcome": asdict(outcome),
        "gain": None if gain is None else gain.row(),
    }

"""Many scenarios at once: all cores, progress, and a file to resume from."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml
from rich.console import Console

from scout_sdk._errors import ConfigError
from scout_server.report import progress
from scout_server.sim.preflight import require_possible
from scout_server.sim.record import CellRecord, record_from
from scout_server.sim.scenario import Scenario, plain, scenario_of
from scout_server.sim.simulate import simulate

__all__ = [
    "Axis",
    "axes_of",
    "combinations",
    "combine",
    "scalar",
    "split_axes",
    "sweep",
    "validated",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the values that it takes."""

    place: str
    """Such as `residency.policy`."""
    values: tuple[object, ...]


def combine(document: Mapping[str, object], place: str, value: object) -> dict[str, object]:
    """Return *document* with the setting at *place* replaced."""
    head, dot, rest = place.partition(".")
    copy = dict(document)
    if not dot:
        copy[head] = value
        return copy
    below = copy.get(head, {})
    if not isinstance(below, Mapping):
        msg = f"{head}: a mapping is needed to set {place}"
        raise ConfigError(msg)
    copy[head] = combine(below, rest, value)
    return copy


def split_axes(document: Mapping[str, object]) -> tuple[dict[str, object], list[Axis]]:
    """Take the `sweep:` mapping (setting: list of values) out of a document."""
    rest = {key: value for key, value in document.items() if key != "sweep"}
    raw = document.get("sweep", {})
    if not isinstance(raw, Mapping) or not all(isinstance(v, list) and v for v in raw.values()):
        msg = "sweep: must map settings, such as cell.replicas, to lists of values"
        raise ConfigError(msg)
    return rest, [Axis(str(place), tuple(values)) for place, values in raw.items()]


def scalar(text: str) -> object:
    """Return what *text* says as YAML; ConfigError when it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        msg = f"{text!r} is no YAML value: {str(error).splitlines()[0]}"
        raise ConfigError(msg) from error


def axes_of(texts: Sequence[str]) -> list[Axis]:
    """Return the axes of `setting=value,value` texts."""
    axes = []
    for text in texts:
        place, sign, values = text.partition("=")
        if not sign or not values:
            msg = f"axis {text!r} is not of the form setting=value,value"
            raise ConfigError(msg)
        axes.append(Axis(place, tuple(scalar(v) for v in values.split(","))))
    return axes


def combinations(
    document: Mapping[str, object], axes: Sequence[Axis]
) -> Iterator[dict[str, object]]:
    """Yield one document per combination, named by what differs; the last axis runs fastest."""
    base = str(document.get("name", "run"))
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = dict(document)
        for axis, value in zip(axes, values, strict=True):
            chosen = combine(chosen, axis.place, value)
        parts = [
            f"{a.place.rpartition('.')[2]}={v}" if len(axes) > 1 else str(v)
            for a, v in zip(axes, values, strict=True)
        ]
        chosen["name"] = ", ".join(parts) if parts else base
        yield chosen


def validated(documents: Sequence[Mapping[str, object]]) -> list[Scenario]:
    """Return the scenarios of *documents*; ConfigError has everything wrong with any of them."""
    wrong: dict[str, None] = {}
    scenarios = []
    for document in documents:
        try:
            scenarios.append(scenario_of(document))
        except ConfigError as error:
            wrong.update(dict.fromkeys(str(error).splitlines()[1:]))
    if wrong:
        raise ConfigError("\n".join([f"scenario: {len(wrong)} error(s)", *wrong]))
    require_possible(scenarios)
    return scenarios


def _key(scenario: Scenario) -> str:
    digest = hashlib.sha256(json.dumps(plain(scenario), sort_keys=True).encode())
    hardware = scenario.hardware
    for name in (scenario.trace.path, scenario.tools.fitted, hardware.profile):
        if name:
            digest.update(_content(Path(name)))
    return digest.hexdigest()[:16]


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _mend(path: Path) -> None:
    """End a line that an interrupted sweep left torn, so that the next one stands by itself."""
    with path.open("rb+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _run(document: dict[str, object]) -> CellRecord:
    return simulate(scenario_of(document))


def sweep(
    document: Mapping[str, object],
    axes: Sequence[Axis],
    *,
    jobs: int,
    console: Console | None = None,
    resume: Path | None = None,
) -> list[CellRecord]:
    """
    Run every combination; return the records in order.

    All documents are validated, and must be possible, before the first run. *resume*: runs found
    there are not repeated, unless their trace has changed; each finished run is appended at once,
    so an interrupted sweep goes on where it was.
    """
    documents = list(combinations(document, axes))
    scenarios = validated(documents)
    keys = [_key(each) for each in scenarios]
    done: dict[str, CellRecord] = {}
    if resume is not None and resume.exists():
        done = _load(resume)
        _mend(resume)
    todo = [(k, d) for k, d in zip(keys, documents, strict=True) if k not in done]
    workers = min(jobs or os.cpu_count() or 1, max(len(todo), 1))
    with progress(console) as bar:
        task = bar.add_task(
            "simulating", total=len(documents), completed=len(documents) - len(todo)
        )

        def keep(key: str, record: CellRecord) -> None:
            done[key] = record
            if resume is not None:
                with resume.open("a", encoding="utf-8") as out:
                    out.write(
                        json.dumps({"key": key, "record": json.loads(record.to_json())}) + "\n"
                    )
            bar.advance(task)

        if workers <= 1:
            for key, each in todo:
                keep(key, _run(each))
        else:
            with ProcessPoolExecutor(workers) as pool:
                futures = {pool.submit(_run, each): key for key, each in todo}
                for future in as_completed(futures):
                    keep(futures[future], future.result())
    return [done[key] for key in keys]


def _load(path: Path) -> dict[str, CellRecord]:
    done = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            # The last line of an interrupted sweep may be torn: that run is repeated.
            continue
        if not isinstance(raw, dict) or "key" not in raw or "record" not in raw:
            msg = f"{path.name}:{number}: not a line of a sweep: key and record are needed"
            raise ConfigError(msg)
        try:
            done[str(raw["key"])] = record_from(cast(Mapping[str, object], raw["record"]))
        except (ValueError, TypeError) as error:
            msg = f"{path.name}:{number}: not a record of this version: {error}"
            raise ConfigError(msg) from error
    return done

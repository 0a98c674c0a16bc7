"""What `scout bench engine` has measured, in a file to which several invocations add."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from scout_sdk import ConfigError
from scout_server.bench.enginerun import Run
from scout_server.bench.programs import Turn

__all__ = ["EngineFile", "Repetition", "digest"]

Setup = Mapping[str, str | int | float]
"""What must be alike for repetitions to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The same sessions on every arm, one arm after the other."""

    workload: str
    number: int
    setup: Setup
    runs: Mapping[str, Run]
    """By arm."""


_LINE = TypeAdapter(Repetition)


class EngineFile:
    """
    Whole repetitions, one JSON object a line; a repetition that was broken off leaves nothing.

    Without a path nothing is kept. A repetition of the same workload with another setup is an
    error, as is a line that cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: list[Repetition] = []
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                self.found.append(_LINE.validate_json(line))
            except ValidationError as error:
                wrong = "; ".join(
                    f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
                )
                msg = f"line {number} of {path} is no repetition of this benchmark: {wrong}"
                raise ConfigError(msg) from error

    def done(self, workload: str, setup: Setup) -> set[int]:
        """Return which repetitions of *workload* are there; ConfigError if under another setup."""
        numbers = set()
        for each in self.found:
            if each.workload != workload:
                continue
            if dict(each.setup) != dict(setup):
                differs = [
                    f"{key} {each.setup.get(key)!r}, now {setup.get(key)!r}"
                    for key in sorted({*each.setup, *setup})
                    if each.setup.get(key) != setup.get(key)
                ]
                msg = f"{self._path} has {workload} under another setup: {'; '.join(differs)}"
                raise ConfigError(msg)
            numbers.add(each.number)
        return numbers

    def add(self, repetition: Repetition) -> None:
        """Keep *repetition*, on disk at once."""
        self.found.append(repetition)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(repetition)) + "\n")

    def runs(self, workloads: Sequence[str]) -> dict[str, dict[str, list[Run]]]:
        """Return all runs by workload, in the given order, and arm, in the order of repetitions."""
        found: dict[str, dict[str, list[Run]]] = {}
        for name in workloads:
            for each in sorted(self.found, key=lambda repetition: repetition.number):
                if each.workload == name:
                    for arm, run in each.runs.items():
                        found.setdefault(name, {}).setdefault(arm, []).append(run)
        return found


def digest(sessions: Sequence[Sequence[Turn]]) -> str:
    """Return a short name of *sessions* that changes when anything in them does."""
    text = json.dumps([[asdict(turn) for turn in turns] for turns in sessions])
    return hashlib.sha256(text.encode()).hexdigest()[:12]

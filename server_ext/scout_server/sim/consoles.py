"""What the simulator's commands share: a console for wide tables, files that can be written."""

from pathlib import Path

import typer
from rich.console import Console

__all__ = ["to_write", "wide_console"]

_COLUMNS = 132


def wide_console() -> Console:
    """Return a console as wide as the terminal, or 132 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=_COLUMNS)


def to_write(path: Path | None) -> Path | None:
    """Return *path*, a file to write; BadParameter, before any work is lost, if it cannot be."""
    if path is None:
        return None
    if path.is_dir():
        msg = f"{path} is a folder"
        raise typer.BadParameter(msg)
    if not path.parent.is_dir():
        msg = f"there is no folder {path.parent}"
        raise typer.BadParameter(msg)
    return path

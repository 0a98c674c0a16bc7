"""The console of the simulator's commands: tables with many columns stay readable in a pipe."""

from rich.console import Console

__all__ = ["wide_console"]

_COLUMNS = 132


def wide_console() -> Console:
    """Return a console as wide as the terminal, or 132 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=_COLUMNS)

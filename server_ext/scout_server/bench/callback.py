"""`scout bench callback`: microseconds that ScoutCallback adds to one LLM call (issue 2)."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from scout_server.report import Target, command_line, emit

__all__ = ["callback"]


def callback(
    calls: Annotated[int, typer.Option(min=1, help="Calls to measure in each round.")] = 5000,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Measure ScoutCallback around one LLM call: start, headers of the request, end.

    It runs in a process of its own, where nothing of the server is loaded.

    Example: scout bench callback --calls 20000
    """
    if find_spec("langchain_core") is None or find_spec("scout_integrations") is None:
        typer.echo(
            "scout bench callback needs LangGraph: pip install 'scout-sdk[langgraph]'", err=True
        )
        raise typer.Exit(2)
    found = subprocess.run(
        [sys.executable, "-m", "scout_integrations._bench", "--calls", str(calls), "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        typer.echo(f"the benchmark ended with status {found.returncode}: {found.stderr}", err=True)
        raise typer.Exit(1)
    report = json.loads(found.stdout)
    rows = [{"part": part, **figures} for part, figures in report["results"].items()]
    targets = [Target(**target) for target in report["targets"]]
    emit(Console(), command_line(), report["seed"], {"per call": rows}, targets, json_output)

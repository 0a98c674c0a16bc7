"""`scout demo`: runs the comparison and prints it."""

import asyncio
import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scout_server.demo.comparison import PLANS, compare
from scout_server.report import command_line, emit, progress

__all__ = ["demo_app"]

demo_app = typer.Typer(add_completion=False)


class Engine(enum.StrEnum):
    """Engines that the demo can start."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


@demo_app.command(epilog="Example: scout demo --json, or: scout demo --engine vllm")
def demo(
    engine: Annotated[
        Engine, typer.Option(help="The embedded engine, or vLLM with SmolLM2 on the CPU.")
    ] = Engine.EMBEDDED,
    repetitions: Annotated[int, typer.Option(min=1, max=20, help="How often each runs.")] = 3,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            min=16, help="KV blocks of each server; default: near the size of the prompts."
        ),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Sessions at a time.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder for --engine vllm; default: models/smollm2.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the users' inputs.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Run the examples against the same server with LRU and with Scout, side by side.

    Takes under three minutes with the embedded engine.
    """
    plan = PLANS[engine.value].adapted(
        kv_blocks=kv_blocks, concurrency=concurrency, repetitions=repetitions, model=model
    )
    with progress() as bar:
        results, targets = asyncio.run(compare(plan, seed=seed, bar=bar))
    emit(Console(), command_line(), seed, results, targets, json_output)

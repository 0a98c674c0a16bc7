"""
The `scout` command.

Commands are imported when they are called, so `scout --help` is fast, and a command whose optional
packages are missing says which extra brings them.
"""

import importlib
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from scout_sdk import ScoutError

try:
    import typer
    from rich.console import Console
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:  # the base install has no command line
    sys.exit(f"scout: {error.name} is missing; pip install 'scout-sdk[server]'")

if TYPE_CHECKING:
    from scout_server.config import FieldInfo

__all__ = ["LAZY", "LazyCommand", "app", "main"]


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command or group of commands that lives in a module of its own."""

    target: str
    """`module:attribute`; the attribute is a typer app."""
    help: str
    extra: str = "server"
    """The extra of scout-sdk that brings what the module imports."""


LAZY: dict[str, LazyCommand] = {
    "demo": LazyCommand(
        "scout_server.demo.cli:demo_app", "Run the examples on LRU and on Scout, side by side."
    ),
    "doctor": LazyCommand(
        "scout_server.doctor:doctor_app", "Say what is installed and what a server understands."
    ),
    "bench": LazyCommand("scout_server.bench:bench_app", "Measure the policies and the hot path."),
    "sim": LazyCommand("scout_server.sim.cli:sim_app", "Simulate agent programs.", "sim"),
    "trace": LazyCommand(
        "scout_server.sim.trace_cli:trace_app", "Read, make and replay traces.", "sim"
    ),
    "gateway": LazyCommand(
        "scout_server.gateway.cli:gateway_app", "Route agent programs to many servers."
    ),
}
"""Commands by name; the place to wire in a new one."""

_BROUGHT_BY = {
    "langgraph": "langgraph",
    "matplotlib": "sim",
    "msgspec": "kv-events",
    "ray": "ray",
    "scipy": "sim",
    "zmq": "kv-events",
}
"""The extra that brings a module which only some commands, or some of their options, need."""


class _LazyGroup(TyperGroup):
    """Lists every command, imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *LAZY]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None or cmd_name not in LAZY:
            return found
        return TyperCommand(cmd_name, help=LAZY[cmd_name].help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in LAZY and super().get_command(ctx, name) is None:
            return name, _load(name, LAZY[name]), args[1:]
        return super().resolve_command(ctx, args)


def _load(name: str, lazy: LazyCommand) -> Any:
    module, _, attribute = lazy.target.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing.split(".")[0] in ("scout_sdk", "scout_server"):
            fail(f"`scout {name}` is not part of this installation ({missing} is missing)")
        fail(f"`scout {name}` needs {missing}: pip install 'scout-sdk[{lazy.extra}]'")
    return typer.main.get_command(loaded)


def fail(message: str) -> NoReturn:
    """Print *message* on stderr and end the command with status 1."""
    _say(f"scout: {message}")
    raise typer.Exit(1)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@app.callback(epilog="Example: scout serve --embedded --port 8000")
def _root() -> None:
    """Agent-aware LLM serving. Start with [bold]scout demo[/bold]."""


@app.command(
    epilog="Example: scout serve --embedded --port 8000, or: scout serve MODEL --dtype bfloat16",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="The model for vLLM; anything after it is vLLM's own.")
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="The engine that needs no GPU, model or torch.")
    ] = False,
    scout_off: Annotated[
        bool, typer.Option("--scout-off", help="The same server with its own LRU.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; embedded: 0 = any.")] = None,
    file: Annotated[
        Path | None, typer.Option("--config", help="Configuration file; default: SCOUT_CONFIG.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write a trace of what is served (no text: counts, block numbers)."),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting, as section.name=value; see `scout config`."),
    ] = None,
) -> None:
    """Serve a model with vLLM and Scout, or the embedded engine, behind the OpenAI API."""
    from scout_server.serve import serve_embedded, serve_vllm

    if embedded:
        if model is not None or ctx.args:
            fail(f"--embedded takes no model and no arguments of vLLM: {[model, *ctx.args]}")
        serve_embedded(
            values or (), file=file, host=host, port=port, scout_off=scout_off, record=record
        )
    elif model is None:
        fail("name a model, or say --embedded")
    else:
        where = [("--host", host), ("--port", port)]
        args = [*ctx.args, *(part for flag, v in where if v is not None for part in (flag, str(v)))]
        serve_vllm(model, args, values or (), file=file, scout_off=scout_off, record=record)


@app.command(epilog="Example: scout config --file scout.yaml")
def config(
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Check this file and print the settings that result."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every setting with its value, allowed values and meaning, as a configuration file."""
    from scout_server.config import describe, load

    values = load(path=file).as_dict()
    rows = [{**asdict(info), "value": _value(values, info)} for info in describe()]
    if json_output:
        typer.echo(json.dumps({"settings": rows}, indent=2))
        return
    open_: list[str] = []
    for row in rows:
        place = [str(row["section"]), *str(row["name"]).split(".")]
        for depth, group in enumerate(place[:-1]):
            if open_[: depth + 1] != place[: depth + 1]:
                open_ = place[: depth + 1]
                typer.echo(f"{'  ' * depth}{group}:")
        indent = "  " * (len(place) - 1)
        if row["meaning"]:
            typer.echo(f"{indent}# {row['meaning']}")
        default = json.dumps(row["default"])
        typer.echo(
            f"{indent}{place[-1]}: {json.dumps(row['value'])}  # {row['kind']}; default {default}"
        )


def _value(values: Mapping[str, object], info: "FieldInfo") -> object:
    found: object = values[info.section]
    for name in info.name.split("."):
        found = found[name] if isinstance(found, Mapping) else None
    return found


def main() -> None:
    """
    Run the command line; an error of ours is one message, not a traceback.

    Being told to terminate unwinds like Ctrl-C does: what a command started is stopped.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app()
    except ScoutError as error:
        _say(str(error))
    except ModuleNotFoundError as error:  # of an extra that one command needs and others do not
        missing = (error.name or "").partition(".")[0]
        if missing not in _BROUGHT_BY:
            raise
        _say(f"scout: this needs {missing}: pip install 'scout-sdk[{_BROUGHT_BY[missing]}]'")
    else:
        return
    sys.exit(1)


def _say(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)


if __name__ == "__main__":
    main()

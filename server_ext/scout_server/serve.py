"""`scout serve`: settings checked as a whole before anything starts, then one of the engines."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from scout_sdk import ConfigError
from scout_server.config import CONFIG_VARIABLE, load, merge

__all__ = ["parse_values", "serve_embedded", "serve_vllm"]

_END_S = 10
"""Seconds that vLLM's engines have to end where a state file is to be written."""


def parse_values(values: Sequence[str]) -> dict[str, object]:
    """
    Return `section.name=value` texts as a document; a value is JSON, or else a string.

    A setting in a group of a section is `section.group.name`. ConfigError lists every text that
    has another form.
    """
    document: dict[str, object] = {}
    wrong: list[str] = []
    for text in values:
        place, equals, raw = text.partition("=")
        names = place.strip().split(".")
        if not (equals and len(names) > 1 and all(names)):
            wrong.append(f"- {text!r}: the form is section.name=value, as in policy.hints=false")
            continue
        try:
            value: object = json.loads(raw)
        except ValueError:
            value = raw
        for name in reversed(names):
            value = {name: value}
        assert isinstance(value, dict)
        document = merge(document, value)
    if wrong:
        raise ConfigError("\n".join(["--set:", *wrong]))
    return document


def serve_vllm(
    model: str,
    args: Sequence[str],
    values: Sequence[str],
    *,
    file: Path | None,
    scout_off: bool,
    record: Path | None = None,
) -> NoReturn:
    """Become vLLM serving *model* with Scout in it; does not return."""
    from scout_server.snapshot import SnapshotSettings
    from scout_server.vllm.launch import build_command, flags_of, support_notice
    from scout_server.vllm.settings import ADDITIONAL_CONFIG_KEY

    arguments, additional = _additional_config(args)
    document = additional.get(ADDITIONAL_CONFIG_KEY)
    if record is not None and scout_off:
        raise ConfigError("--record is Scout's: it does not go with --scout-off on vLLM")
    merged = merge(document if isinstance(document, dict) else {}, parse_values(values))
    merged = merge(merged, _record(record))
    settings = load(merged, path=file)
    learns = settings.of(SnapshotSettings).state_file and not scout_off
    if learns and "--shutdown-timeout" not in flags_of(arguments):
        arguments += ["--shutdown-timeout", str(_END_S)]
    if merged:
        additional[ADDITIONAL_CONFIG_KEY] = merged
    if additional:
        arguments += ["--additional-config", json.dumps(additional)]
    command, environ = build_command(model, arguments, scout_off=scout_off)
    if file is not None:
        environ[CONFIG_VARIABLE] = str(file.resolve())
    notice = support_notice()
    if notice and not scout_off:
        Console(stderr=True).print(f"scout: {notice}", style="yellow", markup=False)
    os.execve(command[0], command, environ)


def serve_embedded(
    values: Sequence[str],
    *,
    file: Path | None,
    host: str | None,
    port: int | None,
    scout_off: bool,
    record: Path | None = None,
) -> None:
    """Run the embedded engine until it is stopped."""
    from scout_server.embedded.launch import serve
    from scout_server.embedded.settings import EmbeddedSettings
    from scout_server.ingress.settings import IngressSettings
    from scout_server.policy.runtime import PolicySettings
    from scout_server.recording import RecordSettings
    from scout_server.snapshot import SnapshotSettings
    from scout_server.tenancy import TenancySettings

    own: dict[str, object] = {}
    if host is not None:
        own["host"] = host
    if port is not None:
        own["port"] = port
    if scout_off:
        own["policy"] = "lru"
    document: dict[str, object] = {"embedded": own, **_record(record)}
    settings = load(merge(parse_values(values), document), path=file)
    engine = settings.of(EmbeddedSettings)
    if engine.port:
        host = f"[{engine.host}]" if ":" in engine.host else engine.host
        where = f"http://{host}:{engine.port}/v1"
        Console(stderr=True).print(f"embedded engine ({engine.policy}) at {where}", markup=False)
    serve(
        engine,
        settings.of(PolicySettings),
        settings.of(TenancySettings),
        settings.of(IngressSettings),
        settings.of(SnapshotSettings),
        settings.of(RecordSettings),
    )


def _record(path: Path | None) -> dict[str, object]:
    """Return the settings that make a server write a trace to *path*; it may change folders."""
    return {} if path is None else {"record": {"file": str(path.absolute())}}


def _additional_config(args: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Take vLLM's own --additional-config out of *args*, so that ours can be added to it."""
    rest: list[str] = []
    found: dict[str, object] = {}
    waiting = False
    for arg in args:
        name, equals, raw = arg.partition("=")
        if waiting:
            found, waiting = _object(arg), False
        elif name.replace("_", "-") == "--additional-config":
            if equals:
                found = _object(raw)
            else:
                waiting = True
        else:
            rest.append(arg)
    if waiting:
        msg = "--additional-config: a JSON object must follow"
        raise ConfigError(msg)
    return rest, found


def _object(text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except ValueError as error:
        msg = f"--additional-config is not JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(document, dict) or not isinstance(document.get("scout", {}), dict):
        msg = '--additional-config must be a JSON object such as {"scout": {"policy": {...}}}'
        raise ConfigError(msg)
    return document

"""Starts the servers that the demo compares: `scout serve`, each in a process of its own."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from scout_sdk import ScoutError

__all__ = ["Running", "ServerSpec", "free_ports", "model_folder", "start", "start_all"]

_STOP_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How one server is started."""

    name: str
    args: Sequence[str]
    """Arguments of `scout serve`, port left out."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    start_s: float = 120.0
    """How long it may take to answer."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    name: str
    root: str
    """Its URL, without /v1."""
    model: str
    """The model that it lists first."""


@contextlib.asynccontextmanager
async def start_all(specs: Sequence[ServerSpec]) -> AsyncIterator[list[Running]]:
    """Start all *specs* at the same time, yield them in order, and stop them at the end."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(stack.enter_async_context(start(s))) for s in specs]
        except* ScoutError as group_error:
            raise group_error.exceptions[0] from None
        yield [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def start(spec: ServerSpec) -> AsyncIterator[Running]:
    """Start one server, wait until it answers, and stop it at the end."""
    (port,) = free_ports(1)
    command = ["-m", "scout_server.cli", "serve", *spec.args, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.environ},
            start_new_session=True,
        )
        try:
            root = f"http://127.0.0.1:{port}"
            yield Running(spec.name, root, await _wait(process, root, spec))
        except _NotUpError as error:
            log.seek(0)
            tail = "\n".join(log.read().decode(errors="replace").splitlines()[-25:])
            msg = f"the server {spec.name!r} did not start: {error}\n{tail}"
            raise ScoutError(msg) from None
        finally:
            await _stop(process)


class _NotUpError(Exception):
    """A server did not come up."""


async def _wait(process: asyncio.subprocess.Process, root: str, spec: ServerSpec) -> str:
    deadline = time.monotonic() + spec.start_s
    async with httpx.AsyncClient(base_url=root, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                msg = f"it ended with status {process.returncode}"
                raise _NotUpError(msg)
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get("/v1/models")
                if answer.status_code == httpx.codes.OK:
                    return str(answer.json()["data"][0]["id"])
            await asyncio.sleep(0.1)
    msg = f"no answer within {spec.start_s:g} s"
    raise _NotUpError(msg)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the server and what it started: its whole session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            continue
        break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on just now, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def model_folder() -> Path:
    """Return where `make setup-vllm-cpu` puts SmolLM2: `models/smollm2` here or in the checkout."""
    here = Path("models", "smollm2")
    return here if here.is_dir() else Path(__file__).resolve().parents[3] / here

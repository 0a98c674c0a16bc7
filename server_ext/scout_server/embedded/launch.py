"""Starting the embedded engine: as a server of its own, or inside a process."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from scout_sdk._errors import ConfigError
from scout_server.config import load
from scout_server.embedded.api import make_app
from scout_server.embedded.engine import Engine
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.ingress import IngressSettings
from scout_server.policy.runtime import PolicySettings
from scout_server.recording import RecordSettings
from scout_server.snapshot import SnapshotSettings
from scout_server.tenancy import TenancySettings

__all__ = ["RunningServer", "app", "configured", "running_server", "serve"]

_START_S = 30.0


def app(
    settings: EmbeddedSettings | None = None,
    policy: PolicySettings | None = None,
    tenancy: TenancySettings | None = None,
    ingress: IngressSettings | None = None,
    snapshots: SnapshotSettings | None = None,
    record: RecordSettings | None = None,
) -> Starlette:
    """Return the embedded engine as an ASGI application."""
    return make_app(settings or EmbeddedSettings(), policy, tenancy, ingress, snapshots, record)


def configured(document: Mapping[str, object]) -> Starlette:
    """Return the application that a configuration document describes, for importers by name."""
    loaded = load(document)
    return make_app(
        loaded.of(EmbeddedSettings),
        loaded.of(PolicySettings),
        loaded.of(TenancySettings),
        loaded.of(IngressSettings),
        loaded.of(SnapshotSettings),
        loaded.of(RecordSettings),
    )


def serve(
    settings: EmbeddedSettings,
    policy: PolicySettings | None = None,
    tenancy: TenancySettings | None = None,
    ingress: IngressSettings | None = None,
    snapshots: SnapshotSettings | None = None,
    record: RecordSettings | None = None,
    *,
    log_level: str = "info",
) -> None:
    """Serve until the process is told to stop; ConfigError when the address cannot be had."""
    listening = _listen(settings.host, settings.port)
    application = make_app(settings, policy, tenancy, ingress, snapshots, record)
    server = uvicorn.Server(_config(application, log_level))
    server.run(sockets=[listening])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server in a thread of this process."""

    url: str
    """Such as `http://127.0.0.1:41234`; an OpenAI client's base URL is this and `/v1`."""
    engine: Engine
    """Belongs to the server's thread: read its counters, call nothing."""


@contextlib.contextmanager
def running_server(
    settings: EmbeddedSettings | None = None,
    policy: PolicySettings | None = None,
    tenancy: TenancySettings | None = None,
    ingress: IngressSettings | None = None,
    snapshots: SnapshotSettings | None = None,
    record: RecordSettings | None = None,
    *,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Iterator[RunningServer]:
    """
    Serve on a free port of the loopback interface, from a thread, as long as the block runs.

    *wrap* may put middleware around the application.
    """
    settings = EmbeddedSettings() if settings is None else settings
    application = make_app(settings, policy, tenancy, ingress, snapshots, record)
    listening = _listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = _Server(_config(wrap(application), "warning"))
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="scout-embedded", daemon=True
    )
    thread.start()
    try:
        if not server.up.wait(_START_S):
            msg = f"the embedded engine did not start within {_START_S:g} s"
            raise ConfigError(msg)
        yield RunningServer(url=f"http://127.0.0.1:{port}", engine=application.state.engine)
    finally:
        server.should_exit = True
        thread.join(_START_S)
        listening.close()


class _Server(uvicorn.Server):
    """Says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()


def _config(application: ASGIApp, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        log_level=log_level,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=2,
        server_header=False,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        msg = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        raise ConfigError(msg) from error
    return listening

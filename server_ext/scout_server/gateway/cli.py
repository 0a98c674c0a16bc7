"""`scout gateway`."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from scout_sdk import ConfigError
from scout_server.config import load
from scout_server.gateway.app import Gateway, create_app
from scout_server.gateway.nodes import check_nodes
from scout_server.gateway.settings import GatewaySettings
from scout_server.tenancy import TenancySettings

__all__ = ["gateway_app", "reread", "serve"]

logger = logging.getLogger(__name__)

Reload = Callable[[], tuple[GatewaySettings, TenancySettings]]

_AT_START = ("connect_timeout_s", "host", "port", "trust_env", "worker")
"""Settings that a new reading of the configuration does not change."""

gateway_app = typer.Typer(add_completion=False)


@gateway_app.command(
    epilog="Example: scout gateway --node http://127.0.0.1:8001 --node http://127.0.0.1:8002"
)
def gateway(
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="A server, without /v1; repeat it. #ranks=N: its ranks."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--config", help="Configuration file; SIGHUP reads it again."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 = any.")] = None,
) -> None:
    """Route agent programs to many servers: who gets KV room now, and where."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    settings, tenancy = _settings(file, node, host, port)
    # uvloop where uvicorn finds it: half the cost of a streamed event.
    factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(settings, tenancy, reload=lambda: _settings(file, node, host, port)))


class _Server(uvicorn.Server):
    """Says where it listens, so that port 0 is of use."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        for listener in [s for server in self.servers for s in server.sockets]:
            host, port = listener.getsockname()[:2]
            logger.info("scout gateway: listening on http://%s:%d", host, port)


def _settings(
    file: Path | None, node: list[str] | None, host: str | None, port: int | None
) -> tuple[GatewaySettings, TenancySettings]:
    loaded = load(path=file)
    settings = loaded.of(GatewaySettings)
    if node:
        settings = replace(settings, nodes=(*settings.nodes, *node))
    if host is not None:
        settings = replace(settings, host=host)
    if port is not None:
        settings = replace(settings, port=port)
    check_nodes(settings)
    return settings, loaded.of(TenancySettings)


def _collect_seldom() -> None:
    """
    Keep the garbage collector from stopping every stream at once.

    What was imported lives as long as we do and is never walked again. Requests leave no cycles
    behind: at Python's own thresholds the collector walks all open ones many times a second, up to
    30 ms at 200 streams, and finds nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 100)


async def reread(gateway: Gateway, reload: Reload) -> None:
    """Let *gateway* take the settings that *reload* returns; what is wrong with them is said."""
    before = gateway.settings
    try:
        await gateway.reconfigure(*reload())
    except ConfigError as error:
        logger.error("scout: the new configuration is not taken: %s", error)
        return
    except Exception:
        logger.exception("scout: the new configuration could not be read")
        return
    logger.info("scout: the configuration was read again")
    for name in _AT_START:
        if getattr(gateway.settings, name) != getattr(before, name):
            logger.warning("scout: gateway.%s changes with the next start only", name)


async def serve(
    settings: GatewaySettings, tenancy: TenancySettings, *, reload: Reload | None = None
) -> None:
    """Serve until stopped; SIGHUP takes the settings that *reload* returns."""
    gateway = Gateway(settings, tenancy)
    server = _Server(
        uvicorn.Config(
            create_app(gateway),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            lifespan="on",
        )
    )
    tasks: set[asyncio.Task[None]] = set()

    def hang_up(reload: Reload) -> None:
        task = asyncio.ensure_future(reread(gateway, reload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if reload is not None and hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up, reload)
    _collect_seldom()
    await server.serve()

"""What several unit tests start."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest


@pytest.fixture
def serve_gateway() -> Callable[..., contextlib.AbstractAsyncContextManager[str]]:
    """Serve a gateway on a free port: async with serve_gateway(gateway) as url."""
    import uvicorn  # not there where only the clients' tests run

    from scout_server.gateway.app import create_app

    class Server(uvicorn.Server):
        """uvicorn that leaves the process's signals alone."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    @contextlib.asynccontextmanager
    async def serve(gateway: object) -> AsyncIterator[str]:
        app = create_app(gateway)  # type: ignore[arg-type]
        server = Server(
            uvicorn.Config(app, port=0, log_level="critical", access_log=False, lifespan="on")
        )
        task = asyncio.create_task(server.serve())
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task
            await server.lifespan.shutdown()  # uvicorn leaves it out when it is forced to end

    return serve

"""The engine of one replica: an ASGI application inside it, or a server process beside it."""

import asyncio
import contextlib
import importlib
import os
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, cast

import aiohttp
from starlette.types import ASGIApp, Message
from yarl import URL

from scout_sdk import ConfigError
from scout_server.ray.calls import Call, Head
from scout_server.tao.headers import to_node

__all__ = ["AsgiEngine", "Engine", "EngineDiedError", "ServerEngine", "load_factory"]

_STOP_S = 10.0
_POLL_S = 0.2
_QUEUE = 64
_ABORT_S = 0.5


class EngineDiedError(Exception):
    """The engine ended an answer before its end, or is gone."""


class Engine(Protocol):
    """What serves the requests that a replica gets."""

    async def start(self) -> None:
        """Return when it can serve; EngineDiedError when it never will."""

    async def stop(self) -> None:
        """Stop serving."""

    def serve(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield one Head, then the body as it comes; closing it aborts the request."""

    def alive(self) -> bool:
        """Whether it still runs."""


def load_factory(text: str) -> Any:
    """Return what `module:attribute` names; ConfigError when there is none."""
    module, colon, attribute = text.partition(":")
    if not (colon and module and attribute):
        msg = f"ray.engine_app is {text!r}; the form is module:function"
        raise ConfigError(msg)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        msg = f"ray.engine_app {text!r} cannot be imported: {error}"
        raise ConfigError(msg) from error


class AsgiEngine:
    """An ASGI application on the replica's own event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lifespan: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Run the application's start-up."""
        up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lifespan = asyncio.create_task(self._live(up), name="scout-lifespan")
        await up

    async def stop(self) -> None:
        """Run the application's shutdown."""
        self._stop.set()
        if self._lifespan is not None:
            await asyncio.wait({self._lifespan}, timeout=_STOP_S)

    def alive(self) -> bool:
        """It lives as long as its process."""
        return True

    async def serve(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the application's answer."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUE)
        gone = asyncio.Event()
        asking = iter([{"type": "http.request", "body": call.body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(asking, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message | None) -> None:
            if not gone.is_set():
                await messages.put(message)

        async def run() -> None:
            try:
                await self._app(_scope(call), receive, send)
            finally:
                await send(None)

        task = asyncio.create_task(run())
        try:
            whole = False
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield Head(status=message["status"], headers=tuple(message["headers"]))
                elif message["type"] == "http.response.body":
                    if body := message.get("body", b""):
                        yield body
                    whole = not message.get("more_body", False)
            if not whole:
                fault = task.exception() if task.done() else None
                msg = f"the engine's answer has no end: {fault!r}"
                raise EngineDiedError(msg)
        finally:
            gone.set()
            if not task.done():
                while not messages.empty():
                    messages.get_nowait()
                await asyncio.wait({task}, timeout=_ABORT_S)
                task.cancel()
            if task.done() and not task.cancelled():
                task.exception()  # an application re-raises what it has answered

    async def _live(self, up: asyncio.Future[None]) -> None:
        asking = iter([{"type": "lifespan.startup"}])

        async def receive() -> Message:
            if (message := next(asking, None)) is not None:
                return message
            await self._stop.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: Message) -> None:
            if up.done():
                return
            if message["type"] == "lifespan.startup.failed":
                up.set_exception(EngineDiedError(str(message.get("message", "start-up failed"))))
            elif message["type"] == "lifespan.startup.complete":
                up.set_result(None)

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if not up.done():  # it knows no lifespan, or failed in it: requests will tell
                up.set_result(None)
            elif not self._stop.is_set():
                raise EngineDiedError from error
        finally:
            if not up.done():
                up.set_result(None)


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": URL(call.path, encoded=True).path,
        "raw_path": call.path.encode("latin-1"),
        "query_string": call.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in call.headers],
        "client": None,
        "server": ("127.0.0.1", 0),
        "state": {},
    }


class ServerEngine:
    """A server process on loopback, such as `scout serve MODEL`; it dies with the replica."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_timeout_s: float,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        """`{port}` in it stands for a free port."""
        self._start_timeout_s = start_timeout_s
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._client: aiohttp.ClientSession | None = None
        self._url = ""

    async def start(self) -> None:
        """Start the server and wait until it says that it is well."""
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [word.replace("{port}", str(port)) for word in self._command]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "scout_server.ray.child",
            *command,
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **(self._environ or {})},
        )
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
        )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._well():
                    if not self.alive():
                        msg = f"{command[0]} ended with status {self._process.returncode}"
                        raise EngineDiedError(msg)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
            msg = f"{command[0]} was not up within {self._start_timeout_s:g} s"
            raise EngineDiedError(msg) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()  # the child ends the server when it sees that
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def serve(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the server's answer; EngineDiedError when it does not begin or end it."""
        target = self._url + call.path + ("?" + call.query.decode("latin-1") if call.query else "")
        try:
            response = await self._session().request(
                call.method,
                URL(target, encoded=True),
                headers=to_node(call.headers, added={}, removed=frozenset()),
                data=call.body if call.body or call.method in ("POST", "PUT", "PATCH") else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineDiedError(str(error)) from error
        try:
            yield Head(status=response.status, headers=tuple(response.raw_headers))
            async for chunk in response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineDiedError(str(error)) from error
        finally:
            response.close()  # not whole: the server stops to generate

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            msg = "the engine is not started"
            raise EngineDiedError(msg)
        return self._client

    async def _well(self) -> bool:
        try:
            async with self._session().get(self._url + "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast(int, probe.getsockname()[1])

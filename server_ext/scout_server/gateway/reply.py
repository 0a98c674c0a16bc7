"""The answer to one client: how far it has come, comments while it is held, refusals."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import Send

from scout_server.tao.asgi import answer

__all__ = ["Reply", "keeping_alive"]

_COMMENT = b": held\n\n"


@dataclass(slots=True)
class Reply:
    """How far the answer to one client has come."""

    send: Send
    started: bool = False
    status: int = 0
    kept_alive: bool = False
    """The answer began with comments, before a node's was there."""

    async def keep_alive(self, every_s: float) -> None:
        """Send comments of an event stream from now on, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            if not self.kept_alive:
                self.kept_alive = True
                await self.send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [
                            (b"content-type", b"text/event-stream; charset=utf-8"),
                            (b"cache-control", b"no-cache"),
                        ],
                    }
                )
            message = {"type": "http.response.body", "body": _COMMENT, "more_body": True}
            await self.send(message)

    async def refuse(
        self, status: int, message: str, *, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        """Answer an error; when comments went before it, as the stream's last event."""
        self.status = status
        if not self.kept_alive:
            await answer(self.send, status, message, kind=kind, headers=headers)
            return
        error = {"error": {"message": message, "type": kind, "code": status}}
        event = b"data: " + json.dumps(error).encode() + b"\n\n"
        await self.send({"type": "http.response.body", "body": event, "more_body": False})


@contextlib.asynccontextmanager
async def keeping_alive(reply: Reply, every_s: float) -> AsyncIterator[None]:
    """Within: comments go to the client; when it ends, none is half sent."""
    if not every_s:
        yield
        return
    task = asyncio.create_task(reply.keep_alive(every_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the client's connection broke: the watcher sees that too

"""From an API server to the engines: events down, state up."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

__all__ = ["EngineLink"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

Call = Callable[[str, str], Awaitable[list[str]]]
State = Mapping[str, object]


class EngineLink:
    """
    Calls into every engine (data-parallel rank) of one server; never raises, never waits long.

    An engine answers between two of its steps, so a busy one answers late: what came last is kept.
    """

    def __init__(self, call: Call, *, timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self.states: Sequence[State] = ()
        """The last known state of each engine, by rank; empty before the first answer."""
        self.failures = 0
        """Calls that got no usable answer."""
        self._flight: asyncio.Task[Sequence[State] | None] | None = None

    @property
    def out(self) -> bool:
        """Whether all engines said last that they run without our code."""
        return bool(self.states) and all(state.get("mode") == "stock" for state in self.states)

    async def refresh(self) -> bool:
        """Ask for the engines' states; False when they did not answer in time."""
        if self._flight is None or self._flight.done():
            # One question at a time, whoever asks: an engine that hangs is not asked again.
            self._flight = asyncio.create_task(self._ask("state", ""))
        try:
            answers = await asyncio.wait_for(asyncio.shield(self._flight), self._timeout_s)
        except TimeoutError:
            self.failures += 1
            return False
        if answers is None:
            return False
        self.states = answers
        return True

    async def post(self, body: bytes, tenant: str) -> Sequence[State] | None:
        """Give a message of the side channel to every engine; None when there is no answer."""
        try:
            text = body.decode()
            return await asyncio.wait_for(self._ask("events", f"{tenant}\n{text}"), self._timeout_s)
        except (TimeoutError, UnicodeDecodeError):
            self.failures += 1
            return None

    async def _ask(self, operation: str, argument: str) -> Sequence[State] | None:
        try:
            answers = [json.loads(text) for text in await self._call(operation, argument)]
        except Exception as error:
            self.failures += 1
            _log.warning("scout: no answer from the engine to %s: %s", operation, error)
            return None
        return [answer if isinstance(answer, dict) else {} for answer in answers]

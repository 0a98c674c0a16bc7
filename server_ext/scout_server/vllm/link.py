"""From an API server to the engines: events down, state up."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

__all__ = ["EngineLink"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

Call = Callable[[str, str], Awaitable[list[str]]]
State = Mapping[str, object]

_MAX_TOLD = 1024
_TOLD_AT_ONCE = 128


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
        self.untold = 0
        """Ends of responses that no engine heard of."""
        self._flight: asyncio.Task[Sequence[State] | None] | None = None
        self._told: deque[Mapping[str, object]] = deque()
        self._telling: asyncio.Task[None] | None = None

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

    async def warm(self) -> float | None:
        """Let idle engines warm up; return in how many seconds to ask again, None: no answer."""
        answers = await self._ask("warm", "")
        seconds = [each.get("next_s") for each in answers or ()]
        return min((s for s in seconds if isinstance(s, int | float)), default=None)

    async def introduce(self, key: bytes) -> bool:
        """Let every engine trust what is sealed with *key*; False when one did not hear it."""
        try:
            answers = await asyncio.wait_for(self._ask("key", key.hex()), self._timeout_s)
        except TimeoutError:
            answers = None
        if answers is not None and all("error" not in answer for answer in answers):
            return True
        _log.warning("scout: an engine does not know this API server; it reads no tool calls")
        return False

    def tell(self, ending: Mapping[str, object]) -> None:
        """Let the engines know soon how a response ended; nobody waits, the oldest are dropped."""
        self._told.append(ending)
        if len(self._told) > _MAX_TOLD:
            self._told.popleft()
            self.untold += 1
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        """Send what has gathered, one message at a time."""
        while self._told:
            batch = [self._told.popleft() for _ in range(min(_TOLD_AT_ONCE, len(self._told)))]
            try:
                asked = self._ask("endings", json.dumps(batch))
                heard = await asyncio.wait_for(asked, self._timeout_s) is not None
            except TimeoutError:
                self.failures += 1
                heard = False
            self.untold += 0 if heard else len(batch)

    async def _ask(self, operation: str, argument: str) -> Sequence[State] | None:
        try:
            answers = [json.loads(text) for text in await self._call(operation, argument)]
        except Exception as error:
            self.failures += 1
            _log.warning("scout: no answer from the engine to %s: %s", operation, error)
            return None
        return [answer if isinstance(answer, dict) else {} for answer in answers]

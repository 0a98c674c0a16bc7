"""The demo's sessions, recorded once in real time and replayed in virtual time (issue 3)."""

import asyncio
import heapq
import importlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from scout_sdk import _wire
from scout_sdk._hints import SessionEvent
from scout_server.demo.workload import Job, run_jobs
from scout_server.embedded.engine import Engine
from scout_server.embedded.launch import running_server
from scout_server.embedded.parse import parse_chat
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.ingress import IngressSettings, RequestReader, expected_tools
from scout_server.policy.runtime import PolicySettings
from scout_server.replica.request import Request
from scout_server.replica.results import Counters
from scout_server.tenancy import TenancySettings

__all__ = ["Item", "Program", "Replay", "record"]

_JOB_HEADER = "x-bench-job"
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Item:
    """One request or event of a session, and what it came after."""

    after: int
    """Index of the item whose end it followed; -1: the session's start."""
    delay_s: float
    """Seconds between that end and this: the client's own time."""
    headers: Mapping[str, str]
    body: Mapping[str, object] | None = None
    """None: an event."""
    event: SessionEvent | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """One session as its client ran it."""

    items: tuple[Item, ...]

    def stripped(self) -> "Program":
        """Return the same session of a client that knows nothing of Scout."""
        kept: list[Item] = []
        for item in self.items:
            headers = {
                name: value
                for name, value in item.headers.items()
                if not name.startswith(_wire.PREFIX) and name != _wire.SESSION_ID_HEADER
            }
            never = item.event is not None
            kept.append(Item(item.after, item.delay_s, headers, None if never else item.body))
        return Program(tuple(kept))


@dataclass(slots=True)
class _Seen:
    start: float
    headers: dict[str, str]
    raw: bytearray = field(default_factory=bytearray)
    end: float = 0.0


class _Recorder:
    """An ASGI application around another: what was posted, from when to when."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.seen: list[tuple[str, _Seen]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (_CHAT, _wire.EVENTS_PATH):
            await self.app(scope, receive, send)
            return
        names = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        seen = _Seen(time.perf_counter(), names)
        self.seen.append((scope["path"], seen))

        async def hear() -> Message:
            message = await receive()
            seen.raw += message.get("body", b"")
            return message

        async def say(message: Message) -> None:
            # Before it is sent: the client may be quicker than this line's successor.
            seen.end = time.perf_counter()
            await send(message)

        await self.app(scope, hear, say)


def _labelled_client(job: int) -> Any:
    """Return an HTTP client for openai whose requests say which job they belong to."""
    openai = importlib.import_module("openai")
    base: Any = openai.DefaultAsyncHttpxClient

    class Labelled(base):  # type: ignore[misc]
        async def send(self, request: Any, **options: Any) -> Any:
            request.headers[_JOB_HEADER] = str(job)
            return await super().send(request, **options)

    return Labelled(timeout=600.0)


def record(
    jobs: Sequence[Job], *, concurrency: int, done: Callable[[], None] = lambda: None
) -> list[Program]:
    """
    Run *jobs*, *concurrency* at a time, against an engine that takes no time; return them.

    The delays are those of the clients and their tools, as this machine runs them now.
    """
    recorders: list[_Recorder] = []

    def wrapped(app: Any) -> Any:
        recorders.append(_Recorder(app))
        return recorders[-1]

    # It takes hints: a client stops sending what a server says that it does not take.
    quick = EmbeddedSettings(
        policy="scout", kv_blocks=1 << 16, step_s=0.0, prefill_tokens_per_s=1e9,
        decode_s_per_sequence=0.0, decode_us_per_kv_token=0.0,
    )  # fmt: skip
    with running_server(quick, wrap=wrapped) as server:
        asyncio.run(_run(jobs, f"{server.url}/v1", quick.model, concurrency, done))
    return _programs(recorders[0].seen, len(jobs))


async def _run(
    jobs: Sequence[Job], url: str, model: str, concurrency: int, done: Callable[[], None]
) -> None:
    room = asyncio.Semaphore(concurrency)

    async def one(index: int, job: Job) -> None:
        async with room:
            client = _labelled_client(index)
            try:
                await run_jobs([job], url, model=model, http_client=client, concurrency=1)
            finally:
                await client.aclose()
            done()

    async with asyncio.TaskGroup() as group:
        for index, job in enumerate(jobs):
            group.create_task(one(index, job))


def _programs(seen: Sequence[tuple[str, _Seen]], jobs: int) -> list[Program]:
    by_job: dict[int, list[tuple[float, float, Item]]] = defaultdict(list)
    job_of: dict[str, int] = {}
    for path, each in seen:
        if path == _CHAT:
            job = int(each.headers[_JOB_HEADER])
            hints = _wire.decode(each.headers).hints
            if hints is not None and hints.session:
                job_of[hints.session] = job
            item = Item(-1, 0.0, _kept(each.headers), json.loads(bytes(each.raw)))
            by_job[job].append((each.start, each.end, item))
    for path, each in seen:
        if path == _wire.EVENTS_PATH:
            for event in _wire.decode_events(bytes(each.raw))[0]:
                if event.session in job_of:
                    item = Item(-1, 0.0, {}, event=event)
                    by_job[job_of[event.session]].append((each.start, each.start, item))
    return [_linked(sorted(by_job[job], key=lambda e: e[:2])) for job in range(jobs)]


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if name.startswith("x-") and name != _JOB_HEADER and not name.startswith("x-stainless")
    }


def _linked(found: Sequence[tuple[float, float, Item]]) -> Program:
    items: list[Item] = []
    for start, _, item in found:
        ends = [
            (end, index)
            for index, (_, end, other) in enumerate(found[: len(items)])
            if other.event is None and end <= start
        ]
        end, after = max(ends, default=(found[0][0], -1))
        items.append(Item(after, start - end, item.headers, item.body, item.event))
    return Program(tuple(items))


class Replay:
    """One engine in virtual time; the clients answer it as they did when they were recorded."""

    def __init__(
        self,
        settings: EmbeddedSettings,
        policy: PolicySettings,
        ingress: IngressSettings | None = None,
    ) -> None:
        self._now = 0.0
        self._settings = settings
        self._ingress = ingress or IngressSettings()
        self.engine = Engine(settings, policy, clock=lambda: self._now)
        self.engine.on_finish = self._finished
        self._reader = RequestReader(
            self._ingress,
            TenancySettings(),
            max_agents=self.engine.policy.max_agents,
            max_sessions=self.engine.policy.max_sessions,
        )
        self._heap: list[tuple[float, int, _Session, int]] = []
        self._serial = itertools.count()
        self._places: dict[str, tuple[_Session, int]] = {}
        self._waiting: list[Program] = []

    def run(self, programs: Sequence[Program], *, concurrency: int) -> Counters:
        """Run *programs* in order to their end; return the counters, cumulative."""
        self._waiting = list(programs)[::-1]
        for _ in range(concurrency):
            self._next_session()
        replica = self.engine.replica
        while True:
            due = replica.next_event_time()
            at = self._heap[0][0] if self._heap else float("inf")
            if min(due, at) == float("inf"):
                break
            if due <= at:
                self._now = due
                self.engine.pump()
            else:
                self._now = at
                _, _, session, index = heapq.heappop(self._heap)
                self._send(session, index)
        if self.engine.faulted is not None:
            raise RuntimeError(f"the policy failed: {self.engine.faulted}")
        return self.engine.counters()

    def _next_session(self) -> None:
        if self._waiting:
            session = _Session(self._waiting.pop())
            self._ended(session, -1)

    def _ended(self, session: "_Session", index: int) -> None:
        """Set the clock of all that followed the end of item *index*."""
        for other, item in enumerate(session.program.items):
            if item.after == index:
                entry = (self._now + item.delay_s, next(self._serial), session, other)
                heapq.heappush(self._heap, entry)
        if not session.left:
            self._next_session()

    def _send(self, session: "_Session", index: int) -> None:
        item = session.program.items[index]
        if item.body is None:
            session.left -= 1
            if item.event is not None and self.engine.policy.hints:
                self.engine.event(item.event)
            self._ended(session, index)
            return
        call = parse_chat(item.body, self._settings)
        arrival = self._reader.read(item.headers, item.body)
        calls = call.reply.calls if self._ingress.tool_calls else ()
        generation = self.engine.submit(
            call.prompt,
            call.reply,
            hints=arrival.hints if self.engine.policy.hints else None,
            tenant=arrival.tenant,
            tools=expected_tools((tool.name, tool.arguments) for tool in calls),
        )
        self._places[generation.request.request_id] = (session, index)

    def _finished(self, request: Request) -> None:
        session, index = self._places.pop(request.request_id)
        session.left -= 1
        self._ended(session, index)


class _Session:
    __slots__ = ("left", "program")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.left = len(program.items)

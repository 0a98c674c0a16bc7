"""Agent programs of token ids, run against a real server; and the same programs as a trace."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from scout_sdk import _wire
from scout_sdk._errors import ConfigError
from scout_sdk._hints import Hints, SessionEvent, ToolEvent, ToolState
from scout_server.replica import block_hashes
from scout_server.sim.traces.records import HashScope, Program, TraceInfo, Turn, runs_of

__all__ = [
    "LiveProgram",
    "LiveRequest",
    "LiveRun",
    "LiveTurn",
    "ask",
    "read_counters",
    "run_programs",
    "trace_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTurn:
    """One request: what is new in its prompt, and how long its reply is."""

    agent: str
    fresh: tuple[int, ...]
    """Token ids that follow the agent's earlier exchanges."""
    output_tokens: int
    gap_s: float = 0.0
    """Seconds between the end of the turn before and this one."""
    tool: str | None = None
    """What runs in that gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgram:
    """
    One program: turns one after the other, each by an agent with a memory of its own.

    A prompt is the agent's anchor, its earlier exchanges in this program with the replies that were
    really given, and what is new.
    """

    name: str
    anchors: Mapping[str, tuple[int, ...]]
    """Fixed prompt of each agent; programs with equal ones share them."""
    turns: tuple[LiveTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One measured request; seconds since the run began."""

    program: int
    turn: int
    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class LiveRun:
    """What a client saw of one run, and what the server counted meanwhile."""

    requests: list[LiveRequest] = field(default_factory=list)
    jct_s: list[float] = field(default_factory=list)
    """Seconds from a program's first request to its last reply, in order of programs."""
    wall_s: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)
    """Differences of the server's counters, by their names without prefix and `_total`."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the cache by those looked up."""
        queried = self.counted.get("prefix_cache_queries", 0.0)
        return self.counted.get("prefix_cache_hits", 0.0) / queried if queried else 0.0


LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
"""Of clients here: a connection is given up before the server does so, which takes it 5 s."""
_COUNTED = frozenset(
    {
        "num_preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "request_decode_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_queue_time_seconds_sum",
    }
)


async def read_counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return those of vLLM's counters that we use; without any, the server is no vLLM."""
    answer = await client.get("/metrics")
    found: dict[str, float] = {}
    if answer.status_code != httpx.codes.OK:
        return found
    for line in answer.text.splitlines():
        name = line.partition("{")[0].partition(" ")[0].removeprefix("vllm:")
        name = name.removesuffix("_total")
        if name in _COUNTED:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered request; seconds of the process's performance clock."""

    sent_s: float
    first_s: float
    last_s: float
    reply: list[int]
    """Its token ids; empty when the server does not give them."""


async def ask(
    client: httpx.AsyncClient,
    model: str,
    prompt: Sequence[int],
    output_tokens: int,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one completion of exactly *output_tokens*; ConfigError when it is refused."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    }
    reply: list[int] = []
    first = last = 0.0
    sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            text = (await answer.aread()).decode(errors="replace")[:300]
            msg = f"the server answered {answer.status_code}: {text}"
            raise ConfigError(msg)
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            last = time.perf_counter()
            first = first or last
            for choice in json.loads(line[5:]).get("choices", ()):
                reply += choice.get("token_ids") or ()
    if not first:
        msg = "the server sent no token"
        raise ConfigError(msg)
    return Answer(sent_s=sent, first_s=first, last_s=last, reply=reply)


async def run_programs(
    root: str,
    model: str,
    programs: Sequence[LiveProgram],
    *,
    concurrency: int,
    hints: bool = True,
    events: bool = False,
    transport: httpx.AsyncBaseTransport | None = None,
) -> LiveRun:
    """
    Run *programs* at the server at *root*, *concurrency* at a time, the next when one has ended.

    With *hints*, requests say who they are; with *events*, tools and ends are told on the side
    channel, as the simulated clients do. ConfigError when the server cannot be asked.
    """
    run = LiveRun(jct_s=[0.0] * len(programs))
    waiting = list(range(len(programs)))[::-1]
    async with httpx.AsyncClient(
        base_url=root, timeout=600.0, limits=LIMITS, transport=transport
    ) as client:
        try:
            before = await read_counters(client)
            begin = time.perf_counter()

            async def worker(side: asyncio.TaskGroup) -> None:
                while waiting:
                    number = waiting.pop()
                    await _Run(client, model, begin, run, hints, side if events else None).program(
                        number, programs[number]
                    )

            async with asyncio.TaskGroup() as side:
                await asyncio.gather(*(worker(side) for _ in range(concurrency)))
                run.wall_s = max(r.last_s for r in run.requests)
            after = await read_counters(client)
        except* httpx.HTTPError as error:
            msg = f"{root}: {error.exceptions[0]!r}"
            raise ConfigError(msg) from error
    run.counted = {name: after.get(name, 0.0) - value for name, value in before.items()}
    return run


class _Run:
    """One program under way."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        begin: float,
        run: LiveRun,
        hints: bool,
        side: asyncio.TaskGroup | None,
    ) -> None:
        self.client = client
        self.model = model
        self.begin = begin
        self.run = run
        self.hints = hints
        self.side = side

    def _now(self) -> float:
        return time.perf_counter() - self.begin

    async def program(self, number: int, program: LiveProgram) -> None:
        memory = {agent: list(anchor) for agent, anchor in program.anchors.items()}
        count = dict.fromkeys(memory, 0)
        started = ended = self._now()
        for index, turn in enumerate(program.turns):
            if turn.gap_s > 0.0:
                if index and turn.tool is not None:
                    tool = ToolEvent(name=turn.tool, state=ToolState.STARTED)
                    self._tell(SessionEvent(session=program.name, agent=turn.agent, tool=tool))
                # measured from the reply, so that our own work in between does not add up
                await asyncio.sleep(max(ended + turn.gap_s - self._now(), 0.0))
            memory[turn.agent] += turn.fresh
            count[turn.agent] += 1
            tools: tuple[ToolEvent, ...] = ()
            if index and turn.tool is not None:
                tools = (ToolEvent(name=turn.tool, state=ToolState.ENDED),)
            hints = Hints(
                session=program.name, agent=turn.agent, turn=count[turn.agent], tools=tools
            )
            got = await self._ask(number, index, memory[turn.agent], turn, hints)
            ended = got.last_s - self.begin
            memory[turn.agent] += got.reply
        self.run.jct_s[number] = ended - started
        self._tell(SessionEvent(session=program.name, final=True))

    def _tell(self, event: SessionEvent) -> None:
        if self.side is not None:
            self.side.create_task(
                self.client.post(_wire.EVENTS_PATH, content=_wire.encode_events([event]))
            )

    async def _ask(
        self, number: int, index: int, prompt: Sequence[int], turn: LiveTurn, hints: Hints
    ) -> Answer:
        headers = _wire.encode(hints) if self.hints else None
        got = await ask(self.client, self.model, prompt, turn.output_tokens, headers)
        if len(got.reply) != turn.output_tokens:
            msg = (
                f"the server gave {len(got.reply)} token ids where {turn.output_tokens} were asked "
                f"for; it must know ignore_eos, min_tokens and return_token_ids, as vLLM does"
            )
            raise ConfigError(msg)
        self.run.requests.append(
            LiveRequest(
                program=number,
                turn=index,
                sent_s=got.sent_s - self.begin,
                first_s=got.first_s - self.begin,
                last_s=got.last_s - self.begin,
                prompt_tokens=len(prompt),
                output_tokens=len(got.reply),
            )
        )
        return got


def trace_of(
    programs: Sequence[LiveProgram], block_tokens: int, *, first_id: int = 0
) -> tuple[TraceInfo, list[Program]]:
    """
    Return *programs* as a trace for the simulator; its block ids begin at *first_id*.

    Replies are not known beforehand; tokens that nobody else uses stand for them, so that blocks
    are equal exactly where they are on the server.
    """
    ids: dict[int, int] = {}
    made = 1 << 31
    found = []
    for program in programs:
        memory = {agent: list(anchor) for agent, anchor in program.anchors.items()}
        turns = []
        for index, turn in enumerate(program.turns):
            prompt = memory[turn.agent]
            prompt += turn.fresh
            hashes = block_hashes(prompt, block_tokens)
            turns.append(
                Turn(
                    agent=turn.agent,
                    input_tokens=len(prompt),
                    output_tokens=turn.output_tokens,
                    hash_runs=runs_of(ids.setdefault(h, first_id + len(ids)) for h in hashes),
                    parents=(index - 1,) if index else (),
                    gap_s=turn.gap_s,
                    tool=turn.tool if index else None,
                    calls_tool=False,
                )
            )
            prompt += range(made, made + turn.output_tokens)
            made += turn.output_tokens
        found.append(Program(program=program.name, arrival_s=0.0, turns=tuple(turns)))
    info = TraceInfo(
        source="programs run on a server", block_tokens=block_tokens, scope=HashScope.GLOBAL
    )
    return info, found

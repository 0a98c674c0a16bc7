"""
AutoGen 0.7: `instrument(team_or_agent)`, and every LLM request says who makes it.

The model client of each agent is replaced by one that delegates to it; the tool calls of each
workbench are wrapped on the instance (a wrapping class would lose AutoGen's streaming, which
asks for the type). `dump_component` and `save_state` give what they gave before.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from autogen_agentchat.agents import CodeExecutorAgent, UserProxyAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import MessageHandlerContext
from autogen_core.models import ChatCompletionClient

from scout_integrations._guard import guarded
from scout_integrations._tools import finished, started
from scout_sdk._context import Slot, close, enclosing, open_slot
from scout_sdk._env import read_environment
from scout_sdk._errors import ConfigError
from scout_sdk._hints import HUMAN, Hints, ToolEvent
from scout_sdk._openai import allow, install, install_if_imported
from scout_sdk._sessions import SESSIONS

__all__ = ["instrument", "uninstrument"]

T = TypeVar("T")

_WIRING = "_scout_wiring"


class _Conversation:
    """
    The session of one instrumented object; its runs come one after the other.

    A given name stays. Without one, each run is a session of its own that ends with it. Kept
    here and not in a ContextVar, since a runtime started earlier does not see the caller's.
    """

    def __init__(self, session: str | None, endpoint: str | None) -> None:
        self.session = session or uuid.uuid4().hex
        self.endpoint = endpoint
        self._named = session is not None
        self.over = False
        self._made_up = False
        self._runs = 0

    @guarded
    def begin(self) -> None:
        """Start a run; one inside another is part of it."""
        self._runs += 1
        if self._runs > 1 or self._named:
            return
        outer = enclosing()
        given = (None if outer is None else outer.hints.session) or read_environment().session
        self.session = given or uuid.uuid4().hex
        self._made_up = given is None
        self.over = False

    @guarded
    def end(self) -> None:
        """End a run."""
        self._runs -= 1
        if self._runs == 0 and self._made_up:
            self.over = True
            SESSIONS.finish(self.session, endpoint=self.endpoint)


@dataclass(frozen=True, slots=True)
class _Place:
    """Whose calls these are. agent: None where only the runtime knows, as in group managers."""

    conversation: _Conversation
    agent: str | None
    team: str
    next_agents: tuple[str, ...] = ()

    def hints(self) -> Hints:
        agent = self.agent or _running_agent() or "default"
        return Hints(
            session=self.conversation.session,
            agent=agent,
            path=f"{self.team}/{agent}" if self.team else agent,
            next_agents=self.next_agents,
        )


def _running_agent() -> str | None:
    """Return the name of the agent that AutoGen's runtime is running here: its type minus key."""
    try:
        agent_id = MessageHandlerContext.agent_id()
    except RuntimeError:
        return None
    name: str = agent_id.type.removesuffix(f"_{agent_id.key}")
    return name


@guarded
def _open(place: _Place, once: bool) -> Slot:
    if once:
        install_if_imported()
    return open_slot(place.hints(), once=once, endpoint=place.conversation.endpoint)


@contextmanager
def _slot(place: _Place, *, once: bool) -> Iterator[None]:
    slot = _open(place, once)
    try:
        yield
    finally:
        if slot is not None:
            close(slot)


@guarded
def _record(place: _Place, event: ToolEvent) -> None:
    hints = place.hints()
    # A cancelled run may leave a tool behind that ends after its session.
    if hints.session is not None and not place.conversation.over:
        endpoint = place.conversation.endpoint
        SESSIONS.record_tool(hints.session, hints.agent, event, endpoint=endpoint)


class _Tool:
    """One call of a tool, from its start to its end."""

    def __init__(self, place: _Place, name: str, arguments: Any, call_id: str | None) -> None:
        self._place = place
        self._name = name
        self._arguments = arguments
        self._call_id = call_id or uuid.uuid4().hex
        self._begun = SESSIONS.clock()
        self._slot: Slot | None = None
        self.failed = False

    def __enter__(self) -> Self:
        _record(self._place, started(self._name, self._call_id, self._arguments))
        self._slot = _open(self._place, False)  # bare clients inside the tool belong to its agent
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if self._slot is not None:
            close(self._slot)
        elapsed_s = SESSIONS.clock() - self._begun
        failed = self.failed or exc_type not in (None, GeneratorExit)
        _record(self._place, finished(self._name, self._call_id, elapsed_s, failed=failed))


class _Client(ChatCompletionClient):  # type: ignore[misc]  # AutoGen's types are not followed
    """Delegates to a model client and opens a slot around every call."""

    component_type = "model"

    def __init__(self, inner: Any, place: _Place) -> None:
        self._inner = inner
        self._place = place

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        with _slot(self._place, once=True):
            return await self._inner.create(*args, **kwargs)

    async def create_stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        with _slot(self._place, once=True):
            async for chunk in self._inner.create_stream(*args, **kwargs):
                yield chunk

    async def close(self) -> None:
        await self._inner.close()

    def actual_usage(self) -> Any:
        return self._inner.actual_usage()

    def total_usage(self) -> Any:
        return self._inner.total_usage()

    def count_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.count_tokens(*args, **kwargs)

    def remaining_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.remaining_tokens(*args, **kwargs)

    @property
    def capabilities(self) -> Any:
        return self._inner.capabilities

    @property
    def model_info(self) -> Any:
        return self._inner.model_info

    def dump_component(self) -> Any:
        return self._inner.dump_component()

    def _to_config(self) -> Any:
        return self._inner._to_config()

    @classmethod
    def _from_config(cls, config: Any) -> Any:
        raise NotImplementedError("the wrapper is never serialised; its inner client is")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


class _Wiring:
    """What was changed on one instrumented object, and how to undo it."""

    def __init__(self, conversation: _Conversation) -> None:
        self._conversation = conversation
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()

    def undo(self) -> None:
        """Restore every attribute, the last one first."""
        while self._undo:
            self._undo.pop()()

    def _set(self, obj: Any, name: str, value: Any) -> None:
        """Set an instance attribute; undone, the class's or the former one shows again."""
        if name in vars(obj):
            before = vars(obj)[name]
            self._undo.append(lambda: setattr(obj, name, before))
        else:
            self._undo.append(lambda: vars(obj).pop(name, None))
        setattr(obj, name, value)

    def walk(self, obj: Any, team: str = "", followers: tuple[str, ...] = ()) -> None:
        """Wire *obj*, and all agents and teams inside it."""
        if id(obj) in self._seen:
            return
        self._seen.add(id(obj))
        participants = getattr(obj, "_participants", None)
        name = getattr(obj, "name", None)
        inside = team
        if participants is not None:
            inside = f"{team}/{name}" if team else str(name or "team")
            in_turn = isinstance(obj, RoundRobinGroupChat) and len(participants) > 1
            for index, participant in enumerate(participants):
                after = (*participants[index + 1 :], *participants[: index + 1])
                self.walk(participant, inside, _first_agents(after) if in_turn else ())
        place = _Place(
            self._conversation, str(name) if participants is None else None, inside, followers
        )
        client = getattr(obj, "_model_client", None)
        if client is not None and not isinstance(client, _Client):
            self._set(obj, "_model_client", _Client(client, place))
        inner = getattr(obj, "_team", None)  # SocietyOfMindAgent
        if inner is not None:
            self.walk(inner, f"{inside}/{name}" if inside else str(name))
        if isinstance(obj, UserProxyAgent):
            self._wire_person(obj, place)
        elif isinstance(obj, CodeExecutorAgent):
            self._wire_executor(obj, place)
        benches = getattr(obj, "_workbench", None) or ()
        for bench in benches if isinstance(benches, list | tuple) else (benches,):
            self._wire_workbench(bench, place)
            for tool in getattr(bench, "_tools", None) or ():
                for held in ("_task_runner", "_agent", "_team"):
                    runner = getattr(tool, held, None)
                    if runner is not None:
                        self.walk(runner, inside)

    def _wire_workbench(self, bench: Any, place: _Place) -> None:
        if "call_tool" in vars(bench):  # an agent's bench, wired before
            return
        call_tool = bench.call_tool

        async def scout_call_tool(name: str, arguments: Any = None, *args: Any, **kw: Any) -> Any:
            with _Tool(place, name, arguments, _call_id(args, kw)) as tool:
                result = await call_tool(name, arguments, *args, **kw)
                tool.failed = bool(getattr(result, "is_error", False))
                return result

        self._set(bench, "call_tool", scout_call_tool)
        if not hasattr(bench, "call_tool_stream"):
            return
        call_tool_stream = bench.call_tool_stream

        async def scout_call_tool_stream(
            name: str, arguments: Any = None, *args: Any, **kw: Any
        ) -> AsyncGenerator[Any, None]:
            with _Tool(place, name, arguments, _call_id(args, kw)) as tool:
                async for item in call_tool_stream(name, arguments, *args, **kw):
                    tool.failed = bool(getattr(item, "is_error", False))
                    yield item

        self._set(bench, "call_tool_stream", scout_call_tool_stream)

    def _wire_person(self, proxy: Any, place: _Place) -> None:
        get_input = proxy._get_input

        async def scout_get_input(*args: Any, **kwargs: Any) -> Any:
            with _Tool(place, HUMAN, None, None):
                return await get_input(*args, **kwargs)

        self._set(proxy, "_get_input", scout_get_input)

    def _wire_executor(self, agent: Any, place: _Place) -> None:
        execute = agent.execute_code_block

        async def scout_execute(code_blocks: Any, *args: Any, **kwargs: Any) -> Any:
            code = [str(getattr(block, "code", "")) for block in code_blocks]
            with _Tool(place, "execute_code", {"commands": code}, None) as tool:
                result = await execute(code_blocks, *args, **kwargs)
                tool.failed = getattr(result, "exit_code", 0) != 0
                return result

        self._set(agent, "execute_code_block", scout_execute)

    def wire_runs(self, obj: Any) -> None:
        """Make each run of *obj* a run of the conversation."""
        conversation, run, run_stream = self._conversation, obj.run, obj.run_stream

        async def scout_run(*args: Any, **kwargs: Any) -> Any:
            conversation.begin()
            try:
                return await run(*args, **kwargs)
            finally:
                conversation.end()

        async def scout_run_stream(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            conversation.begin()
            try:
                async for message in run_stream(*args, **kwargs):
                    yield message
            finally:
                conversation.end()

        self._set(obj, "run", scout_run)
        self._set(obj, "run_stream", scout_run_stream)


def _call_id(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the call id of call_tool(name, arguments, cancellation_token, call_id)."""
    call_id = kwargs.get("call_id", args[1] if len(args) > 1 else None)
    return None if call_id is None else str(call_id)


def _first_agents(speakers: Iterable[Any]) -> tuple[str, ...]:
    """Return who certainly makes the next request when *speakers* speak in this order."""
    for speaker in speakers:
        inner = getattr(speaker, "_team", speaker)  # a SocietyOfMindAgent lets its team speak first
        participants = getattr(inner, "_participants", None)
        if participants is not None and not isinstance(inner, RoundRobinGroupChat):
            return ()
        if participants is not None and (first := _first_agents(participants)):
            return first
        # Without a model it is a person, or runs code: whoever speaks after it asks next.
        if getattr(speaker, "_model_client", None) is not None:
            return (str(speaker.name),)
    return ()


def instrument(obj: T, session_id: str | None = None, base_url: str | None = None) -> T:
    """
    Label every LLM request and tool call of *obj*, a team or an agent, and return it.

    Call it before the first run: a group manager keeps the model client that it was made with.
    Nested teams, and agents and teams used as tools, are part of it. Idempotent: called again,
    it takes the new *session_id*.

    session_id: names the session of all runs; it goes on until `scout_sdk.finish`. Without one:
      that of an enclosing `scout_sdk.context`, else SCOUT_SESSION_ID, else a new one for each
      run, which ends with it.
    base_url: the server; its host may then receive hints. Else SCOUT_BASE_URL, else loopback.
    """
    if not (hasattr(obj, "run") and hasattr(obj, "run_stream")):
        raise ConfigError(f"expected an AutoGen team or agent, not a {type(obj).__name__}")
    if base_url is not None:
        allow(base_url)
    if not read_environment().enabled:
        return obj
    uninstrument(obj)
    install()
    conversation = _Conversation(session_id, base_url)
    wiring = _Wiring(conversation)
    wiring.walk(obj)
    wiring.wire_runs(obj)
    vars(obj)[_WIRING] = wiring
    return obj


def uninstrument(obj: T) -> T:
    """Undo `instrument` and return *obj*; one that is not instrumented stays as it is."""
    wiring = vars(obj).pop(_WIRING, None)
    if wiring is not None:
        wiring.undo()
    return obj

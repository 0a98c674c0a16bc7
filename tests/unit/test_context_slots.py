"""Contexts of the SDK: who the request being built belongs to."""

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import scout_sdk
from scout_sdk import Hints, SessionEvent, _context, context, current_hints, use_hints
from scout_sdk._context import Slot, add_source, close, open_slot, remove_source, take
from scout_sdk._locks import ProcessLock
from scout_sdk._sessions import SESSIONS
from scout_sdk.testing import strict


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    with strict():
        yield
    scout_sdk.shutdown()


def taken(key: str = "", retries: int = 0) -> Hints | None:
    found = take(key, retries)
    return None if found is None else found[0]


def test_nothing_outside():
    """Outside every context there are no hints."""
    assert current_hints() is None
    assert taken() is None


def test_context_names_agent_and_session():
    """Requests inside a context carry its names and count its turns."""
    with context(agent="planner", session="S"):
        first, second = taken("a"), taken("b")

    assert first == Hints(session="S", agent="planner", turn=1)
    assert second == Hints(session="S", agent="planner", turn=2)
    assert taken("c") is None


def test_the_environment_names_what_belongs_to_no_session(monkeypatch):
    """SCOUT_SESSION_ID is the session of calls outside every context, and of contexts without."""
    monkeypatch.setenv("SCOUT_SESSION_ID", "job-7")
    told: list[SessionEvent] = []
    monkeypatch.setattr(SESSIONS, "listener", told.append)
    bare = [taken("a"), taken("a", 1), taken("b")]
    with context(agent="planner"), context(agent="coder"):
        inside = taken("c")
    with context(agent="planner", session="S"):
        named = taken("d")

    assert bare == [Hints(session="job-7", turn=turn) for turn in (1, 1, 2)]
    assert inside == Hints(session="job-7", agent="coder", turn=1)
    assert named == Hints(session="S", agent="planner", turn=1)
    assert told == []  # who named it says when it ends
    monkeypatch.setenv("SCOUT_SESSION_ID", " ")
    assert taken("e") is None


def test_retries_keep_their_turn():
    """Attempts of one call say the same, whatever other calls do between them."""
    with context(agent="planner", session="S"):
        turns = [taken("a"), taken("b"), taken("a", 1), taken("c"), taken("b", 2)]

    assert [h.turn for h in turns] == [1, 2, 1, 3, 2]


def test_contexts_nest():
    """An inner context keeps the session, and its own agent has no place of the outer one."""
    with (
        context(agent="a", session="S", path="p", next_agents=("z",)),
        context(agent="b"),
    ):
        inner = current_hints()

    assert inner == Hints(session="S", agent="b")


def test_a_session_inside_another_names_its_parent():
    """A context with another session says who spawned it."""
    with context(session="outer"), context(session="inner"):
        assert current_hints() == Hints(session="inner", parent="outer")


def test_a_session_is_made_up_once():
    """Without a name, the outermost context makes up a session, other ones at other times."""
    with context(agent="a"):
        first = current_hints().session
        with context(agent="b"):
            assert current_hints().session == first
    with context(agent="a"):
        assert current_hints().session != first


def test_decorator():
    """As a decorator, each call has a context of its own; coroutine functions too."""

    @context(agent="a")
    def sync(depth: int) -> list[str]:
        seen = [current_hints().session]
        return seen + (sync(depth - 1) if depth else [])

    @context(agent="a")
    async def asynchronous() -> Hints:
        await asyncio.sleep(0)
        return current_hints()

    async def both() -> list[Hints]:
        return await asyncio.gather(asynchronous(), asynchronous())

    assert len(set(sync(2))) == 1
    one, other = asyncio.run(both())
    assert one.session != other.session
    assert current_hints() is None


async def test_async_with():
    """`async with` is the same as `with`."""
    async with context(agent="a", session="S") as hints, use_hints(Hints(agent="b")) as used:
        assert hints == Hints(session="S", agent="a")
        assert current_hints() == used == Hints(agent="b")


def test_use_hints_is_exact():
    """use_hints sends what it is given: no turn is counted, no tool event added."""
    hints = Hints(session="S", agent="a", turn=7, final=True)
    with use_hints(hints):
        assert [taken("a"), taken("b")] == [hints, hints]


def test_tasks_and_threads():
    """Tasks and threads with a copied context see it; a plain thread sees nothing."""
    seen: dict[str, Hints | None] = {}

    def note(name: str) -> None:
        seen[name] = current_hints()

    async def run() -> None:
        await asyncio.to_thread(note, "to_thread")
        await asyncio.create_task(asyncio.to_thread(note, "task"))

    with context(agent="a", session="S"):
        asyncio.run(run())
        thread = threading.Thread(target=note, args=("thread",))
        thread.start()
        thread.join()

    expected = Hints(session="S", agent="a")
    assert seen == {"to_thread": expected, "task": expected, "thread": None}


def test_an_end_seen_in_another_context_counts():
    """A slot that is closed elsewhere is dead here, though the ContextVar still holds it."""
    slot = open_slot(Hints(agent="llm"), once=True)
    contextvars.copy_context().run(close, slot)

    assert taken() is None
    close(slot)


def test_slots_of_calls_do_not_pile_up():
    """A loop of calls whose ends are seen elsewhere grows no chain."""
    with context(agent="node", session="S"):
        for _ in range(50):
            contextvars.copy_context().run(close, open_slot(Hints(agent="llm"), once=True))
        depth, slot = 0, _context._CURRENT.get()
        while slot is not None:
            depth, slot = depth + 1, slot.parent
        assert depth == 2


def test_a_call_speaks_for_one_request():
    """The slot of a call is used up by its first request, except for that one's retries."""
    with context(agent="node", session="S"):
        slot = open_slot(Hints(session="S", agent="llm"), once=True)
        agents = [taken("a").agent, taken("b").agent, taken("a", 1).agent, taken("b", 1).agent]
        close(slot)

    assert agents == ["llm", "node", "llm", "node"]


def test_a_call_without_keys():
    """Where attempts have no key, their count tells retries from other requests."""
    with context(agent="node", session="S"):
        slot = open_slot(Hints(session="S", agent="llm"), once=True)
        agents = [taken("", 0), taken("", 1), taken("", 0), taken("", 1)]
        close(slot)

    assert [(h.agent, h.turn) for h in agents] == [
        ("llm", 1),
        ("llm", 1),
        ("node", 1),
        ("llm", 1),
    ]


def test_sources():
    """A source speaks where no LLM call of a slot does."""
    theirs = Slot(Hints(session="T", agent="theirs"), once=True)

    def source() -> Slot | None:
        return theirs

    add_source(source)
    add_source(source)
    try:
        with context(agent="node", session="S"):
            assert taken("a").agent == "theirs"
            assert taken("b").agent == "node"
            slot = open_slot(Hints(agent="llm"), once=True)
            assert taken("c").agent == "llm"
            close(slot)
    finally:
        remove_source(source)
        remove_source(source)
    assert taken("a", 1) is None


def test_who_is_told_of_an_end(monkeypatch):
    """A made-up session ends with its context; a named one when that is said."""
    ended: list[str] = []
    monkeypatch.setattr(SESSIONS, "finish", lambda session, **_: ended.append(session))
    with context(agent="a") as made_up:
        pass
    with context(session="named"):
        pass
    with context(session="over", final=True):
        pass
    scout_sdk.finish("said")

    assert ended == [made_up.session, "over", "said"]


def test_a_lock_held_at_a_fork_does_not_hold_up_the_child(monkeypatch):
    """In another process the lock is free, though a thread of the parent holds it."""
    lock = ProcessLock()
    lock._lock.acquire()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with lock:
        entered = True

    assert entered


def test_importing_the_sdk_imports_the_standard_library_only():
    """`import scout_sdk` loads nothing that has to be installed."""
    code = (
        "import sys; before = set(sys.modules); import scout_sdk;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'scout_sdk'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"

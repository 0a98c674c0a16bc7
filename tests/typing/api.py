"""Correct uses of the public names, checked by mypy and never run; a new name is added here."""

from collections.abc import Mapping
from typing import assert_type

import httpx

import scout_sdk
from scout_sdk import (
    ConfigError,
    Evidence,
    HintOutcome,
    Hints,
    ProtocolError,
    ScoutError,
    SessionEvent,
    ToolEvent,
    ToolState,
    UnsupportedError,
)
from scout_server.config import Settings, describe, load
from scout_server.policy.runtime import PolicySettings
from scout_server.report import Target, versions

# Hints: everything is optional, nothing is positional.
tool = ToolEvent(name="shell", state=ToolState.STARTED, remaining_s=2.0, evidence=Evidence.SLEEP)
hints = Hints(session="s", agent="planner", turn=1, tools=(tool,), next_agents=("coder",))
event = SessionEvent(session="s", tool=tool, age_s=0.5)
assert_type(hints.session, str | None)
assert_type(event.final, bool)
assert_type(HintOutcome("accepted"), HintOutcome)

# Errors are one tree, and also what a stranger would catch.
errors: list[type[ScoutError]] = [ConfigError, ProtocolError, UnsupportedError]
value_errors: list[type[ValueError]] = [ConfigError, ProtocolError]


# Contexts: a context manager, also asynchronous, and a decorator.
def ask() -> None:
    with scout_sdk.context(agent="triage", session="ticket-1", final=True):
        assert_type(scout_sdk.current_hints(), Hints | None)
    with scout_sdk.use_hints(hints) as same:
        assert_type(same, Hints)


async def ask_later() -> None:
    async with scout_sdk.context(agent="triage"):
        pass


@scout_sdk.context(agent="writer")
def write(text: str) -> int:
    return len(text)


assert_type(write("x"), int)

# Injection.
client = scout_sdk.attach(httpx.Client())
assert_type(client, httpx.Client)
scout_sdk.instrument()
scout_sdk.uninstrument()
scout_sdk.install()
scout_sdk.uninstall()
scout_sdk.finish("s")
scout_sdk.flush()
scout_sdk.shutdown()

# Settings and reports.
settings = load({"policy": {"hints": False}})
assert_type(settings, Settings)
assert_type(settings.of(PolicySettings), PolicySettings)
meanings: Mapping[str, str] = {field.name: field.meaning for field in describe()}
target = Target.at_most("median TTFT over LRU's", 0.5, 0.6)
assert_type(target.met, bool)
assert_type(versions(), dict[str, str])

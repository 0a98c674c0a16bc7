"""Made-up coding sessions whose model calls tools that say how long they take (issue 3)."""

import json
import random

from scout_sdk import _wire
from scout_sdk._hints import Evidence, Hints, SessionEvent, ToolEvent, ToolState
from scout_server.bench.recording import Item, Program

__all__ = ["tool_sessions"]

_WAITS = (0.5, 2.0, 8.0, 40.0)
"""Seconds that a tool takes; each is as likely as the others."""
_WORDS = ("port", "berth", "tide", "ship", "table", "depth", "pilot", "buoy", "quay", "rope")


def tool_sessions(sessions: int, *, turns: int, seed: int) -> list[Program]:
    """
    Return sessions of one agent whose every turn but the last calls `sleep N && make`.

    With hints, the client also says on the side channel that the tool has started and how long it
    takes, and which request is its last.
    """
    dice = random.Random(seed)
    return [_session(f"{seed}-{number}", turns, dice) for number in range(sessions)]


def _session(name: str, turns: int, dice: random.Random) -> Program:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You change one file of a library at a time. " * 20}
    ]
    items: list[Item] = []
    after, delay_s = -1, 0.0
    for turn in range(turns):
        final = turn == turns - 1
        wait_s = dice.choice(_WAITS)
        text = " ".join(dice.choices(_WORDS, k=150))
        arguments = json.dumps({"command": f"sleep {wait_s} && make"})
        ask = "[[reply done]]" if final else f"[[tool bash {arguments}]]"
        messages.append({"role": "user", "content": f"{name} {turn}: {text} {ask}"})
        hints = Hints(session=name, agent="coder", turn=turn + 1, final=final)
        items.append(Item(after, delay_s, _wire.encode(hints), {"messages": list(messages)}))
        after, delay_s = len(items) - 1, wait_s * dice.uniform(1.0, 1.3)
        if final:
            break
        started = ToolEvent(
            name="bash", state=ToolState.STARTED, remaining_s=wait_s, evidence=Evidence.SLEEP
        )
        items.append(Item(after, 0.0, {}, event=SessionEvent(session=name, tool=started)))
        called = {"type": "function", "function": {"name": "bash", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
        messages.append({"role": "tool", "content": " ".join(dice.choices(_WORDS, k=60))})
    return Program(tuple(items))

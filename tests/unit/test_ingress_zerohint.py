"""The replay of recorded sessions: the client's own time is kept, the server's is simulated."""

import pytest

from scout_sdk import Hints, SessionEvent, _wire
from scout_server.bench.recording import Item, Program, Replay, _linked
from scout_server.bench.toolsessions import tool_sessions
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy.runtime import PolicySettings

SMALL = EmbeddedSettings(kv_blocks=64)


def chat(text, system="You are an agent. " * 20):
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "max_tokens": 4,
    }


def session(name, agents=("planner", "coder", "planner")):
    items = []
    for index, agent in enumerate(agents):
        headers = _wire.encode(Hints(session=name, agent=agent))
        body = chat(f"{name} {index}", f"You are the {agent}. " * 60)
        items.append(Item(index - 1, 0.5, headers, body))
    return Program(tuple(items))


def test_requests_follow_what_they_followed():
    """
    A request waits for the last one that had ended before it, and for its client's own time.
    """
    empty = {}
    found = [
        (1.0, 3.0, Item(-1, 0.0, empty, {"n": 0})),
        (2.0, 4.0, Item(-1, 0.0, empty, {"n": 1})),
        (3.5, 5.0, Item(-1, 0.0, empty, {"n": 2})),
        (3.75, 3.75, Item(-1, 0.0, empty, event=SessionEvent(session="s"))),
        (6.0, 7.0, Item(-1, 0.0, empty, {"n": 3})),
    ]
    items = _linked(found).items

    assert [(item.after, item.delay_s) for item in items] == [
        (-1, 0.0),
        (-1, 1.0),
        (0, 0.5),
        (0, 0.75),
        (2, 1.0),
    ]


def test_a_replay_is_the_same_every_time():
    """
    Virtual time leaves nothing to chance: two replays count alike, and every session ends.
    """
    programs = [session(f"s{index}") for index in range(6)]
    counted = []
    for _ in range(2):
        replay = Replay(SMALL, PolicySettings())
        counters = replay.run(programs, concurrency=3)
        counted.append((counters.requests, counters.queried_tokens, counters.hit_tokens))
        assert not replay._places

    assert counted[0] == counted[1]
    assert counted[0][0] == 18


@pytest.mark.parametrize("silent", [False, True])
def test_who_is_recognised_depends_on_what_is_sent(silent):
    """
    Stripped of our headers, the same sessions are recognised by their prompts alone.
    """
    programs = [session(f"s{index}") for index in range(6)]
    replay = Replay(SMALL, PolicySettings())
    replay.run([p.stripped() for p in programs] if silent else programs, concurrency=1)
    arrivals = replay.engine.arrivals

    assert arrivals["hint"] == (0 if silent else 18)
    assert arrivals["fingerprint"] > 0 if silent else not arrivals["fingerprint"]


def test_events_of_the_recording_reach_the_core():
    """
    A side-channel event is told at its time, and is no request of its own.
    """
    program = Program((*session("s").items, Item(2, 0.1, {}, event=SessionEvent(session="s"))))
    replay = Replay(SMALL, PolicySettings())
    counters = replay.run([program], concurrency=1)

    assert counters.requests == 3
    assert replay.engine.events["accepted"] == 1
    assert [item.event for item in program.stripped().items] == [None] * 4


def test_tool_calls_of_silent_clients_tell_when_sessions_come_back():
    """
    Read off the responses, the tools' seconds become promises, as the client's own word would.
    """
    program = tool_sessions(1, turns=3, seed=4)[0]
    replay = Replay(EmbeddedSettings(), PolicySettings())
    seen = []
    finish = replay.engine.on_finish

    def note(request):
        seen.append(request.tools)
        finish(request)

    replay.engine.on_finish = note
    replay.run([program.stripped()], concurrency=1)
    (session,) = replay.engine.replica.core.tenant("").sessions

    waits = [item.event.tool.remaining_s for item in program.items if item.event is not None]
    assert seen == [(("bash", wait),) for wait in waits] + [()]
    assert session.kind == "stop:"
    assert session.turns == 3

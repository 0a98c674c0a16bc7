"""A million inputs for each decoder, mutated from valid ones by a seeded generator."""

import random
import tracemalloc

import pytest

from scout_sdk import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_sdk.sleep import Expectation, expected_seconds

TOOL = ToolEvent(
    name="bash",
    state=ToolState.STARTED,
    call_id="c1",
    elapsed_s=0.25,
    remaining_s=5.0,
    evidence=Evidence.SLEEP,
)
HINTS = Hints(
    session="s%1", agent="研究", path="a/b", anchor="0f", turn=3, parent="p", tools=(TOOL,),
    next_agents=("x", "y"),
)  # fmt: skip
SCRAPS = [b'"', b"%", b"\\", b"(", b")", b";", b"=", b",", b"?", b"@", b":", b"\x00", b"\xff"]
SCRAPS += [
    b"9" * 20,
    b"-",
    b".",
    b"{",
    b"}",
    b"[",
    b"]",
    b"null",
    b"true",
    b"e",
    b"\xe7\xa0",
    b"a=1",
]
COMMAND = (
    b"for i in 1 2; do sleep 1 && timeout 3 bash -c 'sleep $((1+1))' & done; wait # time.sleep(2)"
)


def mutated(source: bytes, chance: random.Random) -> bytes:
    octets = bytearray(source)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(octets) + 1)
        match chance.randrange(4):
            case 0:
                octets[at:at] = chance.choice(SCRAPS)
            case 1:
                del octets[at : at + chance.randint(1, 8)]
            case 2:
                octets[at : at + 1] = chance.randbytes(1)
            case _:
                other = chance.randrange(len(octets) + 1)
                octets[at:at] = octets[other : other + chance.randint(1, 12)]
    return bytes(octets)


def fuzz(rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    lines = [(name.encode(), value.encode()) for name, value in _wire.encode(HINTS).items()]
    message = _wire.encode_events(
        [SessionEvent(session="s", agent="a", tool=TOOL), SessionEvent(session="t", final=True)]
    )
    outcome = _wire.encode_outcome(dict.fromkeys(["agent", "session"], HintOutcome.CLIPPED))
    for _ in range(rounds):
        at = chance.randrange(len(lines))
        name, value = lines[at]
        given = [*lines[:at], (name, mutated(value, chance)), *lines[at + 1 :]]
        hints = _wire.decode(given).hints
        assert hints is None or isinstance(hints, Hints)
        events, rejected = _wire.decode_events(mutated(message, chance))
        assert all(isinstance(event, SessionEvent) for event in events)
        assert rejected >= 0
        _wire.decode_outcome(mutated(outcome.encode(), chance).decode("latin-1"))


def fuzz_commands(rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(rounds):
        found = expected_seconds(mutated(COMMAND, chance).decode("latin-1"))
        assert found is None or (isinstance(found, Expectation) and found.seconds >= 0.0)


def test_some_thousand_mutations():
    """A few thousand damaged inputs raise nothing."""
    fuzz(2000, seed=1)
    fuzz_commands(1000, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_million_mutations():
    """A million damaged inputs to each decoder raise nothing and leave no memory behind."""
    fuzz(1000, seed=3)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    fuzz(1000, seed=4)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1_000_000
    assert peak - before < 5_000_000
    fuzz(1_000_000, seed=5)

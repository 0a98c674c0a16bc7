"""From a trace's block ids to the hashes of an engine's blocks."""

from collections.abc import Sequence

from scout_sdk._errors import ConfigError
from scout_server.sim.traces.jsonl import MOST_ID
from scout_server.sim.traces.records import (
    HashScope,
    Program,
    Runs,
    TraceInfo,
    Turn,
    runs_prefix,
)

__all__ = ["PromptHasher", "next_of_session"]

_OWN_TURN, _OWN_PROGRAM = 27, 47
"""Where a turn's and a program's number stand in the hashes that only its reply has: below zero."""


class PromptHasher:
    """
    Gives every turn the hashes of its full engine blocks, prompt first, then reply.

    A trace block of n engine blocks becomes n hashes; ids are those of the trace, spread, so that
    equal prefixes stay equal. A reply's blocks are those that the session's next prompt shows at
    their place; a reply that nobody sends again has hashes that nothing else has: no engine knows
    what will be sent again.
    """

    def __init__(self, info: TraceInfo, block_tokens: int) -> None:
        if info.block_tokens % block_tokens:
            msg = (
                f"block_tokens {block_tokens} does not divide the trace's {info.block_tokens}; "
                f"allowed: {_divisors(info.block_tokens)}"
            )
            raise ConfigError(msg)
        self._factor = info.block_tokens // block_tokens
        self._block_tokens = block_tokens
        # Engine block ids of one program stay below it: hashes of two programs never meet.
        self._shift = MOST_ID.bit_length() + self._factor.bit_length()
        self._global = info.scope is HashScope.GLOBAL

    def hashes(
        self, number: int, turn: Turn, following: Turn | None, index: int = 0
    ) -> Sequence[int]:
        """Return the hashes for *turn*, the one at *index* of the program with *number*."""
        base = 0 if self._global else (number + 1) << self._shift
        prompt = turn.input_tokens // self._block_tokens
        end = (turn.input_tokens + turn.output_tokens) // self._block_tokens
        if (
            following is not None
            and turn.output_tokens
            and _extends(turn.hash_runs, following.hash_runs, prompt // self._factor)
        ):
            found = self._spread(following.hash_runs, base, end)
        else:
            found = self._spread(turn.hash_runs, base, prompt)
        if len(found) < prompt or len(found) == end:
            return found  # a prompt that is not known to its end, or a reply that is
        own = -(((number + 1) << _OWN_PROGRAM) + (index << _OWN_TURN) + len(found))
        return [*found, *range(own, own - (end - len(found)), -1)]

    def _spread(self, runs: Runs, base: int, count: int) -> Sequence[int]:
        factor = self._factor
        if len(runs) == 1:
            first, length = runs[0]
            start = base + first * factor
            return range(start, start + min(length * factor, count))
        hashes: list[int] = []
        for first, length in runs:
            start = base + first * factor
            hashes.extend(range(start, start + length * factor))
            if len(hashes) >= count:
                break
        del hashes[count:]
        return hashes


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _extends(prompt: Runs, following: Runs, full_blocks: int) -> bool:
    """Whether *following* begins with the first *full_blocks* ids of *prompt*."""
    if len(prompt) == 1 and len(following) == 1:
        return prompt[0][0] == following[0][0] and following[0][1] >= full_blocks
    return runs_prefix(prompt, following) >= full_blocks


def next_of_session(program: Program, index: int) -> Turn | None:
    """Return the next turn of the same session and agent after turn *index*, or None."""
    turn = program.turns[index]
    for other in program.turns[index + 1 :]:
        if other.session == turn.session and other.agent == turn.agent:
            return other
    return None

"""What oracles are told: when each chain of a program is used next, which blocks come again."""

import math
from collections.abc import Sequence

from scout_server.sim.chains import chain_name
from scout_server.sim.oracle import Future
from scout_server.sim.programs import ProgramRun
from scout_server.sim.prompts import PromptHasher, next_of_session
from scout_server.sim.tools import ToolSource

__all__ = ["blocks_again", "foresee"]


def blocks_again(
    hasher: PromptHasher, run: ProgramRun, index: int, hashes: Sequence[int], block_tokens: int
) -> int:
    """Return how many of the leading blocks of turn *index* the chain's next prompt repeats."""
    following = next_of_session(run.program, index)
    if following is None:
        return 0
    coming = hasher.hashes(run.number, following, None)
    most = min(len(hashes), len(coming), following.input_tokens // block_tokens)
    return next((i for i in range(most) if hashes[i] != coming[i]), most)


def foresee(
    future: Future, run: ProgramRun, index: int, at: float, *, turn_s: float, tools: ToolSource
) -> None:
    """
    Tell *future* when every chain of the branch that goes on with turn *index* at *at* is used.

    Turns between take *turn_s* each.
    """
    program = run.program
    session = run.session(index)
    seen: dict[str, None] = {}
    while True:
        turn = program.turns[index]
        chain = chain_name(session, turn.agent)
        if chain not in seen:
            seen[chain] = None
            future.tell(chain, turn.agent, at)
        children = [c for c in run.children(index) if run.session(c) == session]
        if not children:
            break
        index = children[0]
        at += turn_s + tools.gap_s(program, index)
    agents = dict.fromkeys(t.agent for t in program.turns if t.session == turn.session)
    for agent in agents:
        chain = chain_name(session, agent)
        if chain not in seen:
            future.tell(chain, agent, math.inf)

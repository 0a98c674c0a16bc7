"""How much room a request will take: learnt from the responses before it."""

from collections import OrderedDict

from scout_server.policy.engine import Turn
from scout_server.tao.asked import Asked

__all__ = ["Estimates"]

_MAX_ANCHORS = 1024
_MAX_SESSIONS = 16_384
_MAX_AGENTS = 4


class Estimates:
    """
    Tokens per byte of a body, and how many tokens of a prompt belong to its anchor.

    A session of several agents has a history for each, and holds them all: the four that ran last
    count.
    """

    def __init__(self) -> None:
        self._tokens_per_byte = 0.25
        self._anchors: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._agents: OrderedDict[tuple[str, str], dict[str, int]] = OrderedDict()
        """Session -> agent -> tokens of its latest prompt, the latest agent last."""

    def turn(self, asked: Asked, *, avoid: frozenset[str] = frozenset()) -> Turn:
        """Return the turn that *asked* is, for the engine; *avoid*: nodes that just failed it."""
        anchor = asked.hints.anchor if asked.hints is not None else None
        prompt = max(1, round(asked.body_bytes * self._tokens_per_byte))
        prefix_tokens = 0
        if anchor is not None:
            prefix_tokens = min(self._anchors.get((asked.tenant, anchor), 0), prompt - 1)
        beside = self._beside(asked)
        return Turn(
            key=asked.key,
            session=asked.session,
            tenant=asked.tenant,
            tokens=prompt + asked.output_tokens + beside,
            prefix=f"{asked.tenant}/{anchor}" if prefix_tokens > 0 else None,
            prefix_tokens=max(0, prefix_tokens),
            hints=asked.hints,
            avoid=avoid,
            beside_tokens=beside,
        )

    def _beside(self, asked: Asked) -> int:
        """Return the tokens that the other agents of a request's session hold."""
        held = self._agents.get((asked.tenant, asked.session), {})
        return sum(tokens for agent, tokens in held.items() if agent != _agent(asked))

    def _note(self, asked: Asked, prompt_tokens: int) -> None:
        key = (asked.tenant, asked.session)
        if asked.final:
            self._agents.pop(key, None)
            return
        held = self._agents.setdefault(key, {})
        held.pop(_agent(asked), None)
        held[_agent(asked)] = prompt_tokens
        if len(held) > _MAX_AGENTS:
            del held[next(iter(held))]
        self._agents.move_to_end(key)
        if len(self._agents) > _MAX_SESSIONS:
            self._agents.popitem(last=False)

    def learn(
        self, asked: Asked, *, prompt_tokens: int | None, cached_tokens: int | None, first: bool
    ) -> None:
        """Learn from a response; a session's *first* turn shows how long its anchor is."""
        if prompt_tokens and asked.body_bytes:
            share = min(2.0, max(0.01, prompt_tokens / asked.body_bytes))
            self._tokens_per_byte += 0.1 * (share - self._tokens_per_byte)
        hints = asked.hints
        if hints is not None and hints.agent is not None and prompt_tokens:
            self._note(asked, prompt_tokens)
        if hints is None or hints.anchor is None or not cached_tokens:
            return
        if first and hints.turn in (None, 1):
            key = (asked.tenant, hints.anchor)
            self._anchors[key] = max(cached_tokens, self._anchors.get(key, 0))
            self._anchors.move_to_end(key)
            if len(self._anchors) > _MAX_ANCHORS:
                self._anchors.popitem(last=False)


def _agent(asked: Asked) -> str:
    return (asked.hints.agent or "") if asked.hints is not None else ""

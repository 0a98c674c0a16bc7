"""One request inside a replica."""

import enum
from collections.abc import Sequence

from scout_sdk._hints import Hints
from scout_server.policy.facts import Finish

__all__ = ["Request", "State"]


class State(enum.Enum):
    """Where a request stands in its replica."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """
    What a replica is asked to compute, and how far it is.

    The reply is a script: *output_tokens* (at least 1) is known to the replica and to nobody else.
    *hashes* has the chained hash of every full block of prompt and output; it may end early, then
    the rest is never found in the cache. *payload* belongs to the caller and is never read.
    """

    __slots__ = (
        "agent",
        "arrival",
        "attained_tokens",
        "blocks",
        "cached_tokens",
        "computed",
        "finish",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "generated",
        "hashed_blocks",
        "hashes",
        "hints",
        "output_tokens",
        "payload",
        "preemptions",
        "priority",
        "program",
        "prompt_tokens",
        "request_id",
        "sequence",
        "state",
        "tenant",
        "tools",
        "warmup",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        hashes: Sequence[int] = (),
        hints: Hints | None = None,
        tenant: str = "",
        warmup: bool = False,
        finish: Finish = Finish.STOP,
        tools: tuple[tuple[str, float | None], ...] = (),
        program: str | None = None,
        agent: str | None = None,
        priority: float = 0.0,
        payload: object = None,
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            msg = (
                f"request {request_id!r}: prompt_tokens and output_tokens are at least 1, "
                f"not {prompt_tokens} and {output_tokens}"
            )
            raise ValueError(msg)
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hashes = hashes
        self.hints = hints
        self.tenant = tenant
        self.warmup = warmup
        self.finish = finish
        """How it will end if nobody aborts it."""
        self.tools = tools
        self.program = program
        self.agent = agent
        self.priority = priority
        self.payload = payload
        self.state = State.NEW
        self.sequence = 0
        """Order of submission at its replica: the last tie breaker."""
        self.arrival = 0.0
        self.blocks: list[int] = []
        self.hashed_blocks = 0
        self.computed = 0
        """Tokens whose KV is in the cache, or being computed."""
        self.generated = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache when it was first scheduled."""
        self.attained_tokens = 0
        """Tokens computed for it so far, recomputation included."""
        self.preemptions = 0
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens so far: prompt and output."""
        return self.prompt_tokens + self.generated

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, computed={self.computed}, "
            f"prompt={self.prompt_tokens}, generated={self.generated}/{self.output_tokens})"
        )

"""Our policy in a replay: the real core and the real order, driven as an engine drives them."""

import random
from collections.abc import Sequence

from scout_sdk._hints import Evidence, Hints, SessionEvent, ToolEvent, ToolState
from scout_server.bench.oracles import inform
from scout_server.bench.workloads import Request, Workload
from scout_server.policy.facts import UNHASHED, Finish, FinishFacts, RequestFacts
from scout_server.policy.runtime import PolicyCore, PolicySettings

__all__ = ["Ours"]


class Ours:
    """
    The policy core under one kind of hints.

    *hints*: `off` (no identity at all), `none` (an anonymous client), `identity` (session, agent),
    `time` (also when the session comes back, within a factor of two, and which request was the
    last), `wrong` (the same, wrong by up to 100 times either way), `lying` (the opposite of the
    truth: a session that returns says that it is final, one that ended promises to be back).
    """

    def __init__(
        self,
        workload: Workload,
        capacity: int,
        working: int,
        *,
        hints: str = "identity",
        informed: bool = False,
        duel: bool = True,
        seed: int = 0,
    ) -> None:
        settings = PolicySettings(hints=hints != "off", fingerprints=hints != "off", duel=duel)
        self.core = PolicyCore(settings, capacity_blocks=capacity + working, block_tokens=32)
        if working:
            self.core.scoring.capacity = capacity
            self.core.duel = self.core.new_duel(capacity)
        if informed:
            inform(self.core.tenant(""), workload)
        self.hints = hints
        self.order = self.core.order
        self.random = random.Random(seed)
        self.id = ""

    def arrive(self, request: Request, index: int) -> None:
        """Tell the core of a request."""
        self.id = str(index)
        hints = None
        if self.hints not in ("off", "none"):
            hints = Hints(session=f"s{request.session}", agent=str(request.agent))
        self.core.arrive(
            RequestFacts(
                request_id=self.id,
                hints=hints,
                block_hashes=request.prompt,
                prompt_tokens=32 * len(request.prompt),
            ),
            now=request.time,
        )

    def take(self, blocks: list[int]) -> None:
        """Use free *blocks* again."""
        self.order.discard_all(blocks)

    def admit(self, blocks: list[int], names: list[int]) -> None:
        """Nothing: the core knows chains, not blocks."""

    def pop(self, n: int, now: float) -> list[int]:
        """Choose *n* victims."""
        return self.order.pop(n, now=now)

    def fill(self, blocks: Sequence[int]) -> None:
        """Take blocks that hold nothing."""
        self.order.extend(blocks, UNHASHED)

    def finish(self, request: Request, index: int) -> None:
        """Nothing yet: the core is told after it has named the owners."""

    def give(self, blocks: list[int], names: list[int], request: Request) -> None:
        """Take a chain's blocks back."""
        segments = self.core.segments(self.id, names)
        for place in range(len(segments) - 1, -1, -1):
            end, group = segments[place]
            start = segments[place - 1].end_block if place else 0
            self.order.extend(reversed(blocks[start:end]), group)
        self._tell(request)

    def _tell(self, request: Request) -> None:
        now = request.time
        finish = Finish.TOOL_CALLS if request.tool else Finish.STOP
        tools = ((request.tool, None),) if request.tool else ()
        self.core.finish(FinishFacts(request_id=self.id, finish=finish, tools=tools), now=now)
        if self.hints not in ("time", "wrong", "lying"):
            return
        session = f"s{request.session}"
        back = request.back
        if self.hints == "lying":
            back = None if back is not None else now + self.random.uniform(0.1, 1.0)
        if back is None:
            self.core.event(SessionEvent(session=session, final=True), now=now)
            return
        spread = 100.0 if self.hints == "wrong" else 2.0
        remaining = (back - now) * spread ** self.random.uniform(-1.0, 1.0)
        self.core.event(
            SessionEvent(
                session=session,
                tool=ToolEvent(
                    name="tool",
                    state=ToolState.STARTED,
                    remaining_s=remaining,
                    evidence=Evidence.DECLARED,
                ),
            ),
            now=now,
        )

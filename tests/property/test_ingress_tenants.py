"""Nothing learnt from one tenant shows in another's decisions."""

import json
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import Hints, SessionEvent, ToolEvent, ToolState
from scout_server.policy.facts import Finish, FinishFacts, RequestFacts
from scout_server.policy.runtime import PolicyCore, PolicySettings

AGENTS = ("planner", "coder", "runner")
STEP = st.tuples(
    st.sampled_from(["hinted", "plain", "tool", "done", "final"]),
    st.integers(0, 2),
    st.sampled_from(AGENTS),
    st.floats(0.01, 20.0),
)
STEPS = st.lists(STEP, max_size=25)


class Client:
    """One tenant's requests and events, in an order of its own."""

    def __init__(self, core: PolicyCore, tenant: str) -> None:
        self.core = core
        self.tenant = tenant
        self.seen: list[tuple[object, ...]] = []
        self._number = 0
        self._chains: dict[tuple[int, str], list[int]] = {}

    def act(self, kind: str, session: int, agent: str, now: float) -> None:
        """Do one step at *now* and note what the core made of it."""
        name = f"s{session}"
        if kind in ("hinted", "plain"):
            self._request(kind == "hinted", session, agent, now)
            return
        tool = None
        if kind != "final":
            state = ToolState.STARTED if kind == "tool" else ToolState.ENDED
            left = 3.0 if kind == "tool" else None
            tool = ToolEvent(name="bash", state=state, call_id="c", remaining_s=left)
        event = SessionEvent(session=name, tool=tool, final=kind == "final")
        self.core.event(event, tenant=self.tenant, now=now)

    def _request(self, hinted: bool, session: int, agent: str, now: float) -> None:
        # Both tenants' prompts are the same, block for block.
        anchor = [hash((agent, part)) for part in range(4)]
        chain = self._chains.setdefault((session, agent), [])
        chain.append(hash((session, agent, len(chain))))
        self._number += 1
        request_id = f"{self.tenant}-{self._number}"
        hints = Hints(session=f"s{session}", agent=agent) if hinted else None
        facts = RequestFacts(
            request_id=request_id,
            hints=hints,
            block_hashes=(*anchor, *chain),
            prompt_tokens=16 * (4 + len(chain)),
            tenant=self.tenant,
        )
        found = self.core.arrive(facts, now=now)
        self.seen.append((found.agent, found.session, found.from_hint))
        ends = [s.end_block for s in self.core.segments(request_id, facts.block_hashes)]
        self.seen.append(tuple(ends))
        self.core.finish(FinishFacts(request_id=request_id, finish=Finish.STOP), now=now)


def decisions(core: PolicyCore, tenant: str) -> object:
    """Return all that is decided for *tenant*: what was learnt, and the score of what is its."""
    own = core.tenant(tenant)
    scores = {
        (session.key, symbol): core.scoring.use(chain.group)
        for session in own.sessions
        for symbol, chain in session.chains.items()
    }
    anchors = {
        (agent.name, end): core.scoring.use(group)
        for agent in own.agents
        for end, group in own.agents.segments(agent)
    }
    snapshot = json.loads(json.dumps(core.snapshot()["tenants"][tenant]))  # type: ignore[index]
    return snapshot, scores, anchors


def run(
    ours: Sequence[tuple[str, int, str, float]], theirs: Sequence[tuple[str, int, str, float]]
) -> tuple[object, ...]:
    """Run both tenants side by side; return what the core saw and decided of ours."""
    core = PolicyCore(
        PolicySettings(duel=False, min_predictability=0.0), capacity_blocks=10_000, block_tokens=16
    )
    client, other = Client(core, "ours"), Client(core, "theirs")
    now = 0.0
    core.tenant("ours")
    core.tick(now=now)
    for index in range(max(len(ours), len(theirs))):
        # Our own times are the same whatever the other does.
        if index < len(ours):
            now += ours[index][3]
            # When everything is scored anew depends on all traffic; here it is told.
            core.scoring.renew(core._tenants.values(), now, force=True)
            client.act(*ours[index][:3], now)
        if index < len(theirs):
            other.act(*theirs[index][:3], now)
    core.scoring.renew(core._tenants.values(), now, force=True)
    return (*client.seen, decisions(core, "ours"))


@given(ours=STEPS, theirs=STEPS)
@settings(max_examples=60, deadline=None)
def test_what_another_tenant_does_changes_no_decision(
    ours: list[tuple[str, int, str, float]], theirs: list[tuple[str, int, str, float]]
) -> None:
    """With room for all, a tenant is recognised, learnt and scored as if it were alone."""
    assert run(ours, theirs[: len(ours)]) == run(ours, [])

"""The policy core, driven as an engine drives it."""

import itertools
import random

import pytest

from scout_sdk import Hints
from scout_sdk._hints import Evidence, SessionEvent, ToolEvent, ToolState
from scout_server.policy import (
    UNOWNED,
    Finish,
    FinishFacts,
    PolicyCore,
    PolicySettings,
    RequestFacts,
)
from scout_server.policy.agents import AgentTable
from scout_server.policy.sessions import Promise
from scout_server.replica.pool import BlockPool


class Engine:
    """A pool and a core; requests are served at once, one after another."""

    def __init__(self, capacity: int, settings: PolicySettings | None = None) -> None:
        self.core = PolicyCore(
            settings or PolicySettings(), capacity_blocks=capacity, block_tokens=16
        )
        self.pool = BlockPool(capacity, self.core.order)
        self.count = 0

    def serve(self, chain, now, hints=None, output=(), **facts):
        """Serve a request whose prompt is *chain*; return its hit blocks."""
        self.count += 1
        name = str(self.count)
        self.assignment = self.core.arrive(
            RequestFacts(
                request_id=name,
                hints=hints,
                block_hashes=chain,
                prompt_tokens=16 * len(chain),
                **facts,
            ),
            now=now,
        )
        full = [*chain, *output]
        found = self.pool.lookup(full, len(chain))
        self.pool.touch(found)
        new = self.pool.allocate(len(full) - len(found), now)
        for block, value in zip(new, full[len(found) :], strict=True):
            self.pool.insert(block, value)
        self.segments = self.core.segments(name, full)
        self.pool.free(found + new, self.segments)
        self.core.finish(FinishFacts(request_id=name, finish=Finish.STOP), now=now)
        return len(found)


def chain(*parts):
    """Return chained hashes: equal at a place only if all before it are equal."""
    hashes = []
    last = 0
    for name, blocks in parts:
        for block in range(blocks):
            last = hash((last, name, block))
            hashes.append(last)
    return hashes


def hints(session, agent, **more):
    return Hints(session=session, agent=agent, **more)


def test_an_anchor_is_what_two_sessions_have_in_common():
    """A hinted agent's common prefix over sessions is apart from what each session added."""
    engine = Engine(100)
    engine.serve(chain(("system", 5), ("one", 3)), 0.0, hints("s1", "a"))
    assert [part.end_block for part in engine.segments] == [8]
    engine.serve(chain(("system", 5), ("two", 2)), 1.0, hints("s2", "a"))
    assert [part.end_block for part in engine.segments] == [5, 7]
    anchor = engine.segments[0].group
    engine.serve(chain(("system", 5), ("three", 4)), 2.0, hints("s3", "a"))
    assert engine.segments[0].group == anchor
    assert engine.segments[1].group != anchor


def test_a_session_keeps_its_group_as_its_chain_grows():
    """A request that continues a session's chain belongs to the same group."""
    engine = Engine(100)
    engine.serve(chain(("system", 2), ("u1", 2)), 0.0, hints("s1", "a"), output=(1, 2))
    first = engine.segments[-1].group
    engine.serve(chain(("system", 2), ("u1", 2), ("more", 3)), 1.0, hints("s1", "a"))
    assert engine.segments[-1].group == first


def test_a_compacted_chain_leaves_the_old_blocks_to_go_first():
    """After a compaction the superseded blocks go before the session's new ones."""
    engine = Engine(60, PolicySettings(duel=False, min_predictability=0.0))
    system = ("system", 4)
    for turn, session in enumerate(("x", "y", "s1")):
        engine.serve(chain(system, (session, 4)), float(turn), hints(session, "a"))
    engine.serve(chain(system, ("s1", 4), ("more", 4)), 4.0, hints("s1", "a"))
    old = engine.segments[-1].group
    engine.serve(chain(system, ("summary", 2)), 6.0, hints("s1", "a"))
    new = engine.segments[-1].group
    assert old != new
    engine.core.tick(now=7.5)
    assert engine.core.order.score(old) < engine.core.order.score(new)


def test_unhinted_agents_are_recognised_by_their_prefix():
    """Without hints, a prefix that two sessions share makes an agent, found again later."""
    engine = Engine(200)
    engine.serve(chain(("system", 6), ("one", 3)), 0.0)
    engine.serve(chain(("system", 6), ("two", 3)), 1.0)
    agent = engine.assignment.agent
    assert [part.end_block for part in engine.segments] == [6, 9]
    engine.serve(chain(("other", 6), ("x", 3)), 2.0)
    assert engine.assignment.agent != agent
    engine.serve(chain(("system", 6), ("three", 3)), 3.0)
    assert engine.assignment.agent == agent
    assert not engine.assignment.from_hint


def test_unhinted_sessions_are_recognised_by_their_growing_chain():
    """A prompt that continues an earlier one belongs to the earlier one's session."""
    engine = Engine(200)
    engine.serve(chain(("system", 6), ("one", 3)), 0.0)
    session = engine.assignment.session
    engine.serve(chain(("system", 6), ("two", 3)), 1.0)
    assert engine.assignment.session != session
    engine.serve(chain(("system", 6), ("one", 3), ("more", 2)), 2.0)
    assert engine.assignment.session == session


def test_two_agents_share_a_preamble_without_mixing():
    """Blocks that two agents' anchors share have a group of their own."""
    engine = Engine(300)
    for at, (agent, text) in enumerate((("a", "A"), ("b", "B")) * 2):
        engine.serve(
            chain(("preamble", 3), (text, 3), (f"u{at}", 2)), float(at), hints(f"s{at}", agent)
        )
    engine.serve(chain(("preamble", 3), ("A", 3), ("u9", 2)), 9.0, hints("s9", "a"))
    a = engine.segments
    engine.serve(chain(("preamble", 3), ("B", 3), ("u10", 2)), 10.0, hints("s10", "b"))
    b = engine.segments
    assert [part.end_block for part in a] == [part.end_block for part in b] == [3, 6, 8]
    assert a[0].group == b[0].group
    assert a[1].group != b[1].group


def test_nothing_is_learnt_across_tenants():
    """The same session and agent of two tenants have different groups."""
    engine = Engine(100)
    for at, tenant in enumerate(("t1", "t1", "t2", "t2")):
        engine.serve(
            chain((tenant, 4), (f"s{at}", 2)), float(at), hints(f"s{at}", "a"), tenant=tenant
        )
        if at == 1:
            first = engine.segments
    assert not {part.group for part in first} & {part.group for part in engine.segments}


def test_with_identity_off_every_block_is_unowned_and_the_order_is_lru():
    """No hints and no fingerprints: one unowned segment, and no other order than LRU."""
    engine = Engine(40, PolicySettings(hints=False, fingerprints=False))
    for at in range(20):
        engine.serve(chain(("system", 5), (f"u{at}", 3)), float(at), hints(f"s{at}", "a"))
        assert [(part.end_block, part.group) for part in engine.segments] == [(8, UNOWNED)]
        assert list(engine.core.order) == list(engine.core.order.lru())
    assert engine.assignment.agent is None


def test_a_final_session_goes_before_a_live_one():
    """When a session says that it is final, its blocks go first."""
    engine = Engine(100, PolicySettings(duel=False, min_predictability=0.0))
    for at in range(6):
        engine.serve(chain(("system", 3), (f"s{at}", 4)), at * 1.0, hints(f"s{at}", "a"))
    live = engine.segments[-1].group
    engine.serve(chain(("system", 3), ("done", 4)), 6.0, hints("done", "a", final=True))
    done = engine.segments[-1].group
    assert engine.core.order.score(done) < engine.core.order.score(live)
    engine.core.event(SessionEvent(session="s5", final=True), now=6.5)
    assert engine.core.order.score(live) == 0.0


def test_a_session_that_ends_while_it_runs_is_over_when_its_request_is():
    """The word that nothing more comes may overtake the end of the last answer."""
    core = PolicyCore(PolicySettings(), capacity_blocks=40, block_tokens=16)
    blocks = chain(("system", 5), ("s", 3))
    for name in ("1", "2"):
        core.arrive(
            RequestFacts(
                request_id=name, hints=hints("s", "a"), block_hashes=blocks, prompt_tokens=128
            ),
            now=0.0,
        )
    core.event(SessionEvent(session="s", final=True), now=1.0)
    core.finish(FinishFacts(request_id="1", finish=Finish.STOP), now=2.0)
    assert (1, 0) == (core.state(now=2.0).sessions_running, core.state(now=2.0).sessions_ended)
    core.finish(FinishFacts(request_id="2", finish=Finish.STOP), now=3.0)
    assert 1 == core.state(now=3.0).sessions_ended


def test_a_session_that_ends_before_its_first_request_is_forgotten():
    """A client whose requests failed still says that it is done; its sessions do not pile up."""
    engine = Engine(64)
    state = ToolState.STARTED
    started = SessionEvent(session="S", tool=ToolEvent(name="sh", state=state, remaining_s=9.0))
    engine.core.event(started, now=0.0)
    assert engine.core.state(now=0.0).sessions_gap == 1
    engine.core.event(SessionEvent(session="S", final=True), now=1.0)
    state = engine.core.state(now=1.0)
    assert (state.sessions_running, state.sessions_gap, state.sessions_ended) == (0, 0, 0)
    engine.serve(chain(("a", 4)), 2.0, hints("S", "a"))
    engine.core.event(SessionEvent(session="S", final=True), now=3.0)
    assert engine.core.state(now=3.0).sessions_ended == 1


def test_a_session_that_is_due_goes_after_one_that_is_away_for_long():
    """A promised return inside the turnover time is worth more than one far outside."""
    engine = Engine(60, PolicySettings(duel=False, min_predictability=0.0))
    now = 0.0
    for turn in range(30):
        now += 1.0
        name = f"s{turn % 3}"
        text = [(f"{name}-{i}", 1) for i in range(turn // 3 + 1)]
        engine.serve(chain(("system", 5), *text), now, hints(name, "a"))
    groups = {}
    for name, remaining in (("s0", 1.0), ("s1", 3000.0)):
        text = [(f"{name}-{i}", 1) for i in range(11)]
        engine.serve(chain(("system", 5), *text), now, hints(name, "a"))
        groups[name] = engine.segments[-1].group
        engine.core.event(
            SessionEvent(
                session=name,
                tool=ToolEvent(
                    name="tool",
                    state=ToolState.STARTED,
                    remaining_s=remaining,
                    evidence=Evidence.DECLARED,
                ),
            ),
            now=now,
        )
    order = engine.core.order
    assert order.score(groups["s0"]) > order.score(groups["s1"])


def test_what_remains_of_a_tool_is_as_of_sending():
    """An event that waited on its way promises no earlier return for that."""
    engine = Engine(40)
    engine.serve(chain(("system", 3), ("s", 2)), 1.0, hints("s", "a"))
    tool = ToolEvent(name="t", state=ToolState.STARTED, remaining_s=3.0, elapsed_s=2.0)
    engine.core.event(SessionEvent(session="s", tool=tool, age_s=2.0), now=10.0)
    session = engine.core.tenant("").sessions.get("s")
    assert Promise(said=8.0, back=13.0) == session.promise


def test_warm_ups_teach_nothing():
    """A warm-up request is assigned, but no transition, gap or session turn is learnt from it."""
    engine = Engine(100)
    for at in range(2):
        engine.serve(chain(("system", 4), (f"s{at}", 2)), float(at), hints(f"s{at}", "a"))
    before = engine.core.snapshot()
    engine.serve(chain(("system", 4)), 2.0, Hints(agent="a"), warmup=True)
    assert engine.assignment.agent == "a"
    assert [part.end_block for part in engine.segments] == [4]
    assert engine.core.snapshot() == before


def test_unknown_requests_are_unowned():
    """Segments of an unknown request are one unowned segment; its end is ignored."""
    core = PolicyCore(PolicySettings(), capacity_blocks=10, block_tokens=16)
    assert [(part.end_block, part.group) for part in core.segments("?", [1, 2])] == [(2, UNOWNED)]
    core.finish(FinishFacts(request_id="?", finish=Finish.ABORT), now=0.0)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -5.0, 1e300])
def test_senseless_promises_do_no_harm(value):
    """A promise that is no number of seconds is ignored or bounded."""
    engine = Engine(40)
    for at in range(10):
        engine.serve(chain(("system", 3), (f"s{at}", 2)), float(at), hints(f"s{at}", "a"))
        engine.core.event(
            SessionEvent(
                session=f"s{at}",
                tool=ToolEvent(name="t", state=ToolState.STARTED, remaining_s=value),
            ),
            now=float(at),
        )
    engine.core.tick(now=100.0)
    scores = [engine.core.order.score(group) for group in engine.core.order.groups()]
    assert all(0.0 <= score <= 1.0 for score in scores)


def test_a_hinted_pool_keeps_hot_anchors_that_lru_loses():
    """A long-idle anchor that is due soon beats finished sessions' blocks: more hits than LRU."""
    hits = {}
    for name, settings in (
        ("scout", PolicySettings()),
        ("lru", PolicySettings(hints=False, fingerprints=False)),
    ):
        engine = Engine(40, settings)
        total = 0
        now = 0.0
        for session in range(60):
            for agent in "abc":
                now += 1.0
                total += engine.serve(
                    chain((agent, 10), (f"s{session}", 6)),
                    now,
                    hints(f"s{session}", agent, final=agent == "c"),
                )
        hits[name] = total
    assert hits["scout"] > 1.2 * hits["lru"]


@pytest.mark.parametrize(
    ("predictable", "modes"), [(True, {False, True}), (False, {False})], ids=["cycle", "random"]
)
def test_our_order_is_followed_only_while_agents_can_be_told(predictable, modes):
    """A cycle of agents is followed once it is learnt; uniformly random agents leave LRU alone."""
    dice = random.Random(7)
    engine = Engine(40)
    seen = set()
    for step in range(600):
        agent = step % 8 if predictable else dice.randrange(8)
        engine.serve(
            chain((f"agent {agent}", 8), (f"turn {step}", 1)), float(step), hints("s", f"a{agent}")
        )
        seen.add(engine.core.order.scout)

    assert seen == modes


def test_below_the_predictability_asked_for_eviction_is_exactly_lru():
    """With the bar out of reach, every victim is the one that plain LRU takes."""
    dice = random.Random(3)
    ours = Engine(40, PolicySettings(min_predictability=1.0))
    plain = Engine(40, PolicySettings(hints=False, fingerprints=False))
    hits = [[], []]
    for step in range(400):
        agent = step % 8 if dice.random() < 0.8 else dice.randrange(8)
        blocks = chain((f"agent {agent}", 8), (f"turn {step}", 1))
        for engine, found in zip((ours, plain), hits, strict=True):
            found.append(engine.serve(blocks, float(step), hints("s", f"a{agent}")))
        assert list(ours.core.order) == list(plain.core.order)

    assert hits[0] == hits[1]


def test_a_preempted_request_keeps_its_blocks_longest_until_it_ends():
    """Its groups rank above all others, through renewals of scores, and like others afterwards."""
    settings = PolicySettings(duel=False, min_predictability=0.0)
    engine = Engine(200, settings)
    for turn in range(6):
        for agent in ("a", "b"):
            hints = Hints(session=f"s{turn % 2}", agent=agent, turn=turn)
            engine.serve(chain((agent, 5), (f"s{turn % 2}{agent}", 2 + turn)), 4.0 * turn, hints)
    core = engine.core
    resumed = chain(("a", 5), ("other", 4))
    core.arrive(
        RequestFacts(
            request_id="resumed",
            hints=Hints(session="other", agent="a"),
            block_hashes=resumed,
            prompt_tokens=144,
        ),
        now=30.0,
    )
    mine = {segment.group for segment in core.segments("resumed", resumed)}
    others = set(core.order.groups()) - mine
    core.finish(FinishFacts(request_id="resumed", finish=Finish.PREEMPTED), now=30.5)
    for now in (30.5, 31.0, 60.0):
        core.refresh(now=now)
        assert min(core.order.score(group) for group in mine) > max(
            core.order.score(group) for group in others
        )
    core.finish(FinishFacts(request_id="resumed", finish=Finish.STOP), now=61.0)
    assert max(core.order.score(group) for group in mine) < float("inf")
    core.refresh(now=62.0)
    assert max(core.order.score(group) for group in mine) < float("inf")


def test_a_prompt_shorter_than_its_agents_anchor_shortens_it():
    """An agent whose anchor is longer than a new session's prompt is served, and learnt from."""
    agents = AgentTable(8, itertools.count(1).__next__, lambda agent: None)
    agent = agents.named("a", hinted=True)
    for session in range(5):
        agents.learn(agent, [1, 2, 3], f"s{session}")
    assert len(agent.anchor) == 3
    assert agents.learn(agent, [1], "short")
    assert agent.anchor == (1,)

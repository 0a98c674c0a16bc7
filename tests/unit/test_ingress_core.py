"""The core learns how a request ended from whoever read its output, before or after its end."""

import pytest

from scout_sdk import Hints, SessionEvent, ToolEvent, ToolState
from scout_server.policy.facts import Finish, FinishFacts, RequestFacts
from scout_server.policy.runtime import PolicyCore, PolicySettings

TOOLS = (("bash", 5.0), ("look", None))


@pytest.fixture
def core():
    return PolicyCore(PolicySettings(), capacity_blocks=100, block_tokens=16)


def arrive(core, request_id="r", blocks=(1, 2, 3), now=0.0):
    facts = RequestFacts(
        request_id=request_id, hints=None, block_hashes=blocks, prompt_tokens=16 * len(blocks)
    )
    return core.tenant("").sessions.get(core.arrive(facts, now=now).session)


def finish(core, request_id="r", now=1.0, tools=(), finish=Finish.STOP):
    core.finish(FinishFacts(request_id=request_id, finish=finish, tools=tools), now=now)


@pytest.mark.parametrize("order", ["before", "after", "with"])
def test_when_the_tools_are_told_does_not_matter(core, order):
    """
    Told with the end, just before it or just after it, the session waits for the same tools.
    """
    session = arrive(core)
    if order == "before":
        assert core.tools("r", Finish.TOOL_CALLS, TOOLS, now=1.0)
    if order == "with":
        finish(core, tools=TOOLS, finish=Finish.TOOL_CALLS)
    else:
        finish(core)
    if order == "after":
        assert core.tools("r", Finish.TOOL_CALLS, TOOLS, now=1.0)

    assert session.kind == "tool_calls:bash+look"
    assert (session.promise.said, session.promise.back) == (1.0, 6.0)


def test_a_session_that_went_on_is_not_held_to_its_last_tools(core):
    """
    News of a request's end that come after the session's next request change nothing.
    """
    session = arrive(core)
    finish(core)
    assert arrive(core, "next", (1, 2, 3, 4), now=2.0) is session

    assert not core.tools("r", Finish.TOOL_CALLS, TOOLS, now=2.0)
    finish(core, "next", now=3.0)
    assert not core.tools("r", Finish.TOOL_CALLS, TOOLS, now=3.0)
    assert (session.kind, session.promise) == ("stop:", None)


def test_the_clients_own_word_stands(core):
    """
    What a client said of its tool through the side channel is not replaced by what was parsed.
    """
    session = arrive(core)
    finish(core)
    tool = ToolEvent(name="bash", state=ToolState.STARTED, remaining_s=30.0)
    core.event(SessionEvent(session=session.key, tool=tool), now=1.5)

    assert not core.tools("r", Finish.TOOL_CALLS, TOOLS, now=1.6)
    assert session.promise.back == 31.5


def test_unknown_requests_and_the_number_remembered(core):
    """
    News of nobody are ignored; of ended requests a bounded number is remembered.
    """
    assert not core.tools("nobody", Finish.TOOL_CALLS, TOOLS, now=0.0)
    for index in range(5000):
        arrive(core, f"r{index}", (index, -index), now=index * 1e-4)
        finish(core, f"r{index}", now=index * 1e-4)
    assert not core.tools("r0", Finish.TOOL_CALLS, TOOLS, now=1.0)
    assert core.tools("r4999", Finish.TOOL_CALLS, TOOLS, now=1.0)
    assert len(core._ended) <= 4096


def crowd(core, tenant, sessions, first_block, now):
    """Let *sessions* of eight blocks each come and go; return the next free block."""
    block = first_block
    for session in range(sessions):
        name = f"{tenant}-{session}"
        hashes = tuple(hash((name, part)) for part in range(8))
        facts = RequestFacts(
            request_id=name,
            hints=Hints(session=name, agent=f"agent{session % 3}"),
            block_hashes=hashes,
            prompt_tokens=128,
            tenant=tenant,
        )
        core.arrive(facts, now=now)
        for segment in core.segments(name, hashes):
            for _ in range(block - first_block - 8 * session, segment.end_block):
                core.order.append(block, segment.group)
                block += 1
        core.finish(FinishFacts(request_id=name, finish=Finish.STOP), now=now)
    return block


def test_a_tenant_keeps_no_more_than_its_share():
    """
    What is over the share goes first and is counted; another tenant's blocks stay.
    """
    settings = PolicySettings(max_retained_share=0.2, duel=False, min_predictability=0.0)
    core = PolicyCore(settings, capacity_blocks=100, block_tokens=16)
    core.order.scout = True
    middle = crowd(core, "modest", 1, 0, now=0.0)
    crowd(core, "greedy", 10, middle, now=1.0)
    core.tick(now=100.0)

    assert core.state(now=100.0).clipped_blocks == 64
    victims = core.order.pop(64, now=100.0)
    assert all(block >= middle for block in victims)
    assert core.order.size(12345) == 0


def test_without_a_share_nothing_is_clipped():
    """
    One tenant may fill the cache when nobody set a share.
    """
    core = PolicyCore(
        PolicySettings(duel=False, min_predictability=0.0), capacity_blocks=100, block_tokens=16
    )
    crowd(core, "greedy", 10, 0, now=1.0)
    core.tick(now=100.0)

    assert core.state(now=100.0).clipped_blocks == 0

"""Random lives of turns at the pool of the Ray Serve application, with faults of every kind."""

import asyncio
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import Hints
from scout_server.gateway.settings import GatewaySettings
from scout_server.ray.calls import NodeFacts, Placed
from scout_server.ray.pool import PoolActor
from scout_server.tao.asked import Asked
from scout_server.tao.trace import TracedEngine, drive, placements, replay

NODES = [NodeFacts(name=name, capacity_tokens=2000) for name in "abc"]


def asked(key: str, session: str, tokens: int, *, final: bool) -> Asked:
    return Asked(
        key=key,
        session=session,
        tenant="",
        hints=Hints(session=session),
        outcomes={},
        final=final,
        body_bytes=4 * tokens,
        output_tokens=10,
        timeout_s=None,
    )


async def live(
    actor: PoolActor, chance: Random, key: str, session: str, nodes: list[NodeFacts]
) -> None:
    """One turn: placed, asked for twice, cut off, retried, lost with its replica, or finished."""
    turn = asked(key, session, chance.randint(1, 3000), final=chance.random() < 0.2)
    for attempt in range(3):
        call = asyncio.create_task(actor.place(turn, attempt, frozenset(), 20))
        if chance.random() < 0.2:  # Serve asks again while the first call waits
            again = asyncio.create_task(actor.place(turn, attempt, frozenset(), 20))
            await asyncio.wait({again})
        if chance.random() < 0.2:  # the client leaves, held or running
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
            await actor.cancel(key, attempt, "client-left")
            await call
            return
        placed = await call
        if not isinstance(placed, Placed):
            return
        if chance.random() < 0.2:
            placed_again = await actor.place(turn, attempt, frozenset({placed.node}), 20)
            assert isinstance(placed_again, Placed)
        if chance.random() < 0.3:
            await actor.renew([(turn, attempt, placed.node)])
        await asyncio.sleep(0)
        match chance.choice(["finish", "finish", "finish", "fail", "die", "leave"]):
            case "finish":
                await actor.finish(key, attempt, turn.body_bytes // 4, 10, None, ())
                await actor.finish(key, attempt, turn.body_bytes // 4, 10, None, ())
                return
            case "leave":
                await actor.cancel(key, attempt, "client-left")
                return
            case "die":
                await actor.lose_node(placed.node)
                nodes[:] = [
                    replace(n, name=n.name + "'") if n.name == placed.node else n for n in nodes
                ]
                await actor.set_nodes(nodes)
                await actor.failed(key, attempt)
            case _:
                await (
                    actor.failed(key, attempt) if attempt < 2 else actor.cancel(key, attempt, "")
                )
    await actor.cancel(key, 2, "no-node")


async def lives(seed: int) -> None:
    chance = Random(seed)
    actor = PoolActor({"ray": {"slots": 2, "trace_events": 100_000}})
    try:
        nodes = list(NODES)
        await actor.set_nodes(nodes)
        async with asyncio.timeout(30), asyncio.TaskGroup() as turns:
            for i in range(30):
                turns.create_task(live(actor, chance, f"k{i}", f"s{chance.randint(0, 7)}", nodes))
                if chance.random() < 0.3:
                    await actor.set_nodes(chance.sample(nodes, chance.randint(1, 3)))
                    await asyncio.sleep(0)
            await actor.set_nodes(nodes)
        assert not actor.engine.waiting
        assert not actor.engine.ledger.bookings
        assert not actor._waits
        assert not actor._asked
        lost, log = await actor.trace()
        assert lost == 0
        assert replay(log, TracedEngine(actor.settings.tao)) == []
        placed = list(placements(log))
        assert await drive(log, GatewaySettings(tao=actor.settings.tao)) == placed
    finally:
        await actor.stop()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_no_life_of_a_turn_leaves_anything_behind(seed: int) -> None:
    """
    Whatever happens to thirty turns, in the end nothing waits or is booked, and the trace replays:
    to an engine bit for bit, and to the gateway's pool placement for placement.
    """
    asyncio.run(lives(seed))

"""KV events of engines: the view of what is held, and the gateway listening on loopback."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_sdk import ConfigError
from scout_server.gateway.nodes import Nodes
from scout_server.gateway.settings import GatewaySettings, node_addresses
from scout_server.policy.engine import TaoEngine, Turn
from scout_server.tao.kv_view import KvView
from scout_server.tao.pool import Pool

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")


def stored(session: str | None, *hashes: int, parent: int | None = None, **more: object) -> dict:
    """An event as vLLM packs it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(16 * len(hashes))),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "session_id": session,
        **more,
    }


def removed(*hashes: int) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


class Publisher:
    """vLLM's publisher as its subscribers see it: PUB, and ROUTER for replay."""

    def __init__(self) -> None:
        self.context = zmq_asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept: list[tuple[int, bytes]] = []
        self.number = 0
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            for number, payload in self.kept:
                if number >= int.from_bytes(start, "big"):
                    await self.router.send_multipart(
                        [client, b"", b"", number.to_bytes(8, "big"), payload]
                    )
            end = (-1).to_bytes(8, "big", signed=True)
            await self.router.send_multipart([client, b"", b"", end, b""])

    async def publish(self, *events: dict, lost: bool = False, rank: int = 0) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), rank])
        self.kept.append((self.number, payload))
        if not lost:
            await self.pub.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.pub.close(0)
        self.router.close(0)
        self.context.term()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


class Listening:
    """A publisher, and a gateway's nodes that listen to it; nothing else of the node answers."""

    def __init__(self, publisher: Publisher, nodes: Nodes, name: str) -> None:
        self.publisher, self.nodes, self.name = publisher, nodes, name
        self.events = nodes.kv[name]
        self.engine = nodes.pool.engine

    def run(self, session: str, tenant: str = "") -> None:
        """A turn of *session* runs at the node."""
        self.engine.set_node(self.name, capacity=10_000, slots=8)
        turn = Turn(key=f"{tenant}-{session}", session=session, tenant=tenant, tokens=200)
        self.engine.submit(turn, now=self.nodes.pool.clock())
        assert self.engine.resume(turn.key, now=self.nodes.pool.clock()) is not None
        self.nodes.runs(session, tenant)

    def residue(self, session: str, tenant: str = "") -> int:
        residue = self.engine.ledger.sessions[tenant, session].residues.get(self.name)
        return residue.tokens if residue is not None else 0

    async def joined(self) -> None:
        """Wait until messages arrive: a ZeroMQ subscription takes a moment."""
        async with asyncio.timeout(20):
            while not self.events.batches:
                await self.publisher.publish()
                await asyncio.sleep(0.01)
        await self.caught_up()

    async def caught_up(self) -> None:
        await until(lambda: self.events._next == self.publisher.number)


@pytest.fixture
async def listen() -> AsyncIterator[Callable[..., Listening]]:
    """Start to listen: await listen(replay=True)."""
    ends: list[Callable[[], object]] = []

    async def begin(*, replay: bool = True) -> Listening:
        publisher = Publisher()
        url = f"http://127.0.0.1:9#kv_events={publisher.events}"
        url += f"&kv_replay={publisher.replay}" if replay else ""
        settings = GatewaySettings(nodes=(url,), poll_s=3600)
        nodes = Nodes(settings, Pool(settings))
        await nodes.start()
        ends.extend([publisher.stop, nodes.stop])
        found = Listening(publisher, nodes, "http://127.0.0.1:9")
        await found.joined()
        return found

    yield begin
    for end in reversed(ends):
        await end()  # type: ignore[misc]


async def test_stored_blocks_are_credit_and_removed_ones_are_not(listen) -> None:
    """What an engine stores for a session counts as held there; what it removes no longer does."""
    node = await listen()
    node.run("a")
    await node.publisher.publish(stored("a", 1, 2, 3), stored("a", 4, parent=3))
    await node.caught_up()
    assert node.residue("a") == 64
    assert node.nodes.held(node.name, "a", "") == 64
    await node.publisher.publish(removed(3))
    await node.caught_up()
    assert node.residue("a") == 32
    await node.publisher.publish({"type": "AllBlocksCleared"})
    await node.caught_up()
    assert node.residue("a") == 0


async def test_a_lost_message_is_asked_for_again(listen) -> None:
    """After a gap in the numbers, the missing messages come from the replay address, in order."""
    node = await listen()
    node.run("a")
    before = node.events.counts()
    await node.publisher.publish(stored("a", 1, 2), lost=True)
    await node.publisher.publish(removed(2), lost=True)
    await node.publisher.publish(stored("b", 7))
    await node.caught_up()
    counts = {name: n - before[name] for name, n in node.events.counts().items()}
    assert node.residue("a") == 16
    assert (counts["gaps"], counts["replayed"], counts["resets"]) == (1, 2, 0)


async def test_without_replay_a_gap_forgets_everything(listen) -> None:
    """A gap without a replay address makes what is held unknown; what comes later counts again."""
    node = await listen(replay=False)
    node.run("a")
    await node.publisher.publish(stored("a", 1, 2))
    await node.publisher.publish(removed(1, 2), lost=True)
    await node.publisher.publish(stored("b", 7))
    await node.caught_up()
    assert node.nodes.held(node.name, "a", "") is None
    assert node.events.counts()["gaps"] == 1
    await node.publisher.publish(stored("a", 1, 2, 3))
    await node.caught_up()
    assert node.nodes.held(node.name, "a", "") == 48


async def test_messages_that_the_engine_kept_no_longer_forget_everything(listen) -> None:
    """When the replay begins after the gap, what was known before it does not count."""
    node = await listen()
    node.run("a")
    await node.publisher.publish(stored("a", 1, 2))
    await node.publisher.publish(removed(1, 2), lost=True)
    await node.publisher.publish(stored("b", 9), lost=True)
    del node.publisher.kept[:-1]
    await node.publisher.publish(stored("b", 7, parent=9))
    await node.caught_up()
    assert node.nodes.held(node.name, "a", "") is None
    assert node.events.view.held("b") == 32


async def test_a_restarted_engine_holds_nothing(listen) -> None:
    """Numbers that begin anew mean a new engine: nothing that the old one held counts."""
    node = await listen()
    node.run("a")
    await node.publisher.publish(stored("a", 1, 2))
    await node.caught_up()
    node.publisher.number = 0
    node.publisher.kept.clear()
    await node.publisher.publish(stored("b", 7))
    await until(lambda: node.events.view.held("b") == 16)
    assert node.nodes.held(node.name, "a", "") is None


async def test_garbage_is_counted_and_harms_nothing(listen) -> None:
    """What is no message of vLLM's is counted; listening goes on."""
    node = await listen()
    node.run("a")
    await node.publisher.pub.send_multipart([b"one frame"])
    number = node.publisher.number.to_bytes(8, "big")
    await node.publisher.pub.send_multipart([b"", number, b"\xc1 no msgpack"])
    node.publisher.number += 1
    await node.publisher.publish({"type": "Unheard"}, stored("a", 1), stored("a", "x"))
    await node.caught_up()
    assert node.residue("a") == 16
    assert node.events.counts()["malformed"] == 4


async def test_other_media_groups_and_tenants_give_no_credit(listen) -> None:
    """Blocks of another medium or group do not count, nor those of a name that two tenants use."""
    node = await listen()
    node.run("a")
    node.run("b", "one")
    node.run("b", "two")
    await node.publisher.publish(
        stored("a", 1), stored("a", 2, medium="CPU"), stored("a", 3, group_idx=1), stored("b", 9)
    )
    await node.caught_up()
    assert (node.residue("a"), node.residue("b", "one"), node.residue("b", "two")) == (16, 0, 0)


def test_a_chain_goes_on_without_a_session() -> None:
    """Blocks without a session belong to the session whose chain they go on, if it is only one."""
    view = KvView()
    view.stored([1, 2], parent=None, block_tokens=16, session="a")
    view.stored([3], parent=2, block_tokens=16, session=None)
    view.stored([1, 2, 3], parent=None, block_tokens=16, session="b")
    view.stored([4], parent=3, block_tokens=16, session=None)
    assert (view.held("a"), view.held("b")) == (48, 48)


def test_shared_heads_count_for_everyone() -> None:
    """Blocks behind another session's head have that head in their chain too."""
    view = KvView()
    view.stored([1, 2], parent=None, block_tokens=16, session="a")
    view.stored([3], parent=2, block_tokens=16, session="b")
    view.stored([4], parent=1, block_tokens=16, session="a")
    assert (view.held("a"), view.held("b")) == (32, 48)
    view.removed([1])
    assert (view.held("a"), view.held("b")) == (0, 0)


CALLS = st.one_of(
    st.tuples(
        st.just("stored"),
        st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True),
        st.none() | st.integers(0, 12),
        st.none() | st.sampled_from("abc"),
    ),
    st.tuples(st.just("removed"), st.lists(st.integers(0, 12), max_size=3), st.none(), st.none()),
    st.tuples(st.sampled_from(["cleared", "reset"]), st.just([]), st.none(), st.none()),
)


@given(st.lists(CALLS, max_size=40))
def test_the_view_is_bounded_and_claims_only_what_is_held(calls: list) -> None:
    """Whatever an engine says, a chain has only blocks that are held, and bounds are kept."""
    view = KvView(max_blocks=8, max_sessions=2)
    for kind, hashes, parent, session in calls:
        if kind == "stored":
            view.stored(hashes, parent=parent, block_tokens=16, session=session)
        elif kind == "removed":
            view.removed(hashes)
        else:
            getattr(view, kind)()
        assert len(view) <= 8
        assert len(view._chains) <= 2
        for chain in view._chains.values():
            assert chain.tokens == 16 * len(chain.hashes)
            assert set(chain.hashes) <= set(view._blocks)
        assert view._references == sum(len(c.hashes) for c in view._chains.values())
        assert view._references == sum(len(u) for u in view._users.values())


def test_losses_keep_the_age_of_credit_and_use_renews_it() -> None:
    """Credit ages from the last use; an eviction lowers it without making it younger."""
    engine = TaoEngine()
    engine.set_node("n", capacity=1000, slots=4)
    engine.submit(Turn(key="k", session="s", tokens=200), now=0.0)
    assert engine.resume("k", now=0.0) is not None
    engine.finish("k", prompt_tokens=100, output_tokens=20, held_tokens=112, now=1.0)
    session = engine.ledger.sessions["", "s"]
    assert engine.ledger.credits(session, now=1.0) == {"n": 112}
    engine.observe_held("s", "n", 80, used=False, now=11.0)
    assert engine.ledger.credits(session, now=11.0) == {"n": 40}
    engine.observe_held("s", "n", 96, used=True, now=11.0)
    assert engine.ledger.credits(session, now=11.0) == {"n": 96}
    engine.observe_held("s", "n", 0, used=False, now=12.0)
    assert engine.ledger.credits(session, now=12.0) == {}
    engine.observe_held("unknown", "n", 10, used=True, now=12.0)


def test_addresses_of_events_follow_the_rank() -> None:
    """The rank is added to the port of a server's KV events, as vLLM does."""
    text = "http://h:8000#ranks=2&kv_events=tcp://h:5557&kv_replay=tcp://h:6557"
    found = list(node_addresses((text,)).values())
    assert [a.kv_events for a in found] == ["tcp://h:5557", "tcp://h:5558"]
    assert [a.kv_replay for a in found] == ["tcp://h:6557", "tcp://h:6558"]
    for wrong in ("kv_events=udp://h:1", "kv_replay=tcp://h:1", "kv_events=tcp://h", "a=1"):
        with pytest.raises(ConfigError, match="kv_events=tcp://HOST:PORT"):
            node_addresses((f"http://h:8000#{wrong}",))


@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
async def test_events_of_vllms_own_publisher_are_understood() -> None:
    """What vLLM's own publisher sends is taken, and asked for again where it was lost."""
    vllm_events = pytest.importorskip("vllm.distributed.kv_events")

    from scout_server.gateway.kv_events import KvEvents

    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        events, replay = (probe.getsockname()[1] for probe in probes)
    publisher = vllm_events.ZmqEventPublisher(
        0, endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}"
    )
    seen: list[tuple[str, int, bool]] = []
    listener = KvEvents(
        f"tcp://127.0.0.1:{events}",
        replay=f"tcp://127.0.0.1:{replay}",
        rank=None,
        changed=lambda *change: seen.append(change),
    )
    stored_event = vllm_events.BlockStored(
        block_hashes=[b"a" * 32, b"b" * 32],
        parent_block_hash=None,
        token_ids=list(range(32)),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        session_id="s",
    )
    gone = vllm_events.BlockRemoved(block_hashes=[b"b" * 32], medium="GPU", group_idx=0)
    # Nobody listens yet: these are lost, and come by replay.
    publisher.publish(vllm_events.KVEventBatch(ts=1.0, events=[stored_event]))
    publisher.publish(vllm_events.KVEventBatch(ts=2.0, events=[gone]))
    task = asyncio.create_task(listener.run())
    try:
        async with asyncio.timeout(30):
            while not listener.batches:
                publisher.publish(vllm_events.KVEventBatch(ts=3.0, events=[]))
                await asyncio.sleep(0.05)
        assert seen == [("s", 32, True), ("s", 16, False)]
        assert listener.replayed >= 2
        publisher.publish(vllm_events.KVEventBatch(ts=4.0, events=[vllm_events.AllBlocksCleared()]))
        await until(lambda: listener.view.held("s") == 0)
        assert listener.malformed == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.shutdown()

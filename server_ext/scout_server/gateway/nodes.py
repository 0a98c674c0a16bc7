"""The servers behind the gateway: connections, health, size, and how they come and go."""

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import aiohttp

from scout_sdk import ConfigError, SessionEvent
from scout_sdk._wire import EVENTS_PATH
from scout_server.gateway.posts import Posts
from scout_server.gateway.settings import (
    GatewaySettings,
    NodeAddress,
    drained_names,
    node_addresses,
)
from scout_server.policy.books import Node
from scout_server.tao.headers import to_node
from scout_server.tao.pool import Pool
from scout_server.tao.telemetry import MAX_BYTES, NodeReport, read_metrics, read_state

if TYPE_CHECKING:
    from scout_server.gateway.kv_events import KvEvents

__all__ = ["Nodes", "check_nodes"]

logger = logging.getLogger(__name__)

_MAX_NAMES = 65_536
_KEEP_S = 4.0
"""How long an idle connection is kept: less than servers keep it (uvicorn: 5 s), or they close it
in the moment when it is used again."""
_SOON = 1 / 8
"""Share of `poll_s` until a node whose engine makes requests wait is looked at again."""


def check_nodes(settings: GatewaySettings) -> None:
    """ConfigError when there is no node, or one is wrong, or needs what is not installed."""
    addresses = node_addresses(settings.nodes)
    if not addresses:
        msg = "no node: give --node URL, or gateway.nodes in the configuration file"
        raise ConfigError(msg)
    drained_names(settings)
    if not any(a.kv_events for a in addresses.values()):
        return
    try:
        from scout_server.gateway import kv_events  # noqa: F401
    except ImportError as error:
        msg = f"kv_events needs {error.name}: pip install 'scout-sdk[kv-events]'"
        raise ConfigError(msg) from error


class Nodes:
    """
    Keeps the pool's view of every node up to date, one task per node.

    A node that fails `failures` looks in a row is down: its sessions move, and it is looked at on.
    A failed connection makes it be looked at at once, and takes no new turns until then.
    """

    def __init__(self, settings: GatewaySettings, pool: Pool) -> None:
        self.settings = settings
        self.pool = pool
        self.known: dict[str, NodeAddress] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._look: dict[str, asyncio.Event] = {}
        self._suspect: set[str] = set()
        self._drained: set[str] = set()
        self._cache: dict[str, tuple[int, int]] = {}
        self._told: dict[str, int] = {}
        """By node: the KV room that it told."""
        self._queued: set[str] = set()
        """Nodes whose engine made requests wait when it was last looked at."""
        self._client: aiohttp.ClientSession | None = None
        self._posts = Posts(self._post, clock=pool.clock)
        self.kv: dict[str, KvEvents] = {}
        """By node: the listener to its KV events."""
        self._kv_tasks: dict[str, asyncio.Task[None]] = {}
        self._names: OrderedDict[str, str | None] = OrderedDict()
        """Session -> its tenant; None: several tenants have one of that name."""
        self._expecting: dict[str, set[asyncio.Timeout]] = {}

    @property
    def client(self) -> aiohttp.ClientSession:
        """The one HTTP client; there from start() to stop()."""
        if self._client is None:
            msg = "the gateway is not running"
            raise RuntimeError(msg)
        return self._client

    async def start(self) -> None:
        """Open the client and look at every node once."""
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout_s),
            auto_decompress=False,
            trust_env=self.settings.trust_env,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
        )
        try:
            await self.configure(self.settings)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop looking and close every connection."""
        await self._posts.stop()
        tasks = [*self._tasks.values(), *self._kv_tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def configure(self, settings: GatewaySettings) -> None:
        """Take the list of nodes; streams go on, and a node taken out ends with its last one."""
        wanted = node_addresses(settings.nodes)
        drained = drained_names(settings)
        self.settings = settings
        for name in [n for n in self.known if n not in wanted]:
            self._drained.add(name)
            self.pool.engine.drain_node(name)
        added = [a for n, a in wanted.items() if n not in self.known]
        for name, address in wanted.items():
            before = self.known.get(name, address)
            self.known[name] = address
            if before != address:  # the same server, with other KV events
                self._deaf(name)
                self._listen(address)
            if (name in drained) != (name in self._drained):
                (self._drained.add if name in drained else self._drained.discard)(name)
                self._set_drain(name)
            self._resize(name)
        for address in added:
            self._look[address.name] = asyncio.Event()
            self._listen(address)
        await asyncio.gather(*(self._first_look(a) for a in added))
        for address in added:
            self._tasks[address.name] = asyncio.create_task(self._watch(address))
        self._gone(wanted)
        self.pool.kick()

    def _gone(self, wanted: dict[str, NodeAddress]) -> None:
        """Forget nodes that were taken out and run nothing any more."""
        for name in [n for n in self.known if n not in wanted]:
            if self.pool.engine.ledger.used(name)[1] == 0:
                self.pool.engine.lose_node(name, forget=True)
                for table in (self.known, self._told, self._cache, self._look):
                    table.pop(name, None)
                for names in (self._drained, self._suspect, self._queued):
                    names.discard(name)
                self._deaf(name)
                task = self._tasks.pop(name, None)
                if task is not None and task is not asyncio.current_task():
                    task.cancel()

    # ---- KV events -------------------------------------------------------------------------

    def _listen(self, address: NodeAddress) -> None:
        """Start to listen to a node's KV events, where it has any."""
        if address.kv_events is None:
            return
        from scout_server.gateway.kv_events import KvEvents

        def changed(session: str, tokens: int, used: bool) -> None:
            tenant = self._names.get(session)
            if tenant is not None:
                self.pool.observe_held(session, address.name, tokens, tenant=tenant, used=used)

        events = self.kv[address.name] = KvEvents(
            address.kv_events, replay=address.kv_replay, rank=address.rank, changed=changed
        )
        self._kv_tasks[address.name] = asyncio.create_task(events.run(), name="scout-kv-events")

    def _deaf(self, name: str) -> None:
        self.kv.pop(name, None)
        task = self._kv_tasks.pop(name, None)
        if task is not None:
            task.cancel()

    def runs(self, session: str, tenant: str) -> None:
        """Note whose a session is: engines name sessions without tenants."""
        if not self.kv:
            return
        if self._names.setdefault(session, tenant) != tenant:
            self._names[session] = None  # of whom the engine speaks cannot be told
        self._names.move_to_end(session)
        if len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)

    def held(self, name: str, session: str, tenant: str) -> int | None:
        """Return the tokens that a node said it holds for a session; None: it did not say."""
        events = self.kv.get(name)
        if events is None or self._names.get(session) != tenant:
            return None
        return events.view.held(session)

    @contextlib.contextmanager
    def expecting(self, name: str, patience: asyncio.Timeout) -> Iterator[None]:
        """Within: *patience* ends when the node goes down before it has begun to answer."""
        waiting = self._expecting.setdefault(name, set())
        waiting.add(patience)
        try:
            yield
        finally:
            waiting.discard(patience)

    def _down(self, name: str) -> None:
        """Take a node as dead: what waits for its first byte is tried elsewhere."""
        logger.warning("scout: node %s is down", name)
        self.pool.engine.lose_node(name)
        if name in self.kv:
            self.kv[name].reset()
        now = asyncio.get_running_loop().time()
        for patience in list(self._expecting.get(name, ())):
            patience.reschedule(now)

    def suspect(self, name: str) -> None:
        """A connection to a node failed: send nothing new there until it was looked at."""
        if name in self._look and name not in self._suspect:
            self._suspect.add(name)
            self._set_drain(name)
            self._look[name].set()

    def any_up(self) -> list[NodeAddress]:
        """Return the nodes that are up."""
        return [self.known[n.name] for n in self._up()]

    def open(self) -> list[NodeAddress]:
        """Return the nodes that take what is new; when none does, those that are up."""
        up = self._up()
        taking = [n for n in up if not n.draining] or up
        return [self.known[n.name] for n in taking]

    def _up(self) -> list[Node]:
        nodes = self.pool.engine.ledger.by_name()
        return [n for n in nodes if n.up and n.name in self.known]

    def tell(
        self,
        told: Mapping[str, Sequence[int]],
        events: Sequence[SessionEvent],
        raw: Iterable[tuple[bytes, bytes]],
        *,
        tenant: str,
    ) -> None:
        """Tell nodes of *events*, by index, with the headers *raw* of who sent them."""
        header = self.settings.tenant_to_nodes
        added = {header: tenant} if header and tenant else {}
        headers = to_node(raw, added=added, removed=frozenset(filter(None, (header,))))
        by_server: dict[str, set[int]] = {}  # ranks are told by their server
        for name, indices in told.items():
            if (address := self.known.get(name)) is not None:
                by_server.setdefault(address.url, set()).update(indices)
        for url, chosen in by_server.items():
            self._posts.put(url, [events[i] for i in sorted(chosen)], headers, tenant=tenant)

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with (
                asyncio.timeout(self.settings.poll_timeout_s),
                self.client.post(url + EVENTS_PATH, data=body, headers=headers) as response,
            ):
                await response.read()

    def _set_drain(self, name: str) -> None:
        self.pool.engine.drain_node(name, draining=name in self._drained or name in self._suspect)
        self.pool.kick()

    async def _first_look(self, address: NodeAddress) -> None:
        report = await self._report(address)
        if report is None:
            logger.warning("scout: node %s does not answer yet", address.name)
            self._size(address, NodeReport())
            self.pool.engine.lose_node(address.name)
        else:
            self._size(address, report)
        self._set_drain(address.name)

    async def _watch(self, address: NodeAddress) -> None:
        name, failures = address.name, 0
        look = self._look[name]
        while True:
            with contextlib.suppress(TimeoutError):
                often = name in self._queued
                async with asyncio.timeout(self.settings.poll_s * (_SOON if often else 1)):
                    await look.wait()
            look.clear()
            report = await self._report(address)
            node = self.pool.engine.ledger.nodes.get(name)
            if report is not None:
                failures = 0
                if node is None or not node.up:
                    logger.info("scout: node %s is up", name)
                self._size(address, report)
            else:
                failures += 1
                if (
                    node is not None
                    and node.up
                    and (failures >= self.settings.failures or name in self._suspect)
                ):
                    self._down(name)
            if name in self._suspect:
                self._suspect.discard(name)
                self._set_drain(name)
            self.pool.expire()
            self._gone(node_addresses(self.settings.nodes))
            if name not in self.known:
                return

    def _size(self, address: NodeAddress, report: NodeReport) -> None:
        engine, name = self.pool.engine, address.name
        engine.set_node(
            name,
            capacity=self._capacity(name, report),
            slots=self.settings.slots,
        )
        # What came while a step was computed waits for its end: only a queue that stays counts.
        engine.press_node(name, pressed=bool(report.waiting) and name in self._queued)
        (self._queued.add if report.waiting else self._queued.discard)(name)
        if report.used_fraction is not None:
            used = round(report.used_fraction * engine.ledger.nodes[name].capacity)
            self.pool.meters.drift[name] = engine.ledger.used(name)[0] - used
        if report.queried_tokens is not None and report.hit_tokens is not None:
            queried, hit = self._cache.get(name, (0, 0))
            self._cache[name] = (report.queried_tokens, report.hit_tokens)
            if report.queried_tokens > queried and report.hit_tokens >= hit:
                engine.ledger.nodes[name].rate.observe(
                    report.hit_tokens - hit, report.queried_tokens - queried
                )

    def _capacity(self, name: str, report: NodeReport | None = None) -> int:
        """Return a node's KV room: what it says, what it said last, or what is configured."""
        if report is not None and report.capacity_tokens:
            self._told[name] = report.capacity_tokens
        return self._told.get(name, self.settings.capacity_tokens)

    def _resize(self, name: str) -> None:
        """Take over the configured size of a node, up or down."""
        if name in self.pool.engine.ledger.nodes:
            capacity, slots = self._capacity(name), self.settings.slots
            self.pool.engine.ledger.set_node(name, capacity=capacity, slots=slots)

    async def _report(self, address: NodeAddress) -> NodeReport | None:
        """Return one look at a node; None: it does not answer."""
        try:
            async with asyncio.timeout(self.settings.poll_timeout_s):
                status, _ = await self._get(address, "/health")
                if status >= 500:
                    return None
                status, body = await self._get(address, "/metrics")
                if status == 200:
                    report = read_metrics(body.decode("utf-8", "replace"), rank=address.rank)
                    if report != NodeReport():
                        return report
                status, body = await self._get(address, "/v1/scout/state")
                return read_state(_json(body)) if status == 200 else NodeReport()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _get(self, address: NodeAddress, path: str) -> tuple[int, bytes]:
        async with self.client.get(address.url + path) as response:
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_BYTES:
                    break
            return response.status, body


def _json(body: bytes) -> object:
    """Return what *body* says; None when it is no JSON, as from a server without our extension."""
    try:
        document: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document

"""Memory beyond HBM: blocks that were evicted can come back, at the price of a transfer."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from scout_server.policy import UNOWNED, Segment
from scout_server.replica import Replica, Request, SchedulerView
from scout_server.sim.hardware.specs import TierDevice, find_tier

__all__ = ["Channel", "Tier", "TierAdmission", "TierSettings", "Tiers", "Transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Host DRAM and CXL memory for KV blocks; sizes per replica."""

    dram_gb: Annotated[float, Ge(0)] = 0.0
    """0: no DRAM tier."""
    dram_device: str = "dram-pcie5"
    cxl_gb: Annotated[float, Ge(0)] = 0.0
    """0: no CXL tier. What DRAM gives up moves here."""
    cxl_device: str = "cxl"
    cxl_bandwidth_gbps: Annotated[float, Ge(0)] = 0.0
    """Instead of the device's own; 0: the device's."""
    write_queue_s: Annotated[float, Ge(0)] = 0.5
    """Evicted blocks are dropped, not stored, when the channel is busy for longer than this."""


class Channel:
    """One direction of a link: transfers take bytes over bandwidth, one after the other."""

    __slots__ = ("bytes_per_s", "free_at", "latency_s")

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at = 0.0

    def finish_at(self, size: float, now: float) -> float:
        """Return when *size* bytes would be there if they were sent now."""
        return max(self.free_at, now) + self.latency_s + size / self.bytes_per_s

    def send(self, size: float, now: float) -> float:
        """Send *size* bytes; return when they are there. The latency does not hold the channel."""
        start = max(self.free_at, now)
        self.free_at = start + size / self.bytes_per_s
        return self.free_at + self.latency_s


class Tier:
    """One tier of one replica: hashes, least recently stored or read first out."""

    __slots__ = ("_held", "capacity", "read", "write")

    def __init__(self, capacity: int, device: TierDevice, bandwidth_gbps: float = 0.0) -> None:
        rate = (bandwidth_gbps or device.bandwidth_gbps) * 1e9
        self.capacity = capacity
        self.read = Channel(rate, device.latency_s)
        self.write = Channel(rate, device.latency_s)
        self._held: OrderedDict[int, float] = OrderedDict()
        """When each block has been written."""

    def __len__(self) -> int:
        """Return the number of blocks held."""
        return len(self._held)

    def __contains__(self, block_hash: int) -> bool:
        """Whether the block is held."""
        return block_hash in self._held

    def touch(self, block_hash: int) -> None:
        """Say that the block was read: it goes last."""
        self._held.move_to_end(block_hash)

    def written_at(self, block_hash: int) -> float:
        """Return from when on a block that is held can be read."""
        return self._held[block_hash]

    def put(self, block_hash: int, written_at: float) -> int | None:
        """Hold a block; return the hash of the block that had to go, if one had."""
        if block_hash in self._held:
            self._held.move_to_end(block_hash)
            return None
        self._held[block_hash] = written_at
        if len(self._held) > self.capacity:
            return self._held.popitem(last=False)[0]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Blocks on their way to a replica."""

    ready_at: float
    hashes: tuple[int, ...]
    """Consecutive blocks of a prompt."""
    before: int
    """Blocks of the prompt before them."""


class TierAdmission:
    """Admission hook of one replica: a turn starts when its blocks have come from a tier."""

    __slots__ = ("_index", "_tiers", "_until")

    def __init__(self, tiers: "Tiers", index: int) -> None:
        self._tiers = tiers
        self._index = index
        self._until = 0.0

    def admit(self, request: Request, view: SchedulerView, now: float) -> bool:
        """Return whether the blocks are there, and put them into the pool."""
        ready = self._tiers.ready_at(request.request_id)
        if ready > now:
            self._until = ready
            return False
        self._tiers.arrive(self._index, request, now)
        return True

    def horizon(self, now: float) -> float:
        """Return when the transfer that was waited for ends."""
        return self._until if self._until > now else math.inf


class Tiers:
    """
    The tiers of every replica, and the link between replicas.

    An evicted block is written to DRAM (unless the channel is too busy), what DRAM gives up goes
    to CXL. When a turn is submitted, reading back the blocks that follow its cached prefix begins,
    if that is quicker than computing them again; they enter the pool when the turn is admitted,
    which waits for them. Copies in a tier stay after a read.
    """

    def __init__(
        self,
        settings: TierSettings,
        *,
        replicas: int,
        block_bytes: float,
        block_tokens: int,
        prefill_s_per_token: float,
        link_bytes_per_s: float,
        devices: int = 1,
    ) -> None:
        self._settings = settings
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._prefill = prefill_s_per_token
        self._replicas: list[Replica] = []
        self._tiers: list[list[Tier]] = []
        self._links = [Channel(link_bytes_per_s, 1e-4) for _ in range(replicas)]
        self.fetched_blocks = 0
        self.stored_blocks = 0
        self.dropped_blocks = 0
        self.wait_s = 0.0
        self._coming: dict[str, Transfer] = {}
        for _ in range(replicas):
            tiers = []
            for size_gb, name, rate in (
                (settings.dram_gb, settings.dram_device, 0.0),
                (settings.cxl_gb, settings.cxl_device, settings.cxl_bandwidth_gbps),
            ):
                blocks = int(size_gb * 1e9 // block_bytes)
                if blocks:
                    device = find_tier(name)
                    tiers.append(Tier(blocks, device, (rate or device.bandwidth_gbps) * devices))
            self._tiers.append(tiers)

    def attach(self, replicas: Sequence[Replica]) -> None:
        """Say which replicas the tiers belong to, in order."""
        self._replicas = list(replicas)

    def filled(self) -> float:
        """Return the share of all tiers' blocks that are filled."""
        tiers = [tier for each in self._tiers for tier in each]
        room = sum(tier.capacity for tier in tiers)
        return sum(len(tier) for tier in tiers) / room if room else 0.0

    def evicted(self, replica: int, now: float, hashes: Sequence[int | None]) -> None:
        """Store what a replica's pool gave up."""
        tiers = self._tiers[replica]
        if not tiers:
            return
        first = tiers[0]
        new = [h for h in hashes if h is not None and h not in first]
        if not new:
            return
        if first.write.free_at > now + self._settings.write_queue_s:
            self.dropped_blocks += len(new)
            return
        written = first.write.send(len(new) * self._block_bytes, now)
        self.stored_blocks += len(new)
        for block_hash in new:
            out = first.put(block_hash, written)
            if out is not None and len(tiers) > 1 and out not in tiers[1]:
                below = tiers[1]
                if below.write.free_at <= now + self._settings.write_queue_s:
                    below.put(out, below.write.send(self._block_bytes, now))

    def fetch(self, replica: int, hashes: Sequence[int], now: float) -> Transfer | None:
        """Start reading back what follows the cached prefix of *hashes*; None: nothing to gain."""
        tiers = self._tiers[replica]
        if not tiers or not hashes:
            return None
        cached = len(self._replicas[replica].pool.lookup(hashes, len(hashes)))
        found: list[tuple[int, Tier]] = []
        for block_hash in hashes[cached:]:
            holder = next((tier for tier in tiers if block_hash in tier), None)
            if holder is None:
                break
            found.append((block_hash, holder))
        if not found:
            return None
        sizes: dict[int, int] = {}
        for _, holder in found:
            sizes[id(holder)] = sizes.get(id(holder), 0) + 1
        ready = max(
            tier.read.finish_at(sizes[id(tier)] * self._block_bytes, now)
            for tier in tiers
            if id(tier) in sizes
        )
        ready = max(ready, max(holder.written_at(h) for h, holder in found))
        if ready - now > len(found) * self._block_tokens * self._prefill:
            return None
        for tier in tiers:
            if id(tier) in sizes:
                tier.read.send(sizes[id(tier)] * self._block_bytes, now)
        for block_hash, holder in found:
            holder.touch(block_hash)
        self.fetched_blocks += len(found)
        self.wait_s += ready - now
        return Transfer(ready_at=ready, hashes=tuple(h for h, _ in found), before=cached)

    def migrate(
        self, source: int, target: int, hashes: Sequence[int], now: float
    ) -> Transfer | None:
        """Start copying what *source* holds of *hashes* and *target* does not; None: nothing."""
        held = len(self._replicas[source].pool.lookup(hashes, len(hashes)))
        there = len(self._replicas[target].pool.lookup(hashes, len(hashes)))
        if held <= there:
            return None
        ready = self._links[source].send((held - there) * self._block_bytes, now)
        return Transfer(ready_at=ready, hashes=tuple(hashes[there:held]), before=there)

    def expect(self, request_id: str, transfer: Transfer) -> None:
        """Say that a request's admission waits for *transfer*."""
        self._coming[request_id] = transfer

    def forget(self, request_id: str) -> None:
        """Say that a request will not be admitted."""
        self._coming.pop(request_id, None)

    def ready_at(self, request_id: str) -> float:
        """Return when what a request waits for is there; 0 when it waits for nothing."""
        transfer = self._coming.get(request_id)
        return transfer.ready_at if transfer is not None else 0.0

    def arrive(self, replica: int, request: Request, now: float) -> None:
        """
        Put what *request* waited for into the pool of the replica that is about to admit it.

        As many blocks as fit into the free ones; if the prefix before them is gone, none.
        """
        transfer = self._coming.pop(request.request_id, None)
        if transfer is None:
            return
        target = self._replicas[replica]
        pool = target.pool
        prefix = pool.lookup(request.hashes, transfer.before)
        if len(prefix) < transfer.before:
            return
        pool.touch(prefix)
        missing = [h for h in transfer.hashes if pool.find(h) is None]
        count = min(len(missing), pool.free_blocks)
        blocks = pool.allocate(count, now) if count else []
        for block, block_hash in zip(blocks, missing, strict=False):
            pool.insert(block, block_hash)
        reached = transfer.before + len(transfer.hashes)
        segments = target.core.segments(request.request_id, request.hashes[:reached])
        at = transfer.before
        for position in range(len(blocks)):
            owner = next((s.group for s in segments if s.end_block > at + position), UNOWNED)
            pool.free([blocks[len(blocks) - 1 - position]], [Segment(1, owner)])
        pool.free(prefix, segments)

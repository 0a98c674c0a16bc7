"""
Scout in vLLM's CPU offload tier: which chunk makes room for the next.

Chosen in `kv_connector_extra_config` by `"eviction_policy": "ScoutCachePolicy",
"cache_policy_module_path": "scout_server.vllm.offload"`.
"""

import inspect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scout_server.policy import UNOWNED
from scout_server.vllm import _compat
from scout_server.vllm.tier import TierOrder, attached

__all__ = ["ScoutCachePolicy"]

_log = logging.getLogger(f"vllm.{__name__}")  # so that vLLM's log settings apply

_Base: Any
_Lru: Any
_Base, _Lru = _compat.cache_policies()


@dataclass(slots=True)
class _Use:
    """What one request's chunks have in common; kept in the request's context."""

    owner: object
    number: int


class ScoutCachePolicy(_Base):  # type: ignore[misc]
    """
    vLLM's CachePolicy by the scores of the policy core that runs in the same engine process.

    vLLM's own LRU policy is kept beside, operation by operation. It evicts while the core follows
    the engine's order, where there is no core, and from the first fault on; and it judges each
    victim of ours. Takes the calls of vLLM 0.32 and 0.33.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._stock = _Lru(cache_capacity)
        self._insert_takes_context = "req_context" in inspect.signature(_Lru.insert).parameters
        self._order: TierOrder[bytes] = TierOrder(self._score, self._version)
        self._expected: dict[bytes, tuple[int, int, int]] = {}
        self._broken = False

    def get(self, key: bytes) -> Any:
        """Return the chunk's status, or None when it is not here."""
        return self._stock.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        """Add a chunk that was just allocated."""
        if self._insert_takes_context:
            self._stock.insert(key, chunk, req_context)
        else:
            self._stock.insert(key, chunk)
        if self._broken:
            return
        try:
            if req_context is not None:
                self._expect([key], req_context)
            unknown = (self._order.use(), 0, UNOWNED)
            use, position, group = self._expected.pop(key, unknown)
            self._order.put(key, group=group, use=use, position=position)
            if chunk.ref_cnt == 0:
                self._order.release(key)
        except Exception as error:
            self._fault("insert", error)

    def remove(self, key: bytes) -> None:
        """Forget a chunk whose store failed."""
        self._stock.remove(key)
        if not self._broken:
            try:
                self._order.remove(key)
            except Exception as error:
                self._fault("remove", error)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Mark chunks, head first, as used just now."""
        keys = list(keys)
        self._stock.touch(keys, req_context)
        if not self._broken:
            try:
                self._used(keys, req_context, self._order.use())
            except Exception as error:
                self._fault("touch", error)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note who stores the chunks that are inserted next."""
        keys = list(keys)
        self._stock.on_store_miss(keys, req_context)
        if not self._broken:
            try:
                self._expect(keys, req_context)
            except Exception as error:
                self._fault("store", error)

    def on_request_access(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note chunks that a running request uses for the first time."""
        keys = list(keys)
        stock = getattr(self._stock, "on_request_access", None)
        if stock is not None:
            stock(keys, req_context)
        if not self._broken:
            try:
                self._used(keys, req_context, self._use(req_context))
            except Exception as error:
                self._fault("access", error)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Rank all chunks of a request that ended, the tail before the head."""
        self._stock.on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        if self._broken:
            return
        try:
            use = self._order.use()
            for keys in key_groups:
                self._used(keys, req_context, use)
        except Exception as error:
            self._fault("finish", error)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict exactly *n* chunks, none of them pinned or protected; or None, nothing changed."""
        found = self._by_score(n, protected) if n and self._leads() else None
        if found is not None:
            return found
        evicted: list[tuple[bytes, Any]] | None = self._stock.evict(n, protected)
        if evicted and not self._broken:
            try:
                for key, _ in evicted:
                    self._order.remove(key)
                self._counted("lru", len(evicted))
            except Exception as error:
                self._fault("evict", error)
        return evicted

    def clear(self) -> None:
        """Forget all chunks, the pinned ones too."""
        self._stock.clear()
        self._order.clear()
        self._expected.clear()

    def mark_evictable(self, key: bytes) -> None:
        """A chunk's last transfer is over."""
        self._stock.mark_evictable(key)
        if not self._broken:
            try:
                self._order.release(key)
            except Exception as error:
                self._fault("release", error)

    def mark_non_evictable(self, key: bytes) -> None:
        """A chunk's first transfer begins."""
        self._stock.mark_non_evictable(key)
        if not self._broken:
            try:
                self._order.pin(key)
            except Exception as error:
                self._fault("pin", error)

    # ---- ours --------------------------------------------------------------------------------

    def _by_score(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        try:
            keys = self._order.choose(n, protected)
            if keys is None:
                return None
            chunks = [self._stock.get(key) for key in keys]
            if len(keys) != n or len(set(keys)) != n:
                raise RuntimeError(f"{len(set(keys))} chunks named where {n} were asked for")
            for key, chunk in zip(keys, chunks, strict=True):
                if chunk is None or chunk.ref_cnt != 0 or key in protected:
                    raise RuntimeError(f"chunk {key.hex()} was named, which must stay")
        except Exception as error:
            self._fault("evict", error)
            return None
        for key in keys:
            self._stock.remove(key)
            self._order.remove(key)
        self._counted("scout", n)
        return list(zip(keys, chunks, strict=True))

    def _leads(self) -> bool:
        """Whether the core is there and follows its own order."""
        guide = attached()
        return not self._broken and guide is not None and guide.leads

    def _score(self, group: int) -> float:
        guide = attached()
        return 0.0 if guide is None else guide.score(group)

    def _version(self) -> int:
        guide = attached()
        return 0 if guide is None else guide.version

    @staticmethod
    def _counted(order: str, chunks: int) -> None:
        guide = attached()
        if guide is not None:
            guide.evicted[order] += chunks

    def _expect(self, keys: list[bytes], context: Any) -> None:
        use = self._use(context)
        for key, position, group in self._placed(keys, context):
            self._expected.pop(key, None)
            self._expected[key] = (use, position, group)
        while len(self._expected) > 2 * self.cache_capacity + 64:
            del self._expected[next(iter(self._expected))]

    def _used(self, keys: Sequence[bytes], context: Any, use: int) -> None:
        for key, position, group in self._placed(keys, context):
            if key in self._order:
                if group == UNOWNED:
                    group = self._order.group(key)
                self._order.put(key, group=group, use=use, position=position)

    def _placed(self, keys: Sequence[bytes], context: Any) -> list[tuple[bytes, int, int]]:
        """Return each key, head first, with the tokens up to its end and its owner."""
        known = getattr(context, "get_offload_key_position", None)
        positions = [known(key) if known is not None else None for key in keys]
        guide = attached()
        if guide is None or guide.breaker.open or not any(positions):
            return [(key, index + 1, UNOWNED) for index, key in enumerate(keys)]
        last = max(position for position in positions if position is not None)
        segments = guide.owners(str(context.req_id), last)
        return [
            (key, index + 1, UNOWNED)
            if position is None
            else (key, position, guide.owner(segments, position))
            for index, (key, position) in enumerate(zip(keys, positions, strict=True))
        ]

    def _use(self, context: Any) -> int:
        """Return the number that all first uses by one running request share."""
        get, put = getattr(context, "get_state", None), getattr(context, "set_state", None)
        if get is None or put is None:
            return self._order.use()
        state = get(_Use)
        if state is None or state.owner is not self:
            state = _Use(self, self._order.use())
            put(state)
        return int(state.number)

    def _fault(self, place: str, error: Exception) -> None:
        """Leave the tier to vLLM's own LRU, which knows all of it."""
        self._broken = True
        guide = attached()
        if guide is not None:
            guide.breaker.trip(f"offload {place}", error)
        else:
            _log.error("scout: fault in offload %s; LRU from now on", place, exc_info=error)

"""Listens to an engine's KV events (vLLM's ZeroMQ publisher); needs the extra `kv-events`."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from scout_server.tao.kv_view import BlockHash, KvView

__all__ = ["KvEvents"]

logger = logging.getLogger(__name__)

_RECEIVE_MESSAGES = 4096
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_REPLAY_S = 2.0
_RETRY_S = 1.0
_END = -1
_BATCHES_IN_A_ROW = 64


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """What is read of it; token ids are skipped unread."""

    block_hashes: list[BlockHash]
    block_size: int
    parent_block_hash: BlockHash | None = None
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class KvEvents:
    """
    One engine's events, in order, into a view of what it holds.

    Lost messages are asked for at the *replay* address; where there is none, or where the engine
    kept no such old ones, the view starts again from nothing. *changed* is called after every
    message that changed what is held for a session: (session, tokens, whether it was used).
    """

    def __init__(
        self,
        address: str,
        *,
        replay: str | None,
        rank: int | None,
        changed: Callable[[str, int, bool], None],
        view: KvView | None = None,
    ) -> None:
        self.view = view or KvView()
        self.batches = self.gaps = self.replayed = self.resets = self.malformed = 0
        self._address = address
        self._replay = replay
        self._rank = rank
        self._changed = changed
        self._next = 0
        self._batch = msgspec.msgpack.Decoder(_Batch)
        self._event = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)

    def counts(self) -> dict[str, int]:
        """Return what happened so far."""
        return {
            "batches": self.batches,
            "gaps": self.gaps,
            "replayed": self.replayed,
            "resets": self.resets,
            "malformed": self.malformed,
            "blocks": len(self.view),
        }

    def reset(self) -> None:
        """The engine went down: nothing of what it held counts."""
        self.view.reset()

    async def run(self) -> None:
        """Listen until cancelled; a fault is logged, and listening starts again."""
        while True:
            try:
                await self._listen()
            except (zmq.ZMQError, OSError) as error:
                logger.warning("scout: KV events of %s: %s", self._address, error)
            except Exception:
                logger.exception("scout: KV events of %s failed", self._address)
            self._restart(0)
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, _RECEIVE_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.subscribe(b"")
            socket.connect(self._address)
            in_a_row = 0
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    self.malformed += 1
                    continue
                await self._message(int.from_bytes(frames[1], "big"), frames[2], context)
                in_a_row += 1
                if in_a_row % _BATCHES_IN_A_ROW == 0:  # a full socket must not starve streams
                    await asyncio.sleep(0)
        finally:
            socket.close()
            context.term()

    async def _message(self, number: int, payload: bytes, context: zmq.asyncio.Context) -> None:
        if number < self._next:  # the engine was started anew: its numbers never go back
            self._restart(0)
        if number > self._next:
            self.gaps += self.batches > 0
            await self._catch_up(number, context)
        self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self.batches += 1
        try:
            batch = self._batch.decode(payload)
        except msgspec.DecodeError:
            self.malformed += 1
            self._restart(self._next)  # it may have held anything
            return
        rank = batch.data_parallel_rank
        if self._rank is not None and rank is not None and rank != self._rank:
            return
        for raw in batch.events:
            try:
                event = self._event.decode(raw)
            except msgspec.DecodeError:  # of a kind that is not known here
                self.malformed += 1
                continue
            self._apply(event)
        for change in self.view.changes():
            self._changed(*change)

    def _apply(self, event: "_Stored | _Removed | _Cleared") -> None:
        if isinstance(event, _Cleared):
            self.view.cleared()
        elif event.medium not in (None, "GPU") or event.group_idx not in (None, 0):
            return  # credit is what the first group of KV caches holds, where it can be used
        elif isinstance(event, _Removed):
            self.view.removed(event.block_hashes)
        else:
            self.view.stored(
                event.block_hashes,
                parent=event.parent_block_hash,
                block_tokens=event.block_size,
                session=event.session_id,
            )

    def _restart(self, number: int) -> None:
        self.resets += 1
        self.view.reset()
        self._next = number

    async def _catch_up(self, number: int, context: zmq.asyncio.Context) -> None:
        """Take the messages before *number* that did not come; else forget what was known."""
        missed: list[tuple[int, bytes]] = []
        if self._replay is not None:
            try:
                missed = await self._replayed(number, context)
            except (TimeoutError, zmq.ZMQError) as error:
                logger.warning("scout: no replay of KV events at %s: %s", self._replay, error)
        whole = [n for n, _ in missed] == list(range(self._next, number))
        if not whole and (self.batches or missed):
            self._restart(missed[0][0] if missed else number)
        for at, payload in missed:
            if at == self._next:
                self.replayed += 1
                self._take(at, payload)
        self._next = max(self._next, number)

    async def _replayed(self, number: int, context: zmq.asyncio.Context) -> list[tuple[int, bytes]]:
        """Return what the engine kept from the next message on, up to *number*."""
        assert self._replay is not None
        socket = context.socket(zmq.DEALER)
        found: list[tuple[int, bytes]] = []
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.connect(self._replay)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            async with asyncio.timeout(_REPLAY_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2:
                        continue
                    at = int.from_bytes(frames[-2], "big", signed=True)
                    if at == _END:
                        return found
                    if self._next <= at < number and len(found) < _RECEIVE_MESSAGES:
                        found.append((at, frames[-1]))
        finally:
            socket.close()

"""What one engine's KV events say that it holds, session by session; no I/O."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["BlockHash", "KvView"]

BlockHash = bytes | int


@dataclass(slots=True)
class _Chain:
    """The blocks of a session's latest prompt that are held, head first."""

    hashes: list[BlockHash] = field(default_factory=list)
    tokens: int = 0


class KvView:
    """
    Follows blocks as an engine stores and removes them, and the chain of each session.

    Bounded: over *max_blocks* the block stored longest ago counts as removed, over *max_sessions*
    the session told of longest ago is unknown again. Both err to the side of less credit.
    """

    def __init__(self, *, max_blocks: int = 262_144, max_sessions: int = 16_384) -> None:
        self._max_blocks = max_blocks
        self._max_sessions = max_sessions
        self._blocks: OrderedDict[BlockHash, tuple[int, BlockHash | None]] = OrderedDict()
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self._users: dict[BlockHash, set[str]] = {}
        self._references = 0
        self._changed: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def stored(
        self,
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None,
        block_tokens: int,
        session: str | None,
    ) -> None:
        """
        Blocks came in (or were used again), one after the other behind *parent*.

        Without a *session* they belong to the one whose chain ends at *parent*, if just one does.
        """
        if not hashes or block_tokens <= 0:
            return
        before = parent
        for block in hashes:
            self._blocks[block] = (block_tokens, before)
            self._blocks.move_to_end(block)
            before = block
        name = session if session is not None else self._owner(parent)
        if name is not None:
            self._extend(name, parent, hashes)
            self._changed[name] = True
        while len(self._blocks) > self._max_blocks:
            self._drop(next(iter(self._blocks)))
        while self._chains and (
            len(self._chains) > self._max_sessions or self._references > 2 * self._max_blocks
        ):
            self._forget(next(iter(self._chains)))

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks went; what follows them in a chain is of no use any more."""
        for block in hashes:
            self._drop(block)

    def cleared(self) -> None:
        """The engine holds nothing any more."""
        for name in self._chains:
            self._changed[name] = False
        for chain in self._chains.values():
            chain.hashes, chain.tokens = [], 0
        self._blocks.clear()
        self._users.clear()
        self._references = 0

    def reset(self) -> None:
        """Events were lost: forget everything, and claim nothing."""
        self._blocks.clear()
        self._chains.clear()
        self._users.clear()
        self._changed.clear()
        self._references = 0

    def held(self, session: str) -> int | None:
        """Return the tokens held for a session; None: nothing is known of it."""
        chain = self._chains.get(session)
        return chain.tokens if chain is not None else None

    def changes(self) -> Iterator[tuple[str, int, bool]]:
        """Yield (session, tokens held, whether it was used) since the last call."""
        changed, self._changed = self._changed, {}
        for name, used in changed.items():
            chain = self._chains.get(name)
            if chain is not None:
                yield name, chain.tokens, used

    # ---- inside ----------------------------------------------------------------------------

    def _owner(self, parent: BlockHash | None) -> str | None:
        if parent is None:
            return None
        ends = [
            name
            for name in self._users.get(parent, ())
            if (chain := self._chains[name]).hashes and chain.hashes[-1] == parent
        ]
        return ends[0] if len(ends) == 1 else None

    def _extend(self, name: str, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        chain = self._chains.setdefault(name, _Chain())
        self._chains.move_to_end(name)
        if parent is None:
            self._cut(name, chain, 0)
        elif not chain.hashes or chain.hashes[-1] != parent:
            if name in self._users.get(parent, ()):
                self._cut(name, chain, chain.hashes.index(parent) + 1)
            else:  # another branch: what is known of the blocks before it
                self._cut(name, chain, 0)
                self._append(name, chain, self._ancestors(parent))
        self._append(name, chain, hashes)

    def _ancestors(self, block: BlockHash | None) -> list[BlockHash]:
        """Return the known blocks up to *block*, head first."""
        found: dict[BlockHash, None] = {}
        while block is not None and block not in found and block in self._blocks:
            found[block] = None
            block = self._blocks[block][1]
        return list(found)[::-1]

    def _append(self, name: str, chain: _Chain, hashes: Sequence[BlockHash]) -> None:
        for block in hashes:
            users = self._users.setdefault(block, set())
            if name in users:  # an engine's chain has no circles; a liar's may
                continue
            users.add(name)
            chain.hashes.append(block)
            chain.tokens += self._blocks[block][0]
            self._references += 1

    def _cut(self, name: str, chain: _Chain, keep: int) -> None:
        """Shorten a chain to its first *keep* blocks."""
        while len(chain.hashes) > keep:
            block = chain.hashes.pop()
            users = self._users[block]
            users.discard(name)
            if not users:
                del self._users[block]
            chain.tokens -= self._blocks[block][0] if block in self._blocks else 0
            self._references -= 1

    def _drop(self, block: BlockHash) -> None:
        for name in list(self._users.get(block, ())):
            chain = self._chains[name]
            at = len(chain.hashes) - 1
            while chain.hashes[at] != block:
                at -= 1
            self._cut(name, chain, at)
            self._changed.setdefault(name, False)
        self._blocks.pop(block, None)

    def _forget(self, name: str) -> None:
        self._cut(name, self._chains[name], 0)
        del self._chains[name]
        self._changed.pop(name, None)

"""What the extension asks of vLLM's objects, as types; vLLM's own are checked by `contract`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

__all__ = [
    "Block",
    "BlockQueue",
    "Coordinator",
    "Manager",
    "Pool",
    "PromptRequest",
    "Request",
    "Sampling",
]


class Block(Protocol):
    """One KV block of the pool."""

    block_id: int
    is_null: bool

    @property
    def block_hash(self) -> object | None:
        """Key under which the block's content can be found; None: nobody can ask for it."""
        ...


class BlockQueue(Protocol):
    """The free blocks of a pool; the whole interface that vLLM uses."""

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are free."""
        ...

    def popleft(self) -> Block:
        """Take the next block to reuse."""
        ...

    def popleft_n(self, n: int) -> list[Block]:
        """Take the next *n* blocks to reuse."""
        ...

    def remove(self, block: Block) -> None:
        """Take *block* out because it is used again."""
        ...

    def append(self, block: Block) -> None:
        """Add a block that is reused last."""
        ...

    def append_n(self, blocks: list[Block]) -> None:
        """Add blocks that are reused last, in this order."""
        ...

    def prepend_n(self, blocks: list[Block]) -> None:
        """Add blocks that are reused first, in this order."""
        ...

    def get_all_free_blocks(self) -> list[Block]:
        """Return the free blocks in the order of reuse."""
        ...

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Iterate in the order of reuse, behind *cursor* or from the start."""
        ...


class Pool(Protocol):
    """The block pool of one engine."""

    blocks: Sequence[Block]
    free_block_queue: BlockQueue
    hash_block_size: int


class Manager(Protocol):
    """Book-keeper of one KV group's blocks."""

    block_size: int


class Coordinator(Protocol):
    """All KV groups of one engine."""

    single_type_managers: Sequence[Manager]

    def get_blocks(self, request_id: str) -> tuple[Sequence[Block], ...]:
        """Return the blocks that a request holds, group by group, head first."""
        ...


class Sampling(Protocol):
    """Sampling parameters of a request."""

    extra_args: Mapping[str, object] | None


class Request(Protocol):
    """One request in the scheduler."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_prompt_tokens: int
    sampling_params: Sampling | None
    session_id: str | None
    status: object

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...


class PromptRequest(Request, Protocol):
    """A request whose prompt can be computed again."""

    prompt_token_ids: Sequence[int] | None
    prompt_embeds: object | None
    mm_features: Sequence[object]
    lora_request: object | None
    cache_salt: str | None
    _block_hasher: object | None

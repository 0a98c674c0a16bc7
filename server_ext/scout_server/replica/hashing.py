"""Chained hashes of full blocks: equal hashes mean equal prefixes."""

from array import array
from collections.abc import Sequence

import xxhash

__all__ = ["block_hashes", "extend_hashes"]

_ROOT = 0x5C0F7


def extend_hashes(parent: int, tokens: Sequence[int], block_tokens: int) -> list[int]:
    """
    Return the chained hash of every full block of *tokens* that follow a block hashed *parent*.

    Token ids are non-negative and below 2**32; a last block that is not full has no hash.
    """
    data = array("I", tokens).tobytes()
    width = array("I").itemsize * block_tokens
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(data[start : start + width], parent)
        hashes.append(parent)
    return hashes


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: int = 0) -> list[int]:
    """
    Return the chained hash of every full block of *tokens*, head first.

    Chains with different *salt* (a tenant, an adapter) share nothing.
    """
    return extend_hashes(_ROOT ^ salt, tokens, block_tokens)

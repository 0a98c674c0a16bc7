"""A cheap deterministic tokenizer: word pieces of about four characters, hashed to ids."""

import functools
import re

import xxhash

__all__ = ["pieces", "special", "tokenize"]

_PIECE = re.compile(r" ?[^\W_]{1,4}|\s+|_+|[^\w\s]{1,2}")
_SPECIAL = 1 << 31


def pieces(text: str) -> list[str]:
    """Return the pieces of *text*; joined, they are the text."""
    return _PIECE.findall(text)


@functools.lru_cache(maxsize=1 << 16)
def _id(piece: str) -> int:
    return xxhash.xxh32_intdigest(piece.encode("utf-8", "surrogatepass")) & ~_SPECIAL


@functools.lru_cache(maxsize=2048)
def tokenize(text: str) -> tuple[int, ...]:
    """Return the token ids of *text*, each below 2**31."""
    return tuple(map(_id, _PIECE.findall(text)))


def special(name: str) -> int:
    """Return the id of a control token, at least 2**31: no text contains it."""
    return xxhash.xxh32_intdigest(name.encode()) | _SPECIAL

"""Which headers pass between client and node, in both directions."""

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

from scout_sdk import HintOutcome, _wire

__all__ = ["is_open", "merged_outcome", "to_client", "to_node"]

_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


_TO_NODE = _HOP | {"host", "content-length", "expect"}
_TO_CLIENT = frozenset(name.encode() for name in _HOP)


def is_open(path: str) -> bool:
    """Whether a (decoded) path leads to the API: servers have doors of their own elsewhere."""
    parts = path.split("/")
    return path.startswith("/v1/") and ".." not in parts and "." not in parts


def _text(raw: bytes) -> str:
    """Return what is written again as the same bytes, which clients write in UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _hops(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names of headers that the sender ends at this hop."""
    return {
        token.strip().lower()
        for name, value in pairs
        if len(name) == 10 and name.lower() == "connection"
        for token in value.split(",")
    }


def to_node(
    raw: Iterable[tuple[bytes, bytes]], *, added: Mapping[str, str], removed: frozenset[str]
) -> CIMultiDict[str]:
    """Return a client's headers as they go to a node; *added* replaces, *removed* never passes."""
    pairs = [(n.decode("latin-1"), _text(v)) for n, v in raw]
    drop = _TO_NODE.union(_hops(pairs), removed, added)
    kept = CIMultiDict([pair for pair in pairs if pair[0].lower() not in drop])
    for name, value in added.items():
        kept.add(name, value)
    return kept


def to_client(raw: Iterable[tuple[bytes, bytes]], *, outcome: str) -> list[tuple[bytes, bytes]]:
    """Return a node's response headers as they go to the client, with our outcome in them."""
    pairs = [(name.lower(), value) for name, value in raw]
    drop = _TO_CLIENT
    for name, value in pairs:
        if name == b"connection":
            drop = drop.union(token.strip().lower() for token in value.split(b","))
    if outcome:
        drop = drop.union((_wire.OUTCOME_HEADER.encode(),))
    kept = [pair for pair in pairs if pair[0] not in drop]
    if outcome:
        kept.append((_wire.OUTCOME_HEADER.encode(), outcome.encode()))
    return kept


def merged_outcome(ours: Mapping[str, HintOutcome], theirs: str | None) -> str:
    """Return the outcome header: what the node says of a field counts more than what we say."""
    merged = dict(ours)
    if theirs:
        merged.update(_wire.decode_outcome(theirs))
    return _wire.encode_outcome(merged) if merged else ""

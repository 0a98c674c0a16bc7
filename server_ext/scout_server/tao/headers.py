"""Which headers pass between client and node, in both directions."""

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

from scout_sdk import HintOutcome, _wire

__all__ = ["merged_outcome", "to_client", "to_node"]

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


def _hops(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names of headers that end at this hop."""
    named = {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for token in value.split(",")
    }
    return named | _HOP


def to_node(
    raw: Iterable[tuple[bytes, bytes]], *, added: Mapping[str, str], removed: frozenset[str]
) -> CIMultiDict[str]:
    """Return a client's headers as they go to a node; *added* replaces, *removed* never passes."""
    pairs = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in raw]
    drop = _hops(pairs) | removed | {"host", "content-length", "expect"} | {*added}
    kept: CIMultiDict[str] = CIMultiDict((n, v) for n, v in pairs if n.lower() not in drop)
    for name, value in added.items():
        kept.add(name, value)
    return kept


def to_client(raw: Iterable[tuple[bytes, bytes]], *, outcome: str) -> list[tuple[bytes, bytes]]:
    """Return a node's response headers as they go to the client, with our outcome in them."""
    pairs = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in raw]
    drop = _hops(pairs)
    if outcome:
        drop.add(_wire.OUTCOME_HEADER)
    kept = [
        (name.lower(), value) for name, value in raw if name.decode("latin-1").lower() not in drop
    ]
    if outcome:
        kept.append((_wire.OUTCOME_HEADER.encode(), outcome.encode()))
    return kept


def merged_outcome(ours: Mapping[str, HintOutcome], theirs: str | None) -> str:
    """Return the outcome header: what the node says of a field counts more than what we say."""
    merged = dict(ours)
    if theirs:
        merged.update(_wire.decode_outcome(theirs))
    return _wire.encode_outcome(merged) if merged else ""

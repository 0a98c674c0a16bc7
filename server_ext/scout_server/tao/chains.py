"""Sessions of clients that name none, told by how their requests grow."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

try:  # comes with the extra `kv-events`
    import msgspec
except ImportError:  # pragma: no cover
    _members = _items = None
else:
    _members = msgspec.json.Decoder(dict[str, msgspec.Raw])
    _items = msgspec.json.Decoder(list[msgspec.Raw])

__all__ = ["Chains", "Link", "digests_of", "parts_of"]

_MAX_BODY = 8 * 1024 * 1024
_MAX_CHAINS = 65_536
_MAX_LOOKED_UP = 256
_STRIDE = 512
_LISTS = ("messages", "input")
_WHOLES = ("prompt", "input")
_HEADS = ("model", "system", "instructions")


@dataclass(frozen=True, slots=True)
class Link:
    """Where a request belongs."""

    session: str
    goes_on: bool
    """Whether it begins with all of an earlier request; else it is the first of its session."""


class Chains:
    """
    Finds the session of a request that begins with all that an earlier one said.

    Agent loops send their whole history again and again, so a session's next request begins with
    its last one. Who branches off a request that has been gone on with is a session of its own.
    Whole requests are remembered by digest, the 65536 latest ones; texts are not kept.
    """

    def __init__(self) -> None:
        self._links: OrderedDict[bytes, Link] = OrderedDict()

    def link(self, digests: Sequence[bytes], *, new: str) -> Link | None:
        """
        Return the session of a request by its `digests_of`; *new* names it if it begins one.

        None: there is too little to tell it by. Again with the same *new*: the same answer.
        """
        if not digests:
            return None
        whole = digests[-1]
        again = self._links.get(whole)
        link = Link(new, goes_on=False)
        if again is not None and again.goes_on:
            link = again  # a retry; a first request that comes twice may be of two sessions
        else:
            for digest in digests[-2::-1]:
                found = self._links.pop(digest, None)
                if found is not None:
                    link = Link(found.session, goes_on=True)
                    break
        self._links[whole] = link
        self._links.move_to_end(whole)
        if len(self._links) > _MAX_CHAINS:
            self._links.popitem(last=False)
        return link


def digests_of(tenant: str, body: bytes) -> tuple[bytes, ...]:
    """Return the digests of a request's 257 longest beginnings, the whole one last."""
    parts = parts_of(body)
    return tuple(_digests(tenant, parts))[-_MAX_LOOKED_UP - 1 :] if parts else ()


def parts_of(body: bytes) -> list[bytes]:
    """
    Return a request's body as its head and its messages, or the whole pieces of its prompt.

    Equal messages have equal bytes as long as one client writes them. Empty: nothing to tell it by.
    """
    if not body or len(body) > _MAX_BODY:
        return []
    try:
        document = _raw(body)
        for name in _LISTS:
            raw = document.get(name, b"").lstrip()
            if raw.startswith(b"["):
                return [_head(document), *_raw_items(raw)]
        for name in _WHOLES:
            raw = document.get(name, b"")
            if raw:
                ends = range(_STRIDE, len(raw), _STRIDE)
                return [_head(document), *(raw[end - _STRIDE : end] for end in ends)]
    except (ValueError, RecursionError):
        pass
    return []


def _head(document: dict[str, bytes]) -> bytes:
    return b"\0".join(document.get(name, b"") for name in _HEADS)


def _raw(body: bytes) -> dict[str, bytes]:
    if _members is not None:
        return {name: bytes(value) for name, value in _members.decode(body).items()}
    document = json.loads(body)
    if not isinstance(document, dict):
        return {}
    return {name: json.dumps(value).encode() for name, value in document.items()}


def _raw_items(raw: bytes) -> list[bytes]:
    if _items is not None:
        return [bytes(item) for item in _items.decode(raw)]
    return [json.dumps(item).encode() for item in json.loads(raw)]


def _digests(tenant: str, parts: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the digest of each beginning of *parts* that has more than the head."""
    digest = hashlib.blake2b(tenant.encode() + b"\0" + parts[0], digest_size=16).digest()
    for part in parts[1:]:
        digest = hashlib.blake2b(digest + part, digest_size=16).digest()
        yield digest

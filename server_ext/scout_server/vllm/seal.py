"""Proof that what stands in a request's xargs was put there by one of our own API servers."""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CALL_XARG", "SEAL_XARG", "TENANT_XARG", "Origin", "Seals", "sealed"]

TENANT_XARG = "scout_tenant"
"""Whom a request belongs to."""
CALL_XARG = "scout_call"
"""Names a request between its API server and the engine, until its response has ended."""
SEAL_XARG = "scout_seal"
"""Proves the two above; a client may write all three, but not prove them."""

_MAX_KEYS = 64
_MAX_CHARS = 64
_UNSEALED = "unsealed:"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, as far as the engine can trust it."""

    tenant: str = ""
    call: str = ""
    """Empty: nobody will tell how its response ends."""


def sealed(key: bytes, tenant: str) -> dict[str, object]:
    """Return the xargs of a new request of *tenant*; equal tenants get different ones."""
    call = secrets.token_hex(8)
    return {TENANT_XARG: tenant, CALL_XARG: call, SEAL_XARG: _seal(key, tenant, call)}


class Seals:
    """
    The keys of the API servers that an engine answers to; a bounded number, the newest ones.

    A tenant that is not proved is kept apart from all that are, under a name of its own.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        """Trust what is sealed with *key*, at most 64 bytes."""
        self._keys[key[:64]] = None
        self._keys.move_to_end(key[:64])
        if len(self._keys) > _MAX_KEYS:
            self._keys.popitem(last=False)

    def origin(self, xargs: Mapping[str, object] | None) -> Origin:
        """Return what *xargs*, which anyone may have written, prove."""
        if not xargs:
            return Origin()
        tenant, call, seal = (xargs.get(name) for name in (TENANT_XARG, CALL_XARG, SEAL_XARG))
        if isinstance(tenant, str) and isinstance(call, str) and isinstance(seal, str):
            for key in reversed(self._keys):
                proof = _seal(key, tenant, call)
                if hmac.compare_digest(proof.encode(), seal.encode("utf-8", "replace")):
                    return Origin(tenant, call)
        if isinstance(tenant, str) and tenant:
            return Origin(_UNSEALED + tenant[:_MAX_CHARS])
        return Origin()


def _seal(key: bytes, tenant: str, call: str) -> str:
    said = f"{len(tenant)}:{tenant}{call}".encode("utf-8", "replace")
    return hashlib.blake2b(said, key=key, digest_size=16).hexdigest()

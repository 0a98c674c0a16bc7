"""Who a request belongs to. Nothing learnt from one tenant shows in another's decisions."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from scout_sdk._wire import credentials_in

__all__ = ["TenancySettings", "tenant_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenancySettings:
    """How a tenant is told from a request."""

    tenant_header: str = ""
    """Header set by a trusted proxy that names the tenant; empty: none is trusted."""
    private_state: bool = False
    """Show every caller of /v1/scout/state the agents of its own tenant only."""


def tenant_of(headers: Mapping[str, str], settings: TenancySettings) -> str:
    """
    Return a short opaque tenant id, the same for the same credentials; "" without any.

    *headers* has lower-case names. The trusted header wins when it is configured; else the API key
    (`Authorization: Bearer`, `api-key` or `x-api-key`) stands for the tenant. Only a hash is kept.
    """
    name = settings.tenant_header.lower()
    value = headers.get(name) if name else None
    kind = "proxy"
    if value is None:
        kind = "key"
        _, value = credentials_in(headers) or ("", None)
    if not value:
        return ""
    return hashlib.sha256(f"{kind}:{value}".encode("utf-8", "surrogateescape")).hexdigest()[:16]

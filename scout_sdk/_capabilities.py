"""Where a server's Scout endpoints are, and what it says that it takes."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from scout_sdk._errors import ConfigError
from scout_sdk._wire import CAPABILITIES_PATH

__all__ = ["MAX_ANSWER_BYTES", "Capabilities", "Endpoint", "fetch_capabilities"]

MAX_ANSWER_BYTES = 65_536
"""Octets of an answer that the SDK reads."""
_MAX_FEATURES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that an OpenAI client knows by its base URL."""

    secure: bool
    host: str
    port: int
    prefix: str
    """Path before `/v1`; empty for most servers."""

    @classmethod
    def parse(cls, base_url: str) -> "Endpoint":
        """Return the server at *base_url*, with or without `/v1`. Raises ConfigError."""
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host or not host.isascii():
            raise ConfigError(
                f"base URL {base_url!r} is not of the form http://HOST[:PORT][/PATH] or https://...,"
                " such as http://host:8000/v1"
            )
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        if not (prefix.isascii() and prefix.isprintable()) or " " in prefix:
            raise ConfigError(f"base URL {base_url!r} has a path that is not percent-encoded")
        return cls(secure=secure, host=host, port=port or (443 if secure else 80), prefix=prefix)

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection that is opened by its first request; *timeout_s* is for a step."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a hint-aware server takes."""

    version: int
    """Version of the protocol that it speaks."""
    features: frozenset[str]
    """What it does: `hints`, `events`, `outcome`, and names of its own."""
    limits: Mapping[str, float]
    """Bounds of its own, by name."""

    @classmethod
    def parse(cls, body: bytes) -> "Capabilities | None":
        """Return the capabilities that *body* states, or None where it states none."""
        try:
            given = json.loads(body)
            version, features = given["version"], given["features"]
            limits = given.get("limits") or {}
        except Exception:  # not JSON, or of another shape
            return None
        if type(version) is not int or not isinstance(features, list):
            return None
        known = {
            str(name): float(bound)
            for name, bound in (limits.items() if isinstance(limits, dict) else ())
            if isinstance(bound, int | float) and abs(bound) < 1e15
        }
        return cls(
            version=version,
            features=frozenset(name for name in features[:_MAX_FEATURES] if isinstance(name, str)),
            limits=MappingProxyType(known),
        )


def fetch_capabilities(
    base_url: str, *, api_key: str | None = None, timeout_s: float = 1.0
) -> Capabilities | None:
    """
    Ask the server at *base_url* what it takes; None: it is no hint-aware server.

    Raises ConfigError for a wrong URL, OSError for a server that cannot be reached, answers
    no HTTP, or does not answer in time.
    """
    endpoint = Endpoint.parse(base_url)
    connection = endpoint.connect(timeout_s)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", endpoint.prefix + CAPABILITIES_PATH, headers=headers)
        answer = connection.getresponse()
        body = answer.read(MAX_ANSWER_BYTES)
    except http.client.HTTPException as fault:
        raise OSError(f"{base_url} does not answer in HTTP: {fault!r}") from fault
    finally:
        connection.close()
    return Capabilities.parse(body) if answer.status == 200 else None

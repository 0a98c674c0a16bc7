"""Which Ray is supported: a thin range, since all that `_compat` extends is alpha."""

from importlib import metadata, util

from packaging.specifiers import SpecifierSet

from scout_sdk import UnsupportedError

__all__ = ["SUPPORTED", "require_ray"]

SUPPORTED = SpecifierSet(">=2.60,<2.61")
"""Releases of Ray that the tests ran on; earlier ones may abandon a held request."""


def require_ray() -> None:
    """Raise UnsupportedError when Ray Serve is missing or outside the supported range."""
    advice = "pip install 'scout-sdk[ray]'"
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        msg = f"Ray is not installed: {advice}"
        raise UnsupportedError(msg) from None
    if not SUPPORTED.contains(version, prereleases=True):
        msg = f"Ray {version} is not supported; supported: {SUPPORTED}: {advice}"
        raise UnsupportedError(msg)
    if util.find_spec("ray.serve") is None or util.find_spec("fastapi") is None:
        msg = f"Ray Serve is not installed: {advice}"
        raise UnsupportedError(msg)

"""The one decorator that keeps our faults out of a user's run; it lives in the SDK."""

from scout_sdk._guard import guarded, warn_once

__all__ = ["guarded", "warn_once"]

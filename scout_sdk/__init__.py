"""Tell a serving engine which agent runs, what it waits for, and when it returns."""

from scout_sdk._errors import ConfigError, ProtocolError, ScoutError, UnsupportedError
from scout_sdk._hints import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState

__all__ = [
    "ConfigError",
    "Evidence",
    "HintOutcome",
    "Hints",
    "ProtocolError",
    "ScoutError",
    "SessionEvent",
    "ToolEvent",
    "ToolState",
    "UnsupportedError",
]

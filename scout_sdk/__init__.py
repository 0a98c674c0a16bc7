"""Tell a serving engine which agent runs, what it waits for, and when it returns."""

from scout_sdk._context import context, current_hints, use_hints
from scout_sdk._errors import ConfigError, ProtocolError, ScoutError, UnsupportedError
from scout_sdk._hints import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState
from scout_sdk._openai import attach, install, uninstall
from scout_sdk._openai import install as instrument
from scout_sdk._openai import uninstall as uninstrument
from scout_sdk._sessions import finish, flush, shutdown
from scout_sdk.recorder import record

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
    "attach",
    "context",
    "current_hints",
    "finish",
    "flush",
    "install",
    "instrument",
    "record",
    "shutdown",
    "uninstall",
    "uninstrument",
    "use_hints",
]

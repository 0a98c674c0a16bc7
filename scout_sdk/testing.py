"""
What tests of code that uses Scout need: a recording server and transport, a clock, strict mode.

Shipped to users. The server and the clock need the standard library only; RecordingTransport
imports httpx when it is first asked for.
"""

from typing import TYPE_CHECKING

from scout_sdk._clock import FakeClock
from scout_sdk._recording import RecordedRequest, RecordingServer
from scout_sdk._replies import Reply, ToolCall
from scout_sdk._strict import enabled as is_strict
from scout_sdk._strict import strict

if TYPE_CHECKING:
    from scout_sdk._recording_transport import RecordingTransport

__all__ = [
    "FakeClock",
    "RecordedRequest",
    "RecordingServer",
    "RecordingTransport",
    "Reply",
    "ToolCall",
    "is_strict",
    "strict",
]


def __getattr__(name: str) -> object:
    if name == "RecordingTransport":
        from scout_sdk._recording_transport import RecordingTransport

        return RecordingTransport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

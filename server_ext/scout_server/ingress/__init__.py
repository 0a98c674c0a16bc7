"""
What arrives at a server, whoever sent it: requests, responses and events, read the same way.

Used by every engine and by the gateway; imports no engine. Nothing here raises on what a client or
an engine sent, and all work and memory are bounded.
"""

from scout_server.ingress.events import EventDesk, Taken
from scout_server.ingress.requests import Arrival, RequestReader
from scout_server.ingress.responses import Ending, ResponseObserver, ToolUse, expected_tools
from scout_server.ingress.settings import IngressSettings

__all__ = [
    "Arrival",
    "Ending",
    "EventDesk",
    "IngressSettings",
    "RequestReader",
    "ResponseObserver",
    "Taken",
    "ToolUse",
    "expected_tools",
]

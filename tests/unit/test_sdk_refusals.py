"""The SDK stops sending headers to a server that says that it takes no hints."""

import openai
import pytest

import scout_sdk
from scout_sdk import SessionEvent, _refusals
from scout_sdk._refusals import note_refusal, refuses_hints
from scout_sdk.events import EventSender
from scout_sdk.testing import FakeClock
from scout_server.embedded.launch import running_server
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.policy.runtime import PolicySettings


@pytest.fixture(autouse=True)
def _forgotten():
    scout_sdk.install()
    yield
    _refusals._refusing.clear()
    scout_sdk.shutdown()


class Watched:
    """An application around another that notes the names of our headers."""

    def __init__(self, app):
        self.app = app
        self.seen = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"].endswith("/completions"):
            names = [name for name, _ in scope["headers"]]
            self.seen.append(any(name.startswith(b"x-scout-") for name in names))
        await self.app(scope, receive, send)


@pytest.mark.parametrize("hints", [True, False])
def test_a_server_without_hints_gets_no_more_headers(hints):
    """
    Once the side channel has asked what the server takes, requests carry hints only if it does.
    """
    watched = []
    settings = EmbeddedSettings(step_s=0.0, prefill_tokens_per_s=1e9, reply_tokens=2)

    def wrap(app):
        watched.append(Watched(app))
        return watched[0]

    with running_server(settings, PolicySettings(hints=hints), wrap=wrap) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="k") as client:
            for _ in range(2):
                with scout_sdk.context(session="s", agent="a"):
                    client.completions.create(model="m", prompt="hi")
                sender = EventSender(url)
                sender.emit(SessionEvent(session="s", final=True))
                sender.flush()
                sender.close()

    assert watched[0].seen == [True, hints]


def test_a_refusal_is_believed_for_a_minute():
    """
    Then hints are tried again; a server that takes them is remembered as no refuser at once.
    """
    clock = FakeClock()
    note_refusal("h", 80, True, clock=clock)
    assert refuses_hints(False, "h", None, clock=clock)
    assert not refuses_hints(True, "h", None, clock=clock)
    assert not refuses_hints(False, "h", 8080, clock=clock)
    clock.advance(61.0)
    assert not refuses_hints(False, "h", 80, clock=clock)
    note_refusal("::1", 8000, True, clock=clock)
    assert refuses_hints(False, "[::1]", 8000, clock=clock)
    note_refusal("::1", 8000, False, clock=clock)
    assert not refuses_hints(False, "[::1]", 8000, clock=clock)


def test_refusals_are_bounded():
    """
    However many servers refuse, a bounded number is remembered.
    """
    for port in range(1000):
        note_refusal("h", port, True)

    assert 0 < len(_refusals._refusing) <= 64
    assert refuses_hints(False, "h", 999)

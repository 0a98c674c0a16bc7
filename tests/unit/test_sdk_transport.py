"""The transports, for real: httpx and httpx2 clients against a loopback server."""

import importlib
import importlib.util

import httpx
import openai
import pytest

import scout_sdk
from scout_sdk import Hints, use_hints
from scout_sdk.testing import RecordingServer, RecordingTransport, Reply, strict
from scout_sdk.transport import AsyncHintTransport, HintTransport

HINTS = Hints(session="s1", agent="planner", turn=3)
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SYNC = {"httpx": (httpx.Client, None)}
ASYNC = {"httpx": (httpx.AsyncClient, None)}
NEWEST = httpx
if importlib.util.find_spec("httpx2"):  # what openai 3 and later use
    NEWEST = importlib.import_module("httpx2")
    SYNC["httpx2"] = (NEWEST.Client, NEWEST.HTTPTransport)
    ASYNC["httpx2"] = (NEWEST.AsyncClient, NEWEST.AsyncHTTPTransport)


@pytest.fixture(autouse=True)
def _strict():
    with strict():
        yield


@pytest.fixture
def server():
    with RecordingServer() as running:
        yield running
    assert running.faults == []


@pytest.mark.parametrize("library", SYNC)
def test_hints_in_force_are_sent(server, library):
    """A synchronous client sends the hints in force, and none outside."""
    client_class, inner = SYNC[library]
    with client_class(transport=HintTransport(inner and inner())) as client:
        with use_hints(HINTS):
            answer = client.post(f"{server.base_url}/chat/completions", json=BODY)
        client.post(f"{server.base_url}/chat/completions", json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == "done"
    assert [request.hints for request in server.requests] == [HINTS, None]


@pytest.mark.parametrize("library", ASYNC)
async def test_hints_in_force_are_sent_from_a_loop(server, library):
    """An asynchronous client sends the hints in force, and none outside."""
    client_class, inner = ASYNC[library]
    async with client_class(transport=AsyncHintTransport(inner and inner())) as client:
        with use_hints(HINTS):
            await client.post(f"{server.base_url}/chat/completions", json=BODY)
        await client.post(f"{server.base_url}/chat/completions", json=BODY)
    assert [request.hints for request in server.requests] == [HINTS, None]


@pytest.mark.parametrize("library", SYNC)
def test_a_callable_says_which_hints(server, library):
    """Hints from a callable are asked for at every request; headers set by hand win."""
    client_class, inner = SYNC[library]
    given = iter([HINTS, None, HINTS])
    transport = HintTransport(inner and inner(), hints=lambda: next(given))
    with client_class(transport=transport) as client:
        for headers in ({}, {}, {"X-Scout-Agent": "mine"}):
            client.post(f"{server.base_url}/chat/completions", json=BODY, headers=headers)
        client.get(f"{server.base_url}/models")
    agents = [request.hints and request.hints.agent for request in server.requests]
    assert agents == ["planner", None, "mine", None]


def test_openai_clients_take_it(server):
    """The openai package works through it, streaming too; its retries say the same."""
    transport = HintTransport(NEWEST.HTTPTransport())
    with (
        NEWEST.Client(transport=transport) as http_client,
        openai.OpenAI(base_url=server.base_url, api_key="k", http_client=http_client) as client,
        scout_sdk.context(session="s2", agent="coder"),
    ):
        scout_sdk.uninstall()
        messages = [{"role": "user", "content": "[[fail 1 t]]"}]
        list(client.chat.completions.create(model="m", messages=messages, stream=True))
    scout_sdk.install()  # as other tests expect it
    assert [request.hints.agent for request in server.requests] == ["coder", "coder"]


def test_strangers_get_nothing():
    """A host that nobody allowed gets no header; an allowed one does."""
    recording = RecordingTransport()
    with httpx.Client(transport=HintTransport(recording, hints=lambda: HINTS)) as client:
        client.post("https://api.example.org/v1/chat/completions", json=BODY)
        client.post("http://127.0.0.1:1/v1/chat/completions", json=BODY)
    named = HintTransport(recording, hints=lambda: HINTS, hosts=["https://gpu.example.com:8000"])
    with httpx.Client(transport=named) as client:
        client.post("https://gpu.example.com:8000/v1/chat/completions", json=BODY)
    assert [request.hints for request in recording.requests] == [None, HINTS, HINTS]


@pytest.mark.parametrize("library", SYNC)
async def test_close_is_forwarded(library):
    """Closing a client closes the transport that is wrapped."""
    recording = RecordingTransport()
    SYNC[library][0](transport=HintTransport(recording)).close()
    assert recording.closed
    recording = RecordingTransport()
    await ASYNC[library][0](transport=AsyncHintTransport(recording)).aclose()
    assert recording.closed
    recording = RecordingTransport()
    async with ASYNC[library][0](transport=AsyncHintTransport(recording)):
        assert not recording.closed


def test_a_broken_callable_breaks_no_request():
    """Outside strict mode a fault in the hints is logged, and the request goes out."""

    def broken():
        raise LookupError("no hints today")

    recording = RecordingTransport()
    url = "http://localhost/v1/chat/completions"
    with httpx.Client(transport=HintTransport(recording, hints=broken)) as client:
        with pytest.raises(LookupError):
            client.post(url, json=BODY)
        scout_sdk._strict._depth, depth = 0, scout_sdk._strict._depth
        try:
            assert client.post(url, json=BODY).status_code == 200
        finally:
            scout_sdk._strict._depth = depth


@pytest.mark.parametrize("library", SYNC)
def test_the_recording_transport_answers(library):
    """RecordingTransport answers text, streams and errors in the client's own library."""
    recording = RecordingTransport(
        lambda request: Reply(status=503) if request.json == {} else Reply(text="a b")
    )
    with SYNC[library][0](transport=recording) as client:
        url = "http://localhost/v1/chat/completions"
        assert client.post(url, json=BODY).json()["choices"][0]["message"]["content"] == "a b"
        assert "data: [DONE]" in client.post(url, json=BODY | {"stream": True}).text
        assert client.post(url, json={}).status_code == 503
    assert [request.method for request in recording.requests] == ["POST"] * 3

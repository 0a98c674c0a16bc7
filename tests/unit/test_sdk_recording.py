"""The recording server that is shipped to users: what real clients make of its answers."""

import asyncio
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from scout_sdk import Hints, SessionEvent
from scout_sdk._wire import CAPABILITIES_PATH, EVENTS_PATH, encode, encode_events
from scout_sdk.testing import RecordedRequest, RecordingServer, Reply, ToolCall


@pytest.fixture
def server():
    with RecordingServer() as running:
        yield running
    assert running.faults == []


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="k") as made:
        yield made


def ask(client, text, **more):
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], **more
    )


def test_chat_answers_and_records(server, client):
    """A chat request gets the text that it asks for, and is recorded byte by byte."""
    answer = ask(client, "[[id a7]] [[say one two]]", extra_headers=encode(Hints(agent="planner")))

    assert answer.choices[0].message.content == "one two"
    (request,) = server.requests
    assert (request.method, request.path, request.mark) == ("POST", "/v1/chat/completions", "a7")
    assert request.hints == Hints(agent="planner")
    assert json.loads(request.body) == request.json
    assert request.header("Authorization") == "Bearer k"


def test_the_outcome_of_hints_is_said(server, client):
    """A hint-aware server says what became of each hint; an unhinted request gets no header."""
    raw = client.chat.completions.with_raw_response
    messages = [{"role": "user", "content": "x"}]
    hinted = raw.create(model="m", messages=messages, extra_headers={"X-Scout-Turn": "-1"})
    plain = raw.create(model="m", messages=messages)

    assert hinted.headers["x-scout-outcome"] == "turn=rejected"
    assert "x-scout-outcome" not in plain.headers


def test_tool_calls_until_their_result_is_there(server, client):
    """A directive makes tool calls; once the last message is a result, the answer is text."""
    first = ask(client, '[[tool run {"command": "sleep 5"}]] [[tool look {}]]')
    calls = first.choices[0].message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("run", {"command": "sleep 5"}),
        ("look", {}),
    ]
    assert first.choices[0].finish_reason == "tool_calls"
    second = client.chat.completions.create(
        model="m",
        messages=[
            {"role": "user", "content": "[[tool run {}]]"},
            {"role": "tool", "tool_call_id": calls[0].id, "content": "ok"},
        ],
    )
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content == "done"


def test_injected_failures_are_retried_by_the_client(server, client):
    """The first N requests with a key fail; the client's retries say how many came before."""
    ask(client, "[[fail 2 k1]]")

    assert [request.retries for request in server.requests] == [0, 1, 2]
    with pytest.raises(openai.RateLimitError):
        ask(client.with_options(max_retries=0), "[[fail 1 k2 429]]")


def test_chat_streams(server, client):
    """A stream carries the words, the finish reason and, when asked, the usage."""
    chunks = list(ask(client, "[[say a b c]]", stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "a b c"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.total_tokens == 7


def test_chat_streams_tool_calls(server, client):
    """A streamed tool call has its name and arguments."""
    chunks = list(ask(client, '[[tool run {"a": 1}]]', stream=True))
    (call,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("run", '{"a": 1}')
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_responses_api(server, client):
    """The responses API gets text, tool calls and streams."""
    assert client.responses.create(model="m", input="[[say hi]]").output_text == "hi"
    (call,) = client.responses.create(model="m", input="[[tool run {}]]").output
    assert (call.type, call.name) == ("function_call", "run")
    result = [
        {"role": "user", "content": "[[tool run {}]]"},
        {"type": "function_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    assert client.responses.create(model="m", input=result).output_text == "done"
    with client.responses.stream(model="m", input="[[say a b]]") as stream:
        assert stream.get_final_response().output_text == "a b"
    with client.responses.stream(model="m", input="[[tool run {}]]") as stream:
        assert stream.get_final_response().output[0].name == "run"


def test_completions_api(server, client):
    """The completions API gets text, streaming or not."""
    assert client.completions.create(model="m", prompt="[[say hi]]").choices[0].text == "hi"
    stream = client.completions.create(model="m", prompt="[[say a b]]", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "a b"


def test_models(client):
    """It lists a model, as clients ask at start."""
    assert [model.id for model in client.models.list()] == ["recorded"]


def test_a_script_answers_before_the_directives():
    """A reply callable wins; where it returns None the directives count."""

    def script(request: RecordedRequest) -> Reply | None:
        if request.hints is None:
            return None
        return Reply(tools=(ToolCall(name="go", arguments='{"n": 1}', call_id="c1"),))

    with (
        RecordingServer(reply=script) as server,
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
    ):
        assert ask(client, "[[say hi]]").choices[0].message.content == "hi"
        hinted = ask(client, "[[say hi]]", extra_headers={"x-scout-agent": "a"})
        assert hinted.choices[0].message.tool_calls[0].id == "c1"


def post(server, path, body, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request(method, path, body)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def test_side_channel(server):
    """Events are taken, counted and kept; the capabilities say so."""
    event = SessionEvent(session="s", final=True)
    assert post(server, EVENTS_PATH, encode_events([event])) == (
        200,
        {"accepted": 1, "rejected": 0},
    )
    assert post(server, EVENTS_PATH, b"nonsense") == (200, {"accepted": 0, "rejected": 1})
    assert server.events == [event]
    assert server.wait_for(lambda s: len(s.events) == 1)
    assert not server.wait_for(lambda s: len(s.events) == 2, timeout_s=0.01)
    status, capabilities = post(server, CAPABILITIES_PATH, None, "GET")
    assert (status, capabilities["version"]) == (200, 1)
    server.clear()
    assert (server.events, server.requests) == ([], [])


def test_a_server_that_never_heard_of_scout():
    """Without hint awareness there is no side channel and no outcome."""
    with RecordingServer(hint_aware=False) as server:
        assert post(server, EVENTS_PATH, encode_events([]))[0] == 404
        assert post(server, CAPABILITIES_PATH, None, "GET")[0] == 404


def test_a_body_that_is_no_object_is_refused(server):
    """A completion request that is not a JSON object gets a 404, not a fault."""
    for body in (b"", b"[1]", b"{", b"\xff"):
        assert post(server, "/v1/chat/completions", body)[0] == 404


def test_a_hundred_at_once(server):
    """A hundred parallel calls from threads and from one loop all get their own answer."""
    with (
        openai.OpenAI(base_url=server.base_url, api_key="k") as client,
        ThreadPoolExecutor(20) as pool,
    ):
        answers = list(pool.map(lambda i: ask(client, f"[[id {i}]]"), range(100)))
    assert [a.choices[0].message.content for a in answers] == [f"done {i}" for i in range(100)]

    async def main():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
            return await asyncio.gather(*(ask(client, f"[[id {i}]]") for i in range(100)))

    answers = asyncio.run(main())
    assert [a.choices[0].message.content for a in answers] == [f"done {i}" for i in range(100)]
    assert len(server.llm_requests) == 200


def test_stop_ends_a_sleeping_answer():
    """Stopping does not wait for an answer that sleeps, nor for idle connections."""
    with RecordingServer() as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(ask, client, "[[sleep 600]]")
            assert server.wait_for(lambda s: len(s.requests) == 1)
            server.stop()
            with pytest.raises(openai.APIConnectionError):
                pending.result()
        client.close()

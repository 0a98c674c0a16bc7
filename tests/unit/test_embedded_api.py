"""The embedded engine's HTTP side, over a real socket."""

import asyncio
import json
import re

import httpx
import openai
import pytest

from scout_sdk import HintOutcome, Hints, SessionEvent
from scout_sdk._wire import decode_outcome, encode, encode_events
from scout_server.embedded.launch import running_server
from scout_server.embedded.settings import EmbeddedSettings

_QUICK = EmbeddedSettings(kv_blocks=512, step_s=0.0005, prefill_tokens_per_s=1e6)
_SYSTEM = {"role": "system", "content": "You are a careful agent with a long prompt. " * 40}


@pytest.fixture(scope="module")
def server():
    with running_server(_QUICK) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as made:
        yield made


def _chat(user: str, **more: object) -> dict[str, object]:
    return {"messages": [_SYSTEM, {"role": "user", "content": user}], **more}


def _metric(text: str, name: str) -> float:
    return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))


def test_a_chat_completion_says_what_was_cached(client):
    """
    The second request with a system prompt finds it; usage and text fit the reply.
    """
    first = client.chat.completions.create(model="m", messages=_chat("one")["messages"])
    again = client.chat.completions.create(
        model="m", messages=_chat("[[reply it is two]]")["messages"]
    )
    assert again.choices[0].message.content == "it is two"
    assert again.choices[0].finish_reason == "stop"
    assert again.model == "m"
    assert first.usage.completion_tokens == _QUICK.reply_tokens
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert 300 < cached < again.usage.prompt_tokens
    assert cached % _QUICK.block_tokens == 0


def test_a_stream_is_the_reply_in_pieces_and_ends_with_the_usage(client):
    """
    The pieces are the text that the same request gives in one piece.
    """
    messages = _chat("tell me")["messages"]
    whole = client.chat.completions.create(model="m", messages=messages)
    chunks = list(
        client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(c.usage is None for c in chunks[:-1])


def test_tool_calls_are_streamed_and_whole(client):
    """
    Both ways give the same name, arguments and finish reason.
    """
    messages = _chat('[[tool look {"at": "it"}]] [[tool wait {}]]')["messages"]
    whole = client.chat.completions.create(model="m", messages=messages).choices[0]
    assert whole.finish_reason == "tool_calls"
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    assert calls == [("look", '{"at": "it"}'), ("wait", "{}")]
    streamed: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            entry = streamed.setdefault(call.index, ["", ""])
            entry[0] += call.function.name or ""
            entry[1] += call.function.arguments or ""
    assert [tuple(entry) for _, entry in sorted(streamed.items())] == calls


def test_completions_and_responses_answer_too(client):
    """
    Text, usage, and for a stream of responses the events in the SDK's own order.
    """
    done = client.completions.create(model="m", prompt="abc [[reply five words]]", max_tokens=99)
    assert done.choices[0].text == "five words"
    cut = client.completions.create(model="m", prompt="abc", max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    response = client.responses.create(model="m", input="[[reply hello]]", instructions="You help")
    assert response.output_text == "hello"
    assert response.usage.output_tokens > 0
    call = client.responses.create(model="m", input='[[tool f {"a": 1}]]').output[0]
    assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"a": 1}')
    with client.responses.stream(model="m", input="[[reply hello there]]") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "hello there"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[1]", 400, "a JSON object, not list"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b'{"messages": []}', 400, "at least one message"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 200, ""),
        (json.dumps(_chat("x" * 100_000)).encode(), 400, "tokens fit"),
    ],
)
def test_bad_bodies_are_openai_errors(http, content, status, message):
    """
    Status 400 and an error object; the engine goes on.
    """
    answer = http.post("/v1/chat/completions", content=content)
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
    assert http.get("/health").status_code == 200


def test_unknown_paths_and_methods_are_openai_errors(http):
    """
    404 and 405 with an error object.
    """
    assert http.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    assert http.get("/v1/chat/completions").status_code == 405


def test_a_body_over_the_limit_is_refused():
    """
    413 names the limit.
    """
    with running_server(EmbeddedSettings(max_body_bytes=2000)) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", content=b" " * 3000)
    assert answer.status_code == 413
    assert "2000 bytes" in answer.json()["error"]["message"]


def test_hints_get_an_outcome(http):
    """
    Good fields are accepted, a bad one is rejected, the request succeeds; counters say so.
    """
    headers = encode(Hints(session="s1", agent="planner", turn=1))
    headers["x-scout-tools"] = "((("
    answer = http.post("/v1/chat/completions", json=_chat("hi"), headers=headers)
    assert answer.status_code == 200
    outcomes = decode_outcome(answer.headers["x-scout-outcome"])
    assert outcomes["agent"] is HintOutcome.ACCEPTED
    assert outcomes["tools"] is HintOutcome.REJECTED
    text = http.get("/metrics").text
    assert _metric(text, 'scout_hints_total{field="agent",outcome="accepted"}') >= 1


def test_other_clients_identity_counts(http):
    """
    A session header of another client is taken; the outcome says so.
    """
    headers = {"x-dynamo-session-id": "abc"}
    answer = http.post("/v1/chat/completions", json=_chat("hi"), headers=headers)
    assert decode_outcome(answer.headers["x-scout-outcome"]) == {"session": HintOutcome.ACCEPTED}


def test_the_lru_server_says_that_it_ignores_hints():
    """
    With identity off every hint's outcome is `ignored`.
    """
    settings = EmbeddedSettings(policy="lru", step_s=0.0005)
    with running_server(settings) as running:
        answer = httpx.post(
            f"{running.url}/v1/chat/completions",
            json=_chat("hi"),
            headers=encode(Hints(session="s1", agent="planner")),
        )
        state = httpx.get(f"{running.url}/v1/scout/state").json()
    outcomes = decode_outcome(answer.headers["x-scout-outcome"])
    assert set(outcomes.values()) == {HintOutcome.IGNORED}
    assert state["mode"] == "lru"


def test_events_capabilities_models_and_state(http):
    """
    The side channel counts what it takes; the server says what it is.
    """
    body = encode_events([SessionEvent(session="s1"), SessionEvent(session="s2", final=True)])
    taken = http.post("/v1/scout/events", content=body)
    assert (taken.status_code, taken.json()) == (202, {"accepted": 2, "rejected": 0})
    refused = http.post("/v1/scout/events", content=b"?")
    assert (refused.status_code, refused.json()) == (400, {"accepted": 0, "rejected": 1})
    capabilities = http.get("/v1/scout/capabilities").json()
    assert capabilities["version"] == 1
    assert {"hints", "events", "outcome"} <= set(capabilities["features"])
    assert http.get("/v1/models").json()["data"][0]["id"] == "scout-embedded"
    state = http.get("/v1/scout/state").json()
    assert state["blocks"]["total"] == 512
    assert state["events"]["accepted"] >= 2
    assert state["core"]["agents"]


def test_metrics_have_vllms_names_and_meanings(http):
    """
    Queries and hits are prompt tokens; the first tokens are counted in a histogram.
    """
    names = ("queries", "hits")
    before = http.get("/metrics").text
    answers = [http.post("/v1/chat/completions", json=_chat(f"m{n}")).json() for n in range(2)]
    after = http.get("/metrics").text
    queried, hit = (
        _metric(after, f"vllm:prefix_cache_{n}_total")
        - _metric(before, f"vllm:prefix_cache_{n}_total")
        for n in names
    )
    usages = [answer["usage"] for answer in answers]
    assert queried == sum(usage["prompt_tokens"] for usage in usages)
    assert hit == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert 'vllm:cache_config_info{block_size="16"' in after
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_count",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "scout_mode",
        "scout_faults_total",
    ):
        assert f"\n{name}{{" in after or f"\n{name} " in after
    ttft = "vllm:time_to_first_token_seconds_count"
    assert _metric(after, ttft) - _metric(before, ttft) == 2


async def _state(client: httpx.AsyncClient) -> dict[str, object]:
    return (await client.get("/v1/scout/state")).json()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_blocks(server, stream):
    """
    After a disconnect nothing runs and every block is free, streaming or not.
    """
    before = server.engine.finishes["abort"]
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        body = _chat("[[tokens 5000]]", stream=stream)
        if stream:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                await anext(answer.aiter_lines())
        else:
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not (await _state(client))["running"]:
                pass
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        while (state := await _state(client))["finishes"].get("abort", 0) == before:
            pass
    assert state["running"] == 0
    assert state["blocks"]["free"] == 512


async def test_requests_share_steps(server):
    """
    Forty requests at once are all answered, each with its own text.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answers = await asyncio.gather(
            *(
                client.post("/v1/chat/completions", json=_chat(f"[[reply number {n}]]"))
                for n in range(40)
            )
        )
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [f"number {n}" for n in range(40)]

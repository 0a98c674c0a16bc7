"""What is read off responses of the four APIs, whole and streamed, in pieces of any size."""

import json

import pytest

from scout_server.ingress import Ending, ResponseObserver, expected_tools
from scout_server.ingress.responses import _MAX_ARGUMENTS, _MAX_BODY, _MAX_LINE
from scout_server.policy.facts import Finish

SLEEP = '{"command": "sleep 5"}'
EXPECTED = Ending(finish=Finish.TOOL_CALLS, tools=(("bash", 5.0), ("look", None)))
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"Content-Type", b"application/json")]


def sse(*events, named=False):
    out = b""
    for event in events:
        if named:
            out += f"event: {event['type']}\n".encode()
        out += b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return out + b"data: [DONE]\n\n"


def observe(data, headers, *, size=7, status=200, end=True):
    found = []
    observer = ResponseObserver(found.append)
    observer.start(status, headers)
    for at in range(0, len(data), size):
        observer.feed(data[at : at + size])
    if end:
        observer.end()
        observer.end()
    assert len(found) <= 1
    return found[0] if found else None


def delta(delta=None, finish=None, index=0):
    return {"choices": [{"index": index, "delta": delta or {}, "finish_reason": finish}]}


def function(index, name=None, arguments=None):
    inner = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {"tool_calls": [{"index": index, "function": inner}]}


CHAT_STREAM = sse(
    delta({"role": "assistant", "content": 'the word "tool_calls" in a text'}),
    delta(function(0, "bash", "")),
    delta(function(0, None, SLEEP[:9])),
    delta(function(1, "look", "{")),
    delta(function(0, None, SLEEP[9:])),
    delta(function(1, None, "}")),
    delta(finish="tool_calls"),
    {"choices": [], "usage": {"prompt_tokens": 1}},
)
CHAT = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "tool_calls": [
                    {"function": {"name": "bash", "arguments": SLEEP}},
                    {"function": {"name": "look", "arguments": "{}"}},
                ]
            },
        },
        {"index": 1, "finish_reason": "stop", "message": {"content": "other choice"}},
    ]
}
ITEMS = [
    {"type": "function_call", "name": "bash", "arguments": SLEEP},
    {"type": "function_call", "name": "look", "arguments": "{}"},
]
RESPONSES = {
    "object": "response",
    "status": "completed",
    "output": [{"type": "reasoning"}, *ITEMS],
}
RESPONSES_STREAM = sse(
    {"type": "response.created", "response": {"output": []}},
    {"type": "response.output_text.delta", "delta": "x", "output_index": 0},
    {
        "type": "response.output_item.added",
        "output_index": 1,
        "item": {**ITEMS[0], "arguments": ""},
    },
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": SLEEP[:8]},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": SLEEP[8:]},
    {"type": "response.output_item.done", "output_index": 2, "item": ITEMS[1]},
    {"type": "response.completed", "response": {"status": "completed", "output": ITEMS}},
    named=True,
)
MESSAGE = {
    "type": "message",
    "stop_reason": "tool_use",
    "content": [
        {"type": "text", "text": "x"},
        {"type": "tool_use", "name": "bash", "input": json.loads(SLEEP)},
        {"type": "tool_use", "name": "look", "input": {}},
    ],
}
MESSAGE_STREAM = sse(
    {"type": "message_start", "message": {"stop_reason": None}},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "name": "bash", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": SLEEP},
    },
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "name": "look", "input": {}},
    },
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
    named=True,
)
CASES = {
    "chat stream": (CHAT_STREAM, STREAM),
    "chat stream, CRLF": (CHAT_STREAM.replace(b"\n", b"\r\n"), STREAM),
    "chat": (json.dumps(CHAT).encode(), JSON),
    "responses stream": (RESPONSES_STREAM, STREAM),
    "responses": (json.dumps(RESPONSES).encode(), JSON),
    "messages stream": (MESSAGE_STREAM, STREAM),
    "messages": (json.dumps(MESSAGE, indent=2).encode(), JSON),
}


@pytest.mark.parametrize("size", [1, 13, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_every_api_tells_its_tool_calls(case, size):
    """
    Whole or streamed, in pieces of any size, each API gives the same names and expected seconds.
    """
    data, headers = CASES[case]

    assert observe(data, headers, size=size) == EXPECTED


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", Finish.STOP),
        ("length", Finish.LENGTH),
        ("content_filter", Finish.STOP),
        ("abort", Finish.ABORT),
    ],
)
def test_ends_without_tools(reason, finish):
    """
    Text and chat completions tell how they ended, streamed and whole.
    """
    text = {"choices": [{"index": 0, "text": "x", "finish_reason": reason}]}

    assert observe(sse(delta({"content": "a"}), delta(finish=reason)), STREAM).finish is finish
    assert observe(json.dumps(text).encode(), JSON) == Ending(finish=finish)
    assert observe(sse(text), STREAM) == Ending(finish=finish)


def test_a_forced_tool_counts_as_a_tool_call():
    """
    A forced tool ends with `stop`; its session waits for the tool all the same.
    """
    data = sse(delta(function(0, "bash", SLEEP)), delta(finish="stop"))

    assert observe(data, STREAM) == Ending(finish=Finish.TOOL_CALLS, tools=(("bash", 5.0),))


def test_a_reply_that_was_cut_has_no_tools():
    """
    Arguments that end in the middle at the token limit are not a call that anybody runs.
    """
    data = sse(delta(function(0, "bash", '{"command": "sl')), delta(finish="length"))

    assert observe(data, STREAM) == Ending(finish=Finish.LENGTH)


def test_older_and_other_kinds_of_calls():
    """
    Custom tools, the old function_call and local shells are calls too.
    """
    custom = {"tool_calls": [{"index": 0, "custom": {"name": "sh", "input": "sleep 3"}}]}
    old = {"function_call": {"name": "bash", "arguments": SLEEP}}
    action = {"type": "exec", "command": ["bash", "-lc", "sleep 2"]}
    shell = {"type": "local_shell_call", "action": action}
    response = {"object": "response", "status": "completed", "output": [shell]}

    assert observe(sse(delta(custom), delta(finish="tool_calls")), STREAM).tools == (("sh", 3.0),)
    assert observe(sse(delta(old), delta(finish="function_call")), STREAM).tools == (("bash", 5.0),)
    assert observe(json.dumps(response).encode(), JSON).tools == (("local_shell_call", 2.0),)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (500, JSON),
        (200, [*JSON, (b"content-encoding", b"gzip")]),
        (200, [(b"content-type", b"text/plain")]),
        (200, []),
        (200, [(b"content-type",)]),
    ],
)
def test_other_responses_are_not_read(status, headers):
    """
    Errors, compressed bodies and other types say nothing.
    """
    assert observe(json.dumps(CHAT).encode(), headers, status=status) is None


def test_a_response_that_breaks_off_says_nothing():
    """
    Without its end, or damaged, a body tells nothing and raises nothing.
    """
    assert observe(CHAT_STREAM, STREAM, end=False) is None
    assert observe(CHAT_STREAM[:90], STREAM) is None
    assert observe(json.dumps(CHAT).encode()[:-3], JSON) is None
    assert observe(b"[" * 100_000, JSON, size=1 << 20) is None


def test_bodies_and_lines_over_their_bounds_are_let_go():
    """
    What is held stays bounded; a stream goes on being read after a line that was too long.
    """
    found = []
    observer = ResponseObserver(found.append)
    observer.start(200, JSON)
    for _ in range(_MAX_BODY // 65_536 + 2):
        observer.feed(b" " * 65_536)
        assert len(observer._rest) <= _MAX_BODY
    observer.feed(json.dumps(CHAT).encode())
    observer.end()
    assert found == []

    observer = ResponseObserver(found.append)
    observer.start(200, STREAM)
    for _ in range(2 * _MAX_LINE // 65_536):
        observer.feed(b"data: " + b"x" * 65_536)
        assert len(observer._rest) <= _MAX_LINE
    observer.feed(b"\n" + CHAT_STREAM)
    observer.end()
    assert found == [EXPECTED]


def test_a_last_event_over_the_bound_still_ends_the_response():
    """
    The event that repeats a whole response may be long; its name says enough.
    """
    text = {"output": [], "text": "x" * _MAX_LINE}
    data = sse(
        {"type": "response.output_item.done", "output_index": 0, "item": ITEMS[0]},
        {"type": "response.completed", "response": text},
        named=True,
    )

    assert observe(data, STREAM, size=4096).tools == (("bash", 5.0),)


def test_calls_and_arguments_are_bounded():
    """
    A model that goes on calling tools costs bounded memory and names sixteen at most.
    """
    found = []
    observer = ResponseObserver(found.append)
    observer.start(200, STREAM)
    for index in range(500):
        observer.feed(sse(delta(function(index, f"tool{index}", "x" * 200))))
    for _ in range(300):
        observer.feed(sse(delta(function(0, None, "y" * 1000))))
    assert len(observer._calls) == 64
    assert max(len(call.arguments) for call in observer._calls.values()) <= _MAX_ARGUMENTS
    observer.feed(sse(delta(finish="tool_calls")))
    observer.end()

    assert [name for name, _ in found[0].tools] == [f"tool{index}" for index in range(16)]


def test_a_fault_of_the_listener_does_not_reach_the_stream():
    """
    Whatever the listener raises, the observer's methods return.
    """

    def broken(ending):
        raise RuntimeError("broken")

    observer = ResponseObserver(broken)
    observer.start(200, STREAM)
    observer.feed(CHAT_STREAM)
    observer.end()


def test_names_are_cleaned_as_those_of_hints():
    """
    A tool without a usable name is left out; a long one is shortened as in a header.
    """
    assert expected_tools([("", "{}"), ("wait", '{"seconds": 2}')]) == (("wait", 2.0),)
    assert len(expected_tools([("n" * 500, "{}")])[0][0]) == 64

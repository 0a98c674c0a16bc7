import json
import os
import subprocess
import sys
import threading

import httpx
import openai
import pytest

import scout_sdk
from scout_sdk import ConfigError, SessionEvent, ToolEvent, ToolState
from scout_sdk._answers import Answer
from scout_sdk._sessions import SESSIONS
from scout_sdk._trace import Program, Turn
from scout_sdk.recorder import _assumed
from scout_sdk.testing import RecordingServer, Reply, ToolCall
from scout_sdk.transport import HintTransport
from scout_server.sim.traces import TraceReader
from scout_server.sim.traces.inspection import inspect


@pytest.fixture
def server():
    with RecordingServer() as server:
        yield server


@pytest.fixture
def file(tmp_path):
    scout_sdk.install()
    yield tmp_path / "t.jsonl"
    scout_sdk.shutdown()


def _ask(client, text, **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=messages, **options)


def _client(server):
    return openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=2)


def test_a_session_becomes_a_program(server, file):
    """
    Agents, tokens as the server tells, tool calls and the tool of a gap are in the trace; the
    program is written when its session ends.
    """
    client = _client(server)
    with scout_sdk.record(file), scout_sdk.context(session="secret-session", final=True):
        with scout_sdk.context(agent="planner"):
            _ask(client, '[[tool search {"q": "secret-argument"}]]')
        event = ToolEvent(name="search", state=ToolState.STARTED, call_id="c", remaining_s=7.0)
        SESSIONS.record_tool("secret-session", "planner", event)
        with scout_sdk.context(agent="coder"):
            _ask(client, "secret-text")

    (program,) = TraceReader(file)
    first, second = program.turns
    assert ("planner", 5, 2, True) == (
        first.agent, first.input_tokens, first.output_tokens, first.calls_tool,
    )  # fmt: skip
    assert ("coder", "search", 7.0, False) == (
        second.agent, second.tool, second.tool_expected_s, second.calls_tool,
    )  # fmt: skip
    assert (0,) == second.parents
    assert not program.aborted
    assert "secret" not in file.read_text()


def test_a_stream_counts_its_pieces_where_usage_is_not_told(server, file):
    """
    A stream ends when it has been read; its tokens are the server's where it tells them, else one
    for each piece.
    """
    client = _client(server)
    with scout_sdk.record(file), scout_sdk.context(session="s"):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            for _ in _ask(client, "[[say one two three]]", stream=True, **options):
                pass

    (program,) = TraceReader(file)
    assert [3, 2] == [turn.output_tokens for turn in program.turns]
    assert 5 == program.turns[1].input_tokens


async def test_parallel_calls_of_an_async_client_join(server, file):
    """
    Two turns under way together have the same parent; the turn after both waits for both.
    """
    import asyncio

    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k")
    with scout_sdk.record(file), scout_sdk.context(session="s", agent="a", final=True):
        await _ask(client, "x")
        await asyncio.gather(_ask(client, "[[sleep 0.2]]"), _ask(client, "[[sleep 0.2]]"))
        await _ask(client, "x")
    await client.close()

    (program,) = TraceReader(file)
    assert [(), (0,), (0,), (1, 2)] == [turn.parents for turn in program.turns]


def test_retries_are_one_turn(server, file):
    """
    Attempts that fail are no turns: a call that is retried is one.
    """
    with scout_sdk.record(file), scout_sdk.context(session="s", final=True):
        _ask(_client(server), "[[fail 2 k]]")

    (program,) = TraceReader(file)
    assert 3 == len(server.llm_requests)
    assert 1 == len(program.turns)


def test_failures_leave_nothing(file):
    """
    A call that fails for good is no turn, and a session without turns no program.
    """
    with (
        RecordingServer(reply=lambda _: Reply(status=400)) as server,
        scout_sdk.record(file),
        scout_sdk.context(session="s", final=True),
        pytest.raises(openai.BadRequestError),
    ):
        _ask(_client(server), "x")

    assert [] == list(TraceReader(file))


def test_a_reader_who_leaves_early_aborts(server, file):
    """
    A stream that is closed before the model's end makes an aborted program.
    """
    with scout_sdk.record(file), scout_sdk.context(session="s"):
        stream = _ask(_client(server), "[[say a b c d e f]]", stream=True)
        next(iter(stream))
        stream.close()

    (program,) = TraceReader(file)
    assert program.aborted


def test_calls_outside_any_context_are_recorded(server, file):
    """
    A call that belongs to no session is a program of its own, and carries no hints.
    """
    client = _client(server)
    with scout_sdk.record(file):
        _ask(client, "x")
        _ask(client, "x")

    programs = list(TraceReader(file))
    assert [1, 1] == [len(program.turns) for program in programs]
    assert [None, None] == [request.hints for request in server.llm_requests]


def test_a_transport_records(server, file):
    """
    Requests through a HintTransport are recorded as well, each once.
    """
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with (
        scout_sdk.record(file),
        scout_sdk.context(session="s"),
        httpx.Client(transport=HintTransport()) as client,
    ):
        client.post(f"{server.base_url}/chat/completions", json=body)

    (program,) = TraceReader(file)
    assert 1 == len(program.turns)
    assert 5 == program.turns[0].input_tokens


def test_responses_are_read(file):
    """
    The Responses API's usage and tool calls are read, streaming or not.
    """
    reply = Reply(tools=(ToolCall(name="search"),))
    with RecordingServer(reply=lambda _: reply) as server, scout_sdk.record(file):
        client = _client(server)
        with scout_sdk.context(session="s"):
            client.responses.create(model="m", input="x")
            for _ in client.responses.create(model="m", input="x", stream=True):
                pass

    (program,) = TraceReader(file)
    assert [(5, 2, True)] * 2 == [
        (turn.input_tokens, turn.output_tokens, turn.calls_tool) for turn in program.turns
    ]
    assert "search" == program.turns[1].tool


def test_one_recording_at_a_time(file, tmp_path):
    """
    A second recording is refused while the first runs; a file that cannot be written, too.
    """
    with scout_sdk.record(file), pytest.raises(ConfigError, match="already"):
        scout_sdk.record(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match=r"\.gz"):
        scout_sdk.record(tmp_path / "t.jsonl.gz")
    with pytest.raises(ConfigError, match="cannot record"):
        scout_sdk.record(file / "below" / "a file")


def test_events_of_strangers_and_many_threads(server, file):
    """
    Threads record into one trace, each session a program; events of unknown sessions are ignored.
    """
    client = _client(server)

    def one(number):
        with scout_sdk.context(session=f"s{number}", agent="a", final=True):
            _ask(client, "x")
            _ask(client, "x")

    with scout_sdk.record(file) as recorder:
        recorder.heard(SessionEvent(session="stranger", final=True))
        threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [2] * 8 == [len(program.turns) for program in TraceReader(file)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_exit_of_the_process_writes_what_is_under_way(server, file):
    """
    A program that is not over is written when the process ends, once: a forked child writes none.
    """
    code = f"""
import os, openai, scout_sdk
scout_sdk.record({str(file)!r})
client = openai.OpenAI(base_url={server.base_url!r}, api_key="k")
with scout_sdk.context(session="s", final=False):
    client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "x"}}])
if os.fork() == 0:
    raise SystemExit
os.wait()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)

    assert 1 == len(list(TraceReader(file)))


def test_prompts_of_an_agent_are_taken_to_extend_each_other(tmp_path):
    """
    Block ids are assumed: a prompt extends its agent's last one unless it is shorter, and agents
    share nothing.
    """
    sizes = [("a", 32), ("b", 16), ("a", 40), ("a", 16)]
    turns = tuple(Turn(agent=agent, input_tokens=n, output_tokens=1) for agent, n in sizes)
    program = _assumed(Program(program="p", arrival_s=0.0, turns=turns))

    assert [((0, 2),), ((3, 1),), ((0, 3),), ((4, 1),)] == [t.hash_runs for t in program.turns]


def test_an_unreadable_answer_is_counted_by_length():
    """
    Where the bytes cannot be read, the output is taken for one token in four bytes.
    """
    unknown, broken = Answer("application/json", "zstd"), Answer("application/json", "")
    for answer in (unknown, broken):
        answer.feed(b"[" * 400)
        answer.close()

    assert (100, 100) == (unknown.output_tokens, broken.output_tokens)


def test_a_compressed_answer_is_read():
    """
    A gzip body is read like a plain one, whatever the pieces it comes in.
    """
    import gzip

    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    answer = Answer("application/json", "gzip")
    for byte in gzip.compress(body.encode()):
        answer.feed(bytes([byte]))
    answer.close()

    assert (9, 4) == (answer.prompt_tokens, answer.output_tokens)


def test_a_recorded_trace_can_be_inspected(server, file):
    """
    `scout trace inspect` reads what the SDK recorded.
    """
    client = _client(server)
    with scout_sdk.record(file):
        for number in range(3):
            with scout_sdk.context(session=f"s{number}", final=True):
                for agent in ("planner", "coder"):
                    with scout_sdk.context(agent=agent):
                        _ask(client, "x")
    reader = TraceReader(file)
    found = inspect(reader.info, reader)

    assert (3, 6) == (found.programs, found.turns)
    assert {"planner": 3, "coder": 3} == found.agents

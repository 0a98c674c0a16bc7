import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from scout_sdk import Hints
from scout_sdk._wire import encode
from scout_server.cli import app
from scout_server.demo.servers import ServerSpec, start_all
from scout_server.embedded.launch import running_server
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.recording import RecordSettings
from scout_server.sim.traces import TraceReader

SHIPPED = Path(__file__).resolve().parents[2] / "examples" / "traces" / "examples.jsonl"

pytestmark = pytest.mark.timeout(240)


def _body(agent, turn):
    prompt = f"You are {agent}. " + "Keep to what is written here. " * 30
    said = [{"role": "user", "content": f"question-{number} " * 20} for number in range(turn + 1)]
    messages = [{"role": "system", "content": prompt}, *said]
    return {"model": "m", "messages": messages, "max_tokens": 8}


def _command(*args):
    result = CliRunner().invoke(app, ["trace", *args, "--json"])
    assert 0 == result.exit_code, result.output
    return json.loads(result.output)["results"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of four sessions with two agents each, and the engine's own hit counters."""
    file = tmp_path_factory.mktemp("trace") / "t.jsonl"
    settings = EmbeddedSettings(step_s=0.0, prefill_tokens_per_s=1e6)
    record = RecordSettings(file=str(file))
    with (
        running_server(settings, record=record) as server,
        httpx.Client(base_url=f"{server.url}/v1") as client,
    ):
        for session in range(4):
            for turn in range(4):
                agent = ("planner", "coder")[turn % 2]
                hints = Hints(session=f"private-{session}", agent=agent, final=turn == 3)
                reply = client.post(
                    "/chat/completions", json=_body(agent, turn), headers=encode(hints)
                )
                reply.raise_for_status()
        counters = server.engine.counters()
    return file, counters


def test_a_trace_says_what_the_engine_counted(recorded):
    """
    The prompt tokens, generated tokens and hits of a recorded trace are those of the engine.
    """
    file, counters = recorded
    turns = [turn for program in TraceReader(file) for turn in program.turns]

    assert 16 == len(turns)
    assert counters.queried_tokens == sum(turn.input_tokens for turn in turns)
    assert counters.generated_tokens == sum(turn.output_tokens for turn in turns)
    assert counters.hit_tokens == sum(turn.hit_tokens or 0 for turn in turns) > 0


def test_a_trace_has_no_text(recorded):
    """
    Neither prompts nor names of sessions are in a recorded trace.
    """
    text = recorded[0].read_text()

    assert not any(word in text for word in ("private", "question", "Keep"))


def test_inspect_reads_a_recorded_trace(recorded):
    """
    `scout trace inspect` finds the programs, the agents, and the reuse that the engine had: full
    blocks are all that an engine can find.
    """
    file, counters = recorded
    found = _command("inspect", str(file))

    assert (4, 16) == (found["programs"], found["turns"])
    assert {"planner": 8, "coder": 8} == found["agents"]
    share = counters.hit_tokens / counters.queried_tokens
    assert share == pytest.approx(found["reuse"], abs=0.03)


def test_advise_reads_a_recorded_trace(recorded):
    """
    `scout trace advise` simulates a recorded trace and gives a verdict with its reasons.
    """
    found = _command("advise", str(recorded[0]))

    assert (4, 16) == (found["programs"], found["turns"])
    assert found["worth it"] is False
    assert found["why"]


async def test_the_command_records_until_it_is_stopped(tmp_path):
    """
    `scout serve --embedded --record FILE` writes what is under way when it is told to stop.
    """
    file = tmp_path / "t.jsonl"
    spec = ServerSpec(name="Scout", args=["--embedded", "--record", str(file)])
    headers = encode(Hints(session="s", agent="a"))
    async with start_all([spec]) as (server,), httpx.AsyncClient(headers=headers) as client:
        url = f"{server.root}/v1/chat/completions"
        (await client.post(url, json=_body("a", 0))).raise_for_status()

    (program,) = TraceReader(file)
    assert ["a"] == [turn.agent for turn in program.turns]


def test_the_shipped_trace():
    """
    The trace of the examples that is shipped is whole: every agent, tools, no aborted program.
    """
    programs = list(TraceReader(SHIPPED))
    turns = [turn for program in programs for turn in program.turns]
    agents = {turn.agent for turn in turns}

    assert SHIPPED.stat().st_size < 200_000
    assert agents >= {"triage", "solver", "writer", "supervisor", "flights", "planner", "coder"}
    assert {"shell", "search_flights", "search_hotels", "search_tables"} <= {t.tool for t in turns}
    assert not any(program.aborted for program in programs)
    assert all(turn.hash_runs for turn in turns)

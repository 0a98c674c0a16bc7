import json
import os
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from scout_sdk import ConfigError, Hints
from scout_sdk._wire import OUTCOME_HEADER, encode
from scout_server.cli import app
from scout_server.demo.servers import ServerSpec, start_all
from scout_server.serve import parse_values

runner = CliRunner()


def test_values_are_json_or_text():
    """
    --set takes JSON values, and anything else as text.
    """
    texts = ["policy.hints=false", "embedded.kv_blocks=512", "embedded.model=a=b", "gateway.x.y=1"]
    parsed = parse_values(texts)

    assert {
        "gateway": {"x": {"y": 1}},
        "policy": {"hints": False},
        "embedded": {"kv_blocks": 512, "model": "a=b"},
    } == parsed


def test_every_malformed_value_is_named():
    """
    One error names every --set that has another form, and the form.
    """
    with pytest.raises(ConfigError) as caught:
        parse_values(["policy.hints", "hints=1", "policy..x=1", "policy.hints=1"])

    message = str(caught.value)
    assert "'policy.hints'" in message
    assert "'hints=1'" in message
    assert "section.name=value" in message


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["serve"], "--embedded"),
        (["serve", "some-model", "--embedded"], "takes no model"),
        (["serve", "--embedded", "--dtype", "float16"], "--dtype"),
    ],
)
def test_contradictory_commands(args, complaint):
    """
    A serve command without an engine, or with two, ends with status 1 and says why.
    """
    result = runner.invoke(app, args)

    assert 1 == result.exit_code
    assert complaint in result.output


def test_wrong_settings_stop_the_server_before_it_starts():
    """
    A wrong setting ends `scout serve` at once and names what is allowed.
    """
    command = [sys.executable, "-m", "scout_server.cli", "serve", "--embedded"]
    settings = ["--set", "embedded.policy=fifo", "--set", "policy.hints=7", "--set", "x.y=1"]
    result = subprocess.run([*command, *settings], capture_output=True, text=True, check=False)

    assert 1 == result.returncode
    assert "3 error(s)" in result.stderr
    assert "'lru' or 'scout'" in result.stderr
    assert "Traceback" not in result.stderr


async def test_the_same_server_with_its_own_lru():
    """
    `scout serve --embedded` takes hints, and with --scout-off it ignores them.
    """
    specs = [
        ServerSpec(name="Scout", args=["--embedded"]),
        ServerSpec(name="LRU", args=["--embedded", "--scout-off"]),
    ]
    headers = encode(Hints(session="s", agent="a"))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with start_all(specs) as servers, httpx.AsyncClient(headers=headers) as client:
        urls = [f"{server.root}/v1/chat/completions" for server in servers]
        outcomes = [(await client.post(url, json=body)).headers[OUTCOME_HEADER] for url in urls]

    assert "accepted" in outcomes[0]
    assert "accepted" not in outcomes[1]


def test_vllm_gets_its_own_arguments_and_our_settings(monkeypatch, tmp_path):
    """
    `scout serve MODEL ...` passes vLLM's arguments on and adds ours to its --additional-config.
    """
    pytest.importorskip("vllm")
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: ran.append((argv, env)))
    config = tmp_path / "scout.json"
    config.write_text("{}")
    extra = '{"other": 1, "scout": {"policy": {"hints": false}}}'
    own = ["--dtype", "float32", f"--additional-config={extra}", "--port", "7"]
    ours = ["--set", "policy.max_agents=9", "--config", str(config)]
    result = runner.invoke(app, ["serve", "some/model", *own, *ours])

    assert 0 == result.exit_code, result.output
    ((argv, env),) = ran
    given = json.loads(argv[argv.index("--additional-config") + 1])
    assert {"other": 1, "scout": {"policy": {"hints": False, "max_agents": 9}}} == given
    assert "some/model" == argv[argv.index("--model") + 1]
    assert "float32" == argv[argv.index("--dtype") + 1]
    assert "7" == argv[argv.index("--port") + 1]
    assert str(config) == env["SCOUT_CONFIG"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], []),
        (["--set", "snapshot.state_file=learnt.json"], ["10"]),
        (["--set", "snapshot.state_file=learnt.json", "--shutdown-timeout=3"], []),
        (["--set", "snapshot.state_file=learnt.json", "--scout-off"], []),
    ],
)
def test_engines_have_time_to_write_their_state(monkeypatch, own, expected):
    """
    With a state file vLLM's engines get ten seconds to end, unless the user said how many.
    """
    pytest.importorskip("vllm")
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: ran.append(argv))
    result = runner.invoke(app, ["serve", "some/model", *own])

    assert 0 == result.exit_code, result.output
    (argv,) = ran
    found = [argv[at + 1] for at, arg in enumerate(argv) if arg == "--shutdown-timeout"]
    assert expected == found

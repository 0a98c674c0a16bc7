import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scout_server.cli import LAZY, app
from scout_server.config import load

runner = CliRunner()


def test_help_lists_every_command():
    """
    `scout --help` names every command, also those whose modules are not imported.
    """
    result = runner.invoke(app, ["--help"])

    assert 0 == result.exit_code
    assert [] == [name for name in [*LAZY, "config"] if name not in result.output]


def test_importing_the_command_line_is_light():
    """
    Importing the command line loads no engine, framework or numerics.
    """
    script = (
        "import sys, scout_server.cli\n"
        "heavy = {'numpy', 'scipy', 'torch', 'vllm', 'ray', 'langchain_core', 'starlette',"
        " 'pydantic', 'aiohttp', 'httpx', 'openai'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert "[]" == out.stdout.strip()


def test_unknown_command():
    """
    An unknown command is a usage error.
    """
    assert 2 == runner.invoke(app, ["dance"]).exit_code


def test_config_prints_a_file_that_loads(tmp_path):
    """
    What `scout config` prints is itself a valid configuration file with the same values.
    """
    file = tmp_path / "scout.yaml"
    file.write_text("policy: {max_agents: 17}\n")
    printed = tmp_path / "printed.yaml"
    printed.write_text(runner.invoke(app, ["config", "--file", str(file)]).output)

    assert load(path=file).as_dict() == load(path=printed).as_dict()


def test_config_as_json():
    """
    `scout config --json` lists every setting with its default, kind and meaning.
    """
    settings = json.loads(runner.invoke(app, ["config", "--json"]).output)["settings"]
    agents = next(s for s in settings if (s["section"], s["name"]) == ("policy", "max_agents"))

    assert "integer >= 1" == agents["kind"]
    assert agents["default"] == agents["value"]


def test_bad_configuration_ends_with_status_1(tmp_path):
    """
    A wrong configuration ends the command with status 1 and names what is wrong, no traceback.
    """
    file = tmp_path / "scout.yaml"
    file.write_text("policy: {max_agents: 0}\n")
    result = subprocess.run(
        [sys.executable, "-m", "scout_server.cli", "config", "--file", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 1 == result.returncode
    assert "policy.max_agents" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", sorted(LAZY))
def test_every_wired_command_loads(name):
    """
    Every command that is wired in imports and has help.
    """
    result = runner.invoke(app, [name, "--help"])

    assert 0 == result.exit_code, result.output
    assert "Usage" in result.output


WITHOUT = """
import sys
for name in ("scipy", "matplotlib", "langgraph", "ray", "zmq"):
    sys.modules[name] = None
from scout_server.cli import main
main()
"""


def _without_extras(*words):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", ["bench", "demo", "doctor", "gateway", "serve"])
def test_commands_need_only_what_they_use(command):
    """With the extra `server` alone, its commands and their help are there."""
    done = _without_extras(command, "--help")

    assert done.returncode == 0, done.stderr


def test_what_an_option_lacks_is_named():
    """A module that only one bench needs is named with its extra, in one line."""
    done = _without_extras("bench", "planner", "--instances", "1")

    assert done.returncode == 1
    assert done.stderr.strip() == "scout: this needs scipy: pip install 'scout-sdk[sim]'"

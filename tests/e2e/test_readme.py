import ast
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, TypedDict

import pytest
import typer

from scout_server.cli import app
from scout_server.embedded.launch import running_server

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/configuration.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [body for name, body in BLOCK.findall(text) if name == language]


def _commands() -> list[str]:
    return [
        line
        for page in PAGES
        for block in _blocks(page, "console")
        for line in block.splitlines()
        if line.strip()
    ]


class State(TypedDict):
    question: str


def _world(url: str) -> dict[str, Any]:
    """What the README's blocks take for given: a graph, a team, a client."""
    import openai
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, StateGraph

    llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="m", max_completion_tokens=2)
    builder = StateGraph(State)
    builder.add_node("writer", lambda s: {"question": str(llm.invoke(s["question"]).content)})
    builder.add_edge(START, "writer")
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
    }
    model_client = OpenAIChatCompletionClient(
        model="m", base_url=f"{url}/v1", api_key="none", model_info=info, max_tokens=2
    )
    members = [AssistantAgent("coder", model_client)]
    return {
        "graph": builder.compile(),
        "team": RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(2)),
        "client": openai.OpenAI(base_url=f"{url}/v1", api_key="none"),
        "close": model_client.close,
        "model": "m",
        "messages": [{"role": "user", "content": "Where is it cold?"}],
    }


async def test_python_blocks_run():
    """
    Every Python block of the README runs against a server, which then knows the agents by name.
    """
    blocks = [block for page in PAGES for block in _blocks(page, "python")]
    assert len(blocks) >= 3
    with running_server() as server:
        world = _world(server.url)
        for block in blocks:
            code = compile(block, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, world)
            if result is not None:
                await result
        await world["close"]()
        arrivals = dict(server.engine.arrivals)

    assert {"hint": len(blocks)} == arrivals


@pytest.mark.parametrize("line", [c for c in _commands() if c.startswith("scout ")])
def test_scout_commands_exist(line):
    """
    Every `scout` command of the pages exists, with the options that are shown.
    """
    words = shlex.split(line.split(">")[0])[1:]
    group = typer.main.get_command(app)
    context = group.make_context("scout", [words[0]], resilient_parsing=True)
    name, command, _ = group.resolve_command(context, [words[0]])
    known = {option for parameter in command.params for option in parameter.opts}
    own = known if name != "serve" or "--embedded" in words else {*known, "--max-model-len"}

    assert [] == [word for word in words if word.startswith("--") and word not in own]


@pytest.mark.parametrize("line", [c for c in _commands() if c.startswith("make ")])
def test_make_targets_exist(line):
    """
    Every `make` target of the pages exists.
    """
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_shown_command_is_checked():
    """
    The pages show no command but scout, make and pip, and pip installs known extras.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    commands = _commands()

    assert {"scout", "make", "pip"} == {line.split()[0] for line in commands}
    named = re.findall(r"scout-sdk\[([\w,-]+)\]", "\n".join(commands))
    assert named
    assert {extra for group in named for extra in group.split(",")} <= extras


def test_links_lead_somewhere():
    """
    Every relative link of the pages names a file of the repository.
    """
    for page in PAGES:
        folder = (ROOT / page).parent
        links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
        missing = [x for x in links if "://" not in x and not os.path.exists(folder / x)]
        assert [] == missing, page

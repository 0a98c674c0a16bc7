"""
A coding team: planner, coder, runner and reviewer, made agent-aware by one line.

    scout serve --embedded --port 8000            # or: scout serve MODEL [vLLM's own arguments]
    python examples/autogen_coding_team.py --base-url http://127.0.0.1:8000/v1

The runner lets the model choose the next check by guided JSON and runs it in a shell. Checks take
seconds; `sleep` and `timeout` in a command tell the server how long the team will be away.
"""

import argparse
import asyncio
from typing import Any

import openai
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelFamily, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool, StaticWorkbench
from autogen_ext.models.openai import OpenAIChatCompletionClient

from scout_integrations.autogen import instrument

CHECKS = {
    "unit tests": "sleep 1.5 && echo '14 passed, 1 skipped in 1.50 s'",
    "type checker": "timeout 10 sleep 1 && echo 'no issues found in 9 files'",
    "linter": "sleep 0.5; echo 'all checks passed'",
}
PROMPT = """You are the {role} of a small team that maintains the Harbour library, a Python package
for tide tables, berths and ship movements. {duty}

What the {role} does:
{steps}

What the whole team keeps to:
- The library runs on Python 3.11 and newer, without dependencies. Public functions have type hints
  and a one-line docstring; units stand in names, as in depth_m and wait_s.
- Times are aware datetimes in UTC. Depths are metres below chart datum, never feet. Money does not
  occur. Random numbers come from a generator that the caller passes in.
- Errors are HarbourError or one of its children; the message names the bad value and the good ones.
- A change is small: one idea, its tests, its line in the changelog. Nobody reformats foreign lines.
- The order of work is planner, coder, runner, reviewer. Nobody does another's work.
- Speak in short plain sentences, at most five lines. No greetings, no praise, no summaries.

An exchange that went well, as a model:
planner: One function, next_high_water(port, after), in harbour/tides.py. Test: two ports, one over
midnight. The table is sorted; use bisect.
coder: def next_high_water(port, after): rows = port.table; return rows[bisect_right(rows, after)]
runner: $ pytest -q tests/test_tides.py; 2 passed in 0.31 s
reviewer: The end of the table raises IndexError. Raise HarbourError with the table's last day.
"""
ROLES = {
    "planner": (
        "You turn a wish into the smallest plan that a coder can follow without asking.",
        """- Name the file, the function and its signature; then the tests, by the fact each states.
- Say which existing function to use. Say what will not be done, if the wish is wider than the plan.
- After a review, plan only what the reviewer asked for. If two findings clash, decide, and say why.
- Think of the empty table, its first and last row, and a port without tides.""",
    ),
    "coder": (
        "You write the code that the plan asks for, complete and ready to run.",
        """- Give whole functions, never an ellipsis. Keep names of the plan. Imports come first.
- Prefer the standard library and a plain loop to a clever line. No global state, no print.
- Write the test beside the code: arrange, act, assert, with real tables instead of mocks.
- If the plan cannot work, say so in one sentence and write the nearest thing that can.""",
    ),
    "runner": (
        "You choose the check to run next and report what it printed.",
        """- Checks are: unit tests, type checker, linter. Tests come first after a change.
- Answer with a JSON object {"check": ...} that names one of them, and nothing else.
- Never run what installs, deletes or reaches the network. Never run the same check twice in a row.
- A check that hangs for ten seconds counts as failed.""",
    ),
    "reviewer": (
        "You read the change as a stranger would and find what would break in a harbour at night.",
        """- First correctness: edges of the table, time zones, units. Then tests. Then names.
- One finding a line: where it is, what goes wrong, what would be right. At most three findings.
- Do not ask for more features. Do not argue about style that the linter accepts.
- When nothing is left that matters, say: approved. Then name the one risk that remains.""",
    ),
}


def prompt(role: str) -> str:
    """Return the long fixed prompt of one agent: this is what the server learns to keep."""
    return PROMPT.format(role=role, duty=ROLES[role][0], steps=ROLES[role][1])


async def shell(command: str) -> str:
    """Run a shell command and return what it printed."""
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()


class Runner(BaseChatAgent):
    """An agent of one's own: its model and its workbench are instrumented like any other's."""

    produced_message_types = (TextMessage,)

    def __init__(self, client: OpenAIChatCompletionClient) -> None:
        super().__init__("runner", "Runs the checks.")
        self._model_client = client
        self._workbench = StaticWorkbench([FunctionTool(shell, "Run a shell command.")])
        self._last = ""

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        open_ = [name for name in CHECKS if name != self._last]
        kind = {"type": "object", "properties": {"check": {"enum": open_}}, "required": ["check"]}
        form = {"type": "json_schema", "json_schema": {"name": "check", "schema": kind}}
        said = "\n".join(f"{message.source}: {message.to_text()}" for message in messages)
        ask = [SystemMessage(content=prompt("runner")), UserMessage(content=said, source="team")]
        parts = self._model_client.create_stream(ask, extra_create_args={"response_format": form})
        answer = "".join([part async for part in parts if isinstance(part, str)])
        self._last = next((name for name in open_ if name in answer), open_[0])
        result = await self._workbench.call_tool("shell", {"command": CHECKS[self._last]})
        said = f"$ {self._last}\n{result.to_text()}"
        return Response(chat_message=TextMessage(content=said, source=self.name))

    async def on_reset(self, cancellation_token: Any) -> None:
        self._last = ""


async def run(base_url: str, task: str, *, model: str, http_client: Any = None) -> str:
    """Let the team work on *task* for two rounds; return what was said."""
    client = OpenAIChatCompletionClient(
        model=model, base_url=base_url, api_key="none", http_client=http_client, temperature=0,
        max_tokens=48, model_info={"vision": False, "function_calling": True, "json_output": True,
            "structured_output": True, "family": ModelFamily.UNKNOWN},
    )  # fmt: skip
    planner, coder, reviewer = (
        AssistantAgent(name, client, system_message=prompt(name), model_client_stream=True)
        for name in ("planner", "coder", "reviewer")
    )
    members = [planner, coder, Runner(client), reviewer]
    team = instrument(RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(9)))
    result = await team.run(task=task)
    return "\n".join(f"{message.source}: {message.to_text()}" for message in result.messages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Let four agents change a library.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--task", default="Add slack_water(port, day) that lists the slack times.")
    args = parser.parse_args()
    models = openai.OpenAI(base_url=args.base_url, api_key="none").models.list().data
    print(asyncio.run(run(args.base_url, args.task, model=models[0].id)))

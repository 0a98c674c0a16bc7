import contextlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from scout_server.embedded.launch import running_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {  # (requests, side-channel events at least)
    "langgraph_travel_planner": (9, 6),  # three specialists; three searches start and end
    "autogen_coding_team": (8, 4),  # two rounds of four; two checks start and end
    "plain_openai": (3, 1),  # three agents; the session ends
}

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Run:
    """What one example printed, and what its server counted."""

    output: str
    arrivals: dict[str, int]
    hints: dict[str, float]
    """Hint fields by outcome."""
    events: dict[str, float]
    ended: tuple[int, int]
    """Sessions that the engine knows, and those of them that it takes for ended."""


def _counted(text: str, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(name + "{"):
            labels, value = line.rsplit(" ", 1)
            outcome = labels.split('outcome="')[1].split('"')[0]
            found[outcome] = found.get(outcome, 0.0) + float(value)
    return found


def _sessions(url: str) -> tuple[int, int]:
    core = httpx.get(f"{url}/v1/scout/state").json()["core"]
    ended = core["sessions_ended"]
    return core["sessions_running"] + core["sessions_gap"] + ended, ended


@pytest.fixture(scope="module")
def runs():
    """Every example, run as its users run it, each against an embedded engine of its own."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name in EXPECTED:
            server = stack.enter_context(running_server())
            command = [str(EXAMPLES / f"{name}.py"), "--base-url", f"{server.url}/v1"]
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            started[name] = (server, process)
        found = {}
        for name, (server, process) in started.items():
            output, errors = process.communicate(timeout=200)
            assert 0 == process.returncode, errors
            metrics = httpx.get(f"{server.url}/metrics").text
            found[name] = Run(
                output,
                dict(server.engine.arrivals),
                _counted(metrics, "scout_hints_total"),
                _counted(metrics, "scout_events_total"),
                _sessions(server.url),
            )
        yield found


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_request_names_its_agent(name, runs):
    """
    An example runs to its end, and each of its requests is known by its hints.
    """
    assert runs[name].output.strip()
    assert {"hint": EXPECTED[name][0]} == runs[name].arrivals


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_hint_is_accepted(name, runs):
    """
    No hint of an example is clipped, deferred, rejected or ignored.
    """
    assert {"accepted"} == {outcome for outcome, count in runs[name].hints.items() if count}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_tools_are_told_while_no_request_runs(name, runs):
    """
    Tools that start and end, and sessions that end, arrive through the side channel.
    """
    assert runs[name].events["accepted"] >= EXPECTED[name][1]
    assert 0 == runs[name].events["rejected"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_events_reach_the_session_of_the_requests(name, runs):
    """
    The engine has one session, and knows it ended: events come in the name of the requests' key.
    """
    assert (1, 1) == runs[name].ended


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_is_short(name):
    """
    An example has fewer than 150 lines.
    """
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150

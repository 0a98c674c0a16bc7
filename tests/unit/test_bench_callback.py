"""`scout bench callback`: the command of the integrations' own benchmark."""

import json

from typer.testing import CliRunner

from scout_server.cli import app


def test_the_command_prints_the_same_report():
    """`scout bench callback` is that benchmark, in a process of its own."""
    found = CliRunner().invoke(app, ["bench", "callback", "--calls", "25", "--json"])

    assert found.exit_code == 0
    report = json.loads(found.output)
    (target,) = report["targets"]
    parts = {row["part"]: row for row in report["results"]["per call"]}
    assert target["name"] == "callback_call_p99_us"
    assert target["value"] == parts["call"]["p99_us"]

"""The callback's benchmark reports as every benchmark does."""

import json

import pytest

from scout_integrations._bench import main


def test_json_report(capsys):
    """One object with command, seed, versions, results and one row for the required figure."""
    assert main(["--calls", "25", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert set(found) == {"command", "seed", "versions", "results", "targets"}
    (target,) = found["targets"]
    assert target["value"] == found["results"]["call"]["p99_us"] > 0
    assert target["met"] == (target["value"] <= 100)


def test_readable_report(capsys):
    """Without --json a person can read it."""
    assert main(["--calls", "25"]) == 0
    assert "callback_call_p99_us" in capsys.readouterr().out


def test_wrong_count(capsys):
    """A wrong number is refused, and the allowed ones are named."""
    with pytest.raises(SystemExit):
        main(["--calls", "0"])
    assert "at least 1" in capsys.readouterr().err

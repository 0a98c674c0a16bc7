import io
import json
import math

from rich.console import Console

from scout_server.report import Target, emit, versions


def _emitted(*, json_output: bool) -> str:
    console = Console(file=io.StringIO(), width=120)
    emit(
        console,
        "scout bench x",
        7,
        {"arms": {"lru": {"hit": 0.25}, "scout": {"hit": 0.75}}, "void": False, "nan": math.nan},
        [Target.at_least("gain", 0.5, 0.15), Target.at_most("ttft", 0.9, 0.6)],
        json_output,
    )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_is_one_object():
    """
    With json_output, the output is one object with command, seed, versions, results and targets.
    """
    document = json.loads(_emitted(json_output=True))

    assert {"command", "seed", "versions", "results", "targets"} == set(document)
    assert {"name": "ttft", "value": 0.9, "bound": "<= 0.6", "met": False} == document["targets"][1]
    assert 0.75 == document["results"]["arms"]["scout"]["hit"]
    assert document["results"]["nan"] is None


def test_tables_name_missed_targets():
    """
    Without json_output, every figure and every missed target is printed.
    """
    text = _emitted(json_output=False)

    assert "scout bench x" in text
    assert "0.75" in text
    assert "missed" in text


def test_a_figure_that_was_not_measured_is_missed():
    """
    A target without a value, or with NaN, is missed.
    """
    values = [None, math.nan]

    assert [False] * 2 == [Target.at_most("a", value, 1.0).met for value in values]
    assert [False] * 2 == [Target.at_least("a", value, 1.0).met for value in values]
    assert Target.equal("a", 0.5, 0.5).met


def test_versions_of_what_is_installed():
    """
    Versions name Python and Scout itself.
    """
    assert {"python", "scout-sdk"} <= set(versions())

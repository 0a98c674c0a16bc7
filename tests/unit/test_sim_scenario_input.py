"""Scenarios with mistakes, sweeps that were interrupted, traces out of order."""

import json

import pytest
from typer.testing import CliRunner

from scout_sdk import ConfigError
from scout_server.cli import app
from scout_server.sim.scenario import scenario_of
from scout_server.sim.simulate import programs_of
from scout_server.sim.sweep import Axis, sweep
from scout_server.sim.traces import Program, TraceInfo, Turn, write_trace

INFO = TraceInfo(source="test", block_tokens=16)
SMALL = {"workload": {"programs": 2, "turns": 2, "agents": 2, "anchor_tokens": 64}}


def sim(*args):
    return CliRunner().invoke(app, ["sim", *args])


def said(result):
    assert result.exit_code == 1, result.output
    return " ".join(result.stderr.split())


def one_turn(name, arrival_s=0.0):
    return Program(
        program=name, arrival_s=arrival_s, turns=(Turn(input_tokens=32, output_tokens=1),)
    )


def test_mistakes_of_every_kind_are_said_together():
    """A wrong type does not hide an unknown name, nor the other way round."""
    with pytest.raises(ConfigError) as caught:
        scenario_of(
            {
                "hardware": {"gpu": "H1", "model": "llama-9", "latency": "tables"},
                "cell": {"replicas": -2, "scheduler": "nope"},
                "residency": {"policy": "lruu"},
                "tiers": {"dram_device": "floppy"},
                "workload": {"programs": "many", "tools": []},
                "tools": {"scale": float("inf")},
                "typo": 1,
            }
        )
    text = str(caught.value)
    assert "11 error(s)" in text
    for place in (
        "hardware.gpu", "hardware.model", "hardware.tables", "cell.replicas", "cell.scheduler",
        "residency.policy", "tiers.dram_device", "workload.programs", "workload.tools",
        "tools.scale", "typo",
    ):  # fmt: skip
        assert f"- {place}: " in text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["hardware.gpu=L40S", "hardware.model=llama-3.1-70b"], "weights 141.1 GB"),
        (["hardware.gpu=L40S", "hardware.model=llama-3.1-70b", "hardware.kv_blocks=9"], "141.1 GB"),
        (["hardware.kv_blocks=100000000"], "hardware.kv_blocks"),
        (["hardware.tensor_parallel=3"], "32 heads"),
        (["tools.fitted=/nowhere/tools.json"], "cannot read /nowhere/tools.json"),
        (["hardware.latency=tables", "hardware.tables=/nowhere"], "dense.csv"),
        (["hardware.latency=calibrated", "hardware.profile=/nowhere"], "cannot read /nowhere"),
        (["trace.path=/nowhere.jsonl"], "there is no file /nowhere.jsonl"),
        (["workload.rate_per_s=.inf"], "workload.rate_per_s"),
        (["residency.policy=[1"], "no YAML value"),
        (["engine.block_tokens=12"], "does not divide"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(settings, wanted):
    """One line each, exit code 1, and nothing was simulated."""
    args = [part for setting in settings for part in ("--set", setting)]
    result = sim("run", *args)
    assert wanted in said(result)
    assert "simulated" not in result.output


def test_everything_impossible_is_said_at_once_before_a_sweep(tmp_path):
    """The third combination cannot run: the first is not run either, and all reasons are there."""
    resume = tmp_path / "runs.jsonl"
    document = {**SMALL, "tools": {"fitted": str(tmp_path / "none.json")}}
    axes = [
        Axis("hardware.model", ("llama-3.1-8b", "llama-3.1-70b")),
        Axis("hardware.gpu", ("H100", "L40S")),
    ]
    with pytest.raises(ConfigError) as caught:
        sweep(document, axes, jobs=1, resume=resume)
    text = str(caught.value)
    assert "none.json" in text
    assert text.count("llama-3.1-70b does not fit") == 2
    assert text.count("none.json") == 1
    assert not resume.exists()

    with pytest.raises(ConfigError) as caught:
        sweep(SMALL, [Axis("cell.replicas", (0, 1)), Axis("router.policy", ("x", "y"))], jobs=1)
    assert "3 error(s)" in str(caught.value)


def test_a_torn_line_does_not_swallow_the_next_run(tmp_path):
    """What an interrupted sweep wrote half is repeated once, and is there the next time."""
    resume = tmp_path / "runs.jsonl"
    axes = [Axis("residency.policy", ("lru", "scout"))]
    whole = sweep(SMALL, axes, jobs=1, resume=resume)
    text = resume.read_text("utf-8")
    resume.write_text(text[: len(text) - 100], "utf-8")
    assert sweep(SMALL, axes, jobs=1, resume=resume) == whole
    keys = []
    for line in resume.read_text("utf-8").splitlines():
        try:
            keys.append(json.loads(line)["key"])
        except ValueError:
            continue
    assert len(set(keys)) == 2


def test_a_sweep_does_not_resume_runs_of_another_trace(tmp_path):
    """The trace's content counts, not its name."""
    path, resume = tmp_path / "t.jsonl", tmp_path / "runs.jsonl"
    document = {"trace": {"path": str(path)}}
    axes = [Axis("residency.policy", ("lru",))]
    write_trace(path, INFO, [one_turn("a")])
    (first,) = sweep(document, axes, jobs=1, resume=resume)
    write_trace(path, INFO, [one_turn("a"), one_turn("b")])
    (second,) = sweep(document, axes, jobs=1, resume=resume)
    assert (first.programs, second.programs) == (1, 2)


def test_a_resume_file_of_another_version_is_named(tmp_path):
    """A record that does not fit is an error with file and line, no traceback."""
    resume = tmp_path / "runs.jsonl"
    resume.write_text('{"key":"k","record":{"label":5}}\n', "utf-8")
    result = sim("sweep", "--axis", "residency.policy=lru", "--resume", str(resume))
    assert "runs.jsonl:1: not a record of this version" in said(result)


def test_programs_arrive_when_they_did_whatever_the_order_of_the_file(tmp_path):
    """A recorder writes a program when it ends: a long one comes late in the file."""
    path = tmp_path / "t.jsonl"
    write_trace(path, INFO, [one_turn("late", 50.0), one_turn("early", 1.0), one_turn("mid", 9.0)])
    _, programs = programs_of(scenario_of({"trace": {"path": str(path)}}))
    assert [p.program for p in programs] == ["early", "mid", "late"]
    _, programs = programs_of(scenario_of({"trace": {"path": str(path), "programs": 2}}))
    assert [p.program for p in programs] == ["early", "mid"]


@pytest.mark.parametrize(
    "command", [["sim", "run", "--set", "trace.skip_bad=true"], ["trace", "advise", "--skip-bad"]]
)
def test_left_out_lines_are_counted_where_they_are_left_out(tmp_path, command):
    """Whoever skips says how many and why."""
    path = tmp_path / "t.jsonl"
    write_trace(path, INFO, [one_turn("a"), one_turn("b")])
    with path.open("a", encoding="utf-8") as out:
        out.write('{"program":"c","turns":[{"in":0,"out":1}]}\n')
    place = [str(path)] if command[0] == "trace" else ["--set", f"trace.path={path}"]
    result = CliRunner().invoke(app, [*command, *place])
    assert result.exit_code == 0, result.output
    assert "t.jsonl:4: turns[0].in: must be at least 1" in " ".join(result.output.split())
    assert "1 broken lines" in result.output or "skipped lines" in result.output
    result = CliRunner().invoke(app, [*command, *place, "--json"])
    assert '"skipped' in result.output


def test_fit_tools_skips_and_refuses_like_the_others(tmp_path):
    """Broken lines are fatal or counted; a trace without gaps has nothing to fit."""
    path = tmp_path / "t.jsonl"
    turns = tuple(
        Turn(input_tokens=9, output_tokens=1, parents=(i - 1,) if i else (), gap_s=1.0 * i)
        for i in range(12)
    )
    write_trace(path, INFO, [Program(program="a", arrival_s=0.0, turns=turns)])
    with path.open("a", encoding="utf-8") as out:
        out.write("{\n")
    assert "t.jsonl:3" in said(sim("fit-tools", str(path)))
    result = sim("fit-tools", str(path), "--skip-bad")
    assert result.exit_code == 0
    assert "skipped lines" in result.output
    write_trace(path, INFO, [one_turn("a")])
    assert "no gap" in said(sim("fit-tools", str(path)))


def test_advice_on_nothing_is_an_error(tmp_path):
    """A trace without programs gets no verdict."""
    path = tmp_path / "t.jsonl"
    write_trace(path, INFO, [])
    result = CliRunner().invoke(app, ["trace", "advise", str(path)])
    assert "no program" in said(result)


@pytest.mark.parametrize(
    "command",
    [
        ["sim", "run", "--html", "{}"],
        ["sim", "sweep", "--axis", "cell.replicas=1", "--resume", "{}"],
        ["sim", "compare", "--out", "{}"],
        ["sim", "calibrate", "{}", "--url", "http://127.0.0.1:9"],
        ["sim", "fit-tools", "{trace}", "{}"],
        ["trace", "convert", "mooncake", "{trace}", "{}"],
        ["trace", "inspect", "{trace}", "--html", "{}"],
        ["trace", "advise", "{trace}", "--html", "{}"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, command):
    """Minutes of simulation are not lost to a folder that is not there."""
    trace = tmp_path / "t.jsonl"
    write_trace(trace, INFO, [one_turn("a")])
    place = tmp_path / "none" / "file"
    args = [part.format(place, trace=trace) for part in command]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "there is no folder" in " ".join(result.output.replace("│", " ").split())

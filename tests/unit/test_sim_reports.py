"""Records, sweeps, reports and commands of the simulator."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scout_sdk import ConfigError
from scout_server.sim.advise import POLICIES, advise
from scout_server.sim.cli import sim_app
from scout_server.sim.distribution import Distribution
from scout_server.sim.html import report_html, write_report
from scout_server.sim.record import record_from
from scout_server.sim.scenario import defaults_yaml, load_document, scenario_of
from scout_server.sim.simulate import simulate
from scout_server.sim.svg import Line, lines
from scout_server.sim.sweep import Axis, axes_of, combinations, split_axes, sweep
from scout_server.sim.trace_cli import trace_app
from scout_server.sim.traces import TraceReader, write_trace
from scout_server.sim.workload import WorkloadSettings, generate, synthetic_info

SMALL = {
    "workload": {"programs": 12, "rate_per_s": 2.0, "turns": 4, "agents": 3},
    "hardware": {"kv_blocks": 1200},
    "cell": {"timeline": 4},
}
EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"


def test_quantiles_are_within_half_a_percent():
    """Mean, least and most are exact; quantiles are near."""
    values = [1.0 + i for i in range(1000)]
    seen = Distribution()
    for value in values:
        seen.add(value)
    found = seen.summary()
    assert found.mean == pytest.approx(sum(values) / 1000)
    assert (found.least, found.most, found.count) == (1.0, 1000.0, 1000)
    assert found.p50 == pytest.approx(500, rel=0.011)
    assert found.p99 == pytest.approx(990, rel=0.011)
    assert Distribution().summary().mean == 0.0


def test_a_record_survives_json():
    """What is written as JSON is read back equal."""
    record = simulate(scenario_of(SMALL))
    assert record_from(json.loads(record.to_json())).to_json() == record.to_json()
    assert record.spans
    assert record.occupancy


def test_defaults_are_a_valid_scenario():
    """`scout sim config` prints what validates, and nothing is left out."""
    import yaml

    document = yaml.safe_load(defaults_yaml())
    assert scenario_of(document) == scenario_of({})
    assert {"hardware", "residency", "tiers", "tao", "workload"} <= set(document)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_is_valid(path):
    """Each example, and every combination of its axes, validates."""
    document, axes = split_axes(load_document(path))
    for combination in combinations(document, axes):
        scenario_of(combination)


def test_a_sweep_goes_on_where_it_was(tmp_path):
    """Finished runs are read back, a torn last line is repeated, and the order is that asked."""
    axes = [Axis("residency.policy", ("lru", "keep")), Axis("seed", (1, 2))]
    file = tmp_path / "runs.jsonl"
    first = sweep(SMALL, axes, jobs=1, resume=file)
    lines_ = file.read_text("utf-8").splitlines()
    assert len(lines_) == 4
    file.write_text("\n".join([*lines_[:2], lines_[2][:50]]), "utf-8")

    again = sweep(SMALL, axes, jobs=1, resume=file)

    assert [r.to_json() for r in again] == [r.to_json() for r in first]
    assert [r.label for r in again] == [
        "policy=lru, seed=1", "policy=lru, seed=2", "policy=keep, seed=1", "policy=keep, seed=2",
    ]  # fmt: skip


def test_a_sweep_over_processes_is_the_same(tmp_path):
    """Two processes give the records that one gives."""
    axes = [Axis("seed", (1, 2))]
    one = sweep(SMALL, axes, jobs=1)
    two = sweep(SMALL, axes, jobs=2)
    assert [r.to_json() for r in one] == [r.to_json() for r in two]


def test_axes_are_parsed_and_refused():
    """Values keep their type; a text without values is an error."""
    assert axes_of(["cell.replicas=1,2"]) == [Axis("cell.replicas", (1, 2))]
    with pytest.raises(ConfigError, match="setting=value"):
        axes_of(["cell.replicas"])
    with pytest.raises(ConfigError, match="sweep"):
        split_axes({"sweep": {"seed": 3}})


def test_a_plot_without_points_is_nothing():
    """Empty series draw nothing, and a constant one draws a line."""
    assert lines([Line("a", [])], title="t", x="x", y="y") == ""
    assert "<polyline" in lines([Line("a", [(0, 1), (1, 1)])], title="t", x="x", y="y")
    assert "&lt;b&gt;" in lines([Line("<b>", [(0, 1)])], title="t", x="x", y="y")


def test_the_report_needs_nothing_else(tmp_path):
    """One page, no script, no link, every record in it, text escaped."""
    records = sweep(SMALL, [Axis("residency.policy", ("lru", "scout"))], jobs=1)
    page = report_html(records, "scout <sim>")
    assert "scout &lt;sim&gt;" in page
    assert not re.search(r"<script|<link|src=|href=|url\(", page)
    for title in ("Job completion time", "HBM", "Programs over time"):
        assert title in page
    assert page.count("<svg") >= 4


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_opens_the_report(tmp_path):
    """A headless browser renders the page: every plot is there and has a size."""
    path = tmp_path / "report.html"
    write_report(path, sweep(SMALL, [Axis("seed", (1, 2))], jobs=1), "scout sim")
    shot = tmp_path / "shot.png"
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2000",
            f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.count("<svg") >= 4
    assert shot.stat().st_size > 20_000


def run(app, *arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_sim_run_prints_a_table_and_json(tmp_path):
    """LRU and the chosen policy, as a table, or as one JSON object with command and seed."""
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps(SMALL), "utf-8")
    shown = run(sim_app, "run", scenario)
    assert shown.exit_code == 0, shown.output
    assert "lru" in shown.output
    assert "scout" in shown.output

    report = tmp_path / "r.html"
    asked = run(sim_app, "run", scenario, "--json", "--html", report, "--set", "seed=3")
    document = json.loads(asked.stdout)
    assert document["seed"] == 3
    assert [r["label"] for r in document["results"]["runs"]] == ["lru", "scout"]
    assert report.stat().st_size > 1000


def test_an_impossible_scenario_fails_before_the_run(tmp_path):
    """A model larger than memory is refused with the arithmetic."""
    done = run(sim_app, "run", "-s", "hardware.model=llama-3.1-70b", "-s", "hardware.gpu=RTX4090")
    assert done.exit_code == 1
    assert "141.1 GB" in done.output


def small_trace(path, **changes):
    settings = WorkloadSettings(programs=10, rate_per_s=1.0, turns=5, agents=3, **changes)
    write_trace(path, synthetic_info(settings, 1), generate(settings, 1))
    return path


def test_a_generated_workload_replays_as_a_trace(tmp_path):
    """A workload and the trace of it give the same run."""
    path = small_trace(tmp_path / "t.jsonl")
    values = {"workload": {"programs": 10, "rate_per_s": 1.0, "turns": 5, "agents": 3}}
    direct = simulate(scenario_of(values))
    replayed = simulate(scenario_of({"trace": {"path": str(path)}}))
    assert replayed.hit_tokens == direct.hit_tokens
    assert replayed.makespan_s == pytest.approx(direct.makespan_s, abs=1e-3)


def test_advise_says_no_and_why(tmp_path):
    """With room for everything the answer is no, because pressure is too low."""
    found = advise(small_trace(tmp_path / "t.jsonl"), gpu="H100", model="llama-3.1-8b")
    assert not found.worth_it
    assert found.verdict.startswith("no")
    assert any("pressure is too low" in reason for reason in found.reasons)
    assert [r.label for r in found.records] == list(POLICIES)


def test_trace_commands_work_end_to_end(tmp_path):
    """convert, inspect and advise on a source file; a bad source is named."""
    source = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1024, "output_length": 9, "hash_ids": [0, i]}
        for i in range(20)
    ]
    source.write_text("".join(json.dumps(r) + "\n" for r in rows) + "broken\n", "utf-8")
    out = tmp_path / "t.jsonl.gz"
    assert run(trace_app, "convert", "mooncake", source, out).exit_code == 1
    done = run(trace_app, "convert", "mooncake", source, out, "--skip-bad")
    assert done.exit_code == 0
    assert "20 programs" in done.output
    assert "m.jsonl:21" in done.output

    seen = json.loads(run(trace_app, "inspect", out, "--json").stdout)
    assert seen["results"]["turns"] == 20
    assert seen["results"]["reuse"] == pytest.approx(19 / 40)
    page = tmp_path / "i.html"
    shown = run(trace_app, "inspect", out, "--html", page)
    assert "Hit rate against cache size" in page.read_text("utf-8")
    assert "hit rate against cache size" in shown.output

    told = json.loads(run(trace_app, "advise", out, "--json").stdout)
    assert told["results"]["worth it"] is False
    assert len(list(TraceReader(out))) == 20
    assert "unknown source" in run(trace_app, "convert", "x", source, out).output


def test_fit_tools_checks_its_quantiles(tmp_path):
    """The fitted quantiles are printed as ratios to the measured ones, and can be simulated."""
    path = small_trace(tmp_path / "t.jsonl")
    out = tmp_path / "tools.json"
    done = run(sim_app, "fit-tools", path, out, "--json")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)["results"]["tools"]["edit"]
    assert row["fit/p50"] == pytest.approx(1.0, abs=0.35)
    record = simulate(scenario_of({"trace": {"path": str(path)}, "tools": {"fitted": str(out)}}))
    assert record.programs == 10
    assert math.isfinite(record.jct_s.mean)


def test_tao_holds_and_places_turns():
    """Held until there is room, programs end sooner in a pool that is too small for all."""
    values = {
        "workload": {
            "programs": 60, "turns": 10, "agents": 1, "chat": True, "anchor_tokens": 500,
            "observation_tokens": 3000, "output_tokens": 40,
            "tools": [{"tool": "shell", "median_s": 3.0, "sigma": 0.6}],
        },
        "arrivals": {"concurrency": 40},
        "hardware": {"kv_blocks": 14000},
        "cell": {"replicas": 2, "timeline": 0},
    }  # fmt: skip
    free = simulate(scenario_of(values))
    held = simulate(scenario_of({**values, "cell": {**values["cell"], "admission": "tao"}}))
    assert held.programs == free.programs == 60
    assert held.hit_rate > free.hit_rate
    assert held.jct_s.mean < free.jct_s.mean

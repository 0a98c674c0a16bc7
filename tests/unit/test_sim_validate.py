"""Validation: measured runs and points are read, compared, and refused when broken."""

import json

import pytest
from typer.testing import CliRunner

from scout_sdk import ConfigError
from scout_server.replica import BatchSettings, LinearLatency, Replica, Request
from scout_server.sim.cli import sim_app
from scout_server.sim.silicon import load_points, simulate_point, summarise
from scout_server.sim.validate import load_run, replay, tables_beside

LATENCY = LinearLatency(
    step_s_fixed=0.01,
    prefill_s_per_token=1e-4,
    decode_s_per_sequence=1e-3,
    decode_s_per_kv_token=1e-7,
)


@pytest.fixture
def folder(tmp_path):
    """A run in the measured format, made by a replica with a known latency."""
    path = tmp_path / "bench_TEST"
    path.mkdir()
    replica = Replica(BatchSettings(max_batched_tokens=512), LATENCY, kv_blocks=60)
    requests = [
        Request(
            f"{i}", prompt_tokens=50 + 13 * i % 200, output_tokens=10 + i % 40,
            hashes=range(1000 * i, 1000 * i + 40),
        )
        for i in range(30)
    ]  # fmt: skip
    at = 100.0
    for request in requests:
        while replica.next_event_time() < at:
            replica.step(replica.next_event_time())
        replica.submit(request, at)
        at += 0.05
    while replica.next_event_time() < 1e9:
        replica.step(replica.next_event_time())
    rows = [
        {
            "request_id": r.request_id,
            "input_toks": r.prompt_tokens,
            "output_toks": r.output_tokens,
            "queued_ts": r.arrival,
            "first_token_ts": r.first_token_at,
            "last_token_ts": r.finished_at,
        }
        for r in requests
    ]
    (path / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    meta = {
        "model": "meta-llama/Llama-3.1-8B",
        "engine_kwargs": {"max_num_seqs": 256, "max_num_batched_tokens": 512},
        "kv_cache": {"num_gpu_blocks": 60, "block_size": 16, "enable_prefix_caching": True},
        "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    }
    (path / "meta.json").write_text(json.dumps(meta), "utf-8")
    return path


def test_a_run_is_met_exactly_by_what_made_it(folder):
    """Replayed with the same step times, every figure is equal, preemptions included."""
    run = load_run(folder)
    errors, replica = replay(run, LATENCY)
    assert run.hardware == "RTX4090"
    assert replica.counters.preemptions > 0
    for error in errors:
        assert error.simulated == pytest.approx(error.measured, rel=1e-6), error.name


def test_other_step_times_show_as_errors(folder):
    """Steps that take a tenth longer give errors, so the comparison compares."""
    slower = LinearLatency(
        step_s_fixed=0.011,
        prefill_s_per_token=1.1e-4,
        decode_s_per_sequence=1.1e-3,
        decode_s_per_kv_token=1.1e-7,
    )
    errors, _ = replay(load_run(folder), slower)
    assert all(error.error > 0.03 for error in errors[:3])


def test_a_broken_run_is_named(folder):
    """Line and field of a broken request, and a missing setting, are in the error."""
    with pytest.raises(ConfigError, match="--tables"):
        tables_beside(folder, load_run(folder))
    with (folder / "requests.jsonl").open("a", encoding="utf-8") as out:
        out.write('{"queued_ts": 1}\n')
    with pytest.raises(ConfigError, match=r"requests\.jsonl:31"):
        load_run(folder)
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    del meta["kv_cache"]["num_gpu_blocks"]
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")
    (folder / "requests.jsonl").write_text(
        "\n".join((folder / "requests.jsonl").read_text("utf-8").splitlines()[:30]), "utf-8"
    )
    with pytest.raises(ConfigError, match="num_gpu_blocks"):
        load_run(folder)


def test_the_command_reports_missed_targets_and_ends_well(folder):
    """A run that a profile does not meet is reported as missed, with exit status 0."""
    done = CliRunner().invoke(sim_app, ["validate", str(folder), "--profile", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert len(document["targets"]) == 4
    assert not all(t["met"] for t in document["targets"])
    bad = CliRunner().invoke(sim_app, ["validate", str(folder), "--against", "hope"])
    assert bad.exit_code == 1
    assert "known: measured-run, silicon" in bad.output


COLUMNS = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,"
    "gemm_quant_mode,moe_quant_mode,batch_size,tp_size,pp_size,attention_dp_size,"
    "silicon_ttft_ms,silicon_tpot_ms"
)


def test_points_are_simulated_at_their_concurrency(tmp_path):
    """Covered points are read, others left out; more at once means slower tokens."""
    path = tmp_path / "sample.csv"
    row = "{name},s,vllm,1,meta-llama/Llama-3.1-8B-Instruct,{gpu},,agg,256,64,,,{n},1,1,1,50,8"
    rows = [
        row.format(name="a", gpu="h100_sxm", n=1),
        row.format(name="b", gpu="h100_sxm", n=64),
        row.format(name="c", gpu="gb300", n=1),
    ]
    path.write_text("\n".join([COLUMNS, *rows]), "utf-8")
    points = list(load_points(path))
    assert [p.name for p in points] == ["a", "b"]
    one, many = (simulate_point(p) for p in points)
    assert one.tpot < many.tpot
    (summary,) = summarise([one, many])
    assert summary["points"] == 2

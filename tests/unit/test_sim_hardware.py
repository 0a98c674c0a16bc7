"""Latency models and the memory arithmetic."""

import math

import pytest

from scout_sdk import ConfigError
from scout_server.replica import LatencyModel, SpanLatency, StepBatch
from scout_server.sim.hardware import latency_of
from scout_server.sim.hardware.fitted import shipped_profiles
from scout_server.sim.hardware.specs import GPUS, MODELS, find_gpu, find_model, pool_blocks
from scout_server.sim.hardware.tables import AttentionTable, Curve, load_llmservingsim

H100, LLAMA = GPUS["H100"], MODELS["llama-3.1-8b"]


def test_kv_bytes_are_those_of_the_models_cards():
    """128 KiB a token for Llama-3.1-8B, 320 KiB for the 70B, 256 KiB for Qwen3-32B."""
    sizes = {name: MODELS[name].kv_bytes_per_token / 1024 for name in MODELS}
    assert sizes["llama-3.1-8b"] == 128
    assert sizes["llama-3.1-70b"] == 320
    assert sizes["qwen3-32b"] == 256


def test_a_model_that_does_not_fit_is_refused_with_the_sum():
    """The error shows memory, weights and what would fit."""
    with pytest.raises(ConfigError, match=r"141\.1 GB") as caught:
        pool_blocks(
            MODELS["llama-3.1-70b"], H100, tensor_parallel=1, memory_fraction=0.9, block_tokens=16
        )
    assert "tensor_parallel 2 fits" in str(caught.value)

    found = pool_blocks(
        MODELS["llama-3.1-70b"], H100, tensor_parallel=4, memory_fraction=0.9, block_tokens=16
    )
    assert found.blocks > 1000


def test_unknown_hardware_lists_the_known():
    """A wrong name is refused with all good ones."""
    with pytest.raises(ConfigError, match="H100"):
        find_gpu("H1000")
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        find_model("llama-4")
    assert find_gpu("rtx 4090").name == "RTX4090"


def _models() -> list[LatencyModel]:
    return [
        latency_of(kind=kind, model=MODELS[model], gpu=GPUS[gpu], tensor_parallel=devices)
        for kind in ("roofline", "fitted")
        for gpu, model, devices in (
            ("H100", "llama-3.1-8b", 1), ("A100", "llama-3.1-70b", 4), ("B200", "qwen3-32b", 2),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("model", _models())
def test_a_run_of_decodes_costs_what_its_steps_cost(model):
    """span_s equals the sum of single steps, and grows with the number of steps."""
    assert isinstance(model, SpanLatency)
    sequences, context = 12, 12 * 900
    single = [model.mixed_s((), sequences, context + i * sequences) for i in range(40)]
    assert model.span_s(sequences, context, 40) == pytest.approx(sum(single), rel=1e-9)
    assert model.span_s(sequences, context, 1) == pytest.approx(single[0])
    assert model.step_s(StepBatch((), (900,) * 12)) == pytest.approx(single[0])


def test_every_required_pair_has_a_profile_with_source_and_error():
    """Three models on seven GPUs are shipped, each with its source and its fit error."""
    profiles = shipped_profiles()
    for gpu in ("A100", "H100", "H200", "B200", "L40S", "RTX4090", "RTX3090"):
        for model in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b"):
            profile = profiles[gpu, model]
            assert profile.source
            assert 0 < profile.error["dense"] < 0.1


def test_this_projects_models_have_profiles_measured_on_vllm():
    """SmolLM2 and the tiny model on a CPU: how it was measured, and what passes outside."""
    for model, prompt_s in (("smollm2-135m", (0.4, 0.8)), ("scout-tiny", (0.02, 0.06))):
        profile = shipped_profiles()["CPU", model]
        assert "scout sim calibrate on vLLM" in profile.source
        assert 0 < profile.error["prefill"] < 0.1
        assert 0 < profile.error["decode"] < 0.15
        assert 1e-3 < profile.front.request_s(0) + profile.front.reply_s < 2e-2
        low, high = prompt_s
        assert low < profile.latency.mixed_s([(512, 0)], 0, 0) < high


def test_profiles_order_gpus_as_their_bandwidth_does():
    """Decoding alone is slower on the GPU with less bandwidth."""
    profiles = shipped_profiles()
    times = [
        profiles[gpu, "llama-3.1-8b"].latency.mixed_s((), 1, 1000)
        for gpu in ("B200", "H200", "H100", "A100", "RTX4090", "L40S")
    ]
    assert times == sorted(times)


def test_a_measured_forward_pass_is_met():
    """B200, Llama-3.1-8B: 9.8 ms for 32 tokens, 31.4 for 2,048, 115 for 8,192 (vLLM 0.19)."""
    latency = shipped_profiles()["B200", "llama-3.1-8b"].latency
    for tokens, measured in ((32, 9.8e-3), (2048, 31.4e-3), (8192, 115e-3)):
        assert latency.mixed_s([(tokens, 0)], 0, 0) == pytest.approx(measured, rel=0.1)


def test_curves_are_straight_between_points_and_beyond():
    """Linear inside, the first value below, the last slope above."""
    curve = Curve([(1, 10.0), (3, 30.0)])
    assert [curve(x) for x in (0, 1, 2, 3, 5)] == [10.0, 10.0, 20.0, 30.0, 50.0]


def _grid():
    for chunk in (0, 16, 64):
        for history in (0, 32) if chunk else (0,):
            for sequences in (0, 1, 4):
                for context in (16, 64) if sequences else (0,):
                    if chunk or sequences:
                        time_us = 2 * chunk + history + 3 * sequences + context
                        yield chunk, history, sequences, context, time_us


def test_attention_is_linear_in_every_axis_and_exact_on_the_grid():
    """A table of a linear function gives that function, mixed cells included."""
    table = AttentionTable(_grid())
    for chunk, history, sequences, context, time_us in _grid():
        assert table(chunk, history, sequences, context) == pytest.approx(time_us)
    assert table(40, 16, 2.5, 40) == pytest.approx(2 * 40 + 16 + 3 * 2.5 + 40)


def _tables(folder):
    layers = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn",
              "down_proj", "embedding", "final_layernorm")  # fmt: skip
    rows = [f"{name},{n},{n + 1}" for name in layers for n in (1, 64)]
    (folder / "dense.csv").write_text("layer,tokens,time_us\n" + "\n".join(rows), "utf-8")
    rows = [f"{name},{n},{n}" for name in ("lm_head", "sampler") for n in (1, 64)]
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\n" + "\n".join(rows), "utf-8")
    rows = [",".join(map(str, row)) for row in _grid()]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
    (folder / "attention.csv").write_text(header + "\n".join(rows), "utf-8")
    return folder


def test_tables_add_up_a_step(tmp_path):
    """A step is the layers' dense kernels, attention, and one output per sequence."""
    model = load_llmservingsim(_tables(tmp_path), layers=2)
    per_layer = 8 * 3.0 + (3 * 2 + 40)
    assert model.step_s(StepBatch((), (40, 40))) == pytest.approx((2 * per_layer + 6 + 4) * 1e-6)
    assert not isinstance(model, SpanLatency)


def test_table_runs_cross_measured_contexts_exactly(tmp_path):
    """A run over several grid cells is the sum of its steps."""
    model = load_llmservingsim(_tables(tmp_path), layers=2, spans=True)
    assert isinstance(model, SpanLatency)
    steps = [model.mixed_s((), 3, 3 * 20 + 3 * i) for i in range(70)]
    assert model.span_s(3, 60, 70) == pytest.approx(math.fsum(steps), rel=1e-9)


def test_missing_tables_are_all_named(tmp_path):
    """A folder without tables is refused with the names of all that are missing."""
    with pytest.raises(ConfigError, match=r"dense\.csv, attention\.csv, per_sequence\.csv"):
        load_llmservingsim(tmp_path, layers=1)
    _tables(tmp_path)
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,one,2\n", "utf-8")
    with pytest.raises(ConfigError, match=r"dense\.csv:2"):
        load_llmservingsim(tmp_path, layers=1)


def test_two_grids_in_one_table_are_both_used():
    """Places that are no full grid (each chunk with its own histories) interpolate all the same."""
    rows = [(16, h, 0, 0, 2 * 16 + h) for h in (0, 32, 64, 512)]
    rows += [(24, h, 0, 0, 2 * 24 + h) for h in (0, 512, 768)]
    rows += [(32, h, 0, 0, 2 * 32 + h) for h in (0, 32, 64, 512, 1024)]
    rows += [(0, 0, n, c, 3 * n + c) for n in (1, 4) for c in (16, 64)]
    table = AttentionTable(rows)
    for chunk, history in ((16, 48), (20, 40), (24, 300), (28, 600), (30, 0)):
        assert table(chunk, history, 0, 0) == pytest.approx(2 * chunk + history)
    assert table(0, 0, 3, 30) == pytest.approx(3 * 3 + 30)

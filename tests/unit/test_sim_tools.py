"""Tool durations: fitted quantiles, heavy tails, timeouts, censoring."""

import math
import random

import pytest

from scout_sdk import ConfigError
from scout_server.sim.tools import (
    FittedTools,
    ReplayTools,
    ToolFit,
    fit_tool,
    fit_tools,
    load_tools,
    save_tools,
)
from scout_server.sim.traces import Program, Turn


def lognormal(count, seed=1, mu=0.5, sigma=0.8):
    rng = random.Random(seed)
    return [math.exp(rng.gauss(mu, sigma)) for _ in range(count)]


def quantile(values, share):
    return sorted(values)[int(share * (len(values) - 1))]


def test_quantiles_of_a_lognormal_are_met():
    """p50, p90 and p99 of the fit are within a tenth of the sample's."""
    values = lognormal(5000)
    fit = fit_tool(values)
    for share in (0.5, 0.9, 0.99):
        assert fit.quantile(share) == pytest.approx(quantile(values, share), rel=0.1)


def test_a_pareto_tail_keeps_its_index():
    """Body plus a tail of index 1: the index is found though the mean does not exist."""
    rng = random.Random(3)
    values = lognormal(4500, mu=-1.0, sigma=0.5) + [
        10 * (1 - rng.random()) ** -1.0 for _ in range(500)
    ]
    fit = fit_tool(values)
    assert fit.tail_index == pytest.approx(1.0, abs=0.35)
    assert fit.quantile(0.99) == pytest.approx(quantile(values, 0.99), rel=0.3)


def test_a_timeout_is_found_and_never_exceeded():
    """Values that stick to the largest one are a cap."""
    values = [min(v, 4.0) for v in lognormal(2000, sigma=1.2)]
    fit = fit_tool(values)
    assert fit.cap_s == 4.0
    assert fit.quantile(0.9999) == 4.0


def test_censored_durations_are_lower_bounds():
    """Cutting half of the values off at 2 s and saying so keeps the median near the truth."""
    truth = lognormal(3000, mu=1.0, sigma=0.6)
    cut = [min(v, 2.5) for v in truth]
    flags = [v > 2.5 for v in truth]
    ignored = fit_tool(cut).log_median
    told = fit_tool(cut, flags).log_median
    assert abs(told - 1.0) < abs(ignored - 1.0)
    assert told == pytest.approx(1.0, abs=0.1)


def test_quantiles_never_fall():
    """A larger share never has a smaller duration, over body, tail and cap."""
    fit = fit_tool([min(v, 30.0) for v in lognormal(1000, sigma=2.0)])
    found = [fit.quantile(i / 200) for i in range(201)]
    assert found == sorted(found)


def made(gaps, tool="shell"):
    turns = [Turn(input_tokens=1, output_tokens=1)]
    turns += [
        Turn(input_tokens=1, output_tokens=1, parents=(i,), gap_s=gap, tool=tool)
        for i, gap in enumerate(gaps)
    ]
    return Program(program="p", arrival_s=0.0, turns=tuple(turns))


def test_fits_survive_a_file(tmp_path):
    """What is saved is loaded, infinities included; a broken file is named."""
    fits = fit_tools([made(lognormal(100)), made(lognormal(3), tool="rare")])
    assert sorted(fits) == ["shell"] or sorted(fits) == ["shell", "unknown"]
    path = tmp_path / "tools.json"
    save_tools(path, fits)
    assert load_tools(path) == fits
    path.write_text('{"tools": {"x": {"samples": 1}}}', "utf-8")
    with pytest.raises(ConfigError, match="'x'"):
        load_tools(path)


def test_draws_depend_on_seed_program_and_turn_only():
    """The same turn has the same gap whatever was asked before; another seed has another."""
    fits = {"shell": fit_tool(lognormal(200))}
    program = made([0.0] * 5)
    one, again, other = FittedTools(fits, 1), FittedTools(fits, 1), FittedTools(fits, 2)
    forward = [one.gap_s(program, i) for i in range(1, 6)]
    backward = [again.gap_s(program, i) for i in range(5, 0, -1)]
    assert forward == backward[::-1]
    assert forward != [other.gap_s(program, i) for i in range(1, 6)]
    assert len(set(forward)) == 5


def test_replay_is_the_trace():
    """Recorded gaps come back, scaled."""
    program = made([2.0, 3.0])
    assert [ReplayTools(0.5).gap_s(program, i) for i in (1, 2)] == [1.0, 1.5]


def test_a_constant_tool_stays_constant():
    """Equal durations fit without a spread."""
    fit = fit_tool([1.5] * 50)
    assert isinstance(fit, ToolFit)
    assert fit.quantile(0.1) == pytest.approx(1.5)
    assert fit.quantile(0.99) == pytest.approx(1.5)

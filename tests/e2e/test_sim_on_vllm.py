"""The simulator beside a real vLLM: programs are measured, calibrated, simulated and compared."""

import asyncio
import math
from pathlib import Path

import pytest

from scout_server.sim.hardware.fitted import load_profile
from scout_server.sim.livecells import LiveCell, ServerKind, programs_of_cell, reference_on
from scout_server.sim.livereplay import simulate_measured
from scout_server.sim.liverun import Campaign, measure
from scout_server.sim.livevalidate import compare, load_measured
from scout_server.sim.probes import Calibration

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

MODELS = Path(__file__).resolve().parents[2] / "models"
SERVER = ServerKind(model="tiny", blocks=88, eviction="lru")
CELLS = [
    LiveCell(server=SERVER, concurrency=n, gaps="short", programs=p, series="test")
    for n, p in ((1, 2), (3, 3))
]
QUICK = Calibration(
    prompt_tokens=(16, 128, 512), history_tokens=(256,), new_tokens=(64,), concurrency=(1, 2),
    context_tokens=(64, 256), decode_s=0.1, repeats=1, loops=(1,), loops_s=0.0,
)  # fmt: skip


@pytest.mark.skipif(not (MODELS / "tiny").is_dir(), reason="make setup-vllm-cpu makes the model")
def test_the_engine_evicts_and_hits_as_the_simulator_says(tmp_path):
    """
    In a pool that is too small every turn is simulated and finds the blocks that it found on vLLM.

    One program at a time leaves next to nothing to the clock: hits are equal but for a block or
    two. With three they depend on who comes first, so that a few points may be between them.
    """
    campaign = Campaign(
        cells=CELLS, repetitions=1, out=tmp_path, models=MODELS, until=math.inf, calibration=QUICK
    )
    said: list[str] = []
    asyncio.run(measure(campaign, said.append))
    campaign.fit()
    measured = load_measured(campaign.lines)
    names = [cell.name for cell in CELLS]
    assert [m.cell for m in measured if m.cell in names] == names
    assert sum(m.cell == reference_on(SERVER).name for m in measured) == len(CELLS) + 2
    for cell in CELLS:
        (line,) = (m for m in measured if m.cell == cell.name)
        planned = {
            (number, index): turn.output_tokens
            for number, program in enumerate(programs_of_cell(cell, 1))
            for index, turn in enumerate(program.turns)
        }
        assert {(r[0], r[1]): r[6] for r in line.requests} == planned
    assert load_profile(campaign.profile(SERVER)).front.request_s_fixed > 0
    simulated = simulate_measured(CELLS, measured, campaign.profile)
    alone, together = compare(CELLS, measured, simulated)
    assert abs(alone.hit_points) < 1.0
    assert 0.2 < alone.measured.hit_rate < 0.5  # with blocks for all it is 0.65
    assert abs(together.hit_points) < 10.0
    asyncio.run(measure(campaign, said.append))  # nothing is left: no server is started
    assert said.count(f"{SERVER.name}: starting") == 1

"""Warm-ups on a running vLLM server, on a CPU and a tiny random model."""

import asyncio
import importlib.util
import random
from pathlib import Path

import httpx
import pytest

from scout_server.bench.enginerun import Run, run_sessions
from scout_server.bench.programs import Turn
from scout_server.demo.servers import Running, ServerSpec, start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
AGENTS, SESSIONS = 8, 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder, made by the project's own script."""
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "scripts" / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    module.tiny(folder)
    return folder


def sessions() -> list[list[Turn]]:
    """Sessions that go through all agents in turn; the anchors do not fit into the pool."""
    dice = random.Random(3)
    anchors = [[dice.randrange(5, 200) for _ in range(320)] for _ in range(AGENTS)]
    return [
        [
            Turn(
                agent=f"a{number}",
                prompt=(*anchors[number], *(dice.randrange(5, 200) for _ in range(20))),
                output=1,
                gap_s=0.9,
                expected_s=0.9,
                tool="wait",
                final=number == AGENTS - 1,
            )
            for number in range(AGENTS)
        ]
        for _ in range(SESSIONS)
    ]


async def drive(tiny: Path, *arguments: str) -> tuple[Run, dict[str, object]]:
    """Run the sessions on a server of its own; return what was measured, and its last state."""
    engine = (
        *("--enforce-eager", "--max-model-len", "1024", "--block-size", "32"),
        *("--max-num-seqs", "8", "--load-format", "dummy", "--num-gpu-blocks-override", "64"),
        *("--served-model-name", "tiny"),
    )
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    spec = ServerSpec(
        name="prefetch", args=(str(tiny), *arguments, *engine), environ=environ, start_s=240.0
    )
    running: Running
    async with start(spec) as running:
        run = await run_sessions(running.root, "tiny", sessions(), concurrency=1, name="s")
        async with httpx.AsyncClient(base_url=running.root) as client:
            state = (await client.get("/v1/scout/state")).json()["engines"][0]
    return run, state


@pytest.mark.parametrize("arguments", [(), ("--api-server-count", "2")], ids=["one", "two"])
def test_anchors_are_warm_when_they_are_asked_for(tiny: Path, arguments: tuple[str, ...]) -> None:
    """
    With one API server or two, anchors are rebuilt in the gaps, most of them are used, none shares
    an engine step with a user's request, and vLLM's own counters know nothing of them.
    """
    enabled = ("--set", "prefetch.enabled=true", "--set", "prefetch.chunk_tokens=128")
    run, state = asyncio.run(drive(tiny, *enabled, *arguments))
    warm, prefetch = run.warm_ups, state["prefetch"]

    assert isinstance(prefetch, dict)
    assert prefetch["off"] is None
    assert warm["started"] > 5, prefetch
    assert warm["used"] >= 0.6 * warm["started"], prefetch
    assert warm["contended"] == 0
    assert len(run.ttft_s) == SESSIONS * AGENTS
    assert run.counters.queried == SESSIONS * AGENTS * 340
    assert state["tokens"] == {"prompt": run.counters.queried, "cached": run.counters.hit}

"""The command line that starts vLLM, and what stands beside it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from scout_sdk import ConfigError, SessionEvent, UnsupportedError, _wire
from scout_server.vllm import launch, register
from scout_server.vllm.breaker import Breaker
from scout_server.vllm.link import EngineLink
from scout_server.vllm.metrics import register_engines
from scout_server.vllm.settings import document_of
from scout_server.vllm.utility import answer


@pytest.fixture
def vllm_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Put an installed distribution `vllm` of a given version on the path."""

    def install(version: str) -> None:
        info = tmp_path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_one_command_puts_scout_in(vllm_at) -> None:
    """The command is vLLM's own server with our scheduler and middleware and the user's flags."""
    vllm_at("0.32.0")
    command, env = launch.build_command("m", ["--port", "1"], environ={"HOME": "h"})

    assert command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "m",
    ]
    assert command[5:7] == ["--port", "1"]
    assert command[-4:] == [
        "--scheduler-cls",
        "scout_server.vllm.ScoutScheduler",
        "--middleware",
        "scout_server.vllm.ScoutMiddleware",
    ]
    assert env["VLLM_PLUGINS"].split(",")[0] == "scout"
    assert env["HOME"] == "h"


def test_plugins_that_the_user_chose_stay(vllm_at) -> None:
    """VLLM_PLUGINS keeps what it had; ours is added once."""
    vllm_at("0.32.0")
    for given, expected in (("a,b", "scout,a,b"), ("", "scout"), ("scout,a", "scout,a")):
        assert launch.build_command("m", environ={"VLLM_PLUGINS": given})[1]["VLLM_PLUGINS"] == (
            expected
        )


def test_scout_off_is_the_stock_server(vllm_at) -> None:
    """With scout_off nothing of ours is in the command or the plugins."""
    vllm_at("0.32.0")
    command, env = launch.build_command("m", scout_off=True, environ={"VLLM_PLUGINS": "scout,a"})

    assert not [part for part in command if "scout" in part]
    assert env["VLLM_PLUGINS"] == "a"


def test_an_unsupported_vllm_starts_without_scout(vllm_at) -> None:
    """Outside of the supported range the stock server starts, and the notice says why."""
    vllm_at("0.99.1")
    command, _ = launch.build_command("m", environ={})

    assert "--scheduler-cls" not in command
    notice = launch.support_notice()
    assert notice is not None
    assert "0.99.1" in notice
    assert "0.32.x" in notice


def test_flags_that_take_scout_out_are_refused(vllm_at) -> None:
    """All flags that `scout serve` sets itself are refused at once, each with its reason."""
    vllm_at("0.32.0")
    with pytest.raises(ConfigError) as caught:
        launch.build_command("m", ["--scheduler_cls=x.Y", "--model", "n"], environ={})
    assert "--scheduler-cls" in str(caught.value)
    assert "--model" in str(caught.value)


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM is an UnsupportedError that names the way to install it."""
    monkeypatch.setattr(launch.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install vllm"):
        launch.build_command("m")


def test_register_may_run_twice_and_without_an_engine() -> None:
    """The general plugin does nothing in a process that runs no engine, however often it runs."""
    register()
    register()


def test_document_of_reads_only_ours() -> None:
    """Only the mapping below `scout` is ours; anything else is no configuration."""
    assert document_of({"scout": {"policy": {}}, "x": 1}) == {"policy": {}}
    for other in (None, {}, [], "scout", {"scout": 3}):
        assert document_of(other) == {}


def test_the_breaker_hands_back_once() -> None:
    """The first fault hands back and is kept as the reason; later ones are counted."""
    calls: list[int] = []
    breaker = Breaker(lambda: calls.append(1))
    breaker.trip("pop", ValueError("first"))
    breaker.trip("arrive", ValueError("second"))

    assert calls == [1]
    assert breaker.faults == 2
    assert breaker.reason == "pop: ValueError: first"


def test_another_scheduler_answers_that_it_is_stock() -> None:
    """The utility says `stock` and why where the engine runs another scheduler."""
    assert json.loads(answer(object(), "state", "")) == {
        "mode": "stock",
        "problems": ["another scheduler runs"],
    }


STATE = {
    "mode": "scout",
    "breaker": {"open": True, "faults": 2, "reason": "x"},
    "evictions": {"popped": 7, "evicted": 5},
    "decision": {"bounds_s": [0.001, 0.01], "buckets": [4, 2, 1], "sum_s": 0.5},
    "arrivals": {"hint": 3},
    "finishes": {"stop": 2},
    "events": {"accepted": 1},
}


async def test_metrics_show_the_engines_states() -> None:
    """Every engine's counters appear with its rank, histograms are cumulative."""

    async def call(operation: str, argument: str) -> list[str]:
        return [json.dumps(STATE), json.dumps({"mode": "stock"})]

    registry = CollectorRegistry()
    link = EngineLink(call, timeout_s=1)
    register_engines(registry, link)
    register_engines(registry, link)
    assert await link.refresh()
    lines = generate_latest(registry).decode().splitlines()

    for line in (
        'scout_mode{engine="0",mode="scout"} 1.0',
        'scout_mode{engine="1",mode="stock"} 1.0',
        'scout_breaker_open{engine="0"} 1.0',
        'scout_faults_total{engine="0"} 2.0',
        'scout_blocks_evicted_total{engine="0"} 5.0',
        'scout_requests_total{engine="0",origin="hint"} 3.0',
        'scout_decision_seconds_bucket{engine="0",le="0.01"} 6.0',
        'scout_decision_seconds_bucket{engine="0",le="+Inf"} 7.0',
        'scout_decision_seconds_sum{engine="0"} 0.5',
    ):
        assert line in lines


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", '{"decision": {"buckets": 1}}', '{"mode": 1}']
)
async def test_nonsense_from_an_engine_breaks_no_scrape(text: str) -> None:
    """Whatever an engine answers, /metrics can be rendered."""

    async def call(operation: str, argument: str) -> list[str]:
        return [text]

    registry = CollectorRegistry()
    link = EngineLink(call, timeout_s=1)
    register_engines(registry, link)
    await link.refresh()
    assert b"scout_link_failures_total" in generate_latest(registry)


async def test_events_reach_every_engine() -> None:
    """A posted message goes out once, with the tenant before it."""
    sent: list[tuple[str, str]] = []

    async def call(operation: str, argument: str) -> list[str]:
        sent.append((operation, argument))
        return ["{}", "{}"]

    body = _wire.encode_events([SessionEvent(session="s", final=True)])
    assert await EngineLink(call, timeout_s=1).post(body, "t") == [{}, {}]
    assert sent == [("events", f"t\n{body.decode()}")]


async def test_a_dead_engine_fails_no_post() -> None:
    """An engine that raises or hangs makes the post return None within the timeout."""

    async def raises(operation: str, argument: str) -> list[str]:
        raise RuntimeError("dead")

    async def hangs(operation: str, argument: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    for call in (raises, hangs):
        link = EngineLink(call, timeout_s=0.01)
        assert await link.post(b"{}", "") is None
        assert link.failures == 1

"""What /metrics shows is what docs/metrics.md says, on every server."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from scout_sdk import HintOutcome, Hints
from scout_server.embedded.engine import Engine
from scout_server.embedded.metrics import Metrics
from scout_server.embedded.script import Wish, write
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.exposition import ENGINE_METRICS, HINTS, engine_metrics
from scout_server.policy.engine import TaoEngine
from scout_server.policy.turns import TaoSettings
from scout_server.policy.usage import OTHER, AgentTokens
from scout_server.tao.meters import Meters
from scout_server.vllm.link import EngineLink
from scout_server.vllm.metrics import OUTCOMES, EngineCollector

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(scout_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def documented(place: str) -> dict[str, tuple[str, tuple[str, ...], str]]:
    found = {}
    for name, kind, labels, places, meaning in ROW.findall((DOCS / "metrics.md").read_text()):
        if place in [each.strip() for each in places.split(",")]:
            found[name] = (kind, tuple(re.findall(r"`(\w+)`", labels)), meaning.strip())
    return found


def exported(families: Iterable[Metric]) -> dict[str, tuple[str, tuple[str, ...], str]]:
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            tuple(getattr(family, "_labelnames", ())),
            family.documentation,
        )
        for family in families
        if family.name.startswith("scout_")
    }


@pytest.fixture
def worked():
    """An embedded engine that has served, evicted and preempted nothing yet but one request."""
    time = [0.0]
    engine = Engine(EmbeddedSettings(kv_blocks=64), clock=lambda: time[0])
    metrics = Metrics(engine)
    for turn in range(8):
        engine.submit(
            list(range(300)) + [turn] * 40,
            write(Wish(max_tokens=4, filler_tokens=4), [1]),
            hints=Hints(session=f"s{turn}", agent=f"agent{turn % 2}"),
        )
        time[0] += 30.0
        engine.pump()
    metrics.outcome("agent", HintOutcome.ACCEPTED)
    return metrics


def test_the_embedded_engine_exports_what_is_documented(worked):
    """
    Names, types, labels and meanings are those of the table, and nothing else is exported.
    """
    families = list(worked.collect())
    shown = exported(families)
    silent = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if not family.samples
    }
    assert {name: what for name, what in shown.items() if name not in silent} == documented(
        "embedded"
    )


def test_vllm_exports_what_is_documented():
    """
    The collector's families and the counter of outcomes are the table's rows for vLLM.
    """
    link = EngineLink(_nobody, timeout_s=1)
    families = exported(EngineCollector(link).collect())
    (hints,) = OUTCOMES.collect()
    families[f"{hints.name}_total"] = ("counter", tuple(OUTCOMES._labelnames), hints.documentation)
    assert families == documented("vLLM")


def test_the_gateway_exports_what_is_documented():
    """
    Everything in the pool's registry is in the table, with its labels.
    """
    meters = Meters(TaoEngine(TaoSettings()), lambda: 0.0)
    labels = {
        instrument._name: tuple(instrument._labelnames)
        for instrument in vars(meters).values()
        if hasattr(instrument, "_labelnames")
    }
    shown = {}
    for family in meters.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        known = labels.get(family.name, tuple(getattr(family, "_labelnames", ())))
        shown[name] = (family.type, known, family.documentation)
    assert shown == documented("gateway")


async def _nobody(operation, argument):
    return []


def _values(families):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_same_state_gives_the_same_lines_in_both_engines(worked):
    """
    What the embedded engine shows of its core is what vLLM would show of an equal state.
    """
    core = worked._engine.core_state()
    state = json.loads(json.dumps({"mode": "scout", "core": core}))
    values = _values(engine_metrics([state]))
    ours = _values(worked.collect())
    shared = [key for key in values if key[0].startswith(("scout_hit", "scout_prompt", "scout_sh"))]
    assert len(shared) >= 10
    for key in shared:
        assert values[key] == ours[key]


def test_hit_and_prompt_tokens_by_agent_are_those_of_the_requests(worked):
    """
    Eight prompts of 340 tokens, four an agent; the common 288 are found but the first time.
    """
    values = _values(worked.collect())
    prompt = {
        dict(key[1:])["agent"]: value
        for key, value in values.items()
        if key[0] == "scout_prompt_tokens_total"
    }
    hit = {
        dict(key[1:])["agent"]: value
        for key, value in values.items()
        if key[0] == "scout_hit_tokens_total"
    }
    assert prompt == {"agent0": 4 * 340, "agent1": 4 * 340, OTHER: 0}
    assert hit == {"agent0": 3 * 288, "agent1": 4 * 288, OTHER: 0}
    assert sum(hit.values()) == worked._engine.counters().hit_tokens


STATE = {
    "mode": "lru",
    "breaker": {"open": False, "faults": 0},
    "evictions": {"popped": 9, "evicted": 4},
    "arrivals": {"hint": 1},
    "offload": {"used": True, "evicted": {"scout": 3, "lru": 2}},
    "prefetch": {"started": 5, "used": 3, "wasted": 1, "cancelled": 1, "tokens": 640,
                 "confidence": 0.4},
    "core": {
        "predictability": 0.8,
        "regretted_blocks": 2,
        "sessions_gap": 6,
        "following": None,
        "shadow_hits": {"use": 10, "rate": 8},
        "shadow_hits_lru": 12,
    },
}  # fmt: skip


def test_every_figure_of_a_state_has_its_line():
    """
    Warm-ups, tier, duel and regrets of two engines are told apart by rank.
    """
    values = _values(engine_metrics([{}, STATE]))
    for name, labels, value in (
        ("scout_warmups_total", {"outcome": "used"}, 3.0),
        ("scout_warmups_total", {"outcome": "wasted"}, 1.0),
        ("scout_warmup_tokens_total", {}, 640.0),
        ("scout_offload_evicted_total", {"order": "scout"}, 3.0),
        ("scout_shadow_hits_total", {"order": "rate"}, 8.0),
        ("scout_shadow_leader", {"order": "lru"}, 1.0),
        ("scout_shadow_leader", {"order": "use"}, 0.0),
        ("scout_blocks_regretted_total", {}, 2.0),
        ("scout_sessions", {"phase": "gap"}, 6.0),
    ):
        assert values[(name, *sorted({"engine": "1", **labels}.items()))] == value
    assert not [key for key in values if key[0] == "scout_warmups_total" and "0" in str(key[2])]


def test_the_labels_of_a_long_run_are_few():
    """
    However many agents a client names, 24 have a name of their own, the busiest among them.
    """
    tokens = AgentTokens()
    for round_ in range(200):
        for busy in range(4):
            tokens.record(f"busy{busy}", prompt_tokens=1000, cached_tokens=900)
        for junk in range(20):
            tokens.record(f"junk{round_}-{junk}", prompt_tokens=10, cached_tokens=0)
    totals = {usage.name: usage for usage in tokens.totals()}
    assert len(totals) == 25
    for busy in range(4):
        assert totals[f"busy{busy}"].prompt_tokens == 200_000
        assert totals[f"busy{busy}"].cached_tokens == 180_000
    assert totals[OTHER].requests >= 3900
    assert len(tokens._weights) <= 48


def test_an_agent_that_comes_up_takes_the_place_of_the_least():
    """
    Its series begins at zero; what it asked for before stays in `other`, which never falls.
    """
    tokens = AgentTokens(limit=2)
    tokens.record("big", prompt_tokens=100, cached_tokens=0)
    tokens.record("small", prompt_tokens=10, cached_tokens=0)
    tokens.record("new", prompt_tokens=8, cached_tokens=1)
    before = asdict(tokens.totals()[-1])
    tokens.record("new", prompt_tokens=8, cached_tokens=2)
    totals = {usage.name: usage for usage in tokens.totals()}
    assert set(totals) == {"big", "new", OTHER}
    assert (totals["new"].prompt_tokens, totals["new"].cached_tokens) == (8, 2)
    assert asdict(totals[OTHER]) == before
    assert before["prompt_tokens"] == 8


def test_the_catalogue_can_be_registered():
    """
    No name twice, none that Prometheus refuses.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(EngineLink(_nobody, timeout_s=1)))
    names = [*ENGINE_METRICS, HINTS.name]
    assert len(set(names)) == len(names)

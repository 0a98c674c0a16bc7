"""The dashboard in docs/grafana asks only for metrics that are exported."""

import json
import re
from pathlib import Path

import pytest

from scout_server.embedded.metrics import ONLY_HERE
from scout_server.exposition import ENGINE_METRICS, HINTS, Described
from scout_server.policy.engine import TaoEngine
from scout_server.policy.turns import TaoSettings
from scout_server.tao.meters import Meters
from scout_server.vllm.link import EngineLink
from scout_server.vllm.metrics import EngineCollector

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "scout.json"
SUFFIX = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}


def _series(described: Described) -> dict[str, set[str]]:
    labels = {"engine", *described.labels}
    return {described.name + suffix: labels for suffix in SUFFIX[described.kind]}


@pytest.fixture(scope="module")
def series():
    """Every exported series with its labels; scrapes add `instance` and `job`."""
    found: dict[str, set[str]] = {}
    for described in (*ENGINE_METRICS.values(), HINTS, *ONLY_HERE):
        found.update(_series(described))
    meters = Meters(TaoEngine(TaoSettings()), lambda: 0.0)
    labels = {
        each._name: set(each._labelnames)
        for each in vars(meters).values()
        if hasattr(each, "_labelnames")
    }
    for family in (
        *EngineCollector(EngineLink(_nobody, timeout_s=1)).collect(),
        *meters.registry.collect(),
    ):
        known = labels.get(family.name, set(getattr(family, "_labelnames", ())))
        for suffix in SUFFIX[family.type]:
            found.setdefault(family.name + suffix, set()).update(known)
    return found


async def _nobody(operation, argument):
    return []


@pytest.fixture(scope="module")
def board():
    """The dashboard as Grafana would read it."""
    return json.loads(BOARD.read_text())


def _queries(board):
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target.get("legendFormat", "")
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"], ""


def test_every_metric_that_the_dashboard_names_is_exported(board, series):
    """
    Each scout_ name in a query is a series of an exporter.
    """
    named = {
        name: title
        for title, expression, _ in _queries(board)
        for name in re.findall(r"\bscout_\w+", expression)
    }
    assert len(named) >= 30
    assert not {name: title for name, title in named.items() if name not in series}


def test_every_label_that_the_dashboard_groups_by_is_one_of_the_metric(board, series):
    """
    Labels in `by (...)`, in legends and in selectors belong to the metrics of their query.
    """
    for title, expression, legend in _queries(board):
        known = {"le", "instance", "job"}
        for name in re.findall(r"\bscout_\w+", expression):
            known |= series[name]
        used = set(re.findall(r"\{\{(\w+)\}\}", legend))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            used |= {label.strip() for label in group.split(",")}
        for selector in re.findall(r"\{([^}]*)\}", expression):
            used |= set(re.findall(r"(\w+)\s*(?:=|!=|=~)\s*\"", selector))
        assert used <= known, title


def test_the_documented_figures_are_on_the_dashboard(board):
    """
    All that the issue asks to be watched has a panel.
    """
    text = " ".join(expression for _, expression, _ in _queries(board))
    for name in (
        "scout_hit_tokens_total",
        "scout_prompt_tokens_total",
        "scout_blocks_regretted_total",
        "scout_warmups_total",
        "scout_predictability",
        "scout_hints_total",
        "scout_decision_seconds_bucket",
        "scout_breaker_open",
        "scout_sessions",
        "scout_gateway_node_drift_tokens",
        "scout_shadow_leader",
    ):
        assert name in text


def test_panels_have_titles_places_and_ids_of_their_own(board):
    """
    No two panels share an id or overlap; every panel but a row asks something.
    """
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "row" or panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        cells |= taken

"""The gain of clients that say nothing, as the command reports it."""

import json

import pytest
from typer.testing import CliRunner

from scout_server.bench import bench_app


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_silent_clients_keep_most_of_the_gain():
    """
    One round of the demo's sessions without our headers keeps a good part of the hinted gain.

    The required 0.7 is of three rounds; single ones were seen from 0.6 to above 1.
    """
    done = CliRunner().invoke(bench_app, ["zero-hint", "--repetitions", "1", "--json"])
    document = json.loads(done.stdout)

    assert done.exit_code == 0
    results = document["results"]
    assert results["requests that count"] == results["of them with hints"] > 50
    assert results["arms"]["hinted"]["points over LRU"] > 5
    share = results["share of the hinted gain"]
    assert share > 0.35
    (target,) = document["targets"]
    assert target["value"] == share
    assert target["met"] == (share >= 0.7)

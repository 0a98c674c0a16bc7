"""`scout bench engine`: its programs, its arms and its figures, without an engine."""

import pytest
from typer.testing import CliRunner

from scout_sdk import ConfigError, Hints
from scout_server.bench import bench_app
from scout_server.bench.engine import ARMS, _chosen
from scout_server.bench.enginefigures import ratios, targets_of
from scout_server.bench.enginefile import EngineFile, Repetition, digest
from scout_server.bench.enginerun import Run
from scout_server.bench.programs import SHAPES, make_sessions
from scout_server.bench.ttl import keep_by_time
from scout_server.demo.measure import Counters
from scout_server.policy import Finish, FinishFacts, PolicyCore, PolicySettings, RequestFacts


@pytest.mark.parametrize("name", SHAPES)
def test_programs_are_the_same_for_the_same_seed(name):
    """
    Every arm gets the same programs; another series has other histories on the same anchors.
    """
    shape = SHAPES[name]
    one = make_sessions(shape, 3, seed=1, series=1)
    other = make_sessions(shape, 3, seed=1, series=2)

    assert one == make_sessions(shape, 3, seed=1, series=1)
    assert one != other
    for turn in (turn for turns in one + other for turn in turns):
        anchor = shape.anchors[turn.agent]
        same = [t for ts in other for t in ts if t.agent == turn.agent]
        assert all(t.prompt[:anchor] == turn.prompt[:anchor] for t in same)
        assert len(turn.prompt) + turn.output <= min(2560, 32 * (shape.blocks - 2))


@pytest.mark.parametrize("name", SHAPES)
def test_the_pool_is_near_the_size_of_the_anchors(name):
    """
    A pool holds between half of all anchors and twice as much.
    """
    shape = SHAPES[name]

    assert 0.5 <= 32 * shape.blocks / sum(shape.anchors.values()) <= 2.0


@pytest.mark.parametrize("name", SHAPES)
def test_a_session_of_one_agent_only_grows(name):
    """
    An agent's next prompt in a session begins with its last one, and the last turn says so.
    """
    for turns in make_sessions(SHAPES[name], 4, seed=0, series=0):
        seen = {}
        for turn in turns:
            last = seen.get(turn.agent, ())
            assert turn.prompt[: len(last)] == last
            seen[turn.agent] = turn.prompt
        assert [turn.final for turn in turns] == [False] * (len(turns) - 1) + [True]


def test_what_is_not_known_is_named_with_what_is():
    """
    A wrong arm is an error that lists the arms.
    """
    with pytest.raises(ConfigError, match="unknown arm best; known: stock"):
        _chosen("arm", ["best"], ARMS)


def _run(ttft, turn, hit, *, started=0, used=0, contended=0):
    return Run(
        ttft_s=[ttft] * 4,
        turn_s=[turn] * 4,
        wall_s=10 * turn,
        counters=Counters(1000.0, 1000.0 * hit),
        warm_ups={"started": started, "used": used, "contended": contended},
    )


def test_targets_are_met_or_missed_by_the_figures():
    """
    Gains are judged against the stock server of the same repetition; misses stay in the list.
    """
    runs = {
        "gaia": {"stock": [_run(1.0, 2.0, 0.5)], "prefetch": [_run(0.5, 1.0, 0.7)]},
        "swe-bench": {"stock": [_run(1.0, 2.0, 0.5)], "prefetch": [_run(0.9, 1.9, 0.55)]},
        "gsm8k": {"stock": [_run(1.0, 2.0, 0.9)], "prefetch": [_run(1.0, 2.0, 0.9)]},
        "idle-gaps": {
            "scout": [_run(1.0, 2.0, 0.4)],
            "prefetch": [_run(0.5, 1.5, 0.9, started=10, used=7)],
        },
        "random": {"scout": [_run(1.0, 2.0, 0.4)], "prefetch": [_run(1.0, 2.0, 0.4)]},
    }
    targets = {target.name: target for target in targets_of(runs)}

    assert targets["gaia: hit points, prefetch over stock"].value == pytest.approx(20.0)
    assert targets["gaia: mean TTFT, prefetch by stock"].met
    assert not targets["swe-bench: mean TTFT, prefetch by stock"].met
    assert not any(name.startswith("gsm8k") for name in targets)  # stock hits 0.85 already
    assert not targets["second best: turn latency, prefetch by stock"].met
    assert targets["best of all: throughput, prefetch by stock (lower bound)"].met
    assert targets["idle-gaps: mean TTFT, prefetch by scout"].met
    assert targets["idle-gaps: share of warm-ups used"].value == pytest.approx(0.7)
    assert targets["random: warm-ups"].met
    rows = {row["workload"]: row for row in ratios(runs) if row["arm"] == "prefetch"}
    assert rows["gsm8k"]["helps"] == "no"
    assert rows["idle-gaps"]["against"] == "scout"


def test_repetitions_of_several_invocations_are_one_result(tmp_path):
    """
    What one invocation has kept, the next finds, number by number, and adds to; figures are equal.
    """
    path = tmp_path / "engine.jsonl"
    setup = {"blocks": 96, "arms": "stock scout"}
    runs = [{"stock": _run(1.0, 2.0, 0.5), "scout": _run(0.1 * n, 1.0, 0.7)} for n in range(3)]
    first = EngineFile(path)
    first.add(Repetition(workload="gaia", number=2, setup=setup, runs=runs[2]))
    first.add(Repetition(workload="gsm8k", number=1, setup=setup, runs=runs[0]))
    again = EngineFile(path)
    assert again.done("gaia", setup) == {2}
    again.add(Repetition(workload="gaia", number=1, setup=setup, runs=runs[1]))

    found = EngineFile(path).runs(["gsm8k", "gaia", "random"])
    assert list(found) == ["gsm8k", "gaia"]
    assert found["gaia"] == {
        "stock": [runs[1]["stock"], runs[2]["stock"]],
        "scout": [runs[1]["scout"], runs[2]["scout"]],
    }


def test_repetitions_of_another_setup_are_not_mixed(tmp_path):
    """
    A file whose workload ran with another pool, or that is no such file, is an error that says so.
    """
    path = tmp_path / "engine.jsonl"
    kept = EngineFile(path)
    kept.add(Repetition(workload="gaia", number=1, setup={"blocks": 96}, runs={}))
    with pytest.raises(ConfigError, match="blocks 96, now 160"):
        kept.done("gaia", {"blocks": 160})
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 of"):
        EngineFile(path)


def test_sessions_have_a_name_that_changes_with_them():
    """
    Another seed or another walk is another name.
    """
    shape = SHAPES["gsm8k"]
    names = {digest(make_sessions(shape, 2, seed=seed, series=1)) for seed in (0, 0, 1)}

    assert len(names) == 2


def _serve(core, name, now, *, final=False):
    """Run one request of ten blocks at *now* and give its blocks back."""
    start = {"old": 0, "new": 10}[name]
    request = f"{name}/{now}"
    hashes = [(name, n) for n in range(10)]
    core.arrive(
        RequestFacts(
            request_id=request,
            hints=Hints(session=name, agent=name, final=final),
            block_hashes=hashes,
            prompt_tokens=160,
        ),
        now=now,
    )
    for segment in core.segments(request, hashes):
        for block in reversed(range(start, start + segment.end_block)):
            core.order.append(block, segment.group)
    core.finish(FinishFacts(request_id=request, finish=Finish.TOOL_CALLS), now=now)


def test_the_ttl_arm_keeps_what_was_just_used_until_its_time_is_over():
    """
    While a session is in its gap its blocks outlast newer ones of an ended session; when its time
    is over, the order is that of last use.
    """
    core = PolicyCore(PolicySettings(), capacity_blocks=20, block_tokens=16)
    keep_by_time(core, ttl_s=5.0)
    _serve(core, "old", 1.0)
    _serve(core, "new", 3.0, final=True)

    core.tick(now=4.0)
    assert core.order.scout is True
    assert set(list(core.order)[:10]) == set(range(10, 20))
    core.tick(now=20.0)
    assert set(list(core.order)[:10]) == set(range(10))


def test_the_command_takes_its_own_defaults():
    """
    The quick form gets as far as looking for the model.
    """
    outcome = CliRunner().invoke(bench_app, ["engine", "--quick", "--model", "nowhere"])

    assert isinstance(outcome.exception, ConfigError)
    assert "no model in nowhere" in str(outcome.exception)


def test_what_is_rehearsed_is_not_kept_among_measurements():
    """
    A rehearsal does not go into a file of real runs; asked to, the command says so.
    """
    outcome = CliRunner().invoke(bench_app, ["engine", "--rehearse", "--out", "x.jsonl"])

    assert isinstance(outcome.exception, ConfigError)
    assert "--out x.jsonl" in str(outcome.exception)


def test_a_pool_that_cannot_hold_a_request_is_refused_at_once(tmp_path):
    """
    Blocks that are too few for a workload's longest request are an error that says how many.
    """
    (tmp_path / "config.json").write_text("{}")
    arguments = ["engine", "--workload", "gaia", "--blocks", "32", "--model", str(tmp_path)]
    outcome = CliRunner().invoke(bench_app, arguments)

    assert isinstance(outcome.exception, ConfigError)
    assert "32 blocks are too few: gaia needs" in str(outcome.exception)

"""Cells on a real engine: programs, their trace, the load generator, calibration, comparison."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from scout_sdk import ConfigError
from scout_server.replica import block_hashes
from scout_server.sim import naps
from scout_server.sim.calibrate import calibrate, fit_front, fit_steps
from scout_server.sim.cli import sim_app
from scout_server.sim.hardware.fitted import (
    FittedLatency,
    FrontLatency,
    Profile,
    load_profile,
    plain,
)
from scout_server.sim.live import run_programs, trace_of
from scout_server.sim.livecells import CELLS, LiveCell, ServerKind, programs_of_cell, reference_on
from scout_server.sim.livekind import server_at
from scout_server.sim.livereplay import (
    LiveLoad,
    gaps_made,
    simulate_cell,
    simulate_measured,
    simulate_runs,
)
from scout_server.sim.livevalidate import (
    CellFigures,
    Measured,
    compare,
    load_measured,
    measured_line,
    measured_of,
)
from scout_server.sim.loops import Loop, fit_loops, loop_cells
from scout_server.sim.probes import (
    Calibration,
    FrontProbe,
    Probe,
    Probes,
    load_probes,
    probe_server,
    probes_text,
)
from scout_server.sim.prompts import PromptHasher, next_of_session

TRUE = FittedLatency(
    weights_s=0.02, dense_s_fixed=0.0, dense_s_per_token=9e-4, knee=3.0, pair_s=1e-8,
    sequence_s=1e-3, kv_token_s=1e-6, step_s_fixed=2e-3, prefill_s_per_request=3e-3,
)  # fmt: skip
FRONT = FrontLatency(request_s_fixed=0.004, request_s_per_token=1e-6, reply_s=0.002)
FIGURES = CellFigures(
    jct_s=1.0, tokens_per_s=1.0, hit_rate=0.5, ttft_s=0.1, queue_s=0.0, preemptions=0.0
)
CELL = LiveCell(
    server=ServerKind(model="tiny", blocks=200, eviction="lru"),
    concurrency=2,
    gaps="short",
    programs=4,
)


@pytest.fixture
def profile(tmp_path):
    """A file with known step times."""
    path = tmp_path / "profile-tiny-lru.json"
    made = Profile(gpu="CPU", model="tiny", latency=TRUE, source="test", error={}, front=FRONT)
    path.write_text(json.dumps(plain(made)), "utf-8")
    return path


class Engine:
    """Answers as vLLM does, at once; counts like it: every prompt's first half is cached."""

    def __init__(self):
        self.prompts = []
        self.sessions = []
        self.events = 0
        self.broken = False
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/scout/events", self.event, methods=["POST"]),
            ]
        )

    @property
    def transport(self):
        return httpx.ASGITransport(self.app)

    async def models(self, _):
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def metrics(self, _):
        total = sum(map(len, self.prompts))
        return PlainTextResponse(
            f'vllm:prefix_cache_queries_total{{engine="0"}} {total}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {total / 2}\n'
            "vllm:num_preemptions_total 3\n"
            f"vllm:request_queue_time_seconds_sum {len(self.prompts) * 0.25}\n"
            f"vllm:request_decode_time_seconds_sum {len(self.prompts) * 0.03}\n"
            f"vllm:request_prefill_time_seconds_sum {1e-6 * total}\n"
            'vllm:cache_config_info{block_size="32",num_gpu_blocks="77"} 1.0\n'
        )

    async def complete(self, request: HttpRequest):
        body = await request.json()
        self.prompts.append(body["prompt"])
        self.sessions.append(request.headers.get("x-session-id"))
        made = list(range(len(self.prompts), len(self.prompts) + body["max_tokens"]))
        if self.broken:
            made = made[1:]

        async def lines():
            for some in (made[:1], made[1:]):
                choice = {"text": "", "token_ids": some}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def event(self, _):
        self.events += 1
        return JSONResponse({"accepted": 1})


def run(engine, programs, **options):
    """Run *programs* on *engine*."""
    return asyncio.run(
        run_programs(
            "http://engine", "tiny", programs, concurrency=2, transport=engine.transport, **options
        )
    )


def hurried(programs):
    """The same programs without gaps."""
    return [
        replace(p, turns=tuple(replace(t, gap_s=0.0) for t in p.turns), name=p.name)
        for p in programs
    ]


def loads(cell, *repetitions, idle_s=5.0):
    """Runs of a cell, one after the other."""
    return [
        LiveLoad(cell=cell, repetition=n, idle_s=idle_s if i else 0.0)
        for i, n in enumerate(repetitions)
    ]


def test_there_are_at_least_twenty_cells_over_all_that_the_issue_names():
    """Both models, both evictions, concurrency 1 to 8, short and long gaps; no cell twice."""
    assert len({c.name for c in CELLS}) == len(CELLS) >= 20
    assert {c.server.model for c in CELLS} == {"smollm2", "tiny"}
    assert {c.server.eviction for c in CELLS} == {"lru", "scout"}
    assert {1, 2, 4, 8} == {c.concurrency for c in CELLS}
    assert {"short", "long"} == {c.gaps for c in CELLS}
    assert all(len({c.server.blocks for c in CELLS if c.server.model == m}) >= 3
               for m in ("smollm2", "tiny"))  # fmt: skip


def test_repetitions_have_equal_sizes_and_different_tokens():
    """A repetition finds nothing of the one before it, and is as long."""
    one, two = programs_of_cell(CELL, 1), programs_of_cell(CELL, 2)
    sizes = [[(len(t.fresh), t.output_tokens, t.gap_s) for t in p.turns] for p in one]
    assert sizes == [[(len(t.fresh), t.output_tokens, t.gap_s) for t in p.turns] for p in two]
    assert one == programs_of_cell(CELL, 1)
    assert one[0].turns[0].fresh != two[0].turns[0].fresh
    assert not set(one[0].anchors) & set(two[0].anchors)
    other = programs_of_cell(replace(CELL, series="other"), 1)
    assert sizes != [[(len(t.fresh), t.output_tokens, t.gap_s) for t in p.turns] for p in other]


def test_the_trace_shares_blocks_exactly_where_the_prompts_do():
    """Blocks of the trace are equal where those of the prompts that were really sent are."""
    engine = Engine()
    programs = hurried(programs_of_cell(CELL, 1))
    measured = run(engine, programs)
    info, traced = trace_of(programs, 32)
    hasher = PromptHasher(info, 32)
    by_turn = {(r.program, r.turn): r for r in measured.requests}
    sent = {session: [] for session in engine.sessions}
    for session, prompt in zip(engine.sessions, engine.prompts, strict=True):
        sent[session].append(prompt)
    forward, backward = {}, {}
    for number, program in enumerate(traced):
        for index, turn in enumerate(program.turns):
            prompt = sent[program.program][index]
            assert turn.input_tokens == len(prompt) == by_turn[number, index].prompt_tokens
            real = block_hashes(prompt, 32)
            ours = hasher.hashes(number, turn, next_of_session(program, index))
            for mine, theirs in zip(ours, real, strict=False):
                assert forward.setdefault(mine, theirs) == theirs
                assert backward.setdefault(theirs, mine) == mine


def test_a_run_reports_what_client_and_counters_saw():
    """Every turn is there; hit rate, queue and preemptions are differences of counters."""
    engine = Engine()
    programs = hurried(programs_of_cell(CELL, 1))
    measured = run(engine, programs, events=True)
    turns = sum(len(p.turns) for p in programs)
    assert turns == len(measured.requests) == len(engine.prompts)
    assert measured.hit_rate == pytest.approx(0.5)
    line = measured_of(CELL, 1, measured)
    assert line.figures.queue_s == pytest.approx(0.25)
    assert line.figures.preemptions == 0
    assert len(programs) == len(measured.jct_s) == engine.events
    assert all(s >= 0 for s in measured.jct_s)


def test_a_server_that_cannot_be_replayed_is_refused():
    """Replies of another length than asked for would not be those of the simulator."""
    engine = Engine()
    engine.broken = True
    with pytest.raises(ExceptionGroup) as caught:
        run(engine, hurried(programs_of_cell(CELL, 1)))
    assert caught.group_contains(ConfigError, match="return_token_ids")


def test_a_simulated_cell_adds_what_passes_outside_the_engine(profile, tmp_path):
    """One program alone: each turn is later by both ways, and by nothing else."""
    cell = replace(CELL, concurrency=1, programs=1)
    turns = len(programs_of_cell(cell, 0)[0].turns)
    tokens = sum(t.input_tokens for t in trace_of(programs_of_cell(cell, 0), 32)[1][0].turns)
    bare = tmp_path / "bare.json"
    raw = json.loads(profile.read_text("utf-8"))
    del raw["front"]
    bare.write_text(json.dumps(raw), "utf-8")
    added = turns * (FRONT.request_s_fixed + FRONT.reply_s) + tokens * FRONT.request_s_per_token
    with_front, without = simulate_cell(cell, profile), simulate_cell(cell, bare)
    assert with_front.jct_s == pytest.approx(without.jct_s + added)
    assert with_front.ttft_s == pytest.approx(without.ttft_s + added / turns)


def test_a_later_run_meets_what_the_server_holds_and_has_learnt(profile):
    """Runs of one server are simulated one after the other, as they were measured."""
    cell = replace(CELL, server=replace(CELL.server, eviction="scout", blocks=120))
    first, again = simulate_runs(loads(cell, 1, 1), load_profile(profile))
    assert first == simulate_cell(cell, profile)
    assert again.hit_rate != first.hit_rate  # what it kept for the agents before is in the way
    lru = replace(CELL, server=replace(CELL.server, blocks=120))
    one, two = simulate_runs(loads(lru, 1, 2), load_profile(profile))
    assert one.hit_rate == two.hit_rate  # other prompts, and what is older goes first
    assert one.jct_s == pytest.approx(two.jct_s)


def test_gaps_are_those_that_the_client_made():
    """Between turns, and before a program that took the place of one that had ended."""
    requests = [
        (0, 0, 0.0, 0.5, 1.0, 5, 6), (1, 0, 0.1, 0.5, 0.8, 5, 6), (0, 1, 1.5, 1.6, 2.0, 5, 6),
        (1, 1, 0.9, 1.6, 1.9, 5, 6), (2, 0, 1.95, 2.0, 2.5, 5, 6),
    ]  # fmt: skip
    measured = Measured(
        cell="a", repetition=1, server_at=0.0, begun_s=0.0, wall_s=2.5, requests=requests,
        figures=FIGURES,
    )  # fmt: skip
    assert {
        (0, 0): 0.0, (1, 0): 0.1, (2, 0): pytest.approx(0.05), (0, 1): 0.5,
        (1, 1): pytest.approx(0.1),
    } == gaps_made(measured)  # fmt: skip


def test_medians_are_of_the_repetitions_on_their_servers(profile):
    """Two starts of a server are two histories; cells that are not asked for are left out."""
    cell = replace(CELL, server=replace(CELL.server, eviction="scout", blocks=120))

    def line(repetition, server_at, begun_s):
        return Measured(
            cell=cell.name, repetition=repetition, server_at=server_at, begun_s=begun_s,
            wall_s=4.0, figures=figures[0], requests=[],
        )  # fmt: skip

    figures = simulate_runs(loads(cell, 1, 2, idle_s=1.0), load_profile(profile))
    together = simulate_measured([cell], [line(1, 7.0, 2.0), line(2, 7.0, 7.0)], lambda _: profile)
    assert together[cell.name].jct_s == pytest.approx((figures[0].jct_s + figures[1].jct_s) / 2)
    apart = simulate_measured([cell], [line(1, 7.0, 0.0), line(2, 8.0, 0.0)], lambda _: profile)
    assert apart[cell.name].hit_rate == pytest.approx(figures[0].hit_rate)
    assert {} == simulate_measured([], [line(1, 7.0, 0.0)], lambda _: profile)


def test_references_beside_a_run_say_how_fast_the_machine_was(profile, tmp_path):
    """Runs on a machine half as fast are met with the profile of the whole; hits do not move."""
    cell = replace(CELL, server=replace(CELL.server, blocks=120))
    reference = reference_on(cell.server)
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(plain(load_profile(profile).paced(2.0))), "utf-8")

    def line(which, repetition, begun_s):
        figures = simulate_cell(which, slow)
        return Measured(
            cell=which.name, repetition=repetition, server_at=7.0, begun_s=begun_s, wall_s=1.0,
            figures=figures, requests=[],
        )  # fmt: skip

    cold = replace(line(reference, 1, 0.0), figures=replace(FIGURES, turn_s=99.0))
    lines = [cold, line(cell, 1, 2.0), line(reference, 2, 4.0)]
    found = simulate_measured([cell], lines, lambda _: profile)[cell.name]
    truth = lines[1].figures
    assert found.turn_s == pytest.approx(truth.turn_s, rel=0.01)
    assert found.hit_rate == truth.hit_rate
    alone = simulate_measured([cell], lines[1:2], lambda _: profile)[cell.name]
    assert alone.turn_s < 0.7 * truth.turn_s
    tokens = {a for p in programs_of_cell(reference, 1) for a in p.anchors}
    assert not tokens & {a for p in programs_of_cell(reference, 2) for a in p.anchors}


def test_errors_are_against_the_median_and_the_spread_is_shown(profile):
    """Three repetitions: the middle one counts; the others say how far apart repeats are."""
    figures = simulate_cell(CELL, profile)
    measured = [
        Measured(
            cell=CELL.name, repetition=n, server_at=0.0, begun_s=0.0, wall_s=1.0, requests=[],
            figures=replace(figures, jct_s=figures.jct_s * f, hit_rate=figures.hit_rate - 0.01),
        )
        for n, f in enumerate((0.9, 0.8, 1.4), start=1)
    ]  # fmt: skip
    (error,) = compare([CELL], measured, {CELL.name: figures})
    assert error.jct == pytest.approx(1 / 0.9 - 1)
    assert error.hit_points == pytest.approx(1.0)
    assert error.throughput == 0.0
    assert error.spread.jct_s == pytest.approx((0.1 + 0.5) / 3 / 0.9)


def test_what_is_measured_is_read_again_and_a_broken_line_is_named(tmp_path, profile):
    """The file of a campaign makes it resumable."""
    line = Measured(
        cell="a", repetition=2, server_at=5.0, begun_s=0.0, wall_s=1.0,
        figures=simulate_cell(CELL, profile),
        requests=[(0, 0, 0.0, 0.1, 0.2, 5, 6)],
    )  # fmt: skip
    path = tmp_path / "measured.jsonl"
    assert load_measured(path) == []
    path.write_text(measured_line(line), "utf-8")
    assert [line] == load_measured(path)
    path.write_text(measured_line(line) + "{}\n", "utf-8")
    with pytest.raises(ConfigError, match=r"measured\.jsonl:2"):
        load_measured(path)


def test_the_command_compares_what_is_there_without_measuring(tmp_path, profile):
    """With no minutes left nothing is started; equal figures give no error, and too few cells."""
    cell = next(c for c in CELLS if c.server.model == "tiny")
    line = Measured(
        cell=cell.name, repetition=1, server_at=0.0, begun_s=3.0, wall_s=1.0,
        figures=simulate_cell(cell, profile), requests=[],
    )  # fmt: skip
    (tmp_path / "measured.jsonl").write_text(measured_line(line), "utf-8")
    arguments = ["validate", "--against", "vllm", "--out", str(tmp_path), "--minutes", "0"]
    done = CliRunner().invoke(sim_app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [True, True, True, False] == [t["met"] for t in document["targets"]]
    (row,) = document["results"]["mean completion time, s"]
    assert row["measured"] == row["simulated"] > 0
    assert row["error, %"] == 0
    wrong = CliRunner().invoke(sim_app, [*arguments, "--only", "nothing-like-it"])
    assert wrong.exit_code == 1
    assert "nothing-like-it" in wrong.stderr


def test_a_server_says_what_it_is():
    """Model, blocks and block size are read from a running server; what is no vLLM is refused."""

    async def ask():
        async with httpx.AsyncClient(transport=Engine().transport, base_url="http://x") as client:
            return await server_at(client, shape="tiny", batched_tokens=512)

    kind = asyncio.run(ask())
    assert ("tiny", 77, 32, "lru") == (kind.model, kind.blocks, kind.block_tokens, kind.eviction)


@pytest.fixture
def served():
    """The engine above on a port of this machine: its URL and itself."""
    engine = Engine()
    config = uvicorn.Config(engine.app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", engine
    server.should_exit = True
    thread.join()


def test_a_server_that_runs_is_measured_and_compared(served, tmp_path, profile):
    """With --url, cells are made for what the server says it is; again, nothing is asked."""
    assert profile.parent == tmp_path  # it has been calibrated
    url, engine = served
    arguments = ["validate", "--against", "vllm", "--url", url, "--out", str(tmp_path), "--json"]
    arguments += ["--shape", "tiny", "--repetitions", "1", "--only", "c1-short"]
    done = CliRunner().invoke(sim_app, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["results"]["hit rate, %"]
    assert ("tiny-77-lru-c1-short", 50.0) == (row["cell"], row["measured"])
    asked = len(engine.prompts)
    assert CliRunner().invoke(sim_app, arguments).exit_code == 0
    assert asked == len(engine.prompts)


def probes_of(latency):
    """Probes that a server with these step times would give."""
    kinds = [(((n, 0),), 0, 0) for n in (16, 48, 96, 192, 384, 768, 1280, 1900)]
    kinds += [(((n, h),), 0, 0) for h in (512, 1280) for n in (32, 128, 512)]
    kinds += [((), c, c * (n + 16)) for c in (1, 2, 3, 4, 6, 8) for n in (96, 512, 1280)]
    return [
        Probe(
            prefill=p, sequences=c, context_tokens=n, spread=0.0, seconds=latency.mixed_s(p, c, n)
        )
        for p, c, n in kinds
    ]


def test_a_fit_recovers_the_steps_that_made_the_probes():
    """Steps of every kind are met, those that were not measured too."""
    found, error = fit_steps(probes_of(TRUE))
    assert max(error.values()) < 1e-3
    for batch in (([(300, 700)], 3, 2000), ([], 5, 4321), ([(40, 0), (80, 64)], 0, 0)):
        assert found.mixed_s(*batch) == pytest.approx(TRUE.mixed_s(*batch), rel=0.01)
    with pytest.raises(ConfigError, match="3 prompt lengths"):
        fit_steps(probes_of(TRUE)[:2])


def test_the_front_is_a_line_through_medians():
    """An outlier does not move it; both ways add up to what was measured."""
    probes = [
        FrontProbe(prompt_tokens=n, seconds=0.003 + 2e-6 * n + extra)
        for n in (100, 500, 1500)
        for extra in (0.0, 0.0, 0.1)
    ]
    front = fit_front(probes)
    assert front.request_s(800) + front.reply_s == pytest.approx(0.003 + 0.0016)
    assert FrontLatency() == fit_front([])


def test_probing_asks_for_every_kind_of_step_and_trusts_the_servers_clock():
    """Prompts alone are timed by the server's counter; what is left of the wall time is front."""
    settings = Calibration(
        prompt_tokens=(16, 48, 96), history_tokens=(64,), new_tokens=(32,), concurrency=(1, 2),
        context_tokens=(32, 64), output_tokens=(4, 4), repeats=1,
    )  # fmt: skip
    engine = Engine()
    probes = asyncio.run(
        probe_server("http://engine", settings, hints=True, transport=engine.transport)
    )
    assert any(session and session.startswith("calibrate") for session in engine.sessions)
    assert probes.inside
    alone = {p.prefill: p.seconds for p in probes.steps if p.prefill}
    assert alone[((48, 0),)] == pytest.approx(48e-6)
    assert alone[((32, 64),)] == pytest.approx(96e-6)
    decodes = [p for p in probes.steps if p.sequences]
    assert 4 == len(decodes)
    assert [pytest.approx(0.01)] * 4 == [p.seconds for p in decodes]
    assert 4 == len(probes.front)
    shorter = settings.up_to(60)
    assert ((16, 48), (), (32,)) == (
        shorter.prompt_tokens, shorter.history_tokens, shorter.context_tokens,
    )  # fmt: skip


def test_loops_tell_what_single_steps_do_not(profile):
    """Loops made with known costs give these costs back; the file of probes keeps them."""
    known = replace(
        load_profile(profile),
        latency=replace(TRUE.paced(1.1), prefill_s_beside=6e-3),
        front=replace(FRONT, busy_s=2e-3),
    )
    hidden = profile.with_name("hidden.json")
    hidden.write_text(json.dumps(plain(known)), "utf-8")
    loops = []
    for cell in loop_cells(CELL.server, (1, 4)):
        figures = simulate_cell(cell, hidden)
        measured = Measured(
            cell=cell.name, repetition=1, server_at=0.0, begun_s=0.0, wall_s=1.0, figures=figures,
            requests=[],
        )  # fmt: skip
        loops.append(Loop(cell=cell, measured=measured))
    probes = Probes(model="tiny", steps=[], front=[], inside=True, loops=loops)
    path = profile.with_name("probes.json")
    path.write_text(probes_text(probes), "utf-8")
    assert load_probes(path) == probes
    found = fit_loops(load_profile(profile), load_probes(path).loops)
    assert found.error["loops"] < 0.01
    other = replace(CELL, series="other", concurrency=3, programs=6)
    fitted = profile.with_name("fitted.json")
    fitted.write_text(json.dumps(plain(found)), "utf-8")
    truth, guess = simulate_cell(other, hidden), simulate_cell(other, fitted)
    assert guess.jct_s == pytest.approx(truth.jct_s, rel=0.02)
    assert simulate_cell(other, profile).jct_s < 0.95 * truth.jct_s
    assert fit_loops(load_profile(profile), []) == load_profile(profile)
    path.write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"probes\.json"):
        load_probes(path)


def test_a_measured_engine_naps_where_it_would_spin(tmp_path, monkeypatch):
    """The waiting loop of the module that the engine loads is replaced, in processes told so."""
    package = tmp_path / "vllm" / "distributed" / "device_communicators"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "shm_broadcast.py").write_text("def sched_yield(): return 'spins'\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.argv.append('theirs')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(other)]))
    code = "import sys; from vllm.distributed.device_communicators.shm_broadcast import *; "
    code += "print(sched_yield(), sys.argv)"

    def said(environ):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environ}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    assert "None ['-c', 'theirs']" == said(naps.environ(1e-5))
    assert "spins ['-c', 'theirs']" == said({})


def test_no_server_is_a_clear_error():
    """A closed port is reported, not a traceback."""
    with pytest.raises(ConfigError, match="does not list a model"):
        calibrate("http://127.0.0.1:9")

"""The trace format: what is written is read, and what is broken is named."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from scout_sdk._hints import HUMAN
from scout_server.sim.traces import (
    HashScope,
    HashSource,
    Program,
    TraceError,
    TraceInfo,
    TraceReader,
    Turn,
    write_trace,
)
from scout_server.sim.traces.convert import CONVERTERS, SourceOptions
from scout_server.sim.traces.inspection import inspect
from scout_server.sim.traces.records import runs_of, runs_prefix
from scout_server.sim.traces.reuse import IntervalSet, accesses, belady_hits, lru_hits

INFO = TraceInfo(source="test", block_tokens=16, scope=HashScope.GLOBAL)


def program(name="p", turns=2, arrival_s=1.5):
    made = [
        Turn(
            agent="planner",
            input_tokens=32 + 16 * i,
            output_tokens=8,
            hash_runs=((0, 2 + i),),
            parents=(i - 1,) if i else (),
            gap_s=0.25 * i,
            tool="shell" if i else None,
        )
        for i in range(turns)
    ]
    return Program(program=name, arrival_s=arrival_s, turns=tuple(made))


def test_a_written_trace_is_read_back_equal(tmp_path):
    """Header, programs and turns survive a round trip, compressed or not."""
    for name in ("t.jsonl", "t.jsonl.gz"):
        path = tmp_path / name
        programs = [program("a"), program("b", turns=3)]

        assert write_trace(path, INFO, programs) == 2

        reader = TraceReader(path)
        assert reader.info == INFO
        assert list(reader) == programs


def test_join_and_branch_survive(tmp_path):
    """Parents, sub-agent sessions and censoring flags are kept."""
    turns = (
        Turn(input_tokens=16, output_tokens=1),
        Turn(input_tokens=16, output_tokens=1, session="a", parents=(0,), gap_s=1.0),
        Turn(input_tokens=16, output_tokens=0, session="b", parents=(0,), gap_censored=True),
        Turn(input_tokens=16, output_tokens=1, parents=(1, 2), tool=HUMAN, tool_expected_s=2.0),
    )
    path = tmp_path / "t.jsonl"
    write_trace(path, INFO, [Program(program="p", arrival_s=0.0, turns=turns, aborted=True)])

    (read,) = TraceReader(path)

    assert read.turns == turns
    assert read.aborted


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("{", "line"),
        ('{"program":"p","turns":[]}', "turns"),
        ('{"program":"p","turns":[{"in":0,"out":1}]}', "turns[0].in"),
        ('{"program":"p","turns":[{"in":5,"out":-1}]}', "turns[0].out"),
        ('{"program":"p","turns":[{"in":5,"out":1,"gap_s":-2}]}', "turns[0].gap_s"),
        ('{"program":"p","turns":[{"in":5,"out":1,"parents":[0]}]}', "turns[0].parents"),
        ('{"program":"p","turns":[{"in":5,"out":1,"hash_runs":[[1,0]]}]}', "turns[0].hash_runs[0]"),
        ('{"program":"p","turns":[{"in":5,"out":1,"hash_runs":[[1,9]]}]}', "turns[0].hash_runs"),
        ('{"program":"p","turns":[{"in":5,"out":1,"tol":"x"}]}', "turns[0].tol"),
        ('{"turns":[{"in":5,"out":1}]}', "program"),
        ('{"program":"good","turns":[{"in":5,"out":1}]}', "program"),
    ],
)
def test_a_broken_line_is_named_or_counted(tmp_path, line, place):
    """The error has file, line and field; with skip_bad the rest is read and the line counted."""
    path = tmp_path / "t.jsonl"
    write_trace(path, INFO, [program("good")])
    with path.open("a", encoding="utf-8") as out:
        out.write(line + "\n")

    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert (caught.value.file, caught.value.line, caught.value.field) == ("t.jsonl", 3, place)

    reader = TraceReader(path, skip_bad=True)
    assert [p.program for p in reader] == ["good"]
    assert reader.skips.skipped == 1


def test_a_broken_header_is_always_fatal(tmp_path):
    """A trace without a valid first line is refused, even with skip_bad."""
    path = tmp_path / "t.jsonl"
    for text in ("", '{"scout_trace":9,"block_tokens":16}', '{"scout_trace":1}', "[]"):
        path.write_text(text + "\n", "utf-8")
        with pytest.raises(TraceError):
            TraceReader(path, skip_bad=True)


def test_runs_are_the_list_they_stand_for():
    """Run-length forms compress consecutive ids, and prefixes are counted in ids."""
    assert runs_of([4, 5, 6, 9, 10, 2]) == ((4, 3), (9, 2), (2, 1))
    assert runs_prefix(runs_of([1, 2, 3, 7]), runs_of([1, 2, 3, 8])) == 3
    assert runs_prefix(runs_of([1, 2, 3]), runs_of([1, 2])) == 2


def test_interval_set_merges():
    """Ranges that touch become one, and coverage counts from the first id."""
    ids = IntervalSet()
    ids.add(0, 4)
    ids.add(8, 4)
    assert ids.covered(2, 10) == 2
    ids.add(4, 4)
    assert ids.covered(2, 10) == 10
    assert ids.covered(12, 1) == 0


def test_belady_is_never_below_lru():
    """On a trace in which programs take turns, the clairvoyant rule finds at least as much."""
    programs = [
        Program(
            program=f"p{n}",
            arrival_s=float(n),
            turns=tuple(
                Turn(
                    input_tokens=16 * (4 + i),
                    output_tokens=1,
                    hash_runs=((100 * n, 4 + i),),
                    parents=(i - 1,) if i else (),
                    gap_s=3.0,
                )
                for i in range(6)
            ),
        )
        for n in range(5)
    ]
    order = accesses(INFO, programs, most_blocks=10_000)
    for size in (8, 16, 32, 64):
        assert belady_hits(order, size) >= lru_hits(order, size)
    assert lru_hits(order, 10_000) == belady_hits(order, 10_000)


def test_inspection_counts_reuse_and_predictability():
    """A fixed alternation of two agents is learnt; its prompts are found but for what is new."""
    turns = tuple(
        Turn(
            agent="ab"[i % 2],
            input_tokens=16 * 8,
            output_tokens=4,
            hash_runs=((i % 2 * 1000, 8),),
            parents=(i - 1,) if i else (),
            gap_s=2.0,
            tool="shell",
        )
        for i in range(40)
    )
    found = inspect(INFO, [Program(program="p", arrival_s=0.0, turns=turns)])

    assert found.turns == 40
    assert found.reuse == pytest.approx(38 / 40)
    assert found.agents_next.order1 > 0.9
    assert found.gap_s.p50 == pytest.approx(2.0)
    assert found.live_tokens_peak == 2 * (16 * 8 + 4)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def converted(source, path, **options):
    info, programs = CONVERTERS[source](path, SourceOptions(**options))
    return info, list(programs)


def test_claude_code_gaps_and_sub_agents(tmp_path):
    """A sub-agent is a branch of its parent's turn, and the session waits for it."""
    base = {"type": "n", "model": "m", "input_types": ["text"], "stop": "tool_use"}
    rows = [
        {
            "id": "s1",
            "block_size": 64,
            "requests": [
                {**base, "t": 0.0, "in": 640, "out": 5, "api_time": 2.0, "hash_runs": [[1, 10]]},
                {
                    "type": "subagent",
                    "t": 3.0,
                    "agent_id": "a1",
                    "subagent_type": "Explore",
                    "requests": [
                        {**base, "t": 0.0, "in": 64, "out": 1, "api_time": 1.0, "hash_runs": []},
                        {
                            **base, "t": 4.0, "in": 64, "out": 1, "api_time": 1.0,
                            "hash_runs": [], "input_types": ["tool_result"],
                        },
                    ],
                },
                {
                    **base, "t": 10.0, "in": 700, "out": 5, "api_time": 2.0,
                    "hash_runs": [[1, 11]], "input_types": ["tool_result"],
                },
            ],
        }
    ]  # fmt: skip
    info, (made,) = converted("claude_code", lines(tmp_path / "c.jsonl", rows))

    assert info.scope is HashScope.PROGRAM
    assert [t.agent for t in made.turns] == ["main", "Explore", "Explore", "main"]
    assert [t.parents for t in made.turns] == [(), (0,), (1,), (0, 2)]
    assert [t.gap_s for t in made.turns] == [0.0, 1.0, 3.0, 2.0]
    assert made.turns[3].tool == "tool"


def test_thunderagent_gaps_are_between_model_calls(tmp_path):
    """The gap is the time from one model call's end to the next one's start."""
    step = {"attempt": 1, "llm_reasoning_s": 2.0, "output_tokens": 10}
    rows = [
        {
            "config": "bs1",
            "instance": "x",
            "t0_unix": 5.0,
            "steps": [
                {"step": 0, "env_prepare_s": 8.0},
                {**step, "llm_reasoning_t": 10.0, "input_tokens": 100, "action": "grep -r x"},
                {**step, "llm_reasoning_t": 12.5, "input_tokens": 150},
                {**step, "llm_reasoning_t": 20.0, "input_tokens": 50},
            ],
        }
    ]
    info, (made,) = converted("thunderagent", lines(tmp_path / "t.jsonl", rows))

    assert info.hashes is HashSource.ASSUMED
    assert [t.gap_s for t in made.turns] == [0.0, 0.5, 5.5]
    assert [t.tool for t in made.turns] == [None, "grep", "shell"]
    assert runs_prefix(made.turns[0].hash_runs, made.turns[1].hash_runs) == 7
    assert runs_prefix(made.turns[1].hash_runs, made.turns[2].hash_runs) == 0


def test_mooncake_keeps_global_hashes_and_counts_bad_lines(tmp_path):
    """Requests become programs of one turn; a line without hashes is named or counted."""
    rows = [
        {"timestamp": 2000, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]},
        {"timestamp": 1, "input_length": 700, "output_length": 5},
    ]
    path = lines(tmp_path / "m.jsonl", rows)
    with pytest.raises(TraceError, match=r"m\.jsonl:2: hash_ids"):
        converted("mooncake", path)

    options = SourceOptions(skip_bad=True)
    info, programs = CONVERTERS["mooncake"](path, options)
    (made,) = list(programs)
    assert info.scope is HashScope.GLOBAL
    assert made.arrival_s == 2.0
    assert made.turns[0].hash_runs == ((3, 1), (9, 1))
    assert options.skips.skipped == 1


def test_conversation_logs_share_a_role_s_prefix(tmp_path):
    """Two logs with one role share that role's assumed anchor and nothing else."""
    rows = [
        {
            "session": f"s{n}",
            "messages": [
                {"t": 1.0, "role": "Programmer", "chars": 400},
                {"t": 9.0, "role": "Tester", "chars": 40},
            ],
            "llm_calls": [{"completion_tokens": 90}, {"completion_tokens": 9}],
        }
        for n in range(2)
    ]
    _, (one, two) = converted("chatdev", lines(tmp_path / "c.jsonl", rows))

    assert [t.output_tokens for t in one.turns] == [90, 9]
    assert one.turns[1].service_s == 8.0
    assert runs_prefix(one.turns[0].hash_runs, two.turns[0].hash_runs) == 40
    assert runs_prefix(one.turns[1].hash_runs, two.turns[1].hash_runs) == 40

    archive = tmp_path / "w.tar"
    with tarfile.open(archive, "w") as tar:
        history = [
            {"role": "human", "content": "q" * 40},
            {"role": "Orchestrator (thought)", "content": "x" * 80},
            {"role": "WebSurfer", "content": "y" * 8},
        ]
        data = json.dumps({"history": history}).encode()
        member = tarfile.TarInfo("logs/1.json")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    _, (log,) = converted("who_and_when", archive)
    assert [t.agent for t in log.turns] == ["Orchestrator", "WebSurfer"]
    assert log.turns[0].output_tokens == 20


def test_llmservingsim_tools_run_after_their_request(tmp_path):
    """`tool_duration_ns` of one request is the gap before the next."""
    rows = [
        {
            "session_id": "s",
            "arrival_time_ns": 2_000_000_000,
            "sub_requests": [
                {"input_toks": 100, "output_toks": 5, "tool_duration_ns": 500_000_000},
                {"input_toks": 200, "output_toks": 5, "tool_duration_ns": 0},
            ],
        },
        {"input_toks": 10, "output_toks": 2, "arrival_time_ns": 0},
    ]
    _, (session, single) = converted("llmservingsim", lines(tmp_path / "l.jsonl", rows))

    assert session.arrival_s == 2.0
    assert [t.gap_s for t in session.turns] == [0.0, 0.5]
    assert len(single.turns) == 1


def test_dynamo_rows_become_one_program_with_a_join(tmp_path):
    """Rows that wait for one another are one program; a circle is refused."""
    row = {"input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    rows = [
        {**row, "request_id": "a", "session_id": "main", "timestamp": 1000},
        {**row, "request_id": "b", "session_id": "sub", "wait_for": ["a"], "delay": 100},
        {
            **row, "request_id": "c", "session_id": "main", "wait_for": ["a", "b"],
            "tool_wait_ms": 250, "tool_events": [{"tool_class": "web"}],
        },
    ]  # fmt: skip
    _, (made,) = converted("dynamo", lines(tmp_path / "d.jsonl", rows))
    assert [t.parents for t in made.turns] == [(), (0,), (0, 1)]
    assert [t.gap_s for t in made.turns] == [0.0, 0.1, 0.25]
    assert made.turns[2].tool == "web"
    assert made.turns[1].session == "sub"

    circle = [
        {**row, "request_id": "a", "wait_for": ["b"]},
        {**row, "request_id": "b", "wait_for": ["a"]},
    ]
    with pytest.raises(TraceError, match="circle"):
        converted("dynamo", lines(tmp_path / "e.jsonl", circle))


def otel_span(name, start, end, parent="", **values):
    attributes = [
        {"key": k.replace("__", "."), "value": {"intValue": v} if isinstance(v, int) else
         {"stringValue": v}}
        for k, v in values.items()
    ]  # fmt: skip
    return {
        "traceId": "t1", "spanId": name, "parentSpanId": parent, "name": name,
        "startTimeUnixNano": str(int(start * 1e9)), "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": attributes,
    }  # fmt: skip


def test_otel_spans_find_agent_tool_and_parallel_calls(tmp_path):
    """The agent is that of the span above; calls that overlap are parallel; then they join."""
    chat = {"gen_ai__operation__name": "chat", "gen_ai__usage__output_tokens": 7}
    spans = [
        otel_span(
            "root", 0, 20, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="lead"
        ),
        otel_span("c1", 1, 2, "root", gen_ai__usage__input_tokens=100, **chat),
        otel_span(
            "x", 2, 5, "root", gen_ai__operation__name="execute_tool", gen_ai__tool__name="grep"
        ),
        otel_span("c2", 6, 8, "root", gen_ai__usage__input_tokens=120, **chat),
        otel_span("c3", 7, 9, "root", gen_ai__usage__input_tokens=130, **chat),
        otel_span("c4", 10, 11, "root", gen_ai__usage__input_tokens=140, **chat),
    ]
    rows = [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}]
    _, (made,) = converted("otel", lines(tmp_path / "o.jsonl", rows))

    assert [t.agent for t in made.turns] == ["lead"] * 4
    assert [t.parents for t in made.turns] == [(), (0,), (0,), (1, 2)]
    assert made.turns[1].tool == "grep"
    assert made.turns[1].gap_s == pytest.approx(4.0)


def test_every_converter_names_a_broken_file(tmp_path):
    """A file that is not JSON is refused with its name and line by every converter."""
    path: Path = tmp_path / "bad.jsonl"
    path.write_text("not json\n", "utf-8")
    packed = tmp_path / "bad.jsonl.gz"
    packed.write_bytes(gzip.compress(b"not json\n"))
    for source in sorted(CONVERTERS):
        for file in (path, packed):
            with pytest.raises(TraceError, match=file.name.replace(".", r"\.")):
                converted(source, file)

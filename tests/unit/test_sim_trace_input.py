"""What strangers feed to the trace commands: broken files, huge numbers, other forms."""

import gzip
import io
import itertools
import json
import tarfile

import pytest
from typer.testing import CliRunner

from scout_sdk._hints import HUMAN
from scout_server.cli import app
from scout_server.sim.prompts import PromptHasher
from scout_server.sim.traces import Program, TraceError, TraceInfo, TraceReader, Turn, write_trace
from scout_server.sim.traces.convert import CONVERTERS, SourceOptions
from scout_server.sim.traces.convert.source import checked

INFO = TraceInfo(source="test", block_tokens=16)
HEADER = '{"scout_trace":1,"source":"x","block_tokens":16}\n'


def converted(source, path):
    return list(CONVERTERS[source](path, SourceOptions())[1])


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (b'{"program":"p","arrival_s":1' + b"0" * 400 + b',"turns":[{"in":5,"out":1}]}',
         "arrival_s"),
        (b'{"program":"p","arrival_s":1e300,"turns":[{"in":5,"out":1}]}', "arrival_s"),
        (b'{"program":"p","turns":[{"in":1' + b"0" * 400 + b',"out":1}]}', "turns[0].in"),
        (b'{"program":"p","turns":[{"in":5,"out":1000000000000}]}', "turns[0].out"),
        (b'{"program":"p","turns":[{"in":5,"out":1,"gap_s":NaN}]}', "turns[0].gap_s"),
        (b'{"program":"p","turns":[{"in":5,"out":1,"gap_s":Infinity}]}', "turns[0].gap_s"),
        (b'{"program":"p","turns":[{"in":5,"out":1,"hash_runs":[[true,true]]}]}',
         "turns[0].hash_runs[0]"),
        (b'{"program":"p","turns":[{"in":5,"out":1,"hash_runs":[[9999999999,1]]}]}',
         "turns[0].hash_runs[0]"),
        (b'{"program":"p","turns":[{"in":5,"out":1},{"in":5,"out":1,"parents":[0,0]}]}',
         "turns[1].parents"),
        (b'{"program":"p\\ud800","turns":[{"in":5,"out":1}]}', "program"),
        (b'{"program":"\xff","turns":[{"in":5,"out":1}]}', "line"),
        (b"[" * 100_000, "line"),
    ],
)  # fmt: skip
def test_no_line_is_worse_than_broken(tmp_path, line, place):
    """Numbers beyond reason, no UTF-8, endless brackets: named like any broken line, or counted."""
    path = tmp_path / "t.jsonl"
    good = b'{"program":"good","turns":[{"in":5,"out":1}]}\n'
    path.write_bytes(HEADER.encode() + line + b"\n" + good)

    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert (caught.value.file, caught.value.line, caught.value.field) == ("t.jsonl", 2, place)
    assert len(str(caught.value)) < 300

    reader = TraceReader(path, skip_bad=True)
    assert [p.program for p in reader] == ["good"]
    assert reader.skips.skipped == 1


@pytest.mark.parametrize("command", ["inspect", "advise"])
@pytest.mark.parametrize("damage", ["cut", "plain"])
def test_a_damaged_archive_is_named(tmp_path, command, damage):
    """A .gz that is cut off, or is none, ends with its name and an exit code, not a traceback."""
    path = tmp_path / "t.jsonl.gz"
    programs = [
        Program(program=f"p{i}", arrival_s=i * 1.37, turns=(Turn(input_tokens=9, output_tokens=1),))
        for i in range(500)
    ]
    write_trace(path, INFO, programs)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"plain text\n")
    result = CliRunner().invoke(app, ["trace", command, str(path)])
    assert result.exit_code == 1
    assert "t.jsonl.gz" in result.stderr
    assert "is damaged" in result.stderr
    result = CliRunner().invoke(app, ["sim", "run", "--set", f"trace.path={path}"])
    assert result.exit_code == 1
    assert "is damaged" in result.stderr


def test_large_ids_of_two_programs_never_meet():
    """Whatever ids the reader takes, two programs whose scope is the program share no hash."""
    hasher = PromptHasher(TraceInfo(source="s", block_tokens=512), 1)
    turn = Turn(input_tokens=1024, output_tokens=1, hash_runs=((2**32 - 2, 2),))
    other = Turn(input_tokens=1024, output_tokens=1, hash_runs=((0, 2),))
    found = [
        set(hasher.hashes(number, each, None, index))
        for number in range(3)
        for index, each in enumerate((turn, other))
    ]
    assert len(set().union(*found)) == sum(len(each) for each in found)


_WRONG = [None, True, -1, 1e400, float("nan"), 10**300, "x", [], {}, [1], [[1]], [None], {"a": 1}]


def _damaged(value):
    """Yield copies of *value*, a JSON value, with one part replaced by something wrong."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield {k: v for k, v in value.items() if k != key}
            for wrong in _WRONG:
                yield {**value, key: wrong}
            for other in _damaged(part):
                yield {**value, key: other}
    elif isinstance(value, list):
        for index, part in enumerate(value):
            for other in [*_WRONG, *_damaged(part)]:
                yield [*value[:index], other, *value[index + 1 :]]


_SOURCES = {
    "claude_code": {
        "id": "t", "block_size": 64, "requests": [
            {"t": 1.0, "in": 100, "out": 5, "hash_runs": [[1, 2]], "api_time": 2.0,
             "input_types": ["text"], "stop": "tool_use"},
            {"type": "subagent", "t": 4.0, "agent_id": "a", "subagent_type": "s", "requests": [
                {"t": 0.0, "in": 50, "out": 5, "hash_runs": [[1, 1]], "api_time": 1.0}]},
        ],
    },
    "thunderagent": {
        "config": "c", "instance": "i", "t0_unix": 5.0, "steps": [
            {"input_tokens": 100, "output_tokens": 5, "llm_reasoning_t": 1.0,
             "llm_reasoning_s": 2.0, "action": "ls"},
        ],
    },
    "mooncake": {"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]},
    "chatdev": {
        "session": "s", "path": "p", "messages": [{"role": "CEO", "chars": 90, "t": 1.0}],
        "llm_calls": [{"completion_tokens": 5}],
    },
    "llmservingsim": {
        "session_id": "s", "arrival_time_ns": 5, "sub_requests": [
            {"input_toks": 50, "output_toks": 5, "tool_duration_ns": 9, "tool_name": "t"},
            {"input_toks": 90, "output_toks": 5, "prefix_reuse_toks": 48, "agent": "a"},
        ],
    },
    "dynamo": {
        "request_id": "r", "session_id": "s", "timestamp": 5, "input_length": 600,
        "output_length": 9, "hash_ids": [0, 1], "wait_for": [], "delay": 5, "tool_wait_ms": 5,
        "tool_events": [{"tool_class": "t"}],
    },
    "otel": {
        "resourceSpans": [{"scopeSpans": [{"spans": [{
            "traceId": "t", "spanId": "s", "parentSpanId": "", "startTimeUnixNano": "1000000000",
            "endTimeUnixNano": "2000000000", "attributes": [
                {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "50"}},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "5"}},
            ]}]}]}],
    },
    "who_and_when": {
        "history": [{"name": "A", "content": "aaaa"}, {"role": "human", "content": "bbbb"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("source", sorted(CONVERTERS))
def test_a_converter_writes_what_can_be_read_or_says_what_is_broken(tmp_path, source):
    """Each part of an entry gone or wrong: named, or converted to what a reader takes."""
    path = tmp_path / "in.jsonl"
    taken = left_out = 0
    for number, each in enumerate([_SOURCES[source], *_damaged(_SOURCES[source])]):
        if source == "who_and_when":
            path = tmp_path / str(number)
            path.mkdir()
            (path / "log.json").write_text(json.dumps(each), "utf-8")
        else:
            written(path, each)
        options = SourceOptions(skip_bad=True)
        try:
            info, found = CONVERTERS[source](path, options)
            taken += len(list(checked(info, found, path.name, options)))
        except TraceError:
            left_out += 1
        left_out += options.skips.skipped
    assert taken > 0
    assert left_out > 0


def test_two_entries_of_one_name_are_not_written(tmp_path):
    """A converted trace can be read: what occurs twice is broken, or left out and counted."""
    row = {"session_id": "s", "sub_requests": [{"input_toks": 50, "output_toks": 5}]}
    path, out = written(tmp_path / "in.jsonl", row, row), tmp_path / "out.jsonl"
    args = ["trace", "convert", "llmservingsim", str(path), str(out)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    assert "occurs twice" in result.stderr
    assert not out.exists()
    result = CliRunner().invoke(app, [*args, "--skip-bad"])
    assert result.exit_code == 0
    assert "1 entries left out" in result.stderr
    assert len(list(TraceReader(out))) == 1


def test_a_conversion_that_fails_leaves_the_old_file(tmp_path):
    """What was there before stays until the new trace is whole."""
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n", "utf-8")
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(_SOURCES["mooncake"]) + "\nnot json\n", "utf-8")
    result = CliRunner().invoke(app, ["trace", "convert", "mooncake", str(path), str(out)])
    assert result.exit_code == 1
    assert out.read_text("utf-8") == "precious\n"
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == ["out.jsonl"]


def test_hashes_of_64_bits_become_small_numbers(tmp_path):
    """Dynamo's real hashes keep their equality; their values are not written."""
    big = [2**63 + 5, 2**62, 2**61]
    path = written(
        tmp_path / "d.jsonl",
        {"request_id": "a", "session_id": "s", "input_length": 1000, "output_length": 1,
         "hash_ids": big[:2]},
        {"request_id": "b", "session_id": "s", "input_length": 1500, "output_length": 1,
         "hash_ids": big},
    )  # fmt: skip
    (made,) = converted("dynamo", path)
    assert [t.hash_runs for t in made.turns] == [((0, 2),), ((0, 3),)]


def test_llmservingsim_reuses_what_it_says_and_no_more(tmp_path):
    """prefix_reuse_toks 0 shares nothing; otherwise the prefix is that of the request before."""
    requests = [(160, 16, None), (160, 16, 0), (200, 16, 96), (240, 32, 144), (64, 1, 64)]
    row = {
        "session_id": "s",
        "sub_requests": [
            {"input_toks": i, "output_toks": o, **({} if r is None else {"prefix_reuse_toks": r})}
            for i, o, r in requests
        ],
    }
    (made,) = converted("llmservingsim", written(tmp_path / "l.jsonl", row))
    ids = [
        [i for first, count in t.hash_runs for i in range(first, first + count)]
        for t in made.turns
    ]  # fmt: skip
    assert [len(each) for each in ids] == [10, 10, 13, 15, 4]
    shared = []
    for before, after in itertools.pairwise(ids):
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        shared.append(same)
        assert not set(after[same:]) & {i for each in ids[: ids.index(after)] for i in each}
    assert shared == [0, 6, 9, 4]


def test_what_people_and_terminals_say_lengthens_the_prompt(tmp_path):
    """Who&When: their text is in the next prompt, and is the gap before it."""
    log = {
        "history": [
            {"name": "A", "content": "x" * 64},
            {"name": "Computer_terminal", "content": "y" * 640},
            {"name": "B", "content": "x" * 64},
            {"name": "human", "content": "y" * 320},
            {"name": "A", "content": "x" * 64},
        ]
    }
    archive = tmp_path / "logs.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        content = json.dumps(log).encode()
        member = tarfile.TarInfo("1.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    (made,) = converted("who_and_when", archive)
    anchor = 640
    assert [t.input_tokens for t in made.turns] == [
        anchor, anchor + 16 + 160, anchor + 16 + 160 + 16 + 80,
    ]  # fmt: skip
    assert [t.tool for t in made.turns] == [None, "terminal", HUMAN]
    packed = archive.read_bytes()
    archive.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"logs\.tar\.gz"):
        converted("who_and_when", archive)


def test_calls_without_parents_keep_their_place_in_time(tmp_path):
    """A call, or a sub-agent, that overlaps the first begins when it did, not with the program."""
    spans = [
        {"traceId": "t", "spanId": f"s{i}", "startTimeUnixNano": str(int(a * 1e9)),
         "endTimeUnixNano": str(int(b * 1e9)), "attributes": [
             {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
             {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "50"}}]}
        for i, (a, b) in enumerate([(10, 20), (14, 16)])
    ]  # fmt: skip
    row = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    (made,) = converted("otel", written(tmp_path / "o.jsonl", row))
    assert [(t.parents, t.gap_s) for t in made.turns] == [((), 0.0), ((), 4.0)]

    session = {
        "id": "t",
        "requests": [
            {"type": "subagent", "t": 2.0, "agent_id": "a", "requests": [
                {"t": 0.0, "in": 50, "out": 5, "hash_runs": [], "api_time": 1.0}]},
            {"t": 9.0, "in": 100, "out": 5, "hash_runs": [], "api_time": 2.0},
        ],
    }  # fmt: skip
    (made,) = converted("claude_code", written(tmp_path / "c.jsonl", session))
    assert [(t.parents, t.gap_s) for t in made.turns] == [((), 0.0), ((0,), 6.0)]


def test_configurations_of_thunderagent_follow_one_another(tmp_path):
    """Runs of another configuration were another experiment: they are not at the same time."""

    def run(config, instance, unix):
        step = {"input_tokens": 100, "output_tokens": 5, "llm_reasoning_t": 1.0,
                "llm_reasoning_s": 30.0}  # fmt: skip
        return {"config": config, "instance": instance, "t0_unix": unix, "steps": [step]}

    path = written(
        tmp_path / "t.jsonl", run("b", "1", 900.0), run("a", "1", 50.0), run("a", "2", 60.0)
    )
    made = converted("thunderagent", path)
    assert [(p.program, p.arrival_s) for p in made] == [("a/1", 0.0), ("a/2", 10.0), ("b/1", 40.0)]


def test_gzip_is_what_the_name_says(tmp_path):
    """A damaged source is named by its converter, too."""
    packed = tmp_path / "bad.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"timestamp":1}\n' * 500)[:-20])
    result = CliRunner().invoke(
        app, ["trace", "convert", "mooncake", str(packed), str(tmp_path / "o"), "--skip-bad"]
    )
    assert result.exit_code == 1
    assert "is damaged" in result.stderr

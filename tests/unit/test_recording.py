import pytest

from scout_sdk import ConfigError, Hints, SessionEvent, ToolEvent, ToolState
from scout_sdk._trace import Program, TraceInfo, Turn, runs_of
from scout_sdk._trace_file import TraceFile
from scout_sdk._trace_programs import Programs, Started
from scout_sdk.testing import FakeClock
from scout_server.policy.facts import Assignment, Finish
from scout_server.recording import BlockNumbers, RecordSettings, recorder_of
from scout_server.sim.traces import TraceReader

INFO = TraceInfo(source="test", block_tokens=16)


class _Client:
    """Requests of one engine under a clock that the test moves."""

    def __init__(self, settings, rank=0):
        self.clock = FakeClock(100.0)
        self.recorder = recorder_of(settings, source="test", block_tokens=16, rank=rank)
        self.number = 0

    def arrive(self, session, agent="a", *, blocks=(), tokens=None, tenant="", **hints):
        self.number += 1
        name = f"r{self.number}"
        self.recorder.arrive(
            name,
            Assignment(agent=agent, session=session, from_hint=True),
            Hints(session=session, agent=agent, **hints),
            blocks,
            prompt_tokens=tokens or 16 * len(blocks) or 5,
            tenant=tenant,
            now=self.clock.now,
        )
        return name

    def finish(self, name, finish=Finish.STOP, **more):
        self.recorder.finish(
            name, finish, output_tokens=3, cached_tokens=16, now=self.clock.now, **more
        )

    def turn(self, session, agent="a", *, seconds=1.0, finish=Finish.STOP, **more):
        name = self.arrive(session, agent, **more)
        self.clock.advance(seconds)
        self.finish(name, finish)
        return name

    def event(self, session, **more):
        self.recorder.event(SessionEvent(session=session, **more), tenant="", now=self.clock.now)


@pytest.fixture
def settings(tmp_path):
    return RecordSettings(file=str(tmp_path / "t.jsonl"), idle_s=60.0)


@pytest.fixture
def client(settings):
    client = _Client(settings)
    yield client
    client.recorder.close()


def _read(client):
    client.recorder.close()
    return list(TraceReader(client.recorder.file.path))


def test_a_turn_has_what_was_measured(client):
    """
    Tokens, blocks, service time, hits, gap and arrival of a turn are those that were told.
    """
    client.turn("s", blocks=["x", "y"], seconds=2.0)
    client.clock.advance(4.0)
    client.turn("s", "b", blocks=["x", "z"], seconds=1.0)
    client.clock.advance(1.0)
    client.turn("t", blocks=["y"])

    one, two = _read(client)
    assert (0.0, 8.0) == (one.arrival_s, two.arrival_s)
    assert [(32, 3, 0.0, 2.0, 16), (32, 3, 4.0, 1.0, 16)] == [
        (t.input_tokens, t.output_tokens, t.gap_s, t.service_s, t.hit_tokens) for t in one.turns
    ]
    assert [((0, 2),), ((0, 1), (2, 1))] == [t.hash_runs for t in one.turns]
    assert ((1, 1),) == two.turns[0].hash_runs


def test_the_tool_of_a_gap(client):
    """
    The tool of a gap is what the reply called, the side channel or the next request's hints said;
    the expectation is what was announced when it began.
    """
    first = client.arrive("s")
    client.finish(first, Finish.TOOL_CALLS, tools=(("fast", 1.0), ("slow", 9.0)))
    second = client.turn("s")
    client.recorder.tools(second, (("told_late", None),))
    client.turn("s")
    started = ToolEvent(name="build", state=ToolState.STARTED, remaining_s=30.0)
    client.event("s", tool=started)
    client.event("s", tool=ToolEvent(name="build", state=ToolState.ENDED))
    client.turn("s")
    client.turn("s", tools=(ToolEvent(name="human", state=ToolState.ENDED),))

    (program,) = _read(client)
    found = [(t.tool, t.tool_expected_s) for t in program.turns]
    told = [("slow", 9.0), ("told_late", None), ("build", 30.0), ("human", None)]
    assert [(None, None), *told] == found
    assert [True, True, False, False, False] == [t.calls_tool for t in program.turns]


def test_a_spawned_session_is_a_branch(client):
    """
    A session with a live parent is part of its program; the parent's next turn waits for it.
    """
    client.turn("root")
    client.turn("child", parent="root")
    client.turn("child", parent="root")
    client.turn("root")

    (program,) = _read(client)
    assert [(), (0,), (1,), (2,)] == [t.parents for t in program.turns]
    names = [t.session for t in program.turns]
    assert names[0] == names[3] == ""
    assert names[1] == names[2] != ""


def test_a_session_is_over_when_it_says_so(client):
    """
    A final request or event writes the program, once its last request has ended; what comes after
    under the same name is another program.
    """
    client.turn("s", final=True)
    late = client.arrive("s")
    client.event("s", final=True)
    client.finish(late)
    client.turn("s")
    client.turn("stays")

    programs = _read(client)
    assert [1, 1, 1, 1] == [len(p.turns) for p in programs]
    assert 4 == len({p.program for p in programs})


def test_a_silent_session_is_over(client):
    """
    A session of which nothing is heard for the idle time is written; one that is heard is not.
    """
    client.turn("silent")
    client.clock.advance(59.0)
    client.turn("heard")
    client.recorder.tick(now=client.clock.now)
    client.turn("silent")
    client.turn("heard")

    assert [1, 1, 2] == [len(p.turns) for p in _read(client)]


def test_what_the_end_cuts_off_is_marked(client):
    """
    At shutdown, programs with a running request, an open tool call or an abort are marked aborted.
    """
    client.turn("done")
    client.turn("running")
    client.arrive("running")
    client.turn("calling", finish=Finish.TOOL_CALLS)
    client.turn("left", finish=Finish.ABORT)
    client.arrive("nothing")

    assert [False, True, True, True] == [p.aborted for p in _read(client)]


def test_preemptions_and_strangers_change_nothing(client):
    """
    A preempted request goes on; ends, events and tools of unknown requests are ignored.
    """
    name = client.arrive("s")
    client.finish(name, Finish.PREEMPTED)
    client.finish("unknown")
    client.recorder.tools("unknown", (("t", None),))
    client.event("unknown", final=True)
    client.finish(name)

    assert [1] == [len(p.turns) for p in _read(client)]


def test_no_names_of_sessions(client):
    """
    Sessions are written as hashes that are equal for equal sessions; tenants as they are told,
    which is hashed.
    """
    client.turn("ann@example.org", final=True)
    client.turn("ann@example.org", final=True, tenant="0123456789abcdef")
    one, two = _read(client)

    assert "ann" not in client.recorder.file.path.read_text()
    assert one.program.split("-")[1] == two.program.split("-")[1]
    assert ("", "0123456789abcdef") == (one.tenant, two.tenant)


def test_requests_without_a_session(client):
    """
    A request of no session is a program of its own, written when it ends.
    """
    for _ in range(2):
        name = client.arrive(None, None)
        client.finish(name)

    assert [1, 1] == [len(p.turns) for p in _read(client)]


def test_every_rank_has_its_file(settings):
    """
    Data-parallel ranks but the first add their number to the file's name.
    """
    names = []
    for rank in (0, 2):
        client = _Client(settings, rank)
        client.turn("s")
        assert 1 == len(_read(client))
        names.append(client.recorder.file.path.name)

    assert ["t.jsonl", "t-rank2.jsonl"] == names


def test_a_fault_ends_the_recording_and_nothing_else(client, caplog):
    """
    A fault of ours is logged once; every later call does nothing.
    """
    client.arrive("s", blocks=[[]])  # not hashable
    client.turn("s")
    client.recorder.tick(now=client.clock.now)

    assert [] == _read(client)
    assert 1 == sum("recording" in r.message for r in caplog.records)


def test_numbers_do_not_depend_on_the_hashes():
    """
    Blocks are numbered by first sight, so other hashes of the same requests give the same trace.
    """
    requests = [[1, 2, 3], [1, 2, 9], [4, 1], [1, 2, 3]]
    found = []
    for salt in (0, 1 << 40):
        numbers = BlockNumbers(1024)
        found.append([numbers.runs([salt ^ block for block in blocks]) for blocks in requests])

    assert found[0] == found[1]
    assert ((0, 3),) == found[0][3]


def test_numbers_are_bounded():
    """
    Blocks that are in use stay known; others are forgotten, and are new when they come back.
    """
    numbers = BlockNumbers(8)
    kept = numbers.runs(["hot"])
    gone = numbers.runs(["cold"])
    for block in range(100):
        numbers.runs([block])
        assert kept == numbers.runs(["hot"])

    assert gone != numbers.runs(["cold"])
    assert len(numbers._young) + len(numbers._old) <= 2 * 8 + 1


def test_memory_is_bounded():
    """
    Requests that never end, and sessions that never do, are written early, the oldest first.
    """
    written = []
    programs = Programs(written.append)
    for number in range(17_000):
        programs.start(f"r{number}", Started(prompt_tokens=1, session=f"s{number}"), now=0.0)
    assert len(programs) <= 16_384
    runs = tuple((2 * i, 1) for i in range(5000))
    for number in range(200):
        started = Started(prompt_tokens=1 << 20, session=f"t{number}", runs=runs)
        programs.start(f"t{number}", started, now=1.0)
        programs.end(f"t{number}", now=1.0, output_tokens=1)

    assert sum(len(t.hash_runs) for p in written for t in p.turns) >= 5000 * 120


def test_a_file_that_is_full_is_kept_and_a_new_one_begins(tmp_path):
    """
    Past its limit a file becomes NAME.1 and a new one begins; both are whole traces. What a file
    held before is kept too.
    """
    path = tmp_path / "t.jsonl"
    path.write_text("before\n")
    file = TraceFile(path, INFO, max_bytes=4000)
    assert "before\n" == (tmp_path / "t.1.jsonl").read_text()
    turns = (Turn(input_tokens=16, output_tokens=1, hash_runs=runs_of([0])),)
    for number in range(60):
        file.add(Program(program=f"p{number}", arrival_s=0.0, turns=turns))
    file.close()

    last, old = list(TraceReader(path)), list(TraceReader(tmp_path / "t.1.jsonl"))
    assert (60, 0) == (file.written, file.dropped)
    assert "p59" == last[-1].program
    assert int(last[0].program[1:]) == int(old[-1].program[1:]) + 1
    assert max(path.stat().st_size, (tmp_path / "t.1.jsonl").stat().st_size) <= 4000
    assert ["t.1.jsonl", "t.jsonl"] == sorted(p.name for p in tmp_path.iterdir())


def test_two_recordings_do_not_share_a_file(tmp_path):
    """
    A file that another recording is writing is refused; once it is closed, it is not.
    """
    first = TraceFile(tmp_path / "t.jsonl", INFO)
    with pytest.raises(ConfigError, match="another recording"):
        TraceFile(tmp_path / "t.jsonl", INFO)
    first.close()
    TraceFile(tmp_path / "t.jsonl", INFO).close()


def test_a_disk_that_fails_loses_programs_and_nothing_else(tmp_path, caplog):
    """
    What cannot be written is counted and said once; nothing is raised.
    """
    file = TraceFile(tmp_path / "t.jsonl", INFO)
    file._out.close()
    turns = (Turn(input_tokens=16, output_tokens=1),)
    for number in range(3):
        file.add(Program(program=f"p{number}", arrival_s=0.0, turns=turns))
    file.close()
    file.close()

    assert 3 == file.dropped
    assert 1 == sum("cannot record" in r.message for r in caplog.records)


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path):
    """
    A server does not start with a file that cannot be written, or that ends in .gz.
    """
    (tmp_path / "file").write_text("")
    for name, complaint in (("file/t.jsonl", "cannot record"), ("t.jsonl.gz", "gz")):
        settings = RecordSettings(file=str(tmp_path / name))
        with pytest.raises(ConfigError, match=complaint):
            recorder_of(settings, source="test", block_tokens=16)
    assert recorder_of(RecordSettings(), source="test", block_tokens=16) is None

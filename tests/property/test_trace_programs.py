from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_sdk import SessionEvent, ToolEvent, ToolState
from scout_sdk._trace import HashScope, Program, TraceInfo
from scout_sdk._trace_programs import Programs, Started
from scout_server.sim.traces import TraceReader, write_trace

SESSIONS = st.sampled_from([None, "a", "b", "c"])
ACTS = st.one_of(
    st.tuples(st.just("start"), SESSIONS, SESSIONS, st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("forget"), st.integers(0, 20)),
    st.tuples(st.just("tools"), st.integers(0, 20)),
    st.tuples(st.just("event"), SESSIONS, st.booleans()),
    st.tuples(st.just("wait"), st.integers(0, 200)),
)


@settings(max_examples=60, deadline=None)
@given(acts=st.lists(ACTS, max_size=60))
def test_whatever_happens_is_a_valid_trace(acts):
    """
    Any order of starts, ends, events and failures gives a trace that the strict reader takes; each
    request that ended is in it exactly once, and no turn starts before its parents' end.
    """
    written: list[Program] = []
    programs = Programs(written.append, idle_s=120.0)
    now = 0.0
    open_: list[str] = []
    started = ended = 0
    for act in acts:
        match act:
            case ("start", session, parent, final):
                started += 1
                open_.append(f"r{started}")
                facts = Started(prompt_tokens=started, session=session, parent=parent, final=final)
                programs.start(open_[-1], facts, now=now)
            case ("end", which, aborted) if open_:
                ended += 1
                programs.end(
                    open_.pop(which % len(open_)), now=now, output_tokens=1, aborted=aborted
                )
            case ("forget", which) if open_:
                programs.forget(open_.pop(which % len(open_)))
            case ("tools", which):
                programs.tools(f"r{which}", (("t", 1.0),))
            case ("event", session, final) if session is not None:
                tool = ToolEvent(name="x", state=ToolState.STARTED, remaining_s=2.0)
                programs.event(SessionEvent(session=session, tool=tool, final=final), now=now)
            case ("wait", seconds) if not open_:
                now += seconds
                programs.tick(now=now)
            case _:
                now += 1.0
    programs.close()

    assert 0 == len(programs)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        write_trace(path, TraceInfo(source="t", block_tokens=1, scope=HashScope.GLOBAL), written)
        assert written == list(TraceReader(path))
    numbers = [turn.input_tokens for program in written for turn in program.turns]
    assert ended == len(numbers) == len(set(numbers))
    for program in written:
        ends: list[float] = []
        for turn in program.turns:
            begin = max((ends[p] for p in turn.parents), default=0.0) + turn.gap_s
            assert turn.service_s is not None
            ends.append(begin + turn.service_s)
        assert ends == sorted(ends)

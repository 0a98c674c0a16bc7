"""Reading commands: total, never negative, and true to how commands compose."""

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scout_sdk.sleep import Bound, expected_seconds, expected_seconds_of_call

PIECES = r"""
sleep 5 0.5 1m $N ; && || & | ( ) { } ' " ` $( $(( )) ${ } \ # for i in do done while if then
else fi case esac wait timeout bash -c python time.sleep( asyncio.sleep( import def : range(3)
Start-Sleep -Seconds 1..3 % foreach <<EOF EOF {1..5} seq exit f() > < [ ] = ,
"""

soups = st.lists(
    st.sampled_from(PIECES.split()) | st.text(max_size=4) | st.just("\n"), max_size=40
).map(" ".join)
seconds = st.integers(0, 100_000).map(lambda n: n / 8)


def sane(expectation):
    if expectation is None:
        return True
    low, high = expectation.at_least_s, expectation.at_most_s
    assert 0.0 <= low < math.inf
    assert high is None or low <= high < math.inf
    assert expectation.seconds == (low if expectation.bound is Bound.AT_LEAST else high)
    assert (expectation.bound is Bound.EXACT) == (low == high)
    assert (expectation.bound is Bound.AT_LEAST) == (high is None)
    return True


@settings(max_examples=400)
@given(soups)
def test_never_raises_and_never_lies_about_its_form(soup):
    """Whatever the text: no exception, nothing negative, bounds in order."""
    assert sane(expected_seconds(soup))
    assert sane(expected_seconds("sleep 1; " + soup))
    assert sane(expected_seconds_of_call(soup, {"command": soup, "timeout": 3}))


@settings(max_examples=100)
@given(
    st.text(max_size=20),
    st.dictionaries(
        st.sampled_from(["command", "cmd", "seconds", "timeout", "commands"]),
        st.none() | st.text() | st.floats() | st.integers() | st.lists(st.text() | st.none()),
    ),
)
def test_any_call_is_answered(name, arguments):
    """Whatever the arguments: no exception."""
    assert sane(expected_seconds_of_call(name, arguments))


@given(st.lists(seconds, min_size=1, max_size=12), st.sampled_from(["; ", " && ", "\n", " ;\n"]))
def test_sequences_add_up(parts, joint):
    """Sleeps one after the other take their sum."""
    expectation = expected_seconds(joint.join(f"sleep {part}" for part in parts))
    assert expectation.bound is Bound.EXACT
    assert math.isclose(expectation.seconds, sum(parts), abs_tol=1e-9)


@given(st.lists(seconds, min_size=1, max_size=12), st.sampled_from([" | ", " & "]))
def test_parallel_takes_the_longest(parts, joint):
    """Sleeps at the same time take their longest."""
    tail = " & wait" if joint == " & " else ""
    expectation = expected_seconds(joint.join(f"sleep {part}" for part in parts) + tail)
    assert (expectation.bound, expectation.seconds) == (Bound.EXACT, max(parts))


@given(seconds, st.integers(1, 400))
def test_loops_multiply(part, rounds):
    """A loop with a constant count takes its body that often, in each language."""
    for source in (
        f"for i in $(seq {rounds}); do sleep {part}; done",
        f"for ((i=0; i<{rounds}; i++)); do sleep {part}; done",
        f"import time\nfor _ in range({rounds}):\n    time.sleep({part})",
        f"1..{rounds} | ForEach-Object {{ Start-Sleep -Seconds {part} }}",
    ):
        expectation = expected_seconds(source)
        assert expectation.bound is Bound.EXACT
        assert math.isclose(expectation.seconds, part * rounds, rel_tol=1e-9, abs_tol=1e-9)


@given(seconds, st.integers(1, 10_000))
def test_a_deadline_cuts(part, limit):
    """Under a timeout nothing takes longer; what is shorter keeps its time."""
    expectation = expected_seconds(f"timeout {limit} sleep {part}")
    assert expectation.seconds == min(part, limit)
    unknown = expected_seconds(f"timeout {limit} sh -c 'make; sleep {part}'")
    assert (unknown.bound is Bound.AT_MOST) == (part < limit)
    assert (unknown.at_least_s, unknown.at_most_s) == (min(part, limit), limit)


@given(soups, seconds)
def test_unknown_work_never_shortens(soup, part):
    """Adding a sleep in front adds exactly that to what is known."""
    alone = expected_seconds("sleep 0; " + soup)
    longer = expected_seconds(f"sleep {part}; " + soup)
    assume(alone is not None and longer is not None)
    assert math.isclose(longer.at_least_s, alone.at_least_s + part, abs_tol=1e-6)


@given(seconds)
def test_quoting_does_not_matter(part):
    """A command means the same under another shell, in a subshell and in Python."""
    for source in (
        f"sleep {part}",
        f"bash -c 'sleep {part}'",
        f"( sleep {part} )",
        f"python3 -c 'import time; time.sleep({part})'",
        f"import subprocess; subprocess.run(['sleep', '{part}'])",
    ):
        assert expected_seconds(source).seconds == part

"""Environment variables, strict mode and the fake clock."""

import threading

import pytest

from scout_sdk._env import Environment, read_environment
from scout_sdk._guard import guarded
from scout_sdk.testing import FakeClock, is_strict, strict


def test_nothing_set():
    """Without variables the SDK is on, with its defaults."""
    assert read_environment({}) == Environment()
    assert read_environment({"SCOUT_BASE_URL": " ", "SCOUT_TIMEOUT": ""}) == Environment()


def test_everything_set():
    """Each variable has its field."""
    assert read_environment(
        {
            "SCOUT_BASE_URL": "http://h:8000/v1",
            "SCOUT_SDK_ENABLED": "Off",
            "SCOUT_SESSION_ID": "s",
            "SCOUT_API_KEY": "k",
            "SCOUT_TIMEOUT": "2.5",
            "SCOUT_DEBUG": "1",
        }
    ) == Environment(
        base_url="http://h:8000/v1",
        enabled=False,
        session="s",
        api_key="k",
        timeout_s=2.5,
        debug=True,
    )


def test_it_is_read_when_asked(monkeypatch):
    """A change of the environment shows at the next reading."""
    monkeypatch.setenv("SCOUT_DEBUG", "yes")
    assert read_environment().debug
    monkeypatch.setenv("SCOUT_DEBUG", "no")
    assert not read_environment().debug


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "inf", "61"])
def test_bad_values_do_no_harm(timeout):
    """A value that cannot be read keeps the default; all such values are named at once."""
    given = read_environment({"SCOUT_TIMEOUT": timeout, "SCOUT_SDK_ENABLED": "maybe"})
    assert (given.timeout_s, given.enabled) == (1.0, True)
    enabled, seconds = given.problems
    assert "SCOUT_SDK_ENABLED='maybe': not one of 0, 1, false" in enabled
    assert f"SCOUT_TIMEOUT={timeout!r}" in seconds


@pytest.mark.parametrize("url", ["h:8000", "localhost", "ftp://h", "http://h:99999", "http://[::1"])
def test_a_wrong_server_counts_as_none(url):
    """A SCOUT_BASE_URL where nothing can be sent is named as a problem, with the form it has."""
    given = read_environment({"SCOUT_BASE_URL": url})
    assert given.base_url is None
    (problem,) = given.problems
    assert problem.startswith(f"SCOUT_BASE_URL: base URL {url!r} is not of the form http://HOST")


def test_strict_mode_reaches_the_guard():
    """Inside strict() our own faults are raised, in every thread; outside they are logged."""

    @guarded
    def broken():
        raise LookupError("ours")

    assert broken() is None
    with strict():
        with strict():
            pass
        assert is_strict()
        with pytest.raises(LookupError):
            broken()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_strict()))
        thread.start()
        thread.join()
        assert seen == [True]
    assert not is_strict()


def test_the_clock_moves_when_told():
    """A fake clock stands still, goes forward by what it is told, and never back."""
    clock = FakeClock(5.0)
    assert clock() == clock.now == 5.0
    assert clock.advance(2.5) == 7.5
    clock.sleep(0.5)
    assert clock() == 8.0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="forward"):
            clock.advance(wrong)

"""What commands say about their duration: a table of real-looking ones, and how they are read."""

import json

import pytest

from scout_sdk import Evidence
from scout_sdk.sleep import Bound, Expectation, expected_seconds, expected_seconds_of_call

EXACT, AT_LEAST, AT_MOST = Bound.EXACT, Bound.AT_LEAST, Bound.AT_MOST

TABLE = [
    # One sleep, and coreutils' units.
    ("sleep 5", 5, EXACT),
    ("sleep 0.5", 0.5, EXACT),
    ("sleep .25", 0.25, EXACT),
    ("sleep 0", 0, EXACT),
    ("sleep 1m 30s", 90, EXACT),
    ("sleep 1.5h", 5400, EXACT),
    ("sleep 2d", 172800, EXACT),
    ("/bin/sleep 3", 3, EXACT),
    ("  sleep   7  # let the server start", 7, EXACT),
    ("usleep 250000", 0.25, EXACT),
    # Sequences.
    ("sleep 1; sleep 2", 3, EXACT),
    ("sleep 1\nsleep 2\n", 3, EXACT),
    ("sleep 2 && echo done", 2, EXACT),
    ("echo waiting; sleep 10; echo ok", 10, EXACT),
    ("cd /srv/app && sleep 3 && ls -la", 3, EXACT),
    ("sleep 0.5 && make", 0.5, AT_LEAST),
    ("make -j8 && sleep 5", 5, AT_LEAST),
    ("npm run build; sleep 3; curl -s localhost:3000/health", 3, AT_LEAST),
    ("docker compose up -d && sleep 15 && docker compose ps", 15, AT_LEAST),
    ("false || sleep 4", 4, EXACT),
    ("true || sleep 4; sleep 1", 1, EXACT),
    ("false && sleep 9; sleep 2", 2, EXACT),
    ("sleep 3 || echo failed", 3, EXACT),
    ("set -e; sleep 2; exit 0; sleep 100", 2, EXACT),
    # Deadlines.
    ("timeout 30 make test", 30, AT_MOST),
    ("timeout 2m pytest -q", 120, AT_MOST),
    ("timeout -k 5 30 ./server", 35, AT_MOST),
    ("timeout --signal=KILL 10 ./bench --all", 10, AT_MOST),
    ("timeout -s INT 10s python train.py", 10, AT_MOST),
    ("timeout 30 sleep 5", 5, EXACT),
    ("timeout 3 sleep 10", 3, EXACT),
    ("timeout 10 bash -c 'while true; do sleep 1; done'", 10, AT_MOST),
    ("timeout 20 tail -f /var/log/syslog", 20, AT_MOST),
    ("sleep 5; timeout 10 make", 15, AT_MOST),
    ("timeout 60 npm test && sleep 2", 62, AT_MOST),
    ("timeout 5 sleep infinity", 5, AT_MOST),
    ("timeout /t 5 /nobreak", 5, EXACT),
    ("curl -m 10 https://example.org", 10, AT_MOST),
    ("curl -sS --max-time 4 http://localhost:8080/ready", 4, AT_MOST),
    ("read -t 3 answer", 3, AT_MOST),
    # Loops.
    ("for i in 1 2 3; do sleep 2; done", 6, EXACT),
    ("for i in {1..5}; do echo $i; sleep 1; done", 5, EXACT),
    ("for i in {0..10..5}; do sleep 1; done", 3, EXACT),
    ("for i in $(seq 5); do sleep 0.2; done", 1, EXACT),
    ("for i in `seq 2 4`; do sleep 1; done", 3, EXACT),
    ("for i in $(seq 0 10 100); do sleep 1; done", 11, EXACT),
    ("for s in 1 2 3; do sleep $s; done", 6, EXACT),
    ("for ((i=0; i<4; i++)); do sleep 2; done", 8, EXACT),
    ("for (( n = 1 ; n <= 3 ; n += 1 )); do sleep 1; done", 3, EXACT),
    ("for i in {1..1000}; do sleep 0.01; done", 10, EXACT),
    ("for i in 1 2; do for j in a b c; do sleep 1; done; done", 6, EXACT),
    ("for i in 1 2 3; do curl -s localhost; sleep 2; done", 6, AT_LEAST),
    ("for host in a,b; do sleep 1; done", 1, EXACT),
    ("for x in {a,b,c}; do sleep 1; done", 3, EXACT),
    # Loops that may be left early, and what depends on a question.
    ("for i in {1..10}; do [ -f x ] && break; sleep 1; done", 10, AT_MOST),
    ("for i in $(seq 100); do test -f x && break; sleep 0.5; done", 50, AT_MOST),
    ("test -f x && sleep 3", 3, AT_MOST),
    ("sleep 2; [[ -f x ]] && sleep 3", 5, AT_MOST),
    ("sleep 1; grep -q ok log || sleep 4", 5, AT_MOST),
    ("if ! test -f x; then sleep 3; fi; sleep 1", 4, AT_MOST),
    # At the same time.
    ("sleep 5 | cat", 5, EXACT),
    ("sleep 2 | sleep 7 | sleep 4", 7, EXACT),
    ("(sleep 3; echo x) | grep x", 3, EXACT),
    ("sleep 5 & wait", 5, EXACT),
    ("sleep 2 & sleep 6 & wait", 6, EXACT),
    ("sleep 5 & sleep 3; wait; echo done", 5, EXACT),
    ("sleep 3; sleep 5 & wait", 8, EXACT),
    ("sleep 9 & sleep 2", 2, EXACT),
    ("for i in 1 2 3; do sleep 5 & done; wait", 5, EXACT),
    ("python server.py & sleep 2 && curl localhost:8000", 2, AT_LEAST),
    ("{ sleep 1; sleep 2; } & wait $!", 3, EXACT),
    # Wrappers and other shells.
    ("bash -c 'sleep 5'", 5, EXACT),
    ('bash -lc "cd /tmp && sleep 3"', 3, EXACT),
    ("sh -c 'sleep 1; exec make'", 1, AT_LEAST),
    ("nohup sleep 4", 4, EXACT),
    ("sudo -u app sleep 4", 4, EXACT),
    ("env FOO=1 BAR=2 sleep 3", 3, EXACT),
    ("FOO=1 sleep 3", 3, EXACT),
    ("nice -n 10 sleep 2", 2, EXACT),
    ("time sleep 1", 1, EXACT),
    ("(sleep 1; sleep 2)", 3, EXACT),
    ("{ sleep 1; sleep 2; }", 3, EXACT),
    ("N=4; sleep $N", 4, EXACT),
    ('DELAY=2s\nsleep "$DELAY"', 2, EXACT),
    ("sleep ${DELAY:-7}", 7, EXACT),
    ("sleep $((2*3))", 6, EXACT),
    ("x=$(sleep 2; echo hi); echo $x", 2, EXACT),
    ("pause() { sleep 3; }; pause; pause", 6, EXACT),
    ("if true; then sleep 2; else sleep 9; fi", 2, EXACT),
    ("if [ -f a ]; then sleep 2; else sleep 9; fi", 9, AT_MOST),
    ("if [ -f a ]; then sleep 2; fi", 2, AT_MOST),
    ("case $1 in a) sleep 1;; b|c) sleep 3 ;; esac", 3, AT_MOST),
    ("bash <<'EOF'\nsleep 2\nsleep 3\nEOF", 5, EXACT),
    ("echo 'sleep 100' && sleep 1", 1, EXACT),
    ("sleep 3 > /dev/null 2>&1", 3, EXACT),
    ("sleep 2 2>/dev/null; sleep 1 &>> log.txt", 3, EXACT),
    ("perl -e 'sleep 4'", 4, EXACT),
    ("perl -e 'select(undef,undef,undef,0.25)'; sleep 1", 1, AT_LEAST),
    ("uv run python -c 'import time; time.sleep(2)'", 2, AT_LEAST),
    # Python.
    ("time.sleep(2)", 2, EXACT),
    ("import time\ntime.sleep(1.5)\nprint('ok')", 1.5, EXACT),
    ("from time import sleep\nsleep(3)", 3, EXACT),
    ("import time as t; t.sleep(2)", 2, EXACT),
    ("import time\nfor _ in range(3):\n    time.sleep(2)", 6, EXACT),
    ("import time\nfor n in (1, 2, 3):\n    time.sleep(n * 0.5)", 3, EXACT),
    ("import time\nDELAY = 60 * 2\ntime.sleep(DELAY)", 120, EXACT),
    ("await asyncio.sleep(2)", 2, EXACT),
    ("import asyncio\nasyncio.run(asyncio.sleep(4))", 4, EXACT),
    ("await asyncio.gather(asyncio.sleep(2), asyncio.sleep(5))", 5, EXACT),
    ("await asyncio.gather(*[asyncio.sleep(2) for _ in range(9)])", 2, EXACT),
    ("await asyncio.wait_for(fetch(), timeout=8)", 8, AT_MOST),
    (
        "import asyncio\nasync def main():\n    await asyncio.sleep(3)\nasyncio.run(main())",
        3,
        EXACT,
    ),
    ("import time, requests\nrequests.get(url)\ntime.sleep(5)", 5, AT_LEAST),
    ("import subprocess\nsubprocess.run(['make'], timeout=30)", 30, AT_MOST),
    ("import os\nos.system('sleep 2')", 2, EXACT),
    ("import subprocess\nsubprocess.run('sleep 1 && sleep 2', shell=True)", 3, EXACT),
    (
        "import os, time\nfor _ in range(10):\n    if os.path.exists('x'):\n        break\n"
        "    time.sleep(1)",
        10,
        AT_MOST,
    ),
    ("try:\n    time.sleep(2)\nexcept ValueError:\n    time.sleep(3)", 5, AT_MOST),
    ("python -c 'import time; time.sleep(3)'", 3, EXACT),
    ('python3 -u -c "import time; [time.sleep(1) for _ in range(4)]"', 4, EXACT),
    ("python3 - <<'EOF'\nimport time\ntime.sleep(6)\nEOF", 6, EXACT),
    # PowerShell.
    ("Start-Sleep -Seconds 5", 5, EXACT),
    ("Start-Sleep -s 2; Write-Host done", 2, EXACT),
    ("Start-Sleep -Milliseconds 500", 0.5, EXACT),
    ("start-sleep 3", 3, EXACT),
    ("1..3 | ForEach-Object { Start-Sleep -Seconds 2 }", 6, EXACT),
    ("foreach ($i in 1..4) { Write-Host $i; Start-Sleep 1 }", 4, EXACT),
    ("for ($i = 0; $i -lt 3; $i++) { Start-Sleep -Seconds 1 }", 3, EXACT),
    ("Invoke-WebRequest http://x; Start-Sleep -Seconds 4", 4, AT_LEAST),
    ('pwsh -NoProfile -Command "Start-Sleep -Seconds 5"', 5, EXACT),
    ("powershell -c Start-Sleep -Seconds 2", 2, EXACT),
]

SILENT = [
    "",
    "make",
    "echo sleep",
    "echo 'sleep 5'",
    "man sleep",
    "sleep",
    "sleep $N",
    "sleep infinity",
    "sleep five",
    "sleep $(cat delay.txt)",
    "while true; do sleep 1; done",
    "until curl -s localhost; do sleep 2; done",
    "for f in *.txt; do sleep 1; done",
    "for i in $(seq $N); do sleep 1; done",
    "python wait_for_it.py",
    "cat sleep.txt",
    "true || sleep 5",
    "for i in $(seq 1 30); do curl -sf localhost:8080 && break; sleep 1; done",
    "for i in {1..30}; do if curl -sf localhost; then break; fi; sleep 2; done",
    "for i in {1..300}; do nc -z localhost 80 && exit 0; sleep 1; done",
    "curl -sf localhost || sleep 5",
    "./script.sh | tail -f",
    "timeout $T make",
    "sleep 5 'unfinished",
    "sleep 5 )",
    "if sleep 5",
    "for i in {1..99999999}; do sleep 1; done",
    "import time\nwhile True:\n    time.sleep(1)",
    "import time\ntime.sleep(n)",
    "import time\nfor x in items:\n    time.sleep(1)",
    "print('time.sleep(5)')",
    "def f():\n    time.sleep(5)\nprint(len('x'))",
    "def pause():\n    while True:\n        pause()\n        time.sleep(1)\npause()",
    "f() { f; sleep 1; }; f",
    "Start-Sleep -Seconds $n",
    "while ($true) { Start-Sleep 1 }",
    "x" * 100_000 + "; sleep 5",
    "(" * 5000 + "sleep 1" + ")" * 5000,
    "time.sleep(" + "-" * 5000 + "1)",
    "time.sleep(" + "1+" * 8000 + "1)",
]


@pytest.mark.parametrize(("command", "seconds", "bound"), TABLE, ids=[c[:50] for c, *_ in TABLE])
def test_the_table(command, seconds, bound):
    """Each of these real-looking commands says how long it takes, and how surely."""
    expectation = expected_seconds(command)
    assert expectation is not None
    assert (expectation.seconds, expectation.bound) == (pytest.approx(seconds), bound)


@pytest.mark.parametrize("command", SILENT, ids=[c[:50] for c in SILENT])
def test_no_answer_where_none_is_known(command):
    """Where the text says nothing, or nobody can tell, there is no answer."""
    assert expected_seconds(command) is None


def test_the_table_is_long_enough():
    """The table has its sixty commands."""
    assert len({command for command, *_ in TABLE}) >= 60


def test_bounds():
    """An expectation says both bounds, and which evidence it is."""
    assert expected_seconds("sleep 5; timeout 10 make") == Expectation(
        seconds=15.0, bound=AT_MOST, at_least_s=5.0, at_most_s=15.0
    )
    assert expected_seconds("sleep 5 && make") == Expectation(
        seconds=5.0, bound=AT_LEAST, at_least_s=5.0, at_most_s=None
    )
    assert expected_seconds("sleep 5").evidence is Evidence.SLEEP
    assert expected_seconds("sleep 5 && make").evidence is Evidence.SLEEP
    assert expected_seconds("timeout 9 make").evidence is Evidence.DEADLINE


def test_nothing_is_executed(tmp_path):
    """Reading a command leaves no trace of it."""
    target = tmp_path / "made"
    for command in (
        f"touch {target}; sleep 1",
        f"sleep $(touch {target}; echo 1)",
        f"open({str(target)!r}, 'w'); time.sleep(1)",
        f"time.sleep(__import__('os').system('touch {target}') or 1)",
    ):
        expected_seconds(command)
    assert not target.exists()


CALLS = [
    ("bash", {"command": "sleep 5"}, 5, EXACT),
    ("bash", '{"command": "sleep 5 && make"}', 5, AT_LEAST),
    ("bash", "sleep 5", 5, EXACT),
    ("execute_python", {"code": "import time; time.sleep(2)"}, 2, EXACT),
    ("shell", {"cmd": ["bash", "-lc", "sleep 3"]}, 3, EXACT),
    ("shell", {"command": ["sleep", "3"], "timeout_ms": 1000}, 1, EXACT),
    ("run", {"commands": ["sleep 1", "sleep 2"]}, 3, EXACT),
    ("run", {"command": "make", "timeout": 30}, 30, AT_MOST),
    ("run", {"command": "sleep 5", "timeout": 120000}, 5, EXACT),
    ("run", {"command": "make", "timeout": 120000}, 120, AT_MOST),
    ("wait", {"seconds": 4}, 4, EXACT),
    ("sleep_tool", {"duration_ms": 1500}, 1.5, EXACT),
    ("browser.wait", {"time": 2}, 2, EXACT),
    ("search", {"query": "sleep 5", "timeout_s": 8}, 8, AT_MOST),
]


@pytest.mark.parametrize(("name", "arguments", "seconds", "bound"), CALLS)
def test_calls(name, arguments, seconds, bound):
    """A tool call says its duration in its code, its pause, or its timeout."""
    expectation = expected_seconds_of_call(name, arguments)
    assert expectation is not None
    assert (expectation.seconds, expectation.bound) == (pytest.approx(seconds), bound)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("search", {"query": "how long is sleep 5"}),
        ("search", {"seconds": 5}),
        ("bash", {"command": "make"}),
        ("bash", {"command": None, "timeout": "soon"}),
        ("bash", {"command": "make", "timeout": True}),
        ("wait", {"seconds": -1}),
        ("wait", {"seconds": float("nan")}),
        ("wait", None),
        ("bash", "[1, 2]"),
        ("bash", json.dumps({"command": "x" * 100_000})),
        ("bash", object()),
    ],
)
def test_silent_calls(name, arguments):
    """A call that says nothing about time gets no answer, whatever its arguments are."""
    assert expected_seconds_of_call(name, arguments) is None

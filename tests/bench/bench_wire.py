"""
Overhead of the wire: microseconds to encode and decode hints, and to read commands.

`python tests/bench/bench_wire.py`. Of five rounds the best p50 and the best p99 count: the
others tell how busy the machine was.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

from scout_sdk import Evidence, Hints, SessionEvent, ToolEvent, ToolState, _wire
from scout_sdk.events import EventSender
from scout_sdk.sleep import expected_seconds

TOOL = ToolEvent(
    name="bash",
    state=ToolState.STARTED,
    call_id="call_abcdef01",
    elapsed_s=0.25,
    remaining_s=5.0,
    evidence=Evidence.SLEEP,
)
USUAL = Hints(
    session="3f9c2a1e-77aa-4be2-9a51-4a0c1f0e2b6d",
    agent="planner",
    path="research/model",
    anchor="9ae16a3b2f90404f",
    turn=3,
    tools=(TOOL,),
    next_agents=("writer",),
)
LARGEST = Hints(
    session="研" * 100,
    agent="研" * 100,
    path="研" * 100,
    parent="研" * 100,
    turn=3,
    tools=(TOOL,) * 16,
    next_agents=("研" * 100,) * 16,
)
BOUND_US = 100.0


def quantiles(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the best p50 and p99 of the microseconds of *call* in five rounds."""
    rounds = []
    for _ in range(5):
        times = []
        for _ in range(repeats):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1000)
        times.sort()
        rounds.append((times[len(times) // 2], times[len(times) * 99 // 100]))
    return min(p50 for p50, _ in rounds), min(p99 for _, p99 in rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    usual, largest = _wire.encode(USUAL), _wire.encode(LARGEST)
    others = [(b"accept", b"*/*")] * 12
    usual_lines = others + [(n.encode(), v.encode()) for n, v in usual.items()]
    largest_lines = others + [(n.encode(), v.encode()) for n, v in largest.items()]
    xargs = _wire.to_xargs(USUAL)
    event = [SessionEvent(session="s", tool=TOOL)]
    sender = EventSender("http://127.0.0.1:9")
    commands = iter(f"cd /srv/{n} && sleep 5 && make" for n in range(10**9))
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: _wire.encode(USUAL),
        "decode": lambda: _wire.decode(usual_lines),
        "decode, no hints": lambda: _wire.decode(others),
        "to_xargs": lambda: _wire.to_xargs(USUAL),
        "from_xargs": lambda: _wire.from_xargs(xargs),
        "encode_events, one": lambda: _wire.encode_events(event),
        "emit, dead server": lambda: sender.emit(event[0]),
        "expected_seconds, new command": lambda: expected_seconds(next(commands)),
        "expected_seconds, none": lambda: expected_seconds("cargo build --release"),
        "encode, largest": lambda: _wire.encode(LARGEST),
        "decode, largest": lambda: _wire.decode(largest_lines),
    }
    results = {}
    for name, call in calls.items():
        p50, p99 = quantiles(call, options.repeats)
        results[name] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
    value = results["encode"]["p99_us"]
    targets = [
        {"name": "encode p99 us", "value": value, "bound": BOUND_US, "met": value < BOUND_US}
    ]
    versions = {"python": platform.python_version(), "http-sf": version("http-sf")}
    command = " ".join(sys.argv)
    if options.json:
        report = {"command": command, "seed": None, "versions": versions}
        sys.stdout.write(json.dumps(report | {"results": results, "targets": targets}) + "\n")
        return
    lines = [command, str(versions), f"{sum(map(len, usual.values()))} octets of values"]
    lines += [
        f"{name:32} p50 {row['p50_us']:8.1f} us   p99 {row['p99_us']:8.1f} us"
        for name, row in results.items()
    ]
    lines += [f"{t['name']}: {t['value']} (below {t['bound']}: {t['met']})" for t in targets]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

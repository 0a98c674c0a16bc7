"""
Record a trace of the three examples, run against the embedded engine.

    python examples/traces/record.py examples/traces/examples.jsonl

The same by hand: `scout serve --embedded --record FILE`, then the examples. It takes a minute or
two: tools take their time, and the gaps are theirs.
"""

import argparse
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scout_server.embedded.launch import running_server
from scout_server.recording import RecordSettings

EXAMPLES = Path(__file__).resolve().parents[1]
RUNS = {
    "plain_openai": [
        ["--ticket", "The desk lamp you sent on Monday hums when it is on."],
        ["--ticket", "My parcel has not come and I leave on Friday."],
        ["--ticket", "Which bulb fits the lantern of 2014, and may I dim it?"],
        ["--ticket", "I ordered two shades by mistake and want to give one back."],
    ],
    "langgraph_travel_planner": [
        ["--request", "Three days in Lisbon for two: flights, hotel, food"],
        ["--request", "A week of museums in Vienna: hotel, food"],
        ["--request", "Four days in Oslo with a child: flights, hotel"],
        ["--request", "Ten days in Peru: flights, food"],
    ],
    "autogen_coding_team": [[], [], []],
}


def run(base_url: str, name: str, args: list[str]) -> None:
    """Run one example to its end."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--base-url", base_url, *args]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record a trace of the three examples.")
    parser.add_argument("file", type=Path, help="trace to write")
    parser.add_argument("--times", type=int, default=1, help="how often each run is repeated")
    parser.add_argument("--at-once", type=int, default=2, help="runs under way")
    options = parser.parse_args()
    # One after another of each kind, so that unlike programs meet.
    jobs = [
        (name, args)
        for row in itertools.zip_longest(*([(n, a) for a in runs] for n, runs in RUNS.items()))
        for name, args in filter(None, row)
    ]
    record = RecordSettings(file=str(options.file))
    with running_server(record=record) as server, ThreadPoolExecutor(options.at_once) as pool:
        base_url = f"{server.url}/v1"
        list(pool.map(lambda job: run(base_url, *job), jobs * options.times))

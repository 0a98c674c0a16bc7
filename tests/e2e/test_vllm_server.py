"""vLLM with Scout, started by its one command, over HTTP, on a CPU and a tiny random model."""

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scout_sdk import Evidence, HintOutcome, Hints, SessionEvent, ToolEvent, ToolState, _wire

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
KEY = "sk-test"
ENGINE = [
    *("--enforce-eager", "--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8"),
    *("--load-format", "dummy", "--num-gpu-blocks-override", "64"),
    *("--enable-prompt-tokens-details", "--served-model-name", "tiny"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder, made by the project's own script."""
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "scripts" / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    module.tiny(folder)
    return folder


@contextlib.contextmanager
def serving(
    tiny: Path, *arguments: str, env: dict[str, str] | None = None, swap: tuple[str, str] = ("", "")
) -> Iterator[httpx.Client]:
    """Run `scout serve`; *swap* replaces one word of the vLLM command that it would become."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **(env or {}),
    }
    if swap[0]:
        from scout_server.vllm.launch import build_command

        command, environ = build_command(
            str(tiny), [*ENGINE, "--port", str(port), *arguments], environ=environ
        )
        command = [swap[1] if word == swap[0] else word for word in command]
    else:
        command = [sys.executable, "-m", "scout_server.cli", "serve", str(tiny)]
        command += [*ENGINE, "--port", str(port), *arguments]
    log = tiny.parent / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 180
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                assert process.poll() is None, log.read_text()[-12000:]
                assert time.monotonic() < deadline, log.read_text()[-12000:]
                time.sleep(0.2)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[httpx.Client]:
    """A server with Scout and an API key, which the client sends."""
    with serving(tiny, "--api-key", KEY) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        yield client


def chat(
    client: httpx.Client, text: str, hints: Hints | None = None, **body: Any
) -> httpx.Response:
    return client.post(
        "/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 2,
            "ignore_eos": True,
            **body,
        },
        headers=_wire.encode(hints) if hints is not None else None,
    )


def state(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/v1/scout/state")
    assert answer.status_code == 200
    return dict(answer.json()["engines"][0])


def counters(client: httpx.Client) -> dict[str, float]:
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_hints_reach_the_scheduler(server: httpx.Client) -> None:
    """A hinted request is told to the policy core with its agent, and its outcome to the client."""
    before = state(server)["arrivals"].get("hint", 0)
    answer = chat(server, "hello there", Hints(session="s1", agent="planner", turn=1))
    after = state(server)

    assert answer.status_code == 200
    outcome = _wire.decode_outcome(answer.headers["x-scout-outcome"])
    assert outcome["session"] is outcome["agent"] is HintOutcome.ACCEPTED
    assert after["arrivals"]["hint"] == before + 1
    assert after["breaker"] == {"open": False, "faults": 0, "reason": None}
    assert after["blocks"]["free"] == after["blocks"]["total"] - 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1, "store": False}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ],
)
def test_every_way_of_asking_takes_hints(
    server: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """Completions, responses and Anthropic messages carry hints to the scheduler too."""
    before = state(server)["arrivals"].get("hint", 0)
    answer = server.post(
        path, json={"model": "tiny", **body}, headers=_wire.encode(Hints(session="s", agent="a"))
    )

    assert answer.status_code == 200, answer.text
    assert state(server)["arrivals"]["hint"] == before + 1


def test_streams_arrive_whole(server: httpx.Client) -> None:
    """A streamed answer has the outcome header, every chunk and the end mark."""
    with server.stream(
        "POST",
        "/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": "count"}],
            "max_tokens": 6,
            "ignore_eos": True,
            "stream": True,
        },
        headers=_wire.encode(Hints(session="s2", agent="planner")),
    ) as answer:
        assert "x-scout-outcome" in answer.headers
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) >= 6


@pytest.mark.parametrize(
    "headers",
    [
        {"x-scout-version": "999", "x-scout-agent": '"a"'},
        {"x-scout-version": "1", "x-scout-agent": '"' + "a" * 6000 + '"'},
        {"x-scout-version": "1", "x-scout-agent": "((((;;;", "x-scout-turn": "-5"},
        {"x-scout-version": "1", "x-scout-session": '"%00%ff\\"', "x-scout-final": "maybe"},
        {"x-scout-version": "1", "x-scout-tools": ",".join(['"t";state=started'] * 300)},
    ],
    ids=["version", "oversized", "malformed", "bytes", "many"],
)
def test_hostile_hints_fail_no_request(server: httpx.Client, headers: dict[str, str]) -> None:
    """Malformed, oversized and unknown hints leave the request a success."""
    answer = server.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        headers=headers,
    )
    assert answer.status_code == 200
    assert state(server)["breaker"]["open"] is False


def test_invalid_requests_are_answered_by_vllm(server: httpx.Client) -> None:
    """A body that is not JSON, or whose xargs are wrong, gets vLLM's own error."""
    hints = _wire.encode(Hints(session="s", agent="a"))
    for content in (b"{", b'{"model": "tiny", "messages": [], "vllm_xargs": "x"}'):
        answer = server.post(
            "/v1/chat/completions",
            content=content,
            headers={**hints, "content-type": "application/json"},
        )
        assert answer.status_code in (400, 422)


def test_events_reach_the_scheduler(server: httpx.Client) -> None:
    """A posted tool event is counted by the engine; nonsense is refused with 400."""
    chat(server, "before the event", Hints(session="s1", agent="a"))
    before = state(server)["events"].get("accepted", 0)
    tool = ToolEvent(
        name="shell", state=ToolState.STARTED, remaining_s=4.0, evidence=Evidence.SLEEP
    )
    body = _wire.encode_events([SessionEvent(session="s1", tool=tool)])
    answer = server.post(_wire.EVENTS_PATH, content=body)

    assert answer.status_code == 202
    assert answer.json() == {"accepted": 1, "rejected": 0}
    assert state(server)["events"]["accepted"] == before + 1
    assert server.post(_wire.EVENTS_PATH, content=b"nonsense").status_code == 400
    assert server.post(_wire.EVENTS_PATH, content=b"x" * 600_000).status_code == 413


def test_the_key_guards_our_routes(server: httpx.Client) -> None:
    """Without the API key, our routes and hinted requests are refused like vLLM's own."""
    anonymous = httpx.Client(base_url=server.base_url)
    with anonymous:
        assert anonymous.get("/v1/scout/state").status_code == 401
        assert anonymous.get(_wire.CAPABILITIES_PATH).status_code == 401
        assert anonymous.post(_wire.EVENTS_PATH, content=b"{}").status_code == 401
        assert chat(anonymous, "x", Hints(session="s", agent="a")).status_code == 401


def test_capabilities_and_metrics(server: httpx.Client) -> None:
    """The server says what it takes, and its /metrics has our figures beside vLLM's."""
    capabilities = server.get(_wire.CAPABILITIES_PATH).json()
    assert capabilities["version"] == _wire.VERSION
    assert {"hints", "events", "outcome", "retention"} <= set(capabilities["features"])

    before = counters(server)
    chat(server, "metrics", Hints(session="m", agent="planner"))
    after = counters(server)
    requests = 'scout_requests_total{engine="0",origin="hint"}'
    assert after[requests] == before.get(requests, 0) + 1
    assert after['scout_breaker_open{engine="0"}'] == 0
    assert after['scout_decision_seconds_count{engine="0"}'] > 0
    assert any(name.startswith("vllm:prefix_cache_queries_total") for name in after)


def sequence() -> list[tuple[str, Hints]]:
    """A fixed order of turns of four agents whose prompts need twice the pool."""
    rng = random.Random(11)
    words = json.dumps(sorted(sys.stdlib_module_names)).replace('"', "").split(", ")
    anchors = [" ".join(rng.choices(words, k=160)) for _ in range(4)]
    turns = []
    for turn in range(36):
        agent = rng.choices(range(4), [6, 3, 2, 1])[0]
        hints = Hints(session=f"s{turn // 6}", agent=f"agent{agent}", turn=turn)
        turns.append((anchors[agent] + " " + " ".join(rng.choices(words, k=20)), hints))
    return turns


def cached_tokens(client: httpx.Client) -> list[int]:
    found = []
    for text, hints in sequence():
        answer = chat(client, text, hints, max_tokens=1)
        assert answer.status_code == 200
        details = answer.json()["usage"]["prompt_tokens_details"]
        found.append(int(details["cached_tokens"]) if details else 0)
    return found


def test_a_fault_in_the_policy_and_identity_off_equal_stock_vllm(tiny: Path) -> None:
    """
    On one sequence of requests, stock vLLM, Scout with identity off, and Scout whose policy breaks
    in the middle give every request the same cached tokens.
    """
    off = ["--set", "policy.hints=false", "--set", "policy.fingerprints=false"]
    with serving(tiny, "--scout-off") as client:
        stock = cached_tokens(client)
        assert client.get("/v1/scout/state").status_code == 404
    with serving(tiny, *off) as client:
        identity_off = cached_tokens(client)
        shown = state(client)
        assert shown["mode"] == "lru"
        assert shown["evictions"]["evicted"] > 0
    broken = {
        "FAULT_AFTER_POPS": "20",
        "PYTHONPATH": str(Path(__file__).parent / "vllm_support"),
        "SCOUT_CONFIG": str(tiny.parent / "off.json"),
    }
    (tiny.parent / "off.json").write_text('{"policy": {"hints": false, "fingerprints": false}}')
    with serving(
        tiny, env=broken, swap=("scout_server.vllm.ScoutScheduler", "faulty.scheduler")
    ) as client:
        faulty = cached_tokens(client)
        shown = state(client)
        assert shown["mode"] == "stock"
        assert shown["breaker"]["faults"] == 1
        assert "planted fault" in shown["breaker"]["reason"]
        assert counters(client)['scout_breaker_open{engine="0"}'] == 1
        assert client.get(_wire.CAPABILITIES_PATH).json()["features"] == []
        late = chat(client, "after the fault", Hints(session="s", agent="a"))
        assert set(_wire.decode_outcome(late.headers["x-scout-outcome"]).values()) == {
            HintOutcome.IGNORED
        }

    assert sum(stock) > 0
    assert identity_off == stock
    assert faulty == stock


BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "enum": ["sleep 5"]}},
            "required": ["command"],
        },
    },
}


def test_tool_calls_and_learnt_state(tiny: Path, tmp_path: Path) -> None:
    """
    Tool calls of whole and streamed responses reach the engine, forged tenants stay apart, and
    what was learnt survives a restart.
    """
    kept = [
        *("--api-key", KEY, "--set", f"snapshot.state_file={tmp_path / 'state.json'}"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--shutdown-timeout", "10"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    ]
    called = {"tools": [BASH], "tool_choice": {"type": "function", "function": {"name": "bash"}}}
    with serving(tiny, *kept) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        for number, stream in enumerate((False, True)):
            answer = chat(
                client,
                f"call {number}",
                Hints(session=f"s{number}", agent="planner"),
                **called,
                stream=stream,
                max_tokens=256,
                ignore_eos=False,
                vllm_xargs={"scout_tenant": "victim"},
            )
            assert answer.status_code == 200, answer.text
            # Of a named tool's arguments vLLM does not promise that they fit the schema.
            assert "tool_calls" in answer.text, answer.text
            assert '"bash"' in answer.text, answer.text
        deadline = time.monotonic() + 20
        while state(client)["endings"] != {"used": 2} and time.monotonic() < deadline:
            time.sleep(0.1)
        shown = state(client)
        assert shown["endings"] == {"used": 2}
        assert {agent["tenant"] for agent in shown["core"]["agents"]} & {"victim"} == set()
        foreign = client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "hello", "max_tokens": 1, "session_id": "their own"},
            headers={"baggage": "gen_ai.agent.name=theirs"},
        )
        outcome = _wire.decode_outcome(foreign.headers["x-scout-outcome"])
        assert outcome["session"] is outcome["agent"] is HintOutcome.ACCEPTED
        names = {agent["name"] for agent in state(client)["core"]["agents"]}
        assert {"planner", "theirs"} <= names
    assert (tmp_path / "state.json").exists()
    with serving(tiny, *kept) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        assert {agent["name"] for agent in state(client)["core"]["agents"]} >= names - {"~"}


def test_every_rank_has_its_core_and_hears_events(tiny: Path) -> None:
    """
    With two data-parallel ranks, a request is known to its rank alone, an event is taken by the
    rank that holds its session and leaves nothing in the other, and
    /metrics shows each, also where it is made of files of several processes.
    """
    shared = tiny.parent / "prometheus"
    shared.mkdir()
    with serving(
        tiny, "--data-parallel-size", "2", env={"PROMETHEUS_MULTIPROC_DIR": str(shared)}
    ) as client:
        for rank in ("0", "1", "1"):
            hints = _wire.encode(Hints(session=f"s{rank}", agent="planner"))
            answer = client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "hello", "max_tokens": 1},
                headers={**hints, "x-data-parallel-rank": rank},
            )
            assert answer.status_code == 200
        body = _wire.encode_events([SessionEvent(session="s1", final=True)])
        assert client.post(_wire.EVENTS_PATH, content=body).status_code == 202
        engines = client.get("/v1/scout/state").json()["engines"]
        assert [engine["arrivals"] for engine in engines] == [{"hint": 1}, {"hint": 2}]
        assert [engine["events"].get("unknown", 0) for engine in engines] == [1, 0]
        assert [engine["events"].get("accepted", 0) for engine in engines] == [0, 1]
        assert [len(engine["core"]["agents"]) for engine in engines] == [1, 1]
        assert [engine["core"]["sessions_ended"] for engine in engines] == [0, 1]
        shown = counters(client)
        assert shown['scout_requests_total{engine="0",origin="hint"}'] == 1
        assert shown['scout_requests_total{engine="1",origin="hint"}'] == 2
        assert any(name.startswith("vllm:prefix_cache_queries_total") for name in shown)
        assert any(name.startswith("scout_hints_total") for name in shown)


def test_a_wrong_configuration_stops_the_start(tiny: Path) -> None:
    """Wrong settings are listed, all of them, before vLLM starts."""
    command = [sys.executable, "-m", "scout_server.cli", "serve", str(tiny)]
    command += ["--set", "policy.hints=maybe", "--set", "vllm.max_body_bytes=-1"]
    command += ["--set", "vllm.nonsense=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode != 0
    for name in ("policy.hints", "vllm.max_body_bytes", "vllm.nonsense"):
        assert name in done.stderr

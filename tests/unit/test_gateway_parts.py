"""Parts of the gateway that need no network."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_sdk import ConfigError, HintOutcome, Hints
from scout_sdk._wire import encode
from scout_server.gateway.settings import node_addresses
from scout_server.policy.engine import TaoEngine, Turn
from scout_server.tao.asked import understand
from scout_server.tao.estimates import Estimates
from scout_server.tao.headers import merged_outcome, to_client, to_node
from scout_server.tao.telemetry import NodeReport, read_metrics, read_state
from scout_server.tao.usage import Usage
from scout_server.tenancy import TenancySettings

METRICS = """
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="200"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1e+06
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250000.0
"""


def test_metrics_of_a_server_are_summed_over_its_engines() -> None:
    """Without a rank a server's engines count together."""
    report = read_metrics(METRICS, rank=None)
    assert report == NodeReport(
        capacity_tokens=4800,
        running=5,
        waiting=4,
        used_fraction=0.25,
        queried_tokens=1_000_000,
        hit_tokens=250_000,
    )


def test_metrics_of_a_rank_are_its_own() -> None:
    """With a rank only that engine's lines count."""
    report = read_metrics(METRICS, rank=1)
    assert (report.capacity_tokens, report.running, report.waiting) == (3200, 3, 4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        'vllm:cache_config_info{block_size="None",num_gpu_blocks="x"} 1',
        "vllm:num_requests_waiting NaN",
        "vllm:num_requests_waiting 1e",
    ],
)
def test_damaged_metrics_say_nothing(text: str) -> None:
    """What cannot be read is as if it were not there."""
    report = read_metrics(text, rank=None)
    assert (report.capacity_tokens, report.waiting) == (None, None)


def test_state_of_our_extension() -> None:
    """Queue and cache counters are read from /v1/scout/state, whatever else is in it."""
    state = {"running": 1, "waiting": 2, "prefix_cache": {"queried_tokens": 9, "hit_tokens": 3}}
    assert read_state(state) == NodeReport(running=1, waiting=2, queried_tokens=9, hit_tokens=3)
    assert read_state([1]) == read_state({"waiting": "x", "prefix_cache": None}) == NodeReport()


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        (
            [
                b'{"usage":{"prompt_tokens":12,"completion_tokens":3,'
                b'"prompt_tokens_details":{"cached_tokens":8}}}'
            ],
            (12, 3, 8),
        ),
        ([b'data: {"usage":{"prompt_to', b'kens": 12}}\n\ndata: [DONE]\n\n'], (12, None, None)),
        (
            [b'{"usage":{"input_tokens":7,"output_tokens":2,"cache_read_input_tokens":5}}'],
            (7, 2, 5),
        ),
        ([b"x" * 20000, b'"prompt_tokens":1'], (1, None, None)),
        ([b"\xff\x00"], (None, None, None)),
    ],
)
def test_usage_is_read_as_bytes_pass(
    chunks: list[bytes], tokens: tuple[int | None, int | None, int | None]
) -> None:
    """Token counts of JSON and streams, in OpenAI's and Anthropic's words, over chunk borders."""
    usage = Usage()
    for chunk in chunks:
        usage.feed(chunk)
    assert usage.tokens() == tokens


def test_usage_notes_the_tools_that_are_called() -> None:
    """Names of called tools are seen in a streamed answer."""
    usage = Usage()
    usage.feed(b'{"tool_calls":[{"id":"c","function":{"name":"run_tests","arguments":"{}"}}]}')
    assert usage.tools == ["run_tests"]


def test_hop_by_hop_headers_end_at_the_gateway() -> None:
    """Hop-by-hop headers, and those that Connection names, do not pass; repeated ones do."""
    raw = [
        (b"Connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"content-length", b"5"),
    ]
    assert to_client(raw, outcome="") == [
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"content-length", b"5"),
    ]
    sent = to_node(raw, added={"x-scout-tenant": "t"}, removed=frozenset({"x-other"}))
    assert list(sent.items()) == [("set-cookie", "a"), ("set-cookie", "b"), ("x-scout-tenant", "t")]


def test_the_nodes_word_counts_more() -> None:
    """Outcomes are merged; damaged ones of a node are left out."""
    ours = {"session": HintOutcome.ACCEPTED, "admission": HintOutcome.DEFERRED}
    merged = merged_outcome(ours, "session=clipped, turn=accepted, bad=nonsense")
    assert merged == "session=clipped, admission=deferred, turn=accepted"
    assert merged_outcome({}, None) == ""


def test_every_wrong_node_is_named() -> None:
    """All wrong addresses are reported at once."""
    with pytest.raises(ConfigError) as caught:
        node_addresses(("ftp://x", "http://ok", "http://ok/", "http://x:y", "http://z#rank=1"))
    assert all(part in str(caught.value) for part in ("ftp://x", "twice", "http://x:y", "ranks=1"))


def test_ranks_become_nodes() -> None:
    """`#ranks=2` gives two nodes of one URL, and /v1 at the end is taken off."""
    found = node_addresses(("http://h:1/v1#ranks=2", "https://h/base/"))
    assert [(a.name, a.url, a.rank) for a in found.values()] == [
        ("http://h:1#rank=0", "http://h:1", 0),
        ("http://h:1#rank=1", "http://h:1", 1),
        ("https://h/base", "https://h/base", None),
    ]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"[" * 100000, b'{"max_tokens": true}', b'{"max_tokens": -4}', b"\xff"],
)
def test_a_damaged_body_is_no_fault(body: bytes) -> None:
    """Any bytes are understood as a request that says nothing."""
    asked = understand(
        [(b"x-scout-turn", b"\xff")], body, tenancy=TenancySettings(), output_tokens=9
    )
    assert (asked.output_tokens, asked.final, asked.session) == (9, True, f"~{asked.key}")


def test_what_a_request_says() -> None:
    """Session, tenant, limit and the client's own timeout are read."""
    raw = [
        (b"X-Session-ID", b"abc"),
        (b"Authorization", b"Bearer k"),
        (b"X-Stainless-Read-Timeout", b"600"),
    ]
    asked = understand(raw, b'{"max_tokens": 5}', tenancy=TenancySettings(), output_tokens=99)
    assert (asked.session, asked.output_tokens, asked.timeout_s) == ("abc", 5, 600.0)
    assert asked.tenant
    assert not asked.final


@given(
    st.dictionaries(
        st.sampled_from(["messages", "max_tokens", "stream", "nvext", "session_id", "tools"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=6,
        ),
    ),
    st.sampled_from([b"", b" ", b"x", b"\xff", b"}"]),
)
def test_long_bodies_mean_what_short_ones_mean(document: dict, rest: bytes) -> None:
    """What is understood of a body does not depend on its length, whole or malformed."""
    short = json.dumps(document).encode() + rest
    long = json.dumps({**document, "prompt": "x" * 4096}).encode() + rest
    found = []
    for body in (short, long):
        asked = understand(
            [(b"x-session-id", b"s")], body, tenancy=TenancySettings(), output_tokens=512
        )
        found.append((asked.hints, asked.outcomes, asked.output_tokens, asked.stream))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 100_000}},
        {"input_audio": {"data": "UklGRiQA" * 100_000, "format": "wav"}},
        {"source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K" * 100_000}},
    ],
)
def test_an_image_or_a_sound_takes_the_room_of_its_tokens(part: dict) -> None:
    """What is written in base64 is no text: a picture does not wait for a whole node."""
    body = json.dumps({"messages": [{"role": "user", "content": [part, {"text": "w " * 500}]}]})
    asked = understand([], body.encode(), tenancy=TenancySettings(), output_tokens=0)
    assert 1000 < asked.body_bytes < 8000
    assert Estimates().turn(asked).tokens < 2000


@pytest.mark.parametrize(
    "content",
    [
        [{"source": {"type": "text", "data": "word " * 2000}}],
        'see "data:image/png;base64,' + "iVBORw0K" * 2000 + '"',
        '{"data": "' + "iVBORw0K" * 2000 + '"}',
        '"data',
    ],
)
def test_what_is_quoted_in_a_text_is_text(content: object) -> None:
    """A prompt that holds base64 is tokens from its beginning to its end."""
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    asked = understand([], body, tenancy=TenancySettings(), output_tokens=0)
    assert asked.body_bytes == len(body)


def test_a_session_takes_room_for_all_its_agents() -> None:
    """A turn needs room for the agent that asks and those beside it, until the session ends."""
    estimates = Estimates()

    def turn(agent: str, *, session: str = "s", final: bool = False) -> tuple[int, int]:
        hints = Hints(session=session, agent=agent, final=final)
        raw = [(name.encode(), value.encode()) for name, value in encode(hints).items()]
        asked = understand(raw, b"x" * 400, tenancy=TenancySettings(), output_tokens=0)
        made = estimates.turn(asked)
        estimates.learn(asked, prompt_tokens=100, cached_tokens=None, first=False)
        return made.tokens, made.beside_tokens

    assert turn("planner") == (100, 0)
    assert turn("planner") == (100, 0)
    assert turn("coder") == (200, 100)
    assert turn("planner") == (200, 100)
    assert turn("coder", session="t") == (100, 0)
    assert turn("planner", final=True) == (200, 100)
    assert turn("coder") == (100, 0)


def test_what_other_agents_hold_stays_when_a_turn_ends() -> None:
    """A session's size after a turn is the turn's own tokens and those of the agents beside it."""
    tao = TaoEngine()
    tao.set_node("a", capacity=10_000, slots=4)
    tao.submit(Turn(key="r", session="s", tokens=3_000, beside_tokens=1_000), now=0.0)
    tao.resume("r", now=0.0)
    tao.finish("r", prompt_tokens=1_900, output_tokens=50, cached_tokens=100, now=1.0)
    (session,) = tao.ledger.sessions.values()
    assert (session.footprint, session.attained) == (2_950, 1_850)

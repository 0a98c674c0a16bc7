"""Headers on requests of the openai package, patched or attached."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

import scout_sdk
from scout_sdk import ConfigError, Hints, _guard, _openai, _wire, context, use_hints
from scout_sdk.testing import RecordingServer, strict

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    with strict():
        scout_sdk.install()
        yield
        scout_sdk.install()
    scout_sdk.shutdown()


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as running:
        yield running


@pytest.fixture
def client(server: RecordingServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=3) as made:
        yield made


def ask(client: openai.OpenAI, text: str = "hello", **options: Any) -> Any:
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], **options
    )


def chat(client: openai.OpenAI) -> None:
    ask(client)


def stream(client: openai.OpenAI) -> None:
    for _ in ask(client, stream=True):
        pass


def raw(client: openai.OpenAI) -> None:
    client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)


def copied(client: openai.OpenAI) -> None:
    ask(client.with_options(max_retries=1))


def responses(client: openai.OpenAI) -> None:
    client.responses.create(model="m", input="hello")


def completions(client: openai.OpenAI) -> None:
    client.completions.create(model="m", prompt="hello")


@pytest.mark.parametrize("call", [chat, stream, raw, copied, responses, completions])
def test_sync_calls(server, client, call: Callable[[openai.OpenAI], None]):
    """Every kind of call carries the hints of its context."""
    with context(agent="planner", session="S"):
        call(client)
    (request,) = server.llm_requests

    assert request.hints == Hints(session="S", agent="planner", turn=1)
    assert request.header("x-session-id") == "S"


async def test_async_calls(server):
    """Async calls, streaming and not, concurrent in one task tree, carry theirs."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:

        async def one(i: int) -> None:
            async with context(agent=f"a{i}", session=f"S{i}"):
                answer = await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": f"[[id {i}]] [[fail 1 k{i}]]"}],
                    stream=i % 2 == 0,
                )
                if i % 2 == 0:
                    async for _ in answer:
                        pass

        await asyncio.gather(*(one(i) for i in range(20)))
    got = {(r.mark, r.hints.session, r.hints.agent, r.hints.turn) for r in server.llm_requests}

    assert got == {(str(i), f"S{i}", f"a{i}", 1) for i in range(20)}
    assert len(server.llm_requests) == 40


def test_retries_are_the_same_turn(server, client):
    """Attempts of one call say the same; the next call is the next turn."""
    with context(agent="a", session="S"):
        ask(client, "[[fail 2 k]]")
        ask(client)

    assert [(r.retries, r.hints.turn) for r in server.llm_requests] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 2),
    ]


def test_headers_of_the_user_win(server, client):
    """A header that the user has set stays."""
    with context(agent="a", session="S"):
        ask(client, extra_headers={"X-Scout-Agent": '"mine"', "x-session-id": "mine"})
    (request,) = server.llm_requests

    assert request.hints.agent == "mine"
    assert request.header("x-session-id") == "mine"
    assert request.hints.session == "S"


def test_strangers_are_told_nothing(server):
    """A request to a host that nobody named carries nothing."""
    sent: list[Any] = []
    with (
        openai.OpenAI(base_url="http://stranger.example/v1", api_key="x") as client,
        context(agent="a", session="S"),
    ):
        from openai._models import FinalRequestOptions

        options = FinalRequestOptions(method="post", url="/chat/completions", json_data={})
        sent.append(client._build_request(options))
        with use_hints(Hints(agent="b")):
            _openai.allow("http://stranger.example:9000")
            sent.append(client._build_request(options))
    _openai._hosts.discard("stranger.example")

    assert [any(name.startswith(_wire.PREFIX) for name in r.headers) for r in sent] == [False, True]


@pytest.mark.parametrize("named", [False, True])
def test_strangers_are_named_once(named, monkeypatch, caplog):
    """Who never named a server hears, once for each host, that its requests carry no hints."""
    monkeypatch.setattr(_openai, "_hosts", {"named.example"} if named else set())
    monkeypatch.setattr(_openai, "_strangers", set())
    with caplog.at_level(logging.DEBUG, "scout_sdk"):
        for host in ("one.example", "one.example", "two.example", "named.example"):
            request = httpx.Request("POST", f"http://{host}/v1/chat/completions")
            if named or host != "named.example":
                _openai.label(request)
                with context(agent="a", session="S"):
                    _openai.label(request)
    told = [record for record in caplog.records if "carry no hints" in record.message]

    assert [record.args for record in told] == [("one.example",), ("two.example",)]
    assert {record.levelno for record in told} == {logging.DEBUG if named else logging.WARNING}


def test_other_endpoints_are_left_alone(server, client):
    """Only requests for completions carry hints."""
    with context(agent="a", session="S"):
        client.models.list()

    assert not any(name.startswith(_wire.PREFIX) for r in server.requests for name, _ in r.headers)


def test_uninstall(server, client):
    """Uninstalled, requests are as without us, until it is installed again; both idempotent."""
    original = openai._base_client.BaseClient._build_request.__wrapped__
    with context(agent="a", session="S"):
        scout_sdk.uninstrument()
        scout_sdk.uninstall()
        assert openai._base_client.BaseClient._build_request is original
        with context(agent="b"):
            ask(client)
        assert scout_sdk.instrument()
        assert scout_sdk.install()
        ask(client)

    assert [r.hints and r.hints.agent for r in server.llm_requests] == [None, "a"]
    assert openai._base_client.BaseClient._build_request.__wrapped__ is original


def test_a_wrapper_over_ours_survives(server, client, monkeypatch):
    """Somebody's patch over ours stays when we go, and we are not put in twice."""
    ours = openai._base_client.BaseClient._build_request
    calls: list[int] = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(self, *args, **kwargs)

    theirs.__wrapped__ = ours  # type: ignore[attr-defined]
    monkeypatch.setattr(openai._base_client.BaseClient, "_build_request", theirs)
    with context(agent="a", session="S"):
        scout_sdk.uninstall()
        ask(client)
        scout_sdk.install()
        ask(client)

    assert len(calls) == 2
    assert openai._base_client.BaseClient._build_request is theirs
    assert [r.hints and r.hints.turn for r in server.llm_requests] == [None, 1]


def test_an_unknown_openai_is_left_alone(monkeypatch, caplog):
    """Where requests are built elsewhere, one warning says what to do."""
    scout_sdk.uninstall()
    monkeypatch.setattr(_guard, "_seen", set())
    monkeypatch.delattr(openai._base_client.BaseClient, "_build_request")
    with caplog.at_level(logging.WARNING, "scout_sdk"):
        assert scout_sdk.install() is False
        assert scout_sdk.install() is False

    assert len(caplog.records) == 1
    assert "scout_sdk.attach" in caplog.text


@pytest.mark.parametrize("text", ["研究员", "a\nb", " pad ", "\x00", "x" * 5000, '"', "é"])
def test_hostile_values(server, client, text):
    """No value breaks a call."""
    with context(agent=text, session=text, path=text, next_agents=(text,) * 100):
        assert ask(client, "[[say fine]]").choices[0].message.content.strip() == "fine"

    assert server.llm_requests[0].decoded.size_bytes <= 4096


def test_our_faults_stay_ours(server, client, monkeypatch, caplog):
    """A fault while labelling is logged once, and the call succeeds without hints."""
    from scout_sdk import _strict

    monkeypatch.setattr(_strict, "_depth", 0)
    monkeypatch.setattr(_guard, "_seen", set())
    monkeypatch.setattr(_wire, "encode", lambda hints: 1 / 0)
    with caplog.at_level(logging.ERROR, "scout_sdk"), context(agent="a", session="S"):
        ask(client)
        ask(client)
    monkeypatch.setattr(_strict, "_depth", 1)

    assert [r.hints for r in server.llm_requests] == [None, None]
    assert len(caplog.records) == 1


def test_switched_off(server, client, monkeypatch):
    """With SCOUT_SDK_ENABLED=0 requests carry nothing."""
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "0")
    with context(agent="a", session="S"):
        ask(client)

    assert server.llm_requests[0].hints is None


def test_attach(server):
    """An attached client carries hints without any patch; twice is as once."""
    scout_sdk.uninstall()
    with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=3) as client:
        assert scout_sdk.attach(scout_sdk.attach(client)) is client
        with context(agent="a", session="S"):
            ask(client, "[[fail 2 k]]")
            ask(client.with_options(max_retries=0))
        ask(client)

    assert [r.hints and r.hints.turn for r in server.llm_requests] == [1, 1, 1, 2, None]


async def test_attach_async(server):
    """So does an async one."""
    scout_sdk.uninstall()
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:
        scout_sdk.attach(client)
        with context(agent="a", session="S"):
            await client.chat.completions.create(model="m", messages=MESSAGES)

    assert server.llm_requests[0].hints == Hints(session="S", agent="a", turn=1)


def test_attached_and_patched(server, client):
    """A request that passes both ways counts once."""
    scout_sdk.attach(client)
    with context(agent="a", session="S"):
        ask(client)
        ask(client)

    assert [r.hints.turn for r in server.llm_requests] == [1, 2]


def test_attach_to_httpx(server):
    """A plain httpx client can be attached too."""
    with httpx.Client() as client, context(agent="a", session="S"):
        scout_sdk.attach(client)
        body = {"model": "m", "messages": MESSAGES}
        client.post(f"{server.base_url}/chat/completions", json=body)

    assert server.llm_requests[0].hints == Hints(session="S", agent="a", turn=1)


def test_attach_to_nothing():
    """Something without an HTTP client is refused, with what is accepted."""
    with pytest.raises(ConfigError, match="a dict; expected an OpenAI"):
        scout_sdk.attach({})

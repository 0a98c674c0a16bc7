import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import scout_sdk
from scout_sdk.testing import RecordingServer, strict

_timeouts = itertools.count(600)


@pytest.fixture(autouse=True)
def _strictly() -> Iterator[None]:
    """Our own faults fail the test; nothing is left behind for the next one."""
    with strict():
        yield
    scout_sdk.shutdown()


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as running:
        yield running


@pytest.fixture
def chat_model(server: RecordingServer) -> Callable[..., Any]:
    """Make LangChain chat models with HTTP clients of their own (LangChain shares equal ones)."""
    import openai
    from langchain_openai import ChatOpenAI

    def make(**options: Any) -> ChatOpenAI:
        url = server.base_url
        options = {"max_retries": 3, **options}
        return ChatOpenAI(
            model="m",
            base_url=url,
            api_key="x",
            # A connection kept alive would outlive its event loop.
            default_headers={"connection": "close"},
            timeout=next(_timeouts),
            http_client=openai.DefaultHttpxClient(base_url=url),
            http_async_client=openai.DefaultAsyncHttpxClient(base_url=url),
            **options,
        )

    return make


@pytest.fixture
def free_port() -> int:
    """A loopback port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Sessions of clients that name none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_server.tao import chains as module
from scout_server.tao.asked import linked, understand
from scout_server.tao.chains import Chains, parts_of
from scout_server.tenancy import TenancySettings


def chat(*texts: str, system: str = "s", model: str = "m") -> bytes:
    """Return the body of a chat request of these messages."""
    messages = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": text} for text in texts]
    return json.dumps({"messages": messages, "model": model}).encode()


def ask(chains: Chains, body: bytes, *headers: tuple[bytes, bytes]) -> tuple[str, bool]:
    """Return the session of a request, and whether only a tool call would keep it."""
    asked = understand(headers, body, tenancy=TenancySettings(), output_tokens=9, growing=True)
    asked = linked(asked, chains)
    return asked.session, asked.tentative


def test_a_history_that_grows_is_one_session() -> None:
    """The next request of an agent loop has the session of the one before; the first may end."""
    chains = Chains()
    session, tentative = ask(chains, chat("a"))
    assert tentative
    assert ask(chains, chat("a", "b", "c")) == (session, False)
    assert ask(chains, chat("a", "b", "c", "d")) == (session, False)


def test_another_history_model_or_tenant_is_another_session() -> None:
    """A shared system prompt alone makes no session, nor do equal texts of others."""
    chains = Chains()
    first, _ = ask(chains, chat("a"))
    others = [
        ask(chains, chat("b", "c")),
        ask(chains, chat("a", "b", model="n")),
        ask(chains, chat("a", "b", system="t")),
        ask(chains, chat("a", "b"), (b"authorization", b"Bearer k")),
    ]
    assert len({first, *(session for session, _ in others)}) == 5
    assert all(tentative for _, tentative in others)


def test_a_branch_is_a_session_of_its_own() -> None:
    """Of two requests that go on with the same one, the first has its session."""
    chains = Chains()
    session, _ = ask(chains, chat("a"))
    assert ask(chains, chat("a", "b"))[0] == session
    branch, tentative = ask(chains, chat("a", "c"))
    assert branch != session
    assert tentative
    assert ask(chains, chat("a", "b", "d")) == (session, False)
    assert ask(chains, chat("a", "c", "d")) == (branch, False)


def test_a_request_that_comes_again() -> None:
    """A later request sent again is a retry; a first one may be of two sessions."""
    chains = Chains()
    session, _ = ask(chains, chat("a"))
    assert ask(chains, chat("a"))[0] != session
    later = ask(chains, chat("a", "b"))
    assert ask(chains, chat("a", "b")) == later
    assert ask(chains, chat("a", "b", "c")) == later


def test_a_prompt_that_grows_is_one_session() -> None:
    """Plain prompts, as text and as tokens, are compared in whole pieces of 512 bytes."""
    for prompt in ("x" * 700, list(range(300))):
        chains = Chains()
        session, _ = ask(chains, json.dumps({"prompt": prompt}).encode())
        more = json.dumps({"prompt": prompt + prompt}).encode()
        assert ask(chains, more) == (session, False)


def test_a_named_session_counts_more() -> None:
    """Who names a session is not looked at."""
    chains = Chains()
    assert ask(chains, chat("a"), (b"x-session-id", b"n")) == ("n", False)
    assert not chains._links


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests longest ago are forgotten."""
    monkeypatch.setattr(module, "_MAX_CHAINS", 2)
    chains = Chains()
    old, _ = ask(chains, chat("a"))
    kept, _ = ask(chains, chat("b"))
    ask(chains, chat("c"))
    assert len(chains._links) == 2
    assert ask(chains, chat("b", "x"))[0] == kept
    assert ask(chains, chat("a", "x"))[0] != old


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_body_is_no_fault(body: bytes) -> None:
    """Whatever is sent, it is a request without a session at worst."""
    assert parts_of(body) == [] or len(parts_of(body)) >= 1


@given(
    st.lists(st.dictionaries(st.sampled_from(["role", "content"]), st.text(max_size=4)), max_size=4)
)
def test_both_parsers_tell_growth_alike(messages: list) -> None:
    """Without msgspec the same requests go on with the same ones."""
    whole = json.dumps({"messages": [*messages, {"role": "x"}]}).encode()
    part = json.dumps({"messages": messages}).encode()
    fast = parts_of(part), parts_of(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_members", None)
        patch.setattr(module, "_items", None)
        slow = parts_of(part), parts_of(whole)
    for before, after in (fast, slow):
        assert after[: len(before)] == before
        assert len(after) == len(messages) + 2

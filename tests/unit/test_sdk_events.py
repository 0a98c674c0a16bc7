"""The side channel's sender against real sockets: good, dead, deaf and refusing servers."""

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest

from scout_sdk import ConfigError, Evidence, SessionEvent, ToolEvent, ToolState
from scout_sdk._capabilities import Endpoint, fetch_capabilities
from scout_sdk.events import EventSender
from scout_sdk.testing import FakeClock, RecordingServer

EVENT = SessionEvent(session="s", agent="a", final=True)
SLEEPING = SessionEvent(
    session="s",
    tool=ToolEvent(
        name="bash",
        state=ToolState.STARTED,
        elapsed_s=0.0,
        remaining_s=5.0,
        evidence=Evidence.SLEEP,
    ),
)


@pytest.fixture
def server():
    with RecordingServer() as running:
        yield running
    assert running.faults == []


@contextlib.contextmanager
def sending(url, **more):
    sender = EventSender(url, **more)
    try:
        yield sender
    finally:
        sender.close()


def totals(sender):
    counts = sender.counts
    return counts.sent, counts.dropped, counts.failed


def posts(server):
    return [r for r in server.requests if r.method == "POST"]


def dead_url():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"


@contextlib.contextmanager
def answering(*answers):
    """A server that gives *answers* to its connections in turn, byte for byte, then hangs up."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        for answer in answers:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


@contextlib.contextmanager
def refusing(*keys):
    """A server that takes events, and refuses those whose Authorization is in the yielded set."""
    refused = set(keys)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(401 if self.headers["authorization"] in refused else 204)

        def do_GET(self):
            self.answer(404)

        def answer(self, status):
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}", refused
        finally:
            listening.shutdown()
            thread.join(5)


def test_an_event_arrives(server):
    """What is emitted arrives as it was, with the key and the content type."""
    with sending(server.base_url, api_key="secret") as sender:
        sender.emit(EVENT)
        assert sender.flush(5)
        assert totals(sender) == (1, 0, 0)
        assert sender.capabilities.features >= {"events", "hints"}
    (event,) = server.events
    assert replace(event, age_s=0.0) == EVENT
    (post,) = posts(server)
    assert post.header("authorization") == "Bearer secret"
    assert post.header("content-type") == "application/json"


def test_events_that_wait_go_in_one_message(server):
    """Events gather while a message is under way: 600 need few messages of at most 256."""
    with sending(server.base_url) as sender:
        for number in range(600):
            sender.emit(replace(EVENT, session=f"s{number}"))
        assert sender.flush(10)
    assert [e.session for e in server.events] == [f"s{number}" for number in range(600)]
    sizes = [len(post.json["events"]) for post in posts(server)]
    assert max(sizes) <= 256
    assert len(sizes) < 300


def test_many_threads(server):
    """Events of many threads all arrive, those of one thread in their order."""
    with sending(server.base_url, max_waiting=5000) as sender:

        def work(thread):
            for number in range(250):
                sender.emit(replace(EVENT, session=f"{thread}-{number}"))

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sender.flush(20)
        assert totals(sender) == (2000, 0, 0)
    arrived = [event.session.split("-") for event in server.events]
    for thread in range(8):
        numbers = [int(number) for name, number in arrived if name == str(thread)]
        assert numbers == list(range(250))


def test_one_connection_is_kept(server):
    """Messages one after the other share a connection, and ask for the capabilities once."""
    with sending(server.base_url) as sender:
        for _ in range(5):
            sender.emit(EVENT)
            assert sender.flush(5)
    assert [r.method for r in server.requests] == ["GET"] + ["POST"] * 5


def test_times_are_as_of_sending(server):
    """An event that waited says so, and its remaining time is shorter by that."""
    clock = FakeClock()
    with sending(dead_url(), clock=clock) as sender:
        sender.emit(EVENT)
        assert not sender.flush(5)
        sender._endpoint = Endpoint.parse(server.base_url)
        sender.emit(SLEEPING)
        sender.emit(SLEEPING)
        clock.advance(0.75)
        assert sender.flush(5)
    event = server.events[0]
    assert (event.age_s, event.tool.elapsed_s, event.tool.remaining_s) == (0.75, 0.75, 4.25)


def test_the_oldest_is_dropped(server):
    """A full queue drops its oldest event and counts it."""
    clock = FakeClock()
    with sending(dead_url(), max_waiting=3, clock=clock) as sender:
        sender.emit(EVENT)
        sender.flush(5)
        for number in range(5):
            sender.emit(replace(EVENT, session=f"s{number}"))
        assert sender.counts.waiting == 3
        sender._endpoint = Endpoint.parse(server.base_url)
        assert not sender.flush(5)
        assert totals(sender) == (3, 2, 1)
        assert sender.flush(5)
    assert [e.session for e in server.events] == ["s2", "s3", "s4"]


def test_a_dead_server_is_left_alone_for_a_while():
    """A refused connection costs its events; later ones wait for the back-off, which doubles."""
    clock = FakeClock()
    with sending(dead_url(), clock=clock) as sender:
        for expected in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
            sender.emit(EVENT)
            assert not sender.flush(5)
            assert sender._not_before - clock.now == expected
            sender.emit(EVENT)
            assert sender.counts.waiting == 1
            clock.advance(expected)
            sender.emit(EVENT)  # wakes the thread, which sees the new time
            assert not sender.flush(5)
            sender._backoff_s = expected
        assert sender.counts.sent == 0


def test_events_get_too_old():
    """What waited for more than a minute is dropped, not sent."""
    clock = FakeClock()
    with RecordingServer() as server, sending(dead_url(), clock=clock) as sender:
        sender.emit(EVENT)
        sender.flush(5)
        sender.emit(replace(EVENT, session="old"))
        sender._endpoint = Endpoint.parse(server.base_url)
        clock.advance(61)
        sender.emit(replace(EVENT, session="new"))
        sender.flush(5)
        assert server.wait_for(lambda s: len(s.events) == 1)
        assert [e.session for e in server.events] == ["new"]


def test_a_black_hole_costs_its_timeout_only():
    """A server that never answers holds nobody: emit returns, flush and close give up."""
    with (
        socket.create_server(("127.0.0.1", 0)) as hole,
        sending(f"http://127.0.0.1:{hole.getsockname()[1]}", timeout_s=0.2) as sender,
    ):
        for _ in range(2000):
            sender.emit(EVENT)
        assert not sender.flush(0.05)
        assert not sender.flush(5)
        counts = sender.counts
        assert counts.failed >= 1
        assert counts.sent == 0
        assert counts.waiting + counts.dropped + counts.failed == 2000


def test_each_message_speaks_for_one_caller(server):
    """Events of several callers gather by caller, in order; an API key of the sender wins."""
    names = [("authorization", "Bearer one"), ("x-api-key", "two"), None]
    with sending(server.base_url) as sender, sending(server.base_url, api_key="own") as own:
        for number in range(30):
            sender.emit(replace(EVENT, session=f"s{number}"), names[number % 3])
        assert sender.flush(5)
        own.emit(replace(EVENT, session="own"), names[0])
        assert own.flush(5)
    told: dict[tuple[str | None, str | None], list[str]] = {}
    for post in posts(server):
        caller = (post.header("authorization"), post.header("x-api-key"))
        told.setdefault(caller, []).extend(e["session"] for e in json.loads(post.body)["events"])
    assert told == {
        ("Bearer one", None): [f"s{n}" for n in range(0, 30, 3)],
        (None, "two"): [f"s{n}" for n in range(1, 30, 3)],
        (None, None): [f"s{n}" for n in range(2, 30, 3)],
        ("Bearer own", None): ["own"],
    }


def test_a_refused_key_silences_its_own_caller_alone():
    """401 drops what the caller has waiting, and what it emits within 60 s; others are heard."""
    clock = FakeClock()
    bad, good = ("authorization", "Bearer bad"), ("authorization", "Bearer good")
    with refusing("Bearer bad") as (url, refused), sending(url, clock=clock) as sender:
        for _ in range(3):
            sender.emit(EVENT, bad)
            sender.emit(EVENT, good)
        assert not sender.flush(5)
        assert totals(sender) == (3, 3, 0)
        sender.emit(EVENT, bad)
        assert totals(sender) == (3, 4, 0)
        clock.advance(60)
        refused.clear()
        sender.emit(EVENT, bad)
        sender.flush(5)
        assert totals(sender) == (4, 4, 0)


def test_a_server_without_a_side_channel_is_left_alone():
    """404 drops what waits and all that comes within 60 s; then it is asked again."""
    clock = FakeClock()
    with (
        RecordingServer(hint_aware=False) as server,
        sending(server.base_url, clock=clock) as sender,
    ):
        sender.emit(EVENT)
        assert not sender.flush(5)
        for _ in range(10):
            sender.emit(EVENT)
        assert totals(sender) == (0, 11, 0)
        assert len(posts(server)) == 1
        clock.advance(60)
        server.hint_aware = True
        sender.emit(EVENT)
        assert not sender.flush(5)
        assert totals(sender) == (1, 11, 0)


@pytest.mark.parametrize(
    ("capabilities", "welcome"),
    [
        ({"version": 1, "features": ["events"]}, True),
        ({"version": 1, "features": ["hints"]}, False),
        ({"version": 2, "features": ["events"]}, False),
    ],
)
def test_capabilities_are_obeyed(capabilities, welcome):
    """No event goes to a server that says it takes none, or speaks another version."""
    body = json.dumps(capabilities).encode()
    first = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    second = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
    with answering(first, second) as url, sending(url) as sender:
        sender.emit(EVENT)
        assert sender.flush(5) is welcome
        assert totals(sender) == ((1, 0, 0) if welcome else (0, 1, 0))


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (b"200", (1, 0, 0)),
        (b"302", (0, 1, 0)),
        (b"401", (0, 1, 0)),
        (b"400", (0, 0, 1)),
        (b"500", (0, 0, 1)),
    ],
)
def test_what_statuses_mean(status, outcome, caplog):
    """2xx is sent; refusals turn the channel off; other answers are failures."""
    missing = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    answer = b"HTTP/1.1 %s X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status
    with answering(missing, answer) as url, sending(url) as sender:
        sender.emit(EVENT)
        sender.flush(5)
        assert totals(sender) == outcome
    assert ("SCOUT_API_KEY" in caplog.text) is (status == b"401")


def test_a_busy_server_says_for_how_long():
    """Retry-After lengthens the back-off, up to a minute."""
    missing = b"HTTP/1.1 404 X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    busy = b"HTTP/1.1 429 X\r\nRetry-After: 7\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    clock = FakeClock()
    with answering(missing, busy) as url, sending(url, clock=clock) as sender:
        sender.emit(EVENT)
        assert not sender.flush(5)
        assert sender._not_before == 7.0


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nA" + b"a" * 70000]
)
def test_nonsense_from_a_server_is_a_failure(answer):
    """A server that hangs up or speaks something else costs its events and nothing more."""
    with answering(*[answer] * 4) as url, sending(url, timeout_s=1) as sender:
        sender.emit(EVENT)
        assert not sender.flush(5)
        assert totals(sender) == (0, 0, 1)


def test_a_connection_that_died_is_opened_again(server):
    """A server that closed the idle connection loses no event."""
    with sending(server.base_url) as sender:
        sender.emit(EVENT)
        assert sender.flush(5)
        sender._connection.sock.shutdown(socket.SHUT_RDWR)
        sender.emit(EVENT)
        assert sender.flush(5)
        assert totals(sender) == (2, 0, 0)
    assert len(server.events) == 2


def test_foreign_objects_do_no_harm(server):
    """Something that is no event is dropped; the next event arrives."""
    with sending(server.base_url) as sender:
        sender.emit("no event")
        sender.emit(SessionEvent(session="s", tool="no tool"))
        sender.emit(EVENT)
        sender.flush(5)
        sender.emit(EVENT)
        sender.flush(5)
    assert EVENT.session in [e.session for e in server.events]


def test_closed_means_closed(server):
    """After close, events are dropped and the thread has ended."""
    sender = EventSender(server.base_url)
    sender.emit(EVENT)
    sender.close(5)
    sender.emit(EVENT)
    assert totals(sender) == (1, 1, 0)
    sender._thread.join(5)
    assert not sender._thread.is_alive()
    sender.close()


def test_switched_off(server, monkeypatch):
    """With SCOUT_SDK_ENABLED=0 nothing is sent."""
    monkeypatch.setenv("SCOUT_SDK_ENABLED", "0")
    with sending(server.base_url) as sender:
        sender.emit(EVENT)
        assert totals(sender) == (0, 1, 0)
    assert server.requests == []


def test_debug_says_what_is_sent(server):
    """With SCOUT_DEBUG=1 a process tells on standard error what is sent, and what is wrong."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from scout_sdk import SessionEvent; from scout_sdk.events import *;"
            "s = EventSender(sys.argv[1]); s.emit(SessionEvent(session='s')); assert s.flush(5);"
            "EventSender(sys.argv[1])",
            server.base_url,
        ],
        env=os.environ | {"SCOUT_DEBUG": "1", "SCOUT_TIMEOUT": "soon"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 events sent to 127.0.0.1" in done.stderr
    assert done.stderr.count("SCOUT_TIMEOUT='soon'") == 1


def test_debug_says_what_requests_carry(server):
    """With SCOUT_DEBUG=1 each request's hints are told, and whose requests have none."""
    code = """
        import sys, httpx, scout_sdk
        with httpx.Client() as client, scout_sdk.context(agent="planner", session="S"):
            scout_sdk.attach(client).post(sys.argv[1] + "/chat/completions", json={})
            for hook in client.event_hooks["request"] * 2:
                hook(client.build_request("POST", "http://stranger.example/v1/responses"))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), server.base_url],
        env=os.environ | {"SCOUT_DEBUG": "1", "SCOUT_BASE_URL": "host:8000"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "request to 127.0.0.1: agent 'planner', session 'S', turn 1, 0 tools" in done.stderr
    assert done.stderr.count("stranger.example carry no hints") == 1
    assert done.stderr.count("SCOUT_BASE_URL: base URL 'host:8000' is not") == 1


def test_no_thread_before_the_first_event(server):
    """A sender that is never used starts no thread and asks nothing."""
    before = threading.active_count()
    with sending(server.base_url) as sender:
        assert sender.flush(1)
        assert threading.active_count() == before
    assert server.requests == []


def run_python(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_exit_sends_what_waits(server):
    """A process that ends at once delivers; the key comes from the environment."""
    run_python(
        """
        import sys
        from scout_sdk import SessionEvent
        from scout_sdk.events import EventSender
        EventSender(sys.argv[1]).emit(SessionEvent(session="last", final=True))
        """,
        server.base_url,
        SCOUT_API_KEY="k",
    )
    assert server.wait_for(lambda s: len(s.events) == 1)
    assert server.events[0].session == "last"
    assert posts(server)[0].header("authorization") == "Bearer k"


def test_exit_does_not_wait_for_a_black_hole():
    """A deaf server holds the end of a process for half a second, not for its timeout."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        spent = run_python(
            """
            import atexit, sys, time
            atexit.register(lambda: print(time.monotonic() - start))
            from scout_sdk import SessionEvent
            from scout_sdk.events import EventSender
            senders = [EventSender(sys.argv[1], timeout_s=50) for _ in range(5)]
            for sender in senders:
                sender.emit(SessionEvent(session="last", final=True))
            start = time.monotonic()
            """,
            f"http://127.0.0.1:{hole.getsockname()[1]}",
        )
    assert float(spent) < 25.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork(server):
    """Parent and child both deliver, each once, also with a thread and a queue before the fork."""
    run_python(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from scout_sdk import SessionEvent
        from scout_sdk.events import EventSender
        sender = EventSender(sys.argv[1])
        def tell(name):
            sender.emit(SessionEvent(session=name))
        tell("before")
        assert sender.flush(5)
        tell("at-fork")
        child = os.fork()
        if child == 0:
            counts = sender.counts
            assert (counts.sent, counts.waiting) == (0, 0), counts
            tell("child")
            os._exit(0 if sender.flush(5) else 3)
        tell("parent")
        assert sender.flush(5)
        assert os.waitpid(child, 0)[1] == 0
        tell("after")
        assert sender.flush(5)
        """,
        server.base_url,
    )
    assert sorted(e.session for e in server.events) == [
        "after",
        "at-fork",
        "before",
        "child",
        "parent",
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", (False, "h", 80, "")),
        ("http://h:8000/v1", (False, "h", 8000, "")),
        ("http://h:8000/v1/", (False, "h", 8000, "")),
        ("https://h/llm/v1", (True, "h", 443, "/llm")),
        ("http://[::1]:1/x", (False, "::1", 1, "/x")),
    ],
)
def test_base_urls(url, expected):
    """A base URL is taken with or without /v1 and with a path before it."""
    endpoint = Endpoint.parse(url)
    assert (endpoint.secure, endpoint.host, endpoint.port, endpoint.prefix) == expected


@pytest.mark.parametrize(
    "url", ["", "h:8000", "ftp://h", "http://", "http://h:99999", "http://h/a b", "http://[::1/"]
)
def test_wrong_base_urls(url):
    """A wrong URL fails at once, with the value and the form that is allowed."""
    with pytest.raises(ConfigError, match="base URL"):
        EventSender(url)


def test_fetch_capabilities(server):
    """A hint-aware server says what it takes; another says nothing; a dead one is an OSError."""
    assert fetch_capabilities(server.base_url, api_key="k").version == 1
    assert server.requests[0].header("authorization") == "Bearer k"
    server.hint_aware = False
    assert fetch_capabilities(server.url) is None
    with pytest.raises(OSError, match="refused"):
        fetch_capabilities(dead_url())
    with answering(b"nonsense\r\n\r\n") as url, pytest.raises(OSError, match="HTTP"):
        fetch_capabilities(url)
    for body in (b"[]", b"{", b'{"version": true, "features": []}', b'{"version": 1}'):
        raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with answering(raw) as url:
            assert fetch_capabilities(url) is None

"""A loopback OpenAI-compatible server that records what it is asked. Standard library only."""

import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from scout_sdk import _wire
from scout_sdk._hints import Hints, SessionEvent
from scout_sdk._replies import Reply, ToolCall, last_role, reply_body, reply_stream, user_texts

__all__ = ["RecordedRequest", "RecordingServer"]

_TOOL = re.compile(r"\[\[tool (\S+) (\{.*?\})\]\]", re.DOTALL)
_FAIL = re.compile(r"\[\[fail (\d+) (\S+?)(?: (\d{3}))?\]\]")
_SLEEP = re.compile(r"\[\[sleep ([\d.]+)\]\]")
_SAY = re.compile(r"\[\[say (.*?)\]\]", re.DOTALL)
_ID = re.compile(r"\[\[id ([^\]]+)\]\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request as it came over the wire."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    """Header lines in their order; names in lower case."""
    body: bytes
    received_s: float
    """Local monotonic time when it had been read."""
    json: Any = field(repr=False, default=None)
    """The body as JSON; None where it is none."""

    def header(self, name: str) -> str | None:
        """Return the value of the first header *name*, or None."""
        wanted = name.lower()
        return next((value for given, value in self.headers if given == wanted), None)

    @property
    def decoded(self) -> _wire.Decoded:
        """What a server makes of the hint headers."""
        return _wire.decode(self.headers)

    @property
    def hints(self) -> Hints | None:
        """The hints that came with it."""
        return self.decoded.hints

    @property
    def retries(self) -> int:
        """How many attempts of the same call came before, as the openai client says."""
        return int(self.header("x-stainless-retry-count") or 0)

    @property
    def mark(self) -> str | None:
        """The last `[[id X]]` in its user messages."""
        marks = _ID.findall(" ".join(user_texts(self.json))) if isinstance(self.json, dict) else []
        return marks[-1] if marks else None

    @property
    def is_llm(self) -> bool:
        """Whether it asks for a completion."""
        return self.method == "POST" and self.path.endswith(("/completions", "/responses"))


class RecordingServer:
    """
    An OpenAI-compatible server on a free loopback port, for tests.

    Chat completions, completions and responses, streaming or not. Without *reply*, directives
    in the last user message say what to answer, so that concurrent runs can be told apart:

    - `[[tool NAME {json}]]`: call this tool (repeatable); not after a tool's result;
    - `[[fail N KEY]]`, `[[fail N KEY STATUS]]`: the first N requests with KEY fail (500);
    - `[[sleep S]]`: wait S seconds first;
    - `[[say TEXT]]`: answer TEXT; without it: `done`, and the mark of `[[id X]]`.

    With *reply*, a callable gets the recorded request and returns a Reply, or None to follow
    the directives. hint_aware=False makes it a server that never heard of Scout: no outcome
    header, 404 for everything under /v1/scout.
    """

    def __init__(
        self,
        *,
        reply: Callable[[RecordedRequest], Reply | None] | None = None,
        hint_aware: bool = True,
    ) -> None:
        self.hint_aware = hint_aware
        self.faults: list[BaseException] = []
        """Exceptions in the server itself, which a test may want to be empty."""
        self._reply = reply
        self._log: list[RecordedRequest] = []
        self._events: list[SessionEvent] = []
        self._failures: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._http: _Server | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    def start(self) -> Self:
        """Listen on a free port; return self."""
        self._http = _Server(self)
        self._port = self._http.server_address[1]
        self._stopping.clear()
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="scout-recording", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close every connection and stop; what was recorded stays."""
        if self._http is None or self._thread is None:
            return
        self._stopping.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._http = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def url(self) -> str:
        """Its root, without a path."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as base_url."""
        return f"{self.url}/v1"

    @property
    def requests(self) -> list[RecordedRequest]:
        """Every request so far, in order of arrival."""
        with self._changed:
            return list(self._log)

    @property
    def llm_requests(self) -> list[RecordedRequest]:
        """The requests for completions so far, in order of arrival."""
        return [request for request in self.requests if request.is_llm]

    @property
    def events(self) -> list[SessionEvent]:
        """Every side-channel event so far, in order of arrival."""
        with self._changed:
            return list(self._events)

    def wait_for(
        self, condition: Callable[["RecordingServer"], bool], timeout_s: float = 5.0
    ) -> bool:
        """Wait until *condition* of this server holds; False when it does not in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def clear(self) -> None:
        """Forget everything recorded."""
        with self._changed:
            self._log.clear()
            self._events.clear()
            self._failures.clear()

    def _record(self, request: RecordedRequest) -> None:
        with self._changed:
            self._log.append(request)
            self._changed.notify_all()

    def _record_events(self, body: bytes) -> tuple[int, int]:
        events, rejected = _wire.decode_events(body)
        with self._changed:
            self._events += events
            self._changed.notify_all()
        return len(events), rejected

    def _answer(self, request: RecordedRequest) -> Reply:
        scripted = self._reply(request) if self._reply is not None else None
        return self._directed(request) if scripted is None else scripted

    def _directed(self, request: RecordedRequest) -> Reply:
        texts = user_texts(request.json)
        last = texts[-1] if texts else ""
        for times, key, status in _FAIL.findall(last):
            with self._changed:
                self._failures[key] += 1
                failing = self._failures[key] <= int(times)
            if failing:
                return Reply(status=int(status or 500), headers={"retry-after-ms": "5"})
        calls = () if last_role(request.json) == "tool" else _TOOL.findall(last)
        said = _SAY.findall(last)
        return Reply(
            text=said[-1] if said else f"done {request.mark or ''}".strip(),
            tools=tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls),
            delay_s=sum(map(float, _SLEEP.findall(last))),
        )


class _Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = False
    block_on_close = True

    def __init__(self, owner: RecordingServer) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:  # an idle keep-alive connection would be read for ever
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        fault = sys.exception()
        if fault is not None and not isinstance(fault, ConnectionError):
            self.owner.faults.append(fault)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer what is read: models, capabilities."""
        owner = self.server.owner
        path = self._take().path
        if path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "recorded", "object": "model"}]})
        elif path == _wire.CAPABILITIES_PATH and owner.hint_aware:
            features = sorted(["hints", "events", "outcome"])
            self._json(200, {"version": _wire.VERSION, "features": features, "limits": {}})
        else:
            self._json(404, {"error": {"message": f"no {path} here", "type": "not_found"}})

    def do_POST(self) -> None:
        """Answer what is asked: completions, and side-channel events."""
        owner = self.server.owner
        request = self._take()
        if request.path == _wire.EVENTS_PATH and owner.hint_aware:
            accepted, rejected = owner._record_events(request.body)
            self._json(200, {"accepted": accepted, "rejected": rejected})
        elif request.is_llm and isinstance(request.json, dict):
            self._complete(request)
        else:
            message = f"no {request.path} here, or a body that is no JSON object"
            self._json(404, {"error": {"message": message, "type": "not_found"}})

    def _take(self) -> RecordedRequest:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            parsed = json.loads(body) if body else None
        except ValueError:
            parsed = None
        request = RecordedRequest(
            method=self.command,
            path=self.path.partition("?")[0],
            headers=tuple((name.lower(), value) for name, value in self.headers.items()),
            body=body,
            received_s=time.monotonic(),
            json=parsed,
        )
        self.server.owner._record(request)
        return request

    def _complete(self, request: RecordedRequest) -> None:
        owner = self.server.owner
        reply = owner._answer(request)
        headers = dict(reply.headers)
        outcome = _wire.encode_outcome(request.decoded.outcomes) if owner.hint_aware else ""
        if outcome:
            headers[_wire.OUTCOME_HEADER] = outcome
        if reply.delay_s and owner._stopping.wait(reply.delay_s):
            self.close_connection = True
        elif reply.status != 200:
            error = {"message": "injected failure", "type": "server_error"}
            self._json(reply.status, {"error": error}, headers)
        elif request.json.get("stream"):
            options = request.json.get("stream_options") or {}
            self._stream(request.path, reply, headers, usage=bool(options.get("include_usage")))
        else:
            self._json(200, reply_body(request.path, reply), headers)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _json(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        self._head(status, fixed | (headers or {}))
        self.wfile.write(body)
        self.wfile.flush()

    def _stream(self, path: str, reply: Reply, headers: dict[str, str], *, usage: bool) -> None:
        fixed = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
        self._head(200, fixed | headers)
        for part in reply_stream(path, reply, usage=usage):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

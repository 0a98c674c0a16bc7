"""
A response on its way to the client: how it ended, and the tools that it calls.

The bytes are only looked at. A response that is no JSON and no event stream, that is compressed, or
that grows over a bound, says nothing.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from scout_sdk._limits import MAX_TOOL_NAME, MAX_TOOLS, clean_text
from scout_sdk.sleep import expected_seconds_of_call
from scout_server.policy.facts import Finish

__all__ = ["Ending", "ResponseObserver", "ToolUse", "expected_tools"]

_log = logging.getLogger("scout")

ToolUse = tuple[str, float | None]
"""Name of a called tool, and the seconds that its arguments say it takes; None: they do not say."""

_MAX_BODY = 1 << 20
_MAX_LINE = 1 << 18
_MAX_ARGUMENTS = 32_768
_MAX_CALLS = 64

_FINISH = {
    "stop": Finish.STOP,
    "end_turn": Finish.STOP,
    "stop_sequence": Finish.STOP,
    "content_filter": Finish.STOP,
    "refusal": Finish.STOP,
    "completed": Finish.STOP,
    "length": Finish.LENGTH,
    "max_tokens": Finish.LENGTH,
    "incomplete": Finish.LENGTH,
    "tool_calls": Finish.TOOL_CALLS,
    "function_call": Finish.TOOL_CALLS,
    "tool_use": Finish.TOOL_CALLS,
    "abort": Finish.ABORT,
    "error": Finish.ABORT,
    "failed": Finish.ABORT,
    "cancelled": Finish.ABORT,
}
"""What the four APIs call the end of a response."""

_TELLING = (
    b"_call",
    b"tool_use",
    b"partial_json",
    b"stop_reason",
    b'"response.completed"',
    b'"response.incomplete"',
    b'"response.failed"',
)
"""What stands in the events that say something; all others are not parsed."""
_ENDING = re.compile(rb'finish_reason"\s*:\s*"')

_CALL_ITEMS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a response said of its end."""

    finish: Finish
    tools: tuple[ToolUse, ...] = ()
    """In the order of the calls; the first sixteen."""


class _Call:
    __slots__ = ("arguments", "name")

    def __init__(self, name: object = "", arguments: object = "") -> None:
        self.name = name if isinstance(name, str) else ""
        self.arguments = ""
        self.add(arguments)

    def add(self, piece: object) -> None:
        """Append a piece of the arguments, up to the bound."""
        if isinstance(piece, str) and len(self.arguments) < _MAX_ARGUMENTS:
            self.arguments += piece[: _MAX_ARGUMENTS - len(self.arguments)]

    def replace(self, arguments: object) -> None:
        """Take *arguments* as the whole of them."""
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments)
        if isinstance(arguments, str) and arguments:
            self.arguments = arguments[:_MAX_ARGUMENTS]


class ResponseObserver:
    """
    Told of one response piece by piece; tells *ended* once, at its end, what it said.

    Nothing is told of a response that says nothing, or breaks off before its end. No method raises;
    at most about a megabyte is held, and of a stream only what belongs to tool calls.
    """

    def __init__(self, ended: Callable[[Ending], None]) -> None:
        self._ended = ended
        self._mode = ""
        self._rest = bytearray()
        self._skipping = False
        self._calls: dict[object, _Call] = {}
        self._finish: Finish | None = None

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note the response's head; only a 200 in JSON or as an event stream is read."""
        try:
            named = {name.lower(): value for name, value in headers}
            kind = named.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
            plain = named.get(b"content-encoding", b"identity").strip().lower() == b"identity"
            if status == 200 and plain:
                self._mode = {b"text/event-stream": "events", b"application/json": "json"}.get(
                    kind, ""
                )
        except Exception:
            self._give_up()

    def feed(self, data: bytes) -> None:
        """Look at the next bytes of the body."""
        if not self._mode or not data:
            return
        try:
            if self._mode == "events":
                self._lines(data)
            elif len(self._rest) + len(data) > _MAX_BODY:
                self._mode = ""
                self._rest.clear()
            else:
                self._rest += data
        except Exception:
            self._give_up()

    def end(self) -> None:
        """Say that the body is complete; again is harmless."""
        mode, self._mode = self._mode, ""
        if not mode:
            return
        try:
            if mode == "json":
                self._whole(json.loads(self._rest))
            elif self._rest and not self._skipping:
                self._line(bytes(self._rest))
            self._rest.clear()
            if self._finish is not None:
                self._ended(self._ending(self._finish))
        except (ValueError, RecursionError):
            self._rest.clear()
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        self._mode = ""
        self._rest.clear()
        self._calls.clear()
        _log.exception("scout: a response could not be read")

    def _ending(self, finish: Finish) -> Ending:
        tools = expected_tools((call.name, call.arguments) for call in self._calls.values())
        if tools and finish is Finish.STOP:
            finish = Finish.TOOL_CALLS  # a forced tool ends with `stop`, a response `completed`
        return Ending(finish=finish, tools=tools if finish is Finish.TOOL_CALLS else ())

    # ---- event streams ---------------------------------------------------------------------

    def _lines(self, data: bytes) -> None:
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            if self._skipping:
                self._skipping = False
            elif self._rest:
                self._rest += data[start:end]
                self._line(bytes(self._rest))
            else:
                self._line(data[start:end])
            self._rest.clear()
            start = end + 1
        if self._skipping:
            return
        if len(self._rest) + len(data) - start > _MAX_LINE:
            self._skipping = True
            self._rest.clear()
        else:
            self._rest += data[start:]

    def _line(self, line: bytes) -> None:
        if line.startswith(b"event: response."):
            # The event itself repeats the whole response and may be over the bound.
            self._finish = _FINISH.get(line[16:].strip().decode("latin-1"), self._finish)
            return
        if not line.startswith(b"data:") or len(line) > _MAX_LINE:
            return
        if not any(mark in line for mark in _TELLING) and not _ENDING.search(line):
            return
        try:
            event = json.loads(line[5:])
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        if "choices" in event:
            self._choices(event, "delta")
            return
        kind = event.get("type")
        if not isinstance(kind, str):
            return
        if kind.startswith("response."):
            self._response_event(kind[9:], event)
        else:
            self._message_event(kind, event)

    def _response_event(self, kind: str, event: Mapping[str, object]) -> None:
        place = event.get("output_index")
        if kind in ("output_item.added", "output_item.done"):
            item = event.get("item")
            if isinstance(item, dict) and item.get("type") in _CALL_ITEMS:
                call = self._call(place, item.get("name") or item["type"])
                if call is not None:
                    call.replace(_arguments_of_item(item))
        elif kind.endswith("_call_arguments.delta") or kind.endswith("_call_input.delta"):
            call = self._call(place, "")
            if call is not None:
                call.add(event.get("delta"))
        elif kind.endswith("_call_arguments.done") or kind.endswith("_call_input.done"):
            call = self._call(place, event.get("name"))
            if call is not None:
                call.replace(event.get("arguments", event.get("input")))
        else:
            self._say(kind)

    def _message_event(self, kind: str, event: Mapping[str, object]) -> None:
        if kind == "content_block_start":
            block = event.get("content_block")
            if isinstance(block, dict) and block.get("type") == "tool_use":
                call = self._call(event.get("index"), block.get("name"))
                if call is not None and block.get("input"):
                    call.replace(block["input"])
        elif kind == "content_block_delta":
            delta = event.get("delta")
            if isinstance(delta, dict) and delta.get("type") == "input_json_delta":
                call = self._call(event.get("index"), "")
                if call is not None:
                    call.add(delta.get("partial_json"))
        elif kind == "message_delta":
            delta = event.get("delta")
            if isinstance(delta, dict):
                self._say(delta.get("stop_reason"))

    # ---- whole bodies ----------------------------------------------------------------------

    def _whole(self, body: object) -> None:
        if not isinstance(body, dict):
            return
        if "choices" in body:
            self._choices(body, "message")
        elif body.get("object") == "response":
            self._say(body.get("status"))
            output = body.get("output")
            for place, item in enumerate(output if isinstance(output, list) else ()):
                if isinstance(item, dict) and item.get("type") in _CALL_ITEMS:
                    call = self._call(place, item.get("name") or item["type"])
                    if call is not None:
                        call.replace(_arguments_of_item(item))
        elif body.get("type") == "message":
            self._say(body.get("stop_reason"))
            content = body.get("content")
            for place, block in enumerate(content if isinstance(content, list) else ()):
                if isinstance(block, dict) and block.get("type") == "tool_use":
                    call = self._call(place, block.get("name"))
                    if call is not None:
                        call.replace(block.get("input"))

    def _choices(self, body: Mapping[str, object], where: str) -> None:
        """Read a chat or text completion, or a piece of one; of several choices the first."""
        choices = body["choices"]
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            said = choice.get(where)
            given = said if isinstance(said, dict) else {}
            calls = given.get("tool_calls")
            for count, entry in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(entry, dict):
                    self._function(entry.get("index", count), entry)
            if isinstance(given.get("function_call"), dict):
                self._function("function", {"function": given["function_call"]})
            self._say(choice.get("finish_reason"))

    def _function(self, place: object, entry: Mapping[str, object]) -> None:
        inner = entry.get("function") or entry.get("custom")
        if not isinstance(inner, dict):
            return
        call = self._call(place, inner.get("name"))
        if call is not None:
            call.add(inner.get("arguments", inner.get("input")))

    def _say(self, reason: object) -> None:
        if isinstance(reason, str):
            self._finish = _FINISH.get(reason, self._finish)

    def _call(self, place: object, name: object) -> _Call | None:
        """Return the call at *place*, made when new; None where there are too many."""
        if not isinstance(place, int | str):
            return None
        call = self._calls.get(place)
        if call is None:
            if len(self._calls) >= _MAX_CALLS:
                return None
            call = self._calls[place] = _Call()
        if isinstance(name, str) and name:
            call.name = name[: 4 * MAX_TOOL_NAME]
        return call


def expected_tools(calls: Iterable[tuple[str, str]]) -> tuple[ToolUse, ...]:
    """
    Return the tools of *calls*, given as (name, arguments in JSON), with their expected seconds.

    At most sixteen; names are shortened as those of hints are, so that both are the same.
    """
    tools: list[ToolUse] = []
    for name, arguments in calls:
        clean, _ = clean_text(name, MAX_TOOL_NAME)
        if clean is None:
            continue
        expectation = expected_seconds_of_call(name, arguments)
        tools.append((clean, None if expectation is None else expectation.seconds))
        if len(tools) == MAX_TOOLS:
            break
    return tuple(tools)


def _arguments_of_item(item: Mapping[str, object]) -> object:
    """Return the arguments of an item of /v1/responses that calls a tool."""
    for key in ("arguments", "input", "action"):
        if key in item:
            return item[key]
    return None

"""Bodies of an OpenAI-compatible server's answers, for the recording server."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Reply", "ToolCall", "last_role", "reply_body", "reply_stream", "user_texts"]

_numbers = itertools.count(1)
_MODEL = "recorded"
_USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call in an answer."""

    name: str
    arguments: str = "{}"
    """JSON, as the model would write it."""
    call_id: str = field(default_factory=lambda: f"call_{next(_numbers):08d}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a recording server answers to one request."""

    text: str = "done"
    tools: tuple[ToolCall, ...] = ()
    """Tool calls; where there are any, the text is not sent."""
    delay_s: float = 0.0
    """Seconds before the answer starts."""
    status: int = 200
    """Any other: the answer is an error with this HTTP status."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """More response headers."""


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return ""


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages of a chat, responses or completions request, in one shape."""
    if "messages" in body:
        return [message for message in body["messages"] if isinstance(message, dict)]
    given = body.get("input", body.get("prompt", ""))
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return []
    return [
        {"role": "tool"}
        if item.get("type") == "function_call_output"
        else {"role": item.get("role"), "content": item.get("content")}
        for item in given
        if isinstance(item, dict)
    ]


def user_texts(body: Mapping[str, Any]) -> list[str]:
    """Return the texts of the user messages of a request, oldest first."""
    return [_text(m.get("content")) for m in _messages(body) if m.get("role") == "user"]


def last_role(body: Mapping[str, Any]) -> str | None:
    """Return the role of a request's last message; `tool` for a tool's result."""
    messages = _messages(body)
    return messages[-1].get("role") if messages else None


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text) or [text]


def reply_body(path: str, reply: Reply) -> dict[str, Any]:
    """Return the JSON that answers a request to *path*."""
    if path.endswith("/responses"):
        return _response(reply, f"resp_{next(_numbers):08d}", "completed")
    if path.endswith("/chat/completions"):
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.tools:
            message |= {"content": None, "tool_calls": _chat_calls(reply)}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if reply.tools else "stop",
        }
        return _envelope("chatcmpl", "chat.completion") | {"choices": [choice], "usage": _USAGE}
    choice = {"index": 0, "text": reply.text, "finish_reason": "stop"}
    return _envelope("cmpl", "text_completion") | {"choices": [choice], "usage": _USAGE}


def reply_stream(path: str, reply: Reply, *, usage: bool) -> Iterator[bytes]:
    """Yield the server-sent events that answer a streaming request to *path*."""
    if path.endswith("/responses"):
        yield from _response_stream(reply)
        return
    chat = path.endswith("/chat/completions")
    envelope = (
        _envelope("chatcmpl", "chat.completion.chunk")
        if chat
        else _envelope("cmpl", "text_completion")
    )
    choices: list[dict[str, Any]] = []
    if not chat:
        choices += [{"index": 0, "text": word} for word in _words(reply.text)]
        choices.append({"index": 0, "text": "", "finish_reason": "stop"})
    else:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.tools:
            deltas += [
                {"tool_calls": [{"index": index} | call]}
                for index, call in enumerate(_chat_calls(reply))
            ]
        else:
            deltas += [{"content": word} for word in _words(reply.text)]
        choices += [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        finish = "tool_calls" if reply.tools else "stop"
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    for choice in choices:
        yield _event(envelope | {"choices": [choice]})
    if usage:
        yield _event(envelope | {"choices": [], "usage": _USAGE})
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def _envelope(prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{next(_numbers):08d}", "object": kind, "created": 0, "model": _MODEL}


def _chat_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.tools
    ]


def _output_items(reply: Reply) -> list[dict[str, Any]]:
    if reply.tools:
        return [
            {
                "id": f"fc_{call.call_id}",
                "type": "function_call",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for call in reply.tools
        ]
    return [
        {
            "id": f"msg_{next(_numbers):08d}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": reply.text, "annotations": []}],
        }
    ]


def _response(
    reply: Reply, name: str, status: str, items: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    done = status == "completed"
    return {
        "id": name,
        "object": "response",
        "created_at": 0,
        "model": _MODEL,
        "status": status,
        "output": (_output_items(reply) if items is None else items) if done else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 5,
            "output_tokens": 2,
            "total_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        if done
        else None,
    }


def _response_stream(reply: Reply) -> Iterator[bytes]:
    name = f"resp_{next(_numbers):08d}"
    items = _output_items(reply)
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(reply, name, "in_progress")}
    ]
    for index, item in enumerate(items):
        at = {"output_index": index, "item_id": item["id"]}
        part_at = at | {"content_index": 0}
        text = item["type"] == "message"
        empty: dict[str, Any] = {"content": []} if text else {"arguments": ""}
        started = item | {"status": "in_progress"} | empty
        events.append(
            {"type": "response.output_item.added", "output_index": index, "item": started}
        )
        if text:
            part = item["content"][0]
            events.append(
                {"type": "response.content_part.added", "part": part | {"text": ""}} | part_at
            )
            events += [
                {"type": "response.output_text.delta", "delta": word, "logprobs": []} | part_at
                for word in _words(reply.text)
            ]
            events.append(
                {"type": "response.output_text.done", "text": reply.text, "logprobs": []} | part_at
            )
            events.append({"type": "response.content_part.done", "part": part} | part_at)
        else:
            arguments = item["arguments"]
            events.append(
                {"type": "response.function_call_arguments.delta", "delta": arguments} | at
            )
            events.append(
                {
                    "type": "response.function_call_arguments.done",
                    "name": item["name"],
                    "arguments": arguments,
                }
                | at
            )
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append(
        {"type": "response.completed", "response": _response(reply, name, "completed", items)}
    )
    for number, event in enumerate(events):
        yield _event(event | {"sequence_number": number})

"""Replies in the forms of the OpenAI API, whole and streamed."""

import json
from collections.abc import Iterator, Mapping
from typing import Protocol

from scout_server.embedded.engine import Generation
from scout_server.embedded.parse import Call
from scout_server.embedded.prompt import ToolCall
from scout_server.policy.facts import Finish

__all__ = ["ChatForm", "CompletionForm", "Form", "ResponseForm"]

Json = dict[str, object]

_REASONS = {
    Finish.STOP: "stop",
    Finish.TOOL_CALLS: "tool_calls",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
}


class Form(Protocol):
    """Writes one generation; the methods of a stream are called in the order given here."""

    def start(self) -> Iterator[bytes]:
        """Yield what comes before the first token."""

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield what carries *text*."""

    def end(self) -> Iterator[bytes]:
        """Yield what comes after the last token."""

    def failure(self, body: Mapping[str, object]) -> Iterator[bytes]:
        """Yield what ends a stream that broke."""

    def body(self) -> Json:
        """Return the whole reply."""


def _data(value: object) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


class _Base:
    prefix = ""
    kind = ""

    def __init__(self, call: Call, generation: Generation, created: int) -> None:
        self._call = call
        self._generation = generation
        self._head: Json = {
            "id": f"{self.prefix}-{generation.request.request_id}",
            "object": self.kind,
            "created": created,
            "model": call.model,
        }

    def _finish(self) -> str:
        return _REASONS[self._generation.finish or Finish.ABORT]

    def _text(self) -> str:
        return self._generation.reply.text(0, self._generation.produced)

    def _calls(self) -> tuple[ToolCall, ...]:
        return self._generation.reply.calls

    def usage(self) -> Json:
        """Return the tokens of the request."""
        request, produced = self._generation.request, self._generation.produced
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": produced,
            "total_tokens": request.prompt_tokens + produced,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        }

    def failure(self, body: Mapping[str, object]) -> Iterator[bytes]:
        """Yield the error, as vLLM does within a stream."""
        yield _data(body)
        yield b"data: [DONE]\n\n"

    def _chunk(self, choice: Json | None, usage: Json | None = None) -> bytes:
        chunk = {**self._head, "choices": [choice] if choice is not None else []}
        if self._call.usage:
            chunk["usage"] = usage
        return _data(chunk)


class ChatForm(_Base):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"

    def start(self) -> Iterator[bytes]:
        """Yield the role."""
        self._head["object"] = "chat.completion.chunk"
        yield self._delta({"role": "assistant", "content": ""})

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield one chunk."""
        if text:
            yield self._delta({"content": text})

    def end(self) -> Iterator[bytes]:
        """Yield tool calls, the finish reason, the usage if asked for."""
        for index, call in enumerate(self._calls()):
            head = {"name": call.name, "arguments": ""}
            entry = {"index": index, "id": call.call_id, "type": "function", "function": head}
            yield self._delta({"tool_calls": [entry]})
            rest = {"index": index, "function": {"arguments": call.arguments}}
            yield self._delta({"tool_calls": [rest]})
        yield self._chunk({"index": 0, "delta": {}, "finish_reason": self._finish()})
        if self._call.usage:
            yield self._chunk(None, self.usage())
        yield b"data: [DONE]\n\n"

    def body(self) -> Json:
        """Return the completion."""
        message: Json = {"role": "assistant", "content": self._text()}
        if self._calls():
            message["content"] = None
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self._calls()
            ]
        choice = {"index": 0, "message": message, "finish_reason": self._finish()}
        return {**self._head, "choices": [choice], "usage": self.usage()}

    def _delta(self, delta: Json) -> bytes:
        return self._chunk({"index": 0, "delta": delta, "finish_reason": None})


class CompletionForm(_Base):
    """`/v1/completions`."""

    prefix = "cmpl"
    kind = "text_completion"

    def start(self) -> Iterator[bytes]:
        """Yield nothing."""
        return iter(())

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield one chunk."""
        if text:
            yield self._chunk({"index": 0, "text": text, "finish_reason": None})

    def end(self) -> Iterator[bytes]:
        """Yield the finish reason, the usage if asked for."""
        yield self._chunk({"index": 0, "text": "", "finish_reason": self._finish()})
        if self._call.usage:
            yield self._chunk(None, self.usage())
        yield b"data: [DONE]\n\n"

    def body(self) -> Json:
        """Return the completion."""
        choice = {"index": 0, "text": self._text(), "finish_reason": self._finish()}
        return {**self._head, "choices": [choice], "usage": self.usage()}


class ResponseForm(_Base):
    """`/v1/responses`: messages and function calls, nothing stored."""

    prefix = "resp"
    kind = "response"

    def __init__(self, call: Call, generation: Generation, created: int) -> None:
        super().__init__(call, generation, created)
        self._sequence = 0
        self._item_id = f"msg_{generation.request.request_id}"
        self._open = False

    def start(self) -> Iterator[bytes]:
        """Yield the response and, for a text, its item."""
        yield self._event("response.created", response=self._response("in_progress"))
        if not self._calls():
            self._open = True
            item = {**self._message(""), "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._event("response.content_part.added", **self._place(), part=part)

    def delta(self, text: str) -> Iterator[bytes]:
        """Yield one piece of the text."""
        if text:
            yield self._event(
                "response.output_text.delta", **self._place(), delta=text, logprobs=[]
            )

    def end(self) -> Iterator[bytes]:
        """Yield what is left of the items, and the whole response."""
        if self._open:
            text = self._text()
            part = {"type": "output_text", "text": text, "annotations": []}
            yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=part)
            yield self._event("response.output_item.done", output_index=0, item=self._message(text))
        for index, item in enumerate(self._call_items()):
            place = {"output_index": index, "item_id": item["id"]}
            started = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=started)
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=arguments,
            )
            yield self._event("response.output_item.done", output_index=index, item=item)
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, body: Mapping[str, object]) -> Iterator[bytes]:
        """Yield the failed response."""
        error = body.get("error")
        message = error.get("message") if isinstance(error, Mapping) else None
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=response)

    def body(self) -> Json:
        """Return the response."""
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self._generation.finish is Finish.LENGTH else "completed"

    def _place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _message(self, text: str) -> Json:
        part = {"type": "output_text", "text": text, "annotations": []}
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def _call_items(self) -> list[Json]:
        return [
            {
                "id": f"fc_{call.call_id}",
                "type": "function_call",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for call in self._calls()
        ]

    def _response(self, status: str) -> Json:
        ended = status in ("completed", "incomplete")
        request, produced = self._generation.request, self._generation.produced
        response: Json = {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._call.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": (self._call_items() or [self._message(self._text())]) if ended else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if ended:
            response["usage"] = {
                "input_tokens": request.prompt_tokens,
                "output_tokens": produced,
                "total_tokens": request.prompt_tokens + produced,
                "input_tokens_details": {
                    "cached_tokens": request.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        return response

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\n".encode() + _data(event)

"""From messages and tools to the tokens that a model would see."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scout_server.embedded.errors import ApiError
from scout_server.embedded.tokens import special, tokenize

__all__ = ["END", "Tool", "ToolCall", "call_tokens", "canonical", "chat_tokens", "text_of"]

_ROLES = {
    role: special(f"<|{role}|>") for role in ("system", "user", "assistant", "tool", "function")
}
_ROLES["developer"] = _ROLES["system"]
_TOOLS = special("<|tools|>")
_CALL = special("<|call|>")
_RESULT = special("<|result|>")
END = special("<|end|>")
"""Ends a message; the last token of every reply that is not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a request offers."""

    name: str
    parameters: Mapping[str, object]
    """JSON schema of its arguments."""
    definition: str
    """What the model is shown of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in a reply."""

    call_id: str
    name: str
    arguments: str
    """JSON."""


def canonical(arguments: object) -> str:
    """Return JSON text in one form, so that a client that rewrites it changes no token."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, separators=(",", ":"), sort_keys=True)


def text_of(content: object, where: str) -> str:
    """Return the text of a message's content; ApiError names *where* it is malformed."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = []
        for index, part in enumerate(content):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append(str(part["text"]))
            elif isinstance(part, Mapping) and isinstance(part.get("type"), str):
                texts.append(canonical(dict(part)))
            else:
                msg = f"{where}[{index}] is not a content part (an object with a type)"
                raise ApiError(msg, param=where)
        return "".join(texts)
    msg = f"{where} is a string, a list of content parts or null, not {type(content).__name__}"
    raise ApiError(msg, param=where)


def call_tokens(calls: Iterable[tuple[str, str]]) -> list[int]:
    """Return the tokens of tool calls, given as (name, arguments)."""
    tokens: list[int] = []
    for name, arguments in calls:
        tokens += (_CALL, *tokenize(name), *tokenize(canonical(arguments)))
    return tokens


def chat_tokens(messages: object, tools: Sequence[Tool]) -> list[int]:
    """
    Return the tokens of a conversation, ready for the assistant's next message.

    Tools stand after the first system message, as in common chat templates. Ids of tool calls are
    left out: they differ from run to run and no template shows them.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ApiError("messages is a list of at least one message", param="messages")
    tokens: list[int] = []
    shown = tuple(t for tool in tools for t in (_TOOLS, *tokenize(tool.definition)))
    if shown and not (isinstance(messages[0], Mapping) and _is_system(messages[0])):
        tokens += (_ROLES["system"], *shown, END)
        shown = ()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ApiError(f"{where} is not an object", param=where)
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            known = ", ".join(sorted(_ROLES))
            msg = f"{where}.role is one of {known}, not {message.get('role')!r}"
            raise ApiError(msg, param=f"{where}.role")
        tokens.append(role)
        tokens += tokenize(text_of(message.get("content"), f"{where}.content"))
        if index == 0 and shown:
            tokens += shown
        tokens += call_tokens(_calls_of(message, where))
        if role == _ROLES["tool"] and isinstance(message.get("name"), str):
            tokens += (_RESULT, *tokenize(str(message["name"])))
        tokens.append(END)
    tokens.append(_ROLES["assistant"])
    return tokens


def _is_system(message: Mapping[str, object]) -> bool:
    return message.get("role") in ("system", "developer")


def _calls_of(message: Mapping[str, object], where: str) -> list[tuple[str, str]]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    param = f"{where}.tool_calls"
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ApiError(f"{param} is a list", param=param)
    found: list[tuple[str, str]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(f"{param} has an entry without function.name", param=param)
        arguments = function.get("arguments", "{}")
        found.append((str(function["name"]), canonical(arguments)))
    return found

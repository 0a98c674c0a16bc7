"""Bodies of the OpenAI API in, prompts and scripted replies out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scout_server.embedded.errors import ApiError
from scout_server.embedded.prompt import Tool, canonical, chat_tokens, text_of
from scout_server.embedded.script import Reply, Wish, check_forced, write
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.embedded.tokens import tokenize

__all__ = ["Call", "parse_chat", "parse_completion", "parse_response"]

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that is well formed and can be served."""

    prompt: list[int]
    reply: Reply
    model: str
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    salt: str
    """Requests with different salts share no cache."""


def parse_chat(body: Body, settings: EmbeddedSettings) -> Call:
    """Return the call of a chat completions body; ApiError says what is wrong with it."""
    messages = body.get("messages")
    tools = _tools(body.get("tools"), nested=True)
    prompt = chat_tokens(messages, tools)
    assert isinstance(messages, Sequence)
    schema = _chat_schema(body)
    limit = _positive(body, "max_completion_tokens") or _positive(body, "max_tokens")
    return _call(body, settings, prompt, messages, tools, schema, limit, _usage(body))


def parse_completion(body: Body, settings: EmbeddedSettings) -> Call:
    """Return the call of a completions body; the prompt is one text or one list of token ids."""
    given = body.get("prompt")
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 1:
        given = given[0]
    text = ""
    if isinstance(given, str) and given:
        text = given
        prompt = list(tokenize(given))
    elif _is_ids(given):
        assert isinstance(given, Sequence)
        prompt = [int(token) for token in given]
    else:
        msg = "prompt is one text or one list of token ids, not empty"
        raise ApiError(msg, param="prompt")
    limit = _positive(body, "max_tokens") or 16
    schema, choices = _structured(body)
    wish = Wish(
        last_user=text,
        schema=schema,
        choices=choices,
        stop=_stop(body),
        max_tokens=_room(prompt, limit, settings),
        filler_tokens=settings.reply_tokens,
    )
    return _finish(body, settings, prompt, wish, _usage(body))


def parse_response(body: Body, settings: EmbeddedSettings) -> Call:
    """Return the call of a responses body; conversations are sent whole, none is stored."""
    if body.get("previous_response_id") is not None:
        msg = "previous_response_id is not supported: the embedded engine stores no responses"
        raise ApiError(msg, param="previous_response_id")
    given = body.get("input")
    messages: list[object] = []
    instructions = body.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str) and given:
        messages.append({"role": "user", "content": given})
    elif isinstance(given, Sequence) and not isinstance(given, str) and given:
        messages += [_item(item, f"input[{index}]") for index, item in enumerate(given)]
    else:
        raise ApiError("input is a text or a list of items, not empty", param="input")
    tools = _tools(body.get("tools"), nested=False)
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    schema = _format_schema(form, "text.format")
    prompt = chat_tokens(messages, tools)
    limit = _positive(body, "max_output_tokens")
    return _call(body, settings, prompt, messages, tools, schema, limit, False)


def _item(item: object, where: str) -> object:
    """Return an input item of the responses API as a chat message."""
    if not isinstance(item, Mapping):
        raise ApiError(f"{where} is not an object", param=where)
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    if kind == "function_call_output":
        output = item.get("output")
        return {"role": "tool", "content": output if isinstance(output, str) else canonical(output)}
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    # Reasoning and the like: kept in the prompt as they are.
    return {"role": "assistant", "content": canonical(dict(item))}


def _call(
    body: Body,
    settings: EmbeddedSettings,
    prompt: list[int],
    messages: Sequence[object],
    tools: Sequence[Tool],
    schema: object,
    limit: int | None,
    usage: bool,
) -> Call:
    users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    last = messages[-1]
    guided, choices = _structured(body)
    forced, offered = _tool_choice(body.get("tool_choice"), tools)
    wish = Wish(
        last_user=text_of(users[-1].get("content"), "content") if users else "",
        no_tools=body.get("tool_choice") == "none"
        or (isinstance(last, Mapping) and last.get("role") in ("tool", "function")),
        tools=offered,
        forced_tool=forced,
        schema=schema if guided is None else guided,
        choices=choices,
        stop=_stop(body),
        max_tokens=_room(prompt, limit, settings),
        filler_tokens=settings.reply_tokens,
    )
    return _finish(body, settings, prompt, wish, usage)


def _finish(
    body: Body, settings: EmbeddedSettings, prompt: list[int], wish: Wish, usage: bool
) -> Call:
    count = body.get("n")
    if count is not None and count != 1:
        raise ApiError(f"n is 1, not {count!r}: one reply a request", param="n")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise ApiError(f"stream is true or false, not {stream!r}", param="stream")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError(f"model is a string, not {model!r}", param="model")
    salt = body.get("cache_salt")
    return Call(
        prompt=prompt,
        reply=write(wish, prompt),
        model=model or settings.model,
        stream=bool(stream),
        usage=usage,
        salt=salt if isinstance(salt, str) else "",
    )


def _room(prompt: Sequence[int], limit: int | None, settings: EmbeddedSettings) -> int:
    """Return how many tokens the reply may have; ApiError when the request is too long."""
    longest = settings.limit_tokens()
    room = longest - len(prompt)
    if room < 1 or (limit is not None and limit > room):
        asked = f" and {limit} of output" if limit is not None else ""
        msg = f"at most {longest} tokens fit; this request has {len(prompt)} of prompt{asked}"
        raise ApiError(msg, param="messages", code="context_length_exceeded")
    return room if limit is None else limit


def _positive(body: Body, name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ApiError(f"{name} is a whole number of at least 1, not {value!r}", param=name)
    return value


def _usage(body: Body) -> bool:
    options = body.get("stream_options")
    return isinstance(options, Mapping) and options.get("include_usage") is True


def _stop(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) for s in stops):
        raise ApiError(f"stop is a text or a list of texts, not {stop!r}", param="stop")
    return tuple(stops)


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 2**32 for t in value)
    )


def _tools(given: object, *, nested: bool) -> list[Tool]:
    """Return the tools of a request; *nested* is chat's form, with `function` inside."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ApiError("tools is a list", param="tools")
    tools = []
    for index, entry in enumerate(given):
        where = f"tools[{index}]"
        function = entry.get("function") if isinstance(entry, Mapping) and nested else entry
        if not isinstance(function, Mapping):
            raise ApiError(f"{where} is not a function tool", param=where)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            if not nested and isinstance(function.get("type"), str):
                name = str(function["type"])  # a hosted tool: shown, never called
            else:
                raise ApiError(f"{where} has no name", param=where)
        parameters = function.get("parameters")
        tools.append(
            Tool(
                name=name,
                parameters=parameters if isinstance(parameters, Mapping) else {"type": "object"},
                definition=canonical(dict(function)),
            )
        )
    return tools


def _tool_choice(choice: object, tools: Sequence[Tool]) -> tuple[str | None, Sequence[Tool]]:
    """Return the tool that must be called (empty: any; None: none must) and those that may be."""
    if choice is None or choice == "auto":
        return None, tools
    if choice == "none":
        return None, ()
    if choice in ("required", "any"):
        check_forced("", tools)
        return "", tools
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name:
            check_forced(name, tools)
            return name, tools
    msg = f"tool_choice is auto, none, required or names a function, not {choice!r}"
    raise ApiError(msg, param="tool_choice")


def _chat_schema(body: Body) -> object:
    form = body.get("response_format")
    if not isinstance(form, Mapping):
        if form is not None:
            raise ApiError("response_format is an object", param="response_format")
        return None
    inner = form.get("json_schema")
    if form.get("type") == "json_schema" and isinstance(inner, Mapping):
        form = {"type": "json_schema", "schema": inner.get("schema")}
    return _format_schema(form, "response_format")


def _format_schema(form: object, where: str) -> object:
    if not isinstance(form, Mapping):
        return None
    kind = form.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = form.get("schema")
        if not isinstance(schema, Mapping):
            raise ApiError(f"{where} has no schema", param=where)
        return schema
    msg = f"{where}.type is text, json_object or json_schema, not {kind!r}"
    raise ApiError(msg, param=where)


def _structured(body: Body) -> tuple[object, Sequence[str]]:
    """Return the schema and the choices of vLLM's own fields."""
    guided = body.get("structured_outputs")
    fields = guided if isinstance(guided, Mapping) else {}
    schema = fields.get("json", body.get("guided_json"))
    choices = fields.get("choice", body.get("guided_choice"))
    if choices is None:
        return schema, ()
    if (
        not isinstance(choices, Sequence)
        or isinstance(choices, str)
        or not choices
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise ApiError(f"choice is a list of texts, not {choices!r}", param="structured_outputs")
    return schema, choices

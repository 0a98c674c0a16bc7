"""Prompts, schemas and scripted replies of the embedded engine."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_server.embedded.errors import ApiError
from scout_server.embedded.parse import parse_chat, parse_completion, parse_response
from scout_server.embedded.schema import instance
from scout_server.embedded.settings import EmbeddedSettings
from scout_server.embedded.tokens import pieces, special, tokenize
from scout_server.policy import Finish

_SETTINGS = EmbeddedSettings(kv_blocks=256)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 3}},
            "required": ["city", "days"],
        },
    },
}


def _chat(user: str, **more: object):
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": user}]
    return parse_chat({"messages": messages, **more}, _SETTINGS)


@given(st.text(max_size=200))
def test_pieces_are_the_text(text):
    """
    No character is lost, no token is a control token, and equal texts have equal tokens.
    """
    assert "".join(pieces(text)) == text
    tokens = tokenize(text)
    assert len(tokens) == len(pieces(text))
    assert all(0 <= token < 2**31 for token in tokens)
    assert special("<|end|>") >= 2**31


def test_a_token_is_about_four_characters():
    """
    English text has between three and five characters a token.
    """
    text = "The planner splits the task into steps, and each specialist works on one of them. " * 20
    assert 3.0 < len(text) / len(tokenize(text)) < 5.0


def test_the_next_turn_starts_with_the_turn_before_and_its_reply():
    """
    Prompt and reply of a turn are a prefix of the next turn's prompt, tool calls included.
    """
    first = _chat('[[tool weather {"days": 3, "city": "Rome"}]]', tools=[_TOOL])
    call = first.reply.calls[0]
    # A framework writes the arguments in its own way and adds ids of its own.
    arguments = json.dumps({"city": "Rome", "days": 3}, indent=1)
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": '[[tool weather {"days": 3, "city": "Rome"}]]'},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "x", "function": {"name": call.name, "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "sunny"},
    ]
    second = parse_chat({"messages": messages, "tools": [_TOOL]}, _SETTINGS)
    whole = [*first.prompt, *first.reply.tokens]
    assert second.prompt[: len(whole)] == whole
    text = _chat("hello")
    longer = parse_chat(
        {
            "messages": [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": text.reply.text(0, 10**6)},
                {"role": "user", "content": [{"type": "text", "text": "go on"}]},
            ]
        },
        _SETTINGS,
    )
    whole = [*text.prompt, *text.reply.tokens]
    assert longer.prompt[: len(whole)] == whole


def test_directives_say_what_is_replied():
    """
    Tools, texts, lengths; a tool's result ends the calling; no directive gives a filler text.
    """
    both = _chat('[[tool a {"x": {"y": 1}}]] [[tool b]]').reply
    assert [(c.name, c.arguments) for c in both.calls] == [("a", '{"x": {"y": 1}}'), ("b", "{}")]
    assert both.finish is Finish.TOOL_CALLS
    assert _chat("[[reply it is 12]]").reply.text(0, 99) == "it is 12"
    assert _chat("[[say it is 13]]").reply.text(0, 99) == "it is 13"
    assert len(_chat("[[tokens 100]]").reply.tokens) == 100
    assert len(_chat("anything").reply.tokens) == _SETTINGS.reply_tokens
    assert _chat("anything").reply == _chat("anything").reply
    assert _chat("anything").reply != _chat("something").reply
    messages = [
        {"role": "user", "content": "[[tool a {}]] [[reply done]]"},
        {"role": "tool", "content": "42"},
    ]
    after = parse_chat({"messages": messages}, _SETTINGS).reply
    assert after.calls == ()
    assert after.text(0, 99) == "done"


def test_a_directive_for_a_tool_that_is_not_offered_is_not_followed():
    """
    A conversation handed to an agent with other tools does not call what that agent lacks.
    """
    reply = _chat("[[tool search {}]] [[tool weather {}]]", tools=[_TOOL]).reply
    assert [call.name for call in reply.calls] == ["weather"]
    assert _chat("[[tool weather {}]]", tools=[_TOOL], tool_choice="none").reply.calls == ()


def test_a_named_or_required_tool_is_called_with_valid_arguments():
    """
    The arguments are the script's, else the smallest that the schema allows.
    """
    named = {"type": "function", "function": {"name": "weather"}}
    reply = _chat("x", tools=[_TOOL], tool_choice=named).reply
    assert json.loads(reply.calls[0].arguments) == {"city": "city", "days": 3}
    reply = _chat("x", tools=[_TOOL], tool_choice="required").reply
    assert reply.calls[0].name == "weather"
    reply = _chat('[[tool weather {"city": "Rome"}]]', tools=[_TOOL], tool_choice=named).reply
    assert reply.calls[0].arguments == '{"city": "Rome"}'
    with pytest.raises(ApiError, match=r"names 'nope'; tools offered: weather"):
        _chat("x", tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "nope"}})


def test_a_schema_is_obeyed_and_the_script_picks_among_its_values():
    """
    [[pick X]] chooses an enum's value, [[reply {...}]] sets fields, else a hash decides.
    """
    schema = {
        "type": "object",
        "properties": {"next": {"enum": ["a", "b", "FINISH"]}, "why": {"type": "string"}},
        "required": ["next", "why"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "route", "schema": schema}}

    def reply(user: str) -> dict[str, str]:
        return json.loads(_chat(user, response_format=form).reply.text(0, 999))

    assert reply("[[pick FINISH]]") == {"next": "FINISH", "why": "why"}
    assert reply('[[reply {"next": "b"}]]') == {"next": "b", "why": "why"}
    assert reply("one") == reply("one")
    assert {reply(f"text {n}")["next"] for n in range(40)} == {"a", "b", "FINISH"}
    choice = _chat("[[pick yes]]", structured_outputs={"choice": ["no", "yes"]}).reply
    assert choice.text(0, 9) == "yes"


def test_a_reply_is_cut_at_max_tokens_and_at_stop():
    """
    A cut reply ends with `length`, a stop text is not part of the reply.
    """
    cut = _chat("[[tokens 100]]", max_tokens=7).reply
    assert (len(cut.tokens), cut.finish) == (7, Finish.LENGTH)
    calls = _chat("[[tool a {}]]", max_completion_tokens=2).reply
    assert (calls.calls, calls.finish) == ((), Finish.LENGTH)
    assert _chat("[[reply one STOP two]]", stop=["STOP"]).reply.text(0, 99) == "one "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages is a list"),
        ({"messages": "hi"}, "messages is a list"),
        ({"messages": ["hi"]}, r"messages\[0\] is not an object"),
        ({"messages": [{"role": "boss"}]}, "role is one of assistant, developer"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a string"),
        ({"messages": [{"role": "user", "content": [3]}]}, r"content\[0\] is not a content part"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "without function.name"),
        ({"n": 3}, "n is 1, not 3"),
        ({"stream": "yes"}, "stream is true or false"),
        ({"max_tokens": 0}, "max_tokens is a whole number"),
        ({"max_tokens": 10**9}, "at most 4096 tokens fit"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] is not a function tool"),
        ({"tool_choice": "required"}, "tools offered: none"),
        ({"tool_choice": 3}, "tool_choice is auto"),
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"stop": 3}, "stop is a text"),
        ({"model": 3}, "model is a string"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body, message):
    """
    Each malformed field is an ApiError with status 400 that names it.
    """
    valid = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ApiError, match=message) as caught:
        parse_chat({**valid, **body} if body else body, _SETTINGS)
    assert caught.value.status == 400


def test_completions_take_texts_and_token_ids():
    """
    A text, a list of one text, and token ids; an empty prompt is an error.
    """
    assert parse_completion({"prompt": "abc"}, _SETTINGS).prompt == list(tokenize("abc"))
    assert parse_completion({"prompt": ["abc"]}, _SETTINGS).prompt == list(tokenize("abc"))
    assert parse_completion({"prompt": [5, 6]}, _SETTINGS).prompt == [5, 6]
    for bad in (None, "", [], ["a", "b"], [-1]):
        with pytest.raises(ApiError, match="prompt is one text"):
            parse_completion({"prompt": bad}, _SETTINGS)


def test_responses_items_are_the_chat_messages():
    """
    The same conversation in both forms has the same tokens.
    """
    chat = parse_chat(
        {
            "messages": [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                },
                {"role": "tool", "content": "2"},
            ]
        },
        _SETTINGS,
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    response = parse_response({"instructions": "You help.", "input": items}, _SETTINGS)
    assert response.prompt == chat.prompt
    with pytest.raises(ApiError, match="previous_response_id"):
        parse_response({"input": "hi", "previous_response_id": "r"}, _SETTINGS)


_LEAVES = st.one_of(
    st.just({"type": "string"}),
    st.integers(0, 9).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}),
    st.sampled_from(["date", "date-time", "uuid", "email"]).map(
        lambda form: {"type": "string", "format": form}
    ),
    st.tuples(st.integers(-9, 9), st.integers(2, 9)).map(
        lambda n: {"type": "integer", "exclusiveMinimum": n[0], "maximum": n[0] + n[1]}
    ),
    st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(
        lambda n: {"type": "number", "minimum": n[0], "exclusiveMaximum": n[0] + n[1]}
    ),
    st.integers(1, 5).map(lambda n: {"type": "integer", "multipleOf": n, "minimum": 7}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"enum": ["a", 1, None]}),
    st.just({"const": {"x": [1]}}),
    st.just({"$ref": "#/$defs/node"}),
    st.just({"type": ["null", "string"]}),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:2],
                "additionalProperties": False,
            }
        ),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda n: {"type": "array", "items": n[0], "minItems": n[1]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(_SCHEMAS)
def test_instances_are_valid(schema):
    """
    A JSON schema validator accepts what is made of a schema, and it is JSON.
    """
    jsonschema = pytest.importorskip("jsonschema")
    node = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["name"],
    }
    schema = {**schema, "$defs": {"node": node}}
    made = instance(schema, lambda values: values[-1])
    jsonschema.validate(json.loads(json.dumps(made)), schema)


def test_schemas_that_cannot_be_made_are_errors():
    """
    Patterns, endless requirements and references to nothing are named.
    """
    first = lambda values: values[0]  # noqa: E731
    with pytest.raises(ApiError, match="pattern"):
        instance({"type": "string", "pattern": "^a"}, first)
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(ApiError, match="deeper than"):
        instance(endless, first)
    with pytest.raises(ApiError, match="not there"):
        instance({"$ref": "#/$defs/none"}, first)
    with pytest.raises(ApiError, match="never end"):
        instance({"$ref": "#"}, first)
    many = {"type": "array", "minItems": 10**9, "items": {"type": "null"}}
    with pytest.raises(ApiError, match="more than"):
        instance(many, first)
    with pytest.raises(ApiError, match="more than"):
        instance({"type": "string", "minLength": 10**9}, first)
    doubling = {
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
        | {"d30": {"type": "null"}},
        "$ref": "#/$defs/d0",
    }
    with pytest.raises(ApiError, match="more than"):
        instance(doubling, first)
    with pytest.raises(ApiError, match="out of range"):
        instance({"type": "number", "minimum": 10**400}, first)

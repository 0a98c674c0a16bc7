"""Whatever a client sends, a body is understood or refused with a reason."""

import contextlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from scout_server.embedded.errors import ApiError
from scout_server.embedded.parse import parse_chat, parse_completion, parse_response
from scout_server.embedded.settings import EmbeddedSettings

_SETTINGS = EmbeddedSettings(kv_blocks=64)
_WORDS = st.sampled_from(
    ["user", "system", "tool", "function", "text", "object", "string", "array", "integer", "x",
     "json_schema", "json_object", "auto", "required", "message", "function_call", "#", "#/x",
     "[[tool x {}]]", "[[tokens 9]]", "[[pick x]]", "[[reply {}]]", "\ud800", ""]
)  # fmt: skip
_KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "arguments", "parameters", "tool_calls",
     "json_schema", "schema", "properties", "required", "enum", "items", "minItems", "anyOf",
     "allOf", "$ref", "minimum", "maximum", "multipleOf", "exclusiveMinimum", "format", "input",
     "output", "choice", "json", "x"]
)  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-9, 9) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": _WORDS}),
    min_size=1,
    max_size=3,
)
_FIELDS = [
    "tools", "tool_choice", "response_format", "structured_outputs", "guided_json", "stop", "n",
    "guided_choice", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream",
    "stream_options", "model", "cache_salt", "text", "instructions",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    asked=st.sampled_from(["messages", "input", "prompt"]),
    given_=_MESSAGES | _JSON,
    more=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3),
)
def test_a_body_is_a_call_or_an_api_error(asked, given_, more):
    """
    Every JSON object gives a reply of at least one token within the limits, or an ApiError.
    """
    parse = {"messages": parse_chat, "input": parse_response, "prompt": parse_completion}[asked]
    with contextlib.suppress(ApiError):
        call = parse({asked: given_, **more}, _SETTINGS)
        assert 1 <= len(call.reply.tokens)
        assert len(call.prompt) + len(call.reply.tokens) <= _SETTINGS.limit_tokens()
        assert call.prompt
        json.dumps([call.reply.text(0, 10**6), [c.arguments for c in call.reply.calls]])

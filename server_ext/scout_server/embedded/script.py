"""What a scripted model answers: directives, schemas, tool choices, else a filler text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from scout_server.embedded.errors import ApiError
from scout_server.embedded.prompt import END, Tool, ToolCall, call_tokens, canonical
from scout_server.embedded.schema import instance
from scout_server.embedded.tokens import pieces, tokenize
from scout_server.policy.facts import Finish

__all__ = ["Reply", "Wish", "check_forced", "write"]

_CALL = re.compile(r"\[\[tool (\S{1,128}?) (\{.*?\})\]\]", re.DOTALL)
_BARE_CALL = re.compile(r"\[\[tool (\S{1,128}?)\]\]")
_TEXT = re.compile(r"\[\[(?:reply|say) (.*?)\]\]", re.DOTALL)
_TOKENS = re.compile(r"\[\[tokens (\d{1,7})\]\]")
_PICK = re.compile(r"\[\[pick (.*?)\]\]", re.DOTALL)
_WORDS = [
    *("the", "agent", "reads", "what", "it", "was", "given", "and", "notes", "a", "plan", "with"),
    *("three", "short", "steps", "then", "checks", "each", "result", "against", "task", "before"),
    *("going", "on", "because", "later", "step", "needs", "an", "earlier", "one", "to", "be"),
    *("right", "so", "answer", "stays", "brief", "every", "number", "in", "can", "found", "text"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request asks of its reply."""

    last_user: str = ""
    """Text of the last user message: the place of directives."""
    no_tools: bool = False
    """No tool is called: the last message is a tool's result, or the client said so."""
    tools: Sequence[Tool] = ()
    forced_tool: str | None = None
    """Name of the tool that must be called; empty: any one."""
    schema: object = None
    """JSON schema of the reply; None: free text."""
    choices: Sequence[str] = ()
    """The reply is one of these, where there are any."""
    stop: Sequence[str] = ()
    max_tokens: int = 1
    filler_tokens: int = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply as it will come out, token by token."""

    tokens: Sequence[int]
    finish: Finish
    pieces: Sequence[str] = ()
    """Text of each token; a tool call and the end of the message have none."""
    calls: tuple[ToolCall, ...] = field(default=())

    def text(self, start: int, end: int) -> str:
        """Return the text of the tokens from *start* up to *end*."""
        return "".join(self.pieces[start:end])


def write(wish: Wish, prompt: Sequence[int]) -> Reply:
    """Return the reply to *prompt*: the same for the same prompt and wish."""
    seed = xxhash.xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in prompt[-4096:]))
    calls = _calls(wish, seed)
    if calls:
        tokens = [*call_tokens((call.name, call.arguments) for call in calls), END]
        if len(tokens) > wish.max_tokens:
            return Reply(tokens=tokens[: wish.max_tokens], finish=Finish.LENGTH)
        return Reply(tokens=tokens, finish=Finish.TOOL_CALLS, calls=calls)
    text = _text(wish, seed)
    for stop in wish.stop:
        text = text.split(stop, 1)[0] if stop else text
    parts = pieces(text)
    tokens = [*tokenize(text), END]
    if len(tokens) > wish.max_tokens:
        cut = wish.max_tokens
        return Reply(tokens=tokens[:cut], pieces=parts[:cut], finish=Finish.LENGTH)
    return Reply(tokens=tokens, pieces=parts, finish=Finish.STOP)


def _found(directive: re.Pattern[str], text: str) -> list[str]:
    # Behind the last end there is none: without this, a hostile text takes long to search.
    return directive.findall(text, 0, text.rfind("]]") + 2)


def _scripted_calls(text: str) -> list[tuple[str, str]]:
    """Return the tool calls that *text* asks for, in its order."""
    full = [(m.start(), m[1], m[2]) for m in _CALL.finditer(text, 0, text.rfind("}]]") + 3)]
    bare = [(m.start(), m[1], "{}") for m in _BARE_CALL.finditer(text)]
    return [(name, arguments) for _, name, arguments in sorted(full + bare)]


def _chooser(wish: Wish, seed: int) -> "_Chooser":
    picks = [word for text in _found(_PICK, wish.last_user) for word in text.split()]
    return _Chooser(picks, seed)


class _Chooser:
    """Takes what the script picks, else one by hash."""

    def __init__(self, picks: Sequence[str], seed: int) -> None:
        self._picks = picks
        self._seed = seed
        self._asked = 0

    def __call__(self, values: Sequence[object]) -> object:
        for pick in self._picks:
            for value in values:
                if str(value) == pick:
                    return value
        self._asked += 1
        digest = xxhash.xxh3_64_intdigest(self._asked.to_bytes(4, "little"), self._seed)
        return values[digest % len(values)]


def _calls(wish: Wish, seed: int) -> tuple[ToolCall, ...]:
    offered = {tool.name: tool for tool in wish.tools}
    scripted: list[tuple[str, str]] = []
    for name, arguments in _scripted_calls(wish.last_user):
        # A conversation that hands over to another agent keeps its directives: skip foreign ones.
        if not offered or name in offered:
            scripted.append((name, arguments))
    if wish.forced_tool is not None:
        name = wish.forced_tool or next((n for n, _ in scripted), "")
        chooser = _chooser(wish, seed)
        name = name or str(chooser(sorted(offered)))
        given = next((a for n, a in scripted if n == name), None)
        if given is None:
            given = canonical(instance(offered[name].parameters, chooser))
        scripted = [(name, given)]
    elif wish.no_tools or (not offered and wish.schema is not None):
        return ()
    return tuple(
        ToolCall(call_id=f"call_{seed & 0xFFFFFFFF:08x}{index:02d}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate(scripted)
    )


def _text(wish: Wish, seed: int) -> str:
    said = _found(_TEXT, wish.last_user)
    text: str | None = said[-1] if said else None
    chooser = _chooser(wish, seed)
    if wish.choices:
        return text if text and text in wish.choices else str(chooser(wish.choices))
    if wish.schema is not None:
        given: Mapping[str, object] = {}
        if text is not None:
            try:
                parsed = json.loads(text)
            except (ValueError, RecursionError):
                parsed = None
            given = parsed if isinstance(parsed, dict) else {}
        return json.dumps(instance(wish.schema, chooser, given))
    wanted = _TOKENS.findall(wish.last_user)
    if text is not None and not wanted:
        return text
    # One token of a reply is its end.
    count = (int(wanted[-1]) if wanted else wish.filler_tokens) - 1
    if count > wish.max_tokens:
        count = wish.max_tokens
    return _filler(text or "", count, seed)


def _filler(text: str, count: int, seed: int) -> str:
    """Return *text* made *count* tokens long with words that *seed* chooses."""
    parts = pieces(text)
    at = seed
    while len(parts) < count:
        at = (at * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        word = _WORDS[(at >> 33) % len(_WORDS)]
        parts += pieces(f" {word}" if parts else word)
    return "".join(parts[:count])


def check_forced(name: str, tools: Sequence[Tool]) -> None:
    """ApiError unless *name* is a tool of *tools* (empty: any)."""
    known = [tool.name for tool in tools]
    if (name and name not in known) or not known:
        msg = f"tool_choice names {name!r}; tools offered: {', '.join(known) or 'none'}"
        raise ApiError(msg, param="tool_choice")

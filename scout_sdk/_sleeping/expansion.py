"""What shell words become: variables, braces, seq and arithmetic, where they are constant."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

from scout_sdk._sleeping.span import Unreadable
from scout_sdk._sleeping.words import Arithmetic, Literal, Part, Substitution, Variable, Word

__all__ = ["MAX_ITEMS", "arithmetic", "expand", "text_of"]

MAX_ITEMS = 10_000
"""Words that one loop may run over."""

_RANGE = re.compile(r"\{(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?\}")
_CHOICE = re.compile(r"\{([^{},]*(?:,[^{},]*)+)\}")
_SEQ = re.compile(r"\s*seq((?:\s+-?\d{1,9}){1,3})\s*")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def text_of(word: Word, variables: Mapping[str, str | None]) -> str | None:
    """Return the text of *word*, or None where only a shell can tell."""
    texts = [_text(part, variables) for part in word.parts]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _text(part: Part, variables: Mapping[str, str | None]) -> str | None:
    if isinstance(part, Literal):
        return part.text
    if isinstance(part, Variable):
        value = variables.get(part.name) if part.name is not None else None
        return part.default if value is None else value
    if isinstance(part, Arithmetic):
        value_ = arithmetic(part.source, variables)
        return None if value_ is None else str(value_)
    return None


def expand(word: Word, variables: Mapping[str, str | None]) -> list[str | None] | None:
    """Return the words that *word* becomes; None: only a shell can tell how many."""
    if len(word.parts) == 1:
        (part,) = word.parts
        if isinstance(part, Substitution):
            return _seq(part.source, variables)
        if isinstance(part, Variable):
            value = _text(part, variables)
            return None if value is None else list(value.split())
    if any(
        isinstance(part, Literal) and not part.quoted and "{" in part.text for part in word.parts
    ):
        return _braces(word, variables)
    text = text_of(word, variables)
    if text is None:
        return None
    globs = any(
        isinstance(part, Literal) and not part.quoted and any(c in part.text for c in "*?[")
        for part in word.parts
    )
    return None if globs else [text]


def _braces(word: Word, variables: Mapping[str, str | None]) -> list[str | None] | None:
    text = text_of(word, variables)
    if text is None:
        # `{1..$N}` stays as it is in bash; what `{a,$b}` becomes depends on the variable.
        return None
    if any(isinstance(part, Literal) and part.quoted and "{" in part.text for part in word.parts):
        return [text]
    if match := _RANGE.search(text):
        numbers = _numbers(int(match[1]), int(match[2]), int(match[3] or 1))
        return [f"{text[: match.start()]}{n}{text[match.end() :]}" for n in numbers]
    if match := _CHOICE.search(text):
        chosen = match[1].split(",")
        return [f"{text[: match.start()]}{one}{text[match.end() :]}" for one in chosen]
    return [text]


def _seq(source: str, variables: Mapping[str, str | None]) -> list[str | None] | None:
    given = _NAME.sub(
        lambda m: (variables.get(m[1]) or m[0]) if m[0].startswith("$") else m[0], source
    )
    match = _SEQ.fullmatch(given)
    if match is None:
        return None
    numbers = [int(n) for n in match[1].split()]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if step == 0 or (numbers[-1] - first) * step < 0:
        return []
    return [str(n) for n in _numbers(first, numbers[-1], step)]


def _numbers(first: int, last: int, step: int) -> range:
    size = max(1, abs(step))
    numbers = range(first, last + 1, size) if last >= first else range(first, last - 1, -size)
    if len(numbers) > MAX_ITEMS:
        raise Unreadable("too many rounds")
    return numbers


def arithmetic(source: str, variables: Mapping[str, str | None]) -> int | None:
    """Return the value of a constant shell expression, or None."""
    if len(source) > 200:
        return None

    def known(match: re.Match[str]) -> str:
        value = variables.get(match[1])
        return value if value is not None and re.fullmatch(r"-?\d{1,12}", value) else "?"

    try:
        tree = ast.parse(_NAME.sub(known, source).strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if abs(value) < 10**12 else None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not constant")

"""Time of a PowerShell script, as far as Start-Sleep and constant loops tell."""

import math
import re

from scout_sdk._sleeping.span import NOTHING, UNKNOWN, Budget, Span, Unreadable

__all__ = ["powershell_span"]

_SLEEP = re.compile(
    r"(?:start-sleep|sleep)"
    r"(?:\s+-(?P<unit>s|sec|second|seconds|m|ms|milliseconds?|duration))?"
    r"[\s:]+(?P<value>\(?[\d.+*\s-]+\)?|'[\d.]+'|\"[\d.]+\")",
    re.IGNORECASE,
)
_ANY_SLEEP = re.compile(r"(?:start-sleep|sleep)\b", re.IGNORECASE)
_RANGE = r"\(?\s*(-?\d{1,6})\s*\.\.\s*(-?\d{1,6})\s*\)?"
_EACH = re.compile(
    rf"{_RANGE}\s*\|\s*(?:foreach-object|foreach|%)\s*(?:-process\s*)?(?=\{{)", re.IGNORECASE
)
_FOREACH = re.compile(rf"foreach\s*\(\s*\$\w+\s+in\s+{_RANGE}\s*\)\s*(?=\{{)", re.IGNORECASE)
_FOR = re.compile(
    r"for\s*\(\s*\$(\w+)\s*=\s*(-?\d{1,6})\s*;\s*\$\1\s*-(lt|le)\s*(-?\d{1,6})\s*;"
    r"\s*\$\1\s*(?:\+\+|\+=\s*1)\s*\)\s*(?=\{)",
    re.IGNORECASE,
)
_BLOCK = re.compile(
    r"(?:if|else|elseif|while|do|switch|try|catch|finally|function)\b", re.IGNORECASE
)
_INSTANT = re.compile(
    r"(?:write-(?:host|output|verbose|error)|echo|get-date|set-location|cd|\$\w+\s*=\s*[\w'\". -]*$"
    r"|exit|return|['\"])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")


def powershell_span(source: str, budget: Budget) -> Span:
    """Return the time of *source*. Raises Unreadable."""
    total = NOTHING
    with budget:
        for statement in _statements(source):
            budget.step()
            total = total.then(_statement(statement, budget))
    return total


def _statements(source: str) -> list[str]:
    """Return the statements of *source*, split where no quote or bracket is open."""
    found: list[str] = []
    start = depth = 0
    quote = ""
    for at, char in enumerate(source):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "{(":
            depth += 1
        elif char in "})":
            depth -= 1
            if depth < 0:
                raise Unreadable("a bracket too many")
        elif depth == 0 and (char in ";\n" or source.startswith("&&", at)):
            found.append(source[start:at])
            start = at + 1
    if quote or depth:
        raise Unreadable("an open quote or bracket")
    found.append(source[start:])
    cleaned = (statement.strip().removeprefix("&").strip() for statement in found)
    return [statement for statement in cleaned if statement and not statement.startswith("#")]


def _statement(statement: str, budget: Budget) -> Span:
    if sleeping := _SLEEP.fullmatch(statement):
        return _sleep(sleeping)
    if _ANY_SLEEP.match(statement):
        return Span(0.0, math.inf, True)
    for loop in (_EACH, _FOREACH, _FOR):
        if found := loop.match(statement):
            body, rest = _braces(statement, found.end())
            once = powershell_span(body, budget)
            rounds = _rounds(loop, found)
            after = powershell_span(rest, budget) if rest else NOTHING
            return Span(once.low * rounds, once.high * rounds if rounds else 0.0, once.said).then(
                after
            )
    if statement.startswith("{") and statement.endswith("}"):
        return powershell_span(statement[1:-1], budget)
    if _BLOCK.match(statement):
        return Span(0.0, math.inf, _ANY_SLEEP.search(statement) is not None)
    return NOTHING if _INSTANT.match(statement) and "|" not in statement else UNKNOWN


def _rounds(loop: re.Pattern[str], found: re.Match[str]) -> int:
    if loop is _FOR:
        last = int(found[4]) + (found[3].lower() == "le")
        return max(0, last - int(found[2]))
    return abs(int(found[2]) - int(found[1])) + 1


def _braces(text: str, at: int) -> tuple[str, str]:
    """Return what stands in the braces that open at *at*, and what follows them."""
    depth, quote = 0, ""
    for end in range(at, len(text)):
        char = text[end]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[at + 1 : end], text[end + 1 :].strip().lstrip(";").strip()
    raise Unreadable("an open brace")


def _sleep(found: re.Match[str]) -> Span:
    value = found["value"].strip().strip("'\"").strip("()").strip()
    factors = [factor.strip() for factor in value.split("*")]
    if not all(_NUMBER.fullmatch(factor) for factor in factors):
        return Span(0.0, math.inf, True)
    seconds = math.prod(map(float, factors))
    if (found["unit"] or "s").lower().startswith("m"):
        seconds /= 1000.0
    return Span(seconds, seconds, True)

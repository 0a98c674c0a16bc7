"""A POSIX shell's words and operators, with a few of bash's: text in, tokens out."""

import re
from dataclasses import dataclass, field

from scout_sdk._sleeping.span import Unreadable

__all__ = [
    "Arithmetic",
    "Literal",
    "Operator",
    "Part",
    "Substitution",
    "Token",
    "Variable",
    "Word",
    "tokens",
]

_OPERATORS = ("&&", "||", ";;", "|&", ";", "&", "|", "(", ")", "\n")
_REDIRECTIONS = ("<<<", "<<-", "<<", "&>>", "&>", ">>", ">&", "<&", ">|", "<>", ">", "<")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_NESTING = 24


@dataclass(frozen=True, slots=True)
class Literal:
    """Text as it stands."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """The value of a variable; *name* None: something that only a shell can tell."""

    name: str | None
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Substitution:
    """The output of the commands in *source*."""

    source: str


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The value of the expression in *source*."""

    source: str


Part = Literal | Variable | Substitution | Arithmetic


@dataclass(slots=True)
class Word:
    """One word of a command."""

    parts: list[Part] = field(default_factory=list)
    stdin: str | None = None
    """Not a word but what a here-document gives to the command."""

    @property
    def plain(self) -> str | None:
        """Its text if it is nothing but unquoted text: what a keyword must be."""
        if len(self.parts) == 1:
            part = self.parts[0]
            if isinstance(part, Literal) and not part.quoted:
                return part.text
        return None


@dataclass(frozen=True, slots=True)
class Operator:
    """What stands between commands."""

    text: str


Token = Word | Operator


def tokens(source: str) -> list[Token]:
    """Return the tokens of *source*, without comments and redirections. Raises Unreadable."""
    return _Lexer(source.replace("\\\r\n", "").replace("\\\n", "")).run()


class _Lexer:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._out: list[Token] = []
        self._documents: list[tuple[Word, str, bool]] = []

    def run(self) -> list[Token]:
        source, end = self._source, len(self._source)
        while self._at < end:
            char = source[self._at]
            if char in " \t\r":
                self._at += 1
            elif char == "#":
                stop = source.find("\n", self._at)
                self._at = end if stop < 0 else stop
            elif redirection := self._redirection():
                self._skip_target(redirection)
            elif source.startswith("((", self._at) and (word := self._expression()):
                self._out.append(word)
            elif operator := next((o for o in _OPERATORS if source.startswith(o, self._at)), None):
                self._at += len(operator)
                self._out.append(Operator(operator))
                if operator == "\n":
                    self._read_documents()
            else:
                word = self._word()
                fd = word.plain
                if not (fd and fd.isdigit() and self._at < end and source[self._at] in "<>"):
                    self._out.append(word)
        return self._out

    def _redirection(self) -> str | None:
        source, at = self._source, self._at
        if source.startswith(("<(", ">("), at):
            return None
        return next((r for r in _REDIRECTIONS if source.startswith(r, at)), None)

    def _skip_target(self, redirection: str) -> None:
        self._at += len(redirection)
        source = self._source
        while self._at < len(source) and source[self._at] in " \t":
            self._at += 1
        if self._at >= len(source) or source[self._at] in "\n;":
            raise Unreadable("a redirection to nowhere")
        target = self._word()
        if redirection in ("<<", "<<-"):
            delimiter = "".join(part.text for part in target.parts if isinstance(part, Literal))
            document = Word()
            self._documents.append((document, delimiter, redirection == "<<-"))
            self._out.append(document)
        elif redirection == "<<<":
            texts = [part.text for part in target.parts if isinstance(part, Literal)]
            whole = len(texts) == len(target.parts)
            self._out.append(Word(stdin="".join(texts) if whole else ""))

    def _read_documents(self) -> None:
        for document, delimiter, tabs in self._documents:
            lines: list[str] = []
            while self._at < len(self._source):
                stop = self._source.find("\n", self._at)
                stop = len(self._source) if stop < 0 else stop
                line = self._source[self._at : stop]
                self._at = stop + 1
                line = line.lstrip("\t") if tabs else line
                if line.rstrip("\r") == delimiter:
                    break
                lines.append(line)
            document.stdin = "\n".join(lines)
        self._documents.clear()

    def _expression(self) -> Word | None:
        """Read `((...))`; None, and nothing read: two parentheses of subshells."""
        start = self._at
        inner = self._balanced(start + 2)
        if self._source.startswith(")", self._at):
            self._at += 1
            return Word([Arithmetic(inner)])
        self._at = start
        return None

    def _word(self) -> Word:
        source, end = self._source, len(self._source)
        word, text = Word(), ""
        while self._at < end:
            char = source[self._at]
            if source.startswith(("<(", ">("), self._at) and not text and not word.parts:
                inner = self._balanced(self._at + 2)
                word.parts += Substitution(inner), Variable(None)
            elif char in " \t\r\n;&|()<>":
                break
            elif char in "'\"`$":
                if text:
                    word.parts.append(Literal(text))
                    text = ""
                self._quoted_or_expanded(char, word.parts, quoted=False)
            elif char == "\\":
                if text:
                    word.parts.append(Literal(text))
                    text = ""
                word.parts.append(Literal(source[self._at + 1 : self._at + 2], quoted=True))
                self._at += 2
            else:
                text += char
                self._at += 1
        if text:
            word.parts.append(Literal(text))
        return word

    def _quoted_or_expanded(self, char: str, parts: list[Part], *, quoted: bool) -> None:
        source, at = self._source, self._at
        if char == "'":
            stop = source.find("'", at + 1)
            if stop < 0:
                raise Unreadable("an open quote")
            parts.append(Literal(source[at + 1 : stop], quoted=True))
            self._at = stop + 1
        elif char == '"':
            self._at += 1
            self._double_quoted(parts)
        elif char == "`":
            stop = source.find("`", at + 1)
            if stop < 0:
                raise Unreadable("an open backquote")
            parts.append(Substitution(source[at + 1 : stop]))
            self._at = stop + 1
        elif source.startswith("$((", at):
            inner = self._balanced(at + 3)
            if not source.startswith(")", self._at):
                raise Unreadable("an open expression")
            self._at += 1
            parts.append(Arithmetic(inner))
        elif source.startswith("$(", at):
            parts.append(Substitution(self._balanced(at + 2)))
        elif source.startswith("${", at):
            stop = source.find("}", at)
            if stop < 0:
                raise Unreadable("an open brace")
            name, _, default = source[at + 2 : stop].partition(":-")
            known = _NAME.fullmatch(name) is not None
            parts.append(Variable(name if known else None, default or None))
            self._at = stop + 1
        elif not quoted and source.startswith("$'", at):
            self._at += 1
            self._quoted_or_expanded("'", parts, quoted=True)
        elif name_match := _NAME.match(source, at + 1):
            parts.append(Variable(name_match.group()))
            self._at = name_match.end()
        elif at + 1 < len(source) and source[at + 1] in "?!$@*#-0123456789":
            parts.append(Variable(None))
            self._at += 2
        else:
            parts.append(Literal("$", quoted=quoted))
            self._at += 1

    def _double_quoted(self, parts: list[Part]) -> None:
        source, text, before = self._source, "", len(parts)
        while self._at < len(source):
            char = source[self._at]
            if char == '"':
                self._at += 1
                if text or len(parts) == before:
                    parts.append(Literal(text, quoted=True))
                return
            if char == "\\" and source[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\"):
                text += source[self._at + 1]
                self._at += 2
            elif char in "`$":
                if text:
                    parts.append(Literal(text, quoted=True))
                    text = ""
                self._quoted_or_expanded(char, parts, quoted=True)
            else:
                text += char
                self._at += 1
        raise Unreadable("an open quote")

    def _balanced(self, start: int, nesting: int = 0) -> str:
        """Return what stands from *start* to its closing parenthesis; move behind that."""
        if nesting > _MAX_NESTING:
            raise Unreadable("nested too deeply")
        source, at, depth, double = self._source, start, 1, False
        while at < len(source):
            char = source[at]
            if char == "\\":
                at += 1
            elif char == '"':
                double = not double
            elif char == "'" and not double:
                at = source.find("'", at + 1)
                if at < 0:
                    break
            elif double and source.startswith("$(", at):
                self._balanced(at + 2, nesting + 1)
                at = self._at - 1
            elif not double and char == "(":
                depth += 1
            elif not double and char == ")":
                depth -= 1
                if depth == 0:
                    self._at = at + 1
                    return source[start:at]
            at += 1
        raise Unreadable("an open parenthesis")

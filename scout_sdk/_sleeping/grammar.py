"""The grammar of shell scripts: tokens in, a tree out."""

from dataclasses import dataclass

from scout_sdk._sleeping.span import Budget, Unreadable
from scout_sdk._sleeping.words import Arithmetic, Operator, Token, Word, tokens

__all__ = [
    "Case",
    "Chain",
    "Counted",
    "For",
    "Function",
    "If",
    "Job",
    "Node",
    "Pipeline",
    "Sequence",
    "Simple",
    "Subshell",
    "While",
    "leaves",
    "read",
]


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and a command with its arguments."""

    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands that run at the same time, each reading the one before."""

    stages: tuple["Node", ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands joined by && and ||."""

    first: "Node"
    rest: tuple[tuple[str, "Node"], ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A command in the background."""

    node: "Node"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Subshell:
    """Commands in a shell of their own."""

    body: Sequence


@dataclass(frozen=True, slots=True)
class For:
    """A loop over words; None: over arguments that nobody here knows."""

    name: str
    words: tuple[Word, ...] | None
    body: Sequence


@dataclass(frozen=True, slots=True)
class Counted:
    """A loop as in C; *head* is what stands in its parentheses."""

    head: str
    body: Sequence


@dataclass(frozen=True, slots=True)
class While:
    """A loop with a condition."""

    condition: Sequence
    until: bool
    body: Sequence


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with their bodies, and what happens otherwise."""

    branches: tuple[tuple[Sequence, Sequence], ...]
    otherwise: Sequence


@dataclass(frozen=True, slots=True)
class Case:
    """Bodies of which at most one runs."""

    bodies: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A definition."""

    name: str
    body: "Node"


Node = (
    Simple
    | Pipeline
    | Chain
    | Job
    | Sequence
    | Subshell
    | For
    | Counted
    | While
    | If
    | Case
    | Function
)

_LEAVING = frozenset({"break", "continue", "exit", "return"})


def leaves(node: Node) -> bool:
    """Tell whether *node* holds a command that leaves a loop, or a round of it, early."""
    match node:
        case Simple():
            return bool(node.words) and node.words[0].plain in _LEAVING
        case Sequence():
            return any(map(leaves, node.nodes))
        case Pipeline():
            return any(map(leaves, node.stages))
        case Chain():
            return leaves(node.first) or any(leaves(then) for _, then in node.rest)
        case If():
            bodies = [part for branch in node.branches for part in branch]
            return any(map(leaves, [*bodies, node.otherwise]))
        case Case():
            return any(map(leaves, node.bodies))
        case For() | Counted() | While():
            return leaves(node.body)
        case _:
            return False


_STARTS = frozenset({"{", "for", "while", "until", "if", "case", "function"})
_CLOSERS = frozenset({"then", "do", "done", "fi", "else", "elif", "esac", "}"})


def read(source: str, budget: Budget) -> Sequence:
    """Return the tree of *source*. Raises Unreadable."""
    reader = _Reader(tokens(source), budget)
    tree = reader.sequence()
    if reader.peek() is not None:
        raise Unreadable("something is left over")
    return tree


class _Reader:
    def __init__(self, given: list[Token], budget: Budget) -> None:
        self._tokens = given
        self._budget = budget
        self._at = 0

    def peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _operator(self, *texts: str) -> str | None:
        token = self.peek()
        if isinstance(token, Operator) and token.text in texts:
            self._at += 1
            return token.text
        return None

    def _keyword(self, *texts: str) -> str | None:
        token = self.peek()
        if isinstance(token, Word) and token.plain in texts:
            self._at += 1
            return token.plain
        return None

    def _need(self, *keywords: str) -> str:
        self._breaks()
        found = self._keyword(*keywords)
        if found is None:
            raise Unreadable(f"no {' or '.join(keywords)}")
        return found

    def _need_operator(self, text: str) -> None:
        if not self._operator(text):
            raise Unreadable(f"no {text}")

    def _breaks(self) -> None:
        while self._operator(";", "\n"):
            pass

    def _newlines(self) -> None:
        while self._operator("\n"):
            pass

    def _at_end(self) -> bool:
        token = self.peek()
        if isinstance(token, Operator):
            return token.text in (")", ";;")
        return token is None or token.plain in _CLOSERS

    def sequence(self) -> Sequence:
        nodes: list[Node] = []
        self._breaks()
        while not self._at_end():
            node = self._chain()
            if self._operator("&"):
                node = Job(node)
            elif not self._at_end() and not self._operator(";", "\n"):
                raise Unreadable("two commands without anything between")
            nodes.append(node)
            self._breaks()
        return Sequence(tuple(nodes))

    def _chain(self) -> Node:
        first = self._pipeline()
        rest: list[tuple[str, Node]] = []
        while joint := self._operator("&&", "||"):
            self._newlines()
            rest.append((joint, self._pipeline()))
        return Chain(first, tuple(rest)) if rest else first

    def _pipeline(self) -> Node:
        negated = False
        while word := self._keyword("!", "time"):
            negated ^= word == "!"
        stages = [self._command()]
        while self._operator("|", "|&"):
            self._newlines()
            stages.append(self._command())
        return Pipeline(tuple(stages), negated) if len(stages) > 1 or negated else stages[0]

    def _command(self) -> Node:
        self._budget.step()
        with self._budget:
            if self._operator("("):
                body = self.sequence()
                self._need_operator(")")
                return self._without_input(Subshell(body))
            keyword = self._keyword(*_STARTS)
            if keyword is None:
                return self._simple()
            node = self._compound(keyword)
            return node if isinstance(node, Function) else self._without_input(node)

    def _without_input(self, node: Node) -> Node:
        """Skip the here-documents of a compound command."""
        while isinstance(token := self.peek(), Word) and token.stdin is not None:
            self._at += 1
        return node

    def _compound(self, keyword: str) -> Node:
        if keyword == "{":
            body = self.sequence()
            self._need("}")
            return body
        if keyword == "for":
            return self._for()
        if keyword in ("while", "until"):
            condition = self.sequence()
            return While(condition, keyword == "until", self._loop_body())
        if keyword == "if":
            return self._if()
        if keyword == "case":
            return self._case()
        name = self._name()
        if self._operator("("):
            self._need_operator(")")
        self._newlines()
        return Function(name, self._command())

    def _name(self) -> str:
        token = self.peek()
        name = token.plain if isinstance(token, Word) else None
        if name is None:
            raise Unreadable("no name")
        self._at += 1
        return name

    def _loop_body(self) -> Sequence:
        self._need("do")
        body = self.sequence()
        self._need("done")
        return body

    def _for(self) -> Node:
        token = self.peek()
        if isinstance(token, Word) and token.parts and isinstance(token.parts[0], Arithmetic):
            self._at += 1
            return Counted(token.parts[0].source, self._loop_body())
        name = self._name()
        words: list[Word] | None = None
        if self._keyword("in"):
            words = []
            while isinstance(token := self.peek(), Word):
                words.append(token)
                self._at += 1
        return For(name, None if words is None else tuple(words), self._loop_body())

    def _if(self) -> If:
        branches: list[tuple[Sequence, Sequence]] = []
        otherwise = Sequence(())
        keyword = "elif"
        while keyword == "elif":
            condition = self.sequence()
            self._need("then")
            branches.append((condition, self.sequence()))
            keyword = self._need("elif", "else", "fi")
        if keyword == "else":
            otherwise = self.sequence()
            self._need("fi")
        return If(tuple(branches), otherwise)

    def _case(self) -> Case:
        bodies: list[Sequence] = []
        if not isinstance(self.peek(), Word):
            raise Unreadable("no subject")
        self._at += 1
        self._need("in")
        self._breaks()
        while not self._keyword("esac"):
            self._operator("(")
            while not self._operator(")"):
                if self.peek() is None:
                    raise Unreadable("an open case")
                self._at += 1
            bodies.append(self.sequence())
            if not self._operator(";;") and not isinstance(self.peek(), Word):
                raise Unreadable("an open case")
            self._breaks()
        return Case(tuple(bodies))

    def _simple(self) -> Node:
        words: list[Word] = []
        while isinstance(token := self.peek(), Word):
            words.append(token)
            self._at += 1
        if not words:
            raise Unreadable("no command")
        name = words[0].plain
        if self._operator("("):
            self._need_operator(")")
            if len(words) != 1 or name is None:
                raise Unreadable("parentheses inside a command")
            self._newlines()
            return Function(name, self._command())
        return Simple(tuple(words))

"""Time of a shell script: a walk over its tree that adds up what sleeps."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from scout_sdk._sleeping import grammar
from scout_sdk._sleeping.expansion import MAX_ITEMS, expand, text_of
from scout_sdk._sleeping.span import NOTHING, Budget, Span, Status, Unreadable, either, parallel
from scout_sdk._sleeping.words import Arithmetic, Literal, Substitution, Word

__all__ = ["Runner", "Shell"]

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_COUNTED = re.compile(
    r"\s*(?:int\s+)?(\w+)\s*=\s*(-?\d+)\s*;\s*\1\s*(<=?)\s*(-?\d+)\s*;\s*"
    r"(?:\1\+\+|\+\+\1|\1\s*\+=\s*(\d+))\s*"
)
_MANY = 64
_YES, _NO, _EITHER = Status.YES, Status.NO, Status.EITHER
_RUNS = {
    "&&": {_YES: _YES, _NO: _NO, Status.LIKELY: _YES, _EITHER: _EITHER},
    "||": {_YES: _NO, _NO: _YES, Status.LIKELY: _EITHER, _EITHER: _EITHER},
}
_NEGATED = {_YES: _NO, _NO: _YES, Status.LIKELY: _EITHER, _EITHER: _EITHER}

Runner = Callable[["Shell", list[str | None], str | None], tuple[Span, Status]]
"""Tells the time of one command (name and arguments, standard input), and if it succeeds.

None as an argument: only a shell can tell it."""


@dataclass(slots=True)
class Shell:
    """
    One shell that walks over a script; `clock` is the time so far.

    Where nothing tells, commands are taken to succeed.
    """

    runner: Runner
    budget: Budget
    clock: Span = NOTHING
    variables: dict[str, str | None] = field(default_factory=dict)
    functions: dict[str, grammar.Node] = field(default_factory=dict)
    jobs: list[Span] = field(default_factory=list)
    ended: bool = False

    def child(self) -> "Shell":
        """Return a subshell: the same variables, its own clock and jobs."""
        return Shell(
            self.runner,
            self.budget,
            variables=dict(self.variables),
            functions=dict(self.functions),
        )

    def run(self, source: str) -> Status:
        """Walk over *source*. Raises Unreadable."""
        with self.budget:
            return self._walk(grammar.read(source, self.budget))

    def _spend(self, span: Span) -> None:
        self.clock = self.clock.then(span)

    def _walk(self, node: grammar.Node) -> Status:
        """Walk over *node* and return whether it succeeds."""
        self.budget.step()
        if self.ended:
            return Status.LIKELY
        with self.budget:
            match node:
                case grammar.Simple():
                    return self._simple(node)
                case grammar.Sequence():
                    status = Status.YES
                    for each in node.nodes:
                        status = self._walk(each)
                    return status
                case grammar.Chain():
                    return self._chain(node)
                case grammar.Pipeline():
                    return self._pipeline(node)
                case grammar.Job():
                    job = self.child()
                    job._walk(node.node)
                    self.jobs.append(self.clock.then(job.clock))
                    return Status.YES
                case grammar.Subshell():
                    inner = self.child()
                    status = inner._walk(node.body)
                    self._spend(inner.clock)
                    return status
                case grammar.For():
                    return self._rounds(node.name, self._items(node.words), node.body)
                case grammar.Counted():
                    return self._counted(node)
                case grammar.While():
                    return self._while(node)
                case grammar.If():
                    return self._if(node, 0)
                case grammar.Case():
                    self._branch([*node.bodies, grammar.Sequence(())])
                    return Status.LIKELY
                case grammar.Function():
                    self.functions[node.name] = node.body
                    return Status.YES

    def _chain(self, node: grammar.Chain) -> Status:
        status = self._walk(node.first)
        for joint, then in node.rest:
            runs = _RUNS[joint][status]
            if runs is Status.YES:
                status = self._walk(then)
            elif runs is Status.EITHER:
                other = self.child()
                other._walk(then)
                self._spend(Span(0.0, other.clock.high, other.clock.said))
                self._forget(other)
        return status

    def _pipeline(self, node: grammar.Pipeline) -> Status:
        if len(node.stages) == 1:
            status = self._walk(node.stages[0])
        else:
            stages = [self.child() for _ in node.stages]
            for stage, each in zip(stages, node.stages, strict=True):
                status = stage._walk(each)
            self._spend(parallel(*(stage.clock for stage in stages)))
        return _NEGATED[status] if node.negated else status

    def _items(self, words: tuple[Word, ...] | None) -> list[str | None] | None:
        if words is None:
            return None
        items: list[str | None] = []
        for word in words:
            several = expand(word, self.variables)
            if several is None:
                self._substitute(word)
                return None
            items += several
            if len(items) > MAX_ITEMS:
                raise Unreadable("too many rounds")
        return items

    def _counted(self, node: grammar.Counted) -> Status:
        found = _COUNTED.fullmatch(node.head)
        if found is None:
            return self._rounds("", None, node.body)
        name, first, less, last, step = found.groups()
        numbers = range(int(first), int(last) + (less == "<="), int(step or 1) or 1)
        if len(numbers) > MAX_ITEMS:
            raise Unreadable("too many rounds")
        return self._rounds(name, [str(n) for n in numbers], node.body)

    def _rounds(self, name: str, items: list[str | None] | None, body: grammar.Sequence) -> Status:
        if items is not None and len(items) <= _MANY:
            start, status = self.clock, Status.YES
            for item in items:
                self.variables[name] = item
                status = self._walk(body)
            if grammar.leaves(body):  # it may go round less often
                self.clock = Span(start.low, self.clock.high, self.clock.said)
                self.ended = False
            return status
        once = self.child()
        once.variables[name] = None  # what depends on it is unknown
        once._walk(body)
        each = once.clock
        if items is None:
            self._spend(Span(0.0, math.inf, each.said))
        else:
            low = 0.0 if grammar.leaves(body) else each.low * len(items)
            self._spend(Span(low, each.high * len(items), each.said))
        self._forget(once)
        return Status.LIKELY

    def _while(self, node: grammar.While) -> Status:
        once = self.child()
        status = once._walk(node.condition)
        if status is (Status.YES if node.until else Status.NO):  # it never goes round
            self._spend(once.clock)
            return Status.YES
        once._walk(node.body)
        self._spend(Span(0.0, math.inf, once.clock.said))
        self._forget(once)
        return Status.LIKELY

    def _if(self, node: grammar.If, at: int) -> Status:
        if at == len(node.branches):
            return self._walk(node.otherwise)
        condition, body = node.branches[at]
        status = self._walk(condition)
        if status is Status.YES:
            return self._walk(body)
        if status is Status.NO:
            return self._if(node, at + 1)
        rest = grammar.If(node.branches[at + 1 :], node.otherwise)
        self._branch([body, rest if rest.branches else node.otherwise])
        return Status.LIKELY

    def _branch(self, bodies: list[grammar.Node]) -> None:
        """Walk over all *bodies*, of which one runs."""
        shells = [self.child() for _ in bodies]
        for shell, body in zip(shells, bodies, strict=True):
            shell._walk(body)
        self._spend(either(*(shell.clock for shell in shells)))
        self._forget(*shells)

    def _forget(self, *branches: "Shell") -> None:
        """Keep only the variables that are the same whichever of *branches* ran."""
        for name in {*self.variables, *(n for branch in branches for n in branch.variables)}:
            values = {shell.variables.get(name) for shell in (self, *branches)}
            self.variables[name] = values.pop() if len(values) == 1 else None

    def _simple(self, node: grammar.Simple) -> Status:
        stdin = next((w.stdin for w in reversed(node.words) if w.stdin is not None), None)
        words = [word for word in node.words if word.stdin is None]
        assigned: dict[str, str | None] = {}
        while words and (found := _ASSIGNMENT.match(_head(words[0]))):
            value = self._substitute(words.pop(0))
            known = value is not None and not found[2]
            assigned[found[1]] = value[found.end() :] if known and value is not None else None
        if words and isinstance(words[0].parts[0], Arithmetic):  # ((...)): may set anything
            self.variables = dict.fromkeys(self.variables)
            return Status.EITHER
        arguments: list[str | None] = []
        for word in words:
            several = expand(word, self.variables)
            arguments += [self._substitute(word)] if several is None else several
        if not arguments:
            self.variables |= assigned
            return Status.YES
        name = arguments[0]
        if name in self.functions:
            return self._walk(self.functions[name])
        if name == "wait":
            self.clock = parallel(self.clock, *self.jobs)
            self.jobs.clear()
            return Status.YES
        if name in ("exit", "return"):
            self.ended = name == "exit"
            return Status.YES if arguments[1:] in ([], ["0"]) else Status.NO
        if name in ("export", "local", "declare", "readonly"):
            for argument in arguments[1:]:
                variable, _, value = (argument or "").partition("=")
                self.variables[variable] = value
            return Status.YES
        span, status = self.runner(self, arguments, stdin)
        self._spend(span)
        return status

    def _substitute(self, word: Word) -> str | None:
        """Return the text of *word*, None where only a shell can tell; spend its commands' time."""
        for part in word.parts:
            if isinstance(part, Substitution):
                inner = self.child()
                inner.run(part.source)
                self._spend(inner.clock)
        return text_of(word, self.variables)


def _head(word: Word) -> str:
    """Return the unquoted text that *word* starts with."""
    part = word.parts[0] if word.parts else None
    return part.text if isinstance(part, Literal) and not part.quoted else ""

"""Time of a shell script: a walk over its tree that adds up what sleeps."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from scout_sdk._sleeping import grammar
from scout_sdk._sleeping.expansion import MAX_ITEMS, expand, text_of
from scout_sdk._sleeping.span import NOTHING, Budget, Span, Unreadable, either, parallel
from scout_sdk._sleeping.words import Arithmetic, Literal, Substitution, Word

__all__ = ["Runner", "Shell"]

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_COUNTED = re.compile(
    r"\s*(?:int\s+)?(\w+)\s*=\s*(-?\d+)\s*;\s*\1\s*(<=?)\s*(-?\d+)\s*;\s*"
    r"(?:\1\+\+|\+\+\1|\1\s*\+=\s*(\d+))\s*"
)
_MANY = 64

Runner = Callable[["Shell", list[str | None], str | None], tuple[Span, bool | None]]
"""Tells the time of one command (name and arguments, standard input), and if it succeeds.

None as an argument: only a shell can tell it. None as the answer: nobody knows."""


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

    def run(self, source: str) -> bool | None:
        """Walk over *source*. Raises Unreadable."""
        with self.budget:
            return self._walk(grammar.read(source, self.budget))

    def _spend(self, span: Span) -> None:
        self.clock = self.clock.then(span)

    def _walk(self, node: grammar.Node) -> bool | None:
        """Walk over *node* and return whether it succeeds."""
        self.budget.step()
        if self.ended:
            return None
        with self.budget:
            match node:
                case grammar.Simple():
                    return self._simple(node)
                case grammar.Sequence():
                    status: bool | None = True
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
                    return True
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
                    return None
                case grammar.Function():
                    self.functions[node.name] = node.body
                    return True

    def _chain(self, node: grammar.Chain) -> bool | None:
        status = self._walk(node.first)
        for joint, then in node.rest:
            if joint == "&&" and status is not False:
                status = self._walk(then)
            elif joint == "||" and status is not True:
                other = self.child()
                failed = other._walk(then)
                if status is False:
                    self._spend(other.clock)
                    status = failed
                else:  # taken to have succeeded, but who knows
                    self._spend(Span(0.0, other.clock.high, other.clock.said))
        return status

    def _pipeline(self, node: grammar.Pipeline) -> bool | None:
        if len(node.stages) == 1:
            status = self._walk(node.stages[0])
        else:
            stages = [self.child() for _ in node.stages]
            for stage, each in zip(stages, node.stages, strict=True):
                status = stage._walk(each)
            self._spend(parallel(*(stage.clock for stage in stages)))
        return status if not node.negated or status is None else not status

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

    def _counted(self, node: grammar.Counted) -> bool | None:
        found = _COUNTED.fullmatch(node.head)
        if found is None:
            return self._rounds("", None, node.body)
        name, first, less, last, step = found.groups()
        numbers = range(int(first), int(last) + (less == "<="), int(step or 1) or 1)
        if len(numbers) > MAX_ITEMS:
            raise Unreadable("too many rounds")
        return self._rounds(name, [str(n) for n in numbers], node.body)

    def _rounds(
        self, name: str, items: list[str | None] | None, body: grammar.Sequence
    ) -> bool | None:
        if items is not None and len(items) <= _MANY:
            status: bool | None = True
            for item in items:
                self.variables[name] = item
                status = self._walk(body)
            return status
        once = self.child()
        once.variables[name] = None  # what depends on it is unknown
        once._walk(body)
        each = once.clock
        if items is None:
            self._spend(Span(0.0, math.inf, each.said))
        else:
            self._spend(Span(each.low * len(items), each.high * len(items), each.said))
        self._forget(once)
        return None

    def _while(self, node: grammar.While) -> bool | None:
        once = self.child()
        status = once._walk(node.condition)
        if status is node.until:  # it is known not to go round at all
            self._spend(once.clock)
            return True
        once._walk(node.body)
        self._spend(Span(0.0, math.inf, once.clock.said))
        self._forget(once)
        return None

    def _if(self, node: grammar.If, at: int) -> bool | None:
        if at == len(node.branches):
            return self._walk(node.otherwise)
        condition, body = node.branches[at]
        status = self._walk(condition)
        if status is True:
            return self._walk(body)
        if status is False:
            return self._if(node, at + 1)
        rest = grammar.If(node.branches[at + 1 :], node.otherwise)
        self._branch([body, rest if rest.branches else node.otherwise])
        return None

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

    def _simple(self, node: grammar.Simple) -> bool | None:
        stdin = next((w.stdin for w in reversed(node.words) if w.stdin is not None), None)
        words = [word for word in node.words if word.stdin is None]
        assigned: dict[str, str | None] = {}
        while words and (found := _ASSIGNMENT.match(_head(words[0]))):
            value = self._substitute(words.pop(0))
            known = value is not None and not found[2]
            assigned[found[1]] = value[found.end() :] if known and value is not None else None
        if words and isinstance(words[0].parts[0], Arithmetic):  # ((...)): may set anything
            self.variables = dict.fromkeys(self.variables)
            return None
        arguments: list[str | None] = []
        for word in words:
            several = expand(word, self.variables)
            arguments += [self._substitute(word)] if several is None else several
        if not arguments:
            self.variables |= assigned
            return True
        name = arguments[0]
        if name in self.functions:
            return self._walk(self.functions[name])
        if name == "wait":
            self.clock = parallel(self.clock, *self.jobs)
            self.jobs.clear()
            return True
        if name in ("exit", "return"):
            self.ended = name == "exit"
            return arguments[1:] in ([], ["0"])
        if name in ("export", "local", "declare", "readonly"):
            for argument in arguments[1:]:
                variable, _, value = (argument or "").partition("=")
                self.variables[variable] = value
            return True
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

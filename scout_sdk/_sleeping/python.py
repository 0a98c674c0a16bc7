"""Time of Python code: what it sleeps in, read from its syntax tree and never run."""

import ast
import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scout_sdk._sleeping.span import (
    NOTHING,
    UNKNOWN,
    Budget,
    Span,
    Unreadable,
    either,
    parallel,
)

__all__ = ["has_call", "python_span"]

_SLEEPS = frozenset(
    {"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep", "gevent.sleep", "eventlet.sleep"}
)
_RUNS = frozenset({"asyncio.run", "anyio.run", "trio.run", "asyncio.create_task", "asyncio.shield"})
_GATHERS = frozenset({"asyncio.gather", "asyncio.wait"})
_LIMITS = frozenset({"asyncio.wait_for"})
_SCOPES = frozenset({"asyncio.timeout", "anyio.fail_after", "anyio.move_on_after"})
_SHELLS = frozenset(
    {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
    | {"os.system", "subprocess.getoutput"}
)
_INSTANT_NAMES = """
    print len range str int float bool list dict set tuple sum min max abs sorted enumerate zip
    map filter isinstance repr round any all type getattr hasattr format
    time.time time.monotonic time.perf_counter time.strftime datetime.now datetime.datetime.now
    sys.exit exit quit os.getcwd os.getpid os.path.join os.path.exists os.path.isfile
    os.environ.get json.dumps json.loads
    sys.stdout.flush sys.stdout.write
"""
_INSTANT = frozenset(_INSTANT_NAMES.split())
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_MANY = 64
_MAX_ROUNDS = 10_000

_Value = float | str | None


def has_call(source: str) -> bool:
    """Return whether *source* is Python code that calls something."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Call) for node in ast.walk(tree))


def python_span(source: str, budget: Budget, shell_span: Callable[[str, Budget], Span]) -> Span:
    """Return the time of *source*; shell_span reads the commands that it starts."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise Unreadable("no Python") from fault
    return _Reader(budget, shell_span).body(tree.body)


@dataclass(slots=True)
class _Reader:
    budget: Budget
    shell_span: Callable[[str, Budget], Span]
    values: dict[str, _Value] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """What an imported name stands for."""
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)

    def body(self, statements: Iterable[ast.stmt]) -> Span:
        """Return the time of *statements*, one after the other."""
        total = NOTHING
        with self.budget:
            for statement in statements:
                self.budget.step()
                total = total.then(self._statement(statement))
        return total

    def _statement(self, node: ast.stmt) -> Span:
        match node:
            case ast.Import() | ast.ImportFrom():
                return self._import(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name] = node
                return NOTHING
            case ast.For() | ast.AsyncFor():
                return self._for(node)
            case ast.While():
                return self._while(node)
            case ast.If():
                return self._if(node)
            case ast.With() | ast.AsyncWith():
                return self._with(node)
            case ast.Try():
                main = self.body([*node.body, *node.orelse])
                handlers = [self.body(handler.body) for handler in node.handlers]
                worst = max((handler.high for handler in handlers), default=0.0)
                said = any(handler.said for handler in handlers)
                return main.then(Span(0.0, worst, said)).then(self.body(node.finalbody))
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self._assign(node)
            case ast.ClassDef():
                return NOTHING
            case _:
                return self._expressions(node)

    def _expressions(self, node: ast.AST) -> Span:
        """Return the time of the expressions directly in a statement."""
        total = NOTHING
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                total = total.then(self.expression(child))
        return total

    def _import(self, node: ast.Import | ast.ImportFrom) -> Span:
        span = NOTHING
        for alias in node.names:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
            if isinstance(node, ast.ImportFrom):
                self.names[alias.asname or alias.name] = f"{module}.{alias.name}"
            elif alias.asname:
                self.names[alias.asname] = alias.name
            if module.partition(".")[0] not in sys.stdlib_module_names:
                span = UNKNOWN  # some take seconds
        return span

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Span:
        span = NOTHING if node.value is None else self.expression(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        plain = isinstance(node, ast.Assign)
        for target in targets:
            if isinstance(target, ast.Name):
                known = plain and node.value is not None
                self.values[target.id] = self._constant(node.value) if known else None
        return span

    def _if(self, node: ast.If) -> Span:
        test = self.expression(node.test)
        if _is_main(node.test) or _truth(node.test) is True:
            return test.then(self.body(node.body))
        if _truth(node.test) is False:
            return test.then(self.body(node.orelse))
        before = dict(self.values)
        yes = self.body(node.body)
        after, self.values = self.values, before
        no = self.body(node.orelse)
        self.values = {
            name: value if self.values.get(name) == value else None for name, value in after.items()
        } | {name: None for name in self.values if name not in after}
        return test.then(either(yes, no))

    def _while(self, node: ast.While) -> Span:
        once = self.expression(node.test).then(self.body(node.body))
        return NOTHING if _truth(node.test) is False else Span(0.0, math.inf, once.said)

    def _for(self, node: ast.For | ast.AsyncFor) -> Span:
        start = self.expression(node.iter)
        items = self._items(node.iter)
        name = node.target.id if isinstance(node.target, ast.Name) else None
        leaves = any(isinstance(inner, ast.Break | ast.Return) for inner in ast.walk(node))
        if items is None:
            self._forget(node)
            once = self.body(node.body)
            return start.then(Span(0.0, math.inf, once.said))
        if len(items) > _MANY or leaves:
            self._forget(node)
            once = self.body(node.body)
            rounds = len(items)
            high = once.high * rounds if rounds else 0.0
            return start.then(Span(0.0 if leaves else once.low * rounds, high, once.said))
        total = start
        for item in items:
            if name is not None:
                self.values[name] = item
            total = total.then(self.body(node.body))
        return total.then(self.body(node.orelse))

    def _forget(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self.values[inner.id] = None

    def _items(self, node: ast.expr) -> list[_Value] | None:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            if any(isinstance(each, ast.Starred) for each in node.elts):
                return None
            return [self._constant(each) for each in node.elts]
        if isinstance(node, ast.Call) and self._name(node.func) in ("range", "enumerate"):
            if self._name(node.func) == "enumerate" and node.args:
                inner = self._items(node.args[0])
                return None if inner is None else [None] * len(inner)
            bounds = [self._constant(argument) for argument in node.args]
            whole = [int(b) for b in bounds if isinstance(b, float) and b == b // 1]
            if not 1 <= len(whole) == len(bounds) <= 3 or (len(whole) == 3 and whole[2] == 0):
                return None
            numbers = range(*whole)
            if len(numbers) > _MAX_ROUNDS:
                raise Unreadable("too many rounds")
            return [float(n) for n in numbers]
        return None

    def _with(self, node: ast.With | ast.AsyncWith) -> Span:
        limit = math.inf
        span = NOTHING
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and self._name(call.func) in _SCOPES and call.args:
                value = self._constant(call.args[0])
                limit = min(limit, value if isinstance(value, float) else math.inf)
            else:
                span = span.then(self.expression(call))
        inner = self.body(node.body)
        return span.then(inner if math.isinf(limit) else inner.within(limit))

    def expression(self, node: ast.expr) -> Span:
        """Return the time of *node*."""
        self.budget.step()
        with self.budget:
            if isinstance(node, ast.Call):
                return self._call(node)
            if isinstance(node, ast.Lambda):
                return NOTHING
            if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
                return self._comprehension(node)
            if isinstance(node, ast.DictComp):
                return UNKNOWN
            total = NOTHING
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    total = total.then(self.expression(child))
            return total

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Span:
        items = self._items(node.generators[0].iter) if len(node.generators) == 1 else None
        self._forget(node)
        once = self.expression(node.elt)
        if items is None or node.generators[0].ifs:
            return Span(0.0, math.inf if once.high else 0.0, once.said)
        return Span(once.low * len(items), once.high * len(items) if items else 0.0, once.said)

    def _name(self, node: ast.expr) -> str:
        """Return the dotted name that *node* stands for, or an empty string."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self._name(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def _call(self, node: ast.Call) -> Span:
        name = self._name(node.func)
        if name in _SLEEPS or (name == "sleep" and "sleep" not in self.functions):
            return self._sleep(node)
        if name in _RUNS:
            return self._all(node.args[:1])
        if name in _GATHERS or name.endswith(".gather"):
            return self._gather(node)
        if name in _LIMITS and node.args:
            limit = self._argument(node, 1, "timeout")
            inner = self._all(node.args[:1])
            known = isinstance(limit, float)
            return inner.within(limit) if known and isinstance(limit, float) else inner
        if name in _SHELLS:
            return self._shell(node)
        if name in self.functions:
            return self._all(node.args).then(self.body(self.functions[name].body))
        arguments = self._all([*node.args, *(keyword.value for keyword in node.keywords)])
        if name in _INSTANT or (
            isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        ):
            return arguments
        return arguments.then(UNKNOWN)

    def _all(self, nodes: Iterable[ast.expr]) -> Span:
        total = NOTHING
        for node in nodes:
            total = total.then(self.expression(node))
        return total

    def _gather(self, node: ast.Call) -> Span:
        spans: list[Span] = []
        for argument in node.args:
            inner = argument.value if isinstance(argument, ast.Starred) else argument
            if isinstance(inner, ast.ListComp | ast.GeneratorExp):
                self._forget(inner)
                spans.append(self.expression(inner.elt))
            elif isinstance(inner, ast.List | ast.Tuple):
                spans += [self.expression(each) for each in inner.elts]
            else:
                spans.append(self.expression(inner))
        return parallel(*spans)

    def _sleep(self, node: ast.Call) -> Span:
        value = self._constant(node.args[0]) if node.args else None
        if not isinstance(value, float) or not 0.0 <= value < math.inf:
            return Span(0.0, math.inf, True)
        return Span(value, value, True)

    def _argument(self, node: ast.Call, at: int, name: str) -> _Value:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in given:
            return self._constant(given[name])
        return self._constant(node.args[at]) if len(node.args) > at else None

    def _shell(self, node: ast.Call) -> Span:
        command = node.args[0] if node.args else None
        if isinstance(command, ast.List | ast.Tuple):
            words = [self._constant(each) for each in command.elts]
            texts = [word for word in words if isinstance(word, str)]
            quoted = ("'" + text.replace("'", "'\\''") + "'" for text in texts)
            source = " ".join(quoted) if len(texts) == len(words) else None
        else:
            text = self._constant(command) if command is not None else None
            source = text if isinstance(text, str) else None
        span = UNKNOWN if source is None else self.shell_span(source, self.budget)
        limit = self._argument(node, 99, "timeout")
        return span.within(limit) if isinstance(limit, float) else span

    def _constant(self, node: ast.expr | None) -> _Value:
        """Return the constant number or text that *node* is, or None."""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, int | float) and not isinstance(node.value, bool):
                return float(node.value)
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self._constant(node.operand)
            return -inner if isinstance(inner, float) else None
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            with self.budget:
                left, right = self._constant(node.left), self._constant(node.right)
            if isinstance(left, float) and isinstance(right, float):
                try:
                    return _OPERATIONS[type(node.op)](left, right)
                except (ZeroDivisionError, OverflowError):
                    return None
        return None


_METHOD_NAMES = "append format join split strip items keys values get lower upper"
_METHODS = frozenset(_METHOD_NAMES.split())


def _truth(node: ast.expr) -> bool | None:
    return bool(node.value) if isinstance(node, ast.Constant) else None


def _is_main(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and node.left.id == "__name__"
    )

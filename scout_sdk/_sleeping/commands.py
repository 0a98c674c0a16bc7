"""Time of one command of a shell: what sleeps, what bounds, what is over at once."""

import math
import re
from collections.abc import Sequence

from scout_sdk._sleeping.powershell import powershell_span
from scout_sdk._sleeping.python import python_span
from scout_sdk._sleeping.shell import Shell
from scout_sdk._sleeping.span import NOTHING, UNKNOWN, Budget, Span, Status, seconds_of

__all__ = ["run_command", "shell_span"]

_INSTANT_NAMES = """
    : [ [[ alias basename break builtin cat cd chmod chown continue
    cp cut date declare dirname echo expr false
    getopts grep egrep fgrep hash head hostname id install jobs kill let ln ls mkdir mktemp mv
    popd printenv printf pushd pwd readlink realpath rm rmdir sed seq set shift sort stat tail tee
    test touch tr trap true tty type ulimit umask unalias uname uniq unset wc which whoami
    write-host write-output rem title cls clear nl rev tac tput logger disown bg
"""
_INSTANT = frozenset(_INSTANT_NAMES.split())
_QUESTION_NAMES = "[ [[ test grep egrep fgrep pgrep pidof diff cmp which type nc ping"
_QUESTIONS = frozenset(_QUESTION_NAMES.split())
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash"})
_POWERSHELLS = frozenset({"pwsh", "powershell", "powershell.exe", "pwsh.exe"})
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:\.exe)?|py")
_TIMEOUTS = frozenset({"timeout", "gtimeout"})
# Commands that run another, with those of their options that take a value.
_WRAPPERS = {
    "builtin": "",
    "chrt": "",
    "command": "",
    "env": "uCS",
    "eval": "",
    "exec": "a",
    "ionice": "cnp",
    "nice": "n",
    "nohup": "",
    "setsid": "",
    "stdbuf": "ioe",
    "sudo": "ugpCh",
    "time": "fo",
    "unbuffer": "",
    "caffeinate": "",
}
_LAUNCHERS = frozenset({"uv", "poetry", "pipenv", "conda", "pdm", "hatch", "xvfb-run"})
_ONE_LINER = re.compile(
    r"\s*(?:select\s+undef\s*,\s*undef\s*,\s*undef\s*,|sleep)\s*\(?\s*([\d.]+)\s*\)?\s*;?\s*"
)

_Arguments = Sequence[str | None]


def shell_span(source: str, budget: Budget) -> Span:
    """Return the time of the shell script *source*. Raises Unreadable."""
    shell = Shell(run_command, budget)
    shell.run(source)
    return shell.clock


def run_command(shell: Shell, words: _Arguments, stdin: str | None) -> tuple[Span, Status]:
    """Return the time of a command, and whether it succeeds."""
    shell.budget.step()
    if words[0] is None:
        return UNKNOWN, Status.LIKELY
    name = words[0].rpartition("/")[2]
    arguments = words[1:]
    if name in ("true", ":", "echo", "printf"):
        return NOTHING, Status.YES
    if name == "false":
        return NOTHING, Status.NO
    if name == "sleep":
        return _sleep(arguments)
    if name == "usleep":
        micros = seconds_of(arguments[0]) if len(arguments) == 1 else None
        return (UNKNOWN, Status.LIKELY) if micros is None else (_exactly(micros / 1e6), Status.YES)
    if name == "start-sleep" or name.lower() == "start-sleep":
        line = " ".join(f"'{a}'" if a and " " in a else a or "$_" for a in words)
        return powershell_span(line, shell.budget), Status.YES
    if name in _TIMEOUTS:
        return _timeout(shell, arguments, stdin)
    if name in ("curl", "read", "inotifywait"):
        return _bounded(name, arguments), Status.LIKELY
    if name in _INSTANT:
        follows = name == "tail" and any(a and re.match(r"-\w*[fF]|--follow", a) for a in arguments)
        return (UNKNOWN if follows else NOTHING), (
            Status.EITHER if name in _QUESTIONS else Status.YES
        )
    if name in _QUESTIONS:
        return UNKNOWN, Status.EITHER
    if name in _WRAPPERS:
        return _wrapped(shell, name, arguments, stdin)
    if name in _LAUNCHERS and arguments and arguments[0] == "run":
        span, status = _wrapped(shell, "", arguments[1:], stdin)
        return span.then(UNKNOWN), status
    return _interpreter(shell, name, arguments, stdin), Status.LIKELY


def _exactly(seconds: float) -> Span:
    return Span(0.0, math.inf, True) if math.isinf(seconds) else Span(seconds, seconds, True)


def _sleep(arguments: _Arguments) -> tuple[Span, Status]:
    given = [seconds_of(argument) for argument in arguments]
    known = [seconds for seconds in given if seconds is not None]
    if not given or len(known) < len(given):
        return Span(0.0, math.inf, True), Status.LIKELY
    return _exactly(math.fsum(known)), Status.YES


def _timeout(shell: Shell, arguments: _Arguments, stdin: str | None) -> tuple[Span, Status]:
    """`timeout [-k GRACE] [-s SIGNAL] LIMIT COMMAND`, and the one of Windows: `/t SECONDS`."""
    rest = list(arguments)
    if rest and (rest[0] or "").lower() == "/t":
        seconds = seconds_of(rest[1]) if len(rest) > 1 else None
        return (UNKNOWN, Status.LIKELY) if seconds is None else (_exactly(seconds), Status.YES)
    grace = 0.0
    while rest and rest[0] is not None and rest[0].startswith("-") and len(rest[0]) > 1:
        option = rest.pop(0) or ""
        if option in ("-k", "--kill-after", "-s", "--signal"):
            value = rest.pop(0) if rest else None
            if option in ("-k", "--kill-after"):
                grace = seconds_of(value) or 0.0
        elif option.startswith("--kill-after="):
            grace = seconds_of(option.partition("=")[2]) or 0.0
        elif option.startswith("-k"):
            grace = seconds_of(option[2:]) or 0.0
    limit = seconds_of(rest.pop(0)) if rest else None
    if not rest:
        return UNKNOWN, Status.LIKELY
    span, status = run_command(shell, rest, stdin)
    if limit is None or limit == 0.0:  # unknown, or none at all
        return Span(0.0 if limit is None else span.low, math.inf, span.said), Status.LIKELY
    return span.within(limit, grace), Status.NO if span.low > limit else status


def _bounded(name: str, arguments: _Arguments) -> Span:
    """Commands with a deadline of their own."""
    options = {"curl": ("-m", "--max-time"), "read": ("-t",), "inotifywait": ("-t", "--timeout")}
    if any(a is None or a.startswith(("--retry", "-Z", "--parallel")) for a in arguments):
        return UNKNOWN
    for at, argument in enumerate(arguments):
        for option in options[name]:
            value = None
            if argument == option and at + 1 < len(arguments):
                value = arguments[at + 1]
            elif argument and argument.startswith(option + "=") and option.startswith("--"):
                value = argument.partition("=")[2]
            seconds = seconds_of(value)
            if seconds:
                return UNKNOWN.within(seconds)
    return UNKNOWN


def _wrapped(
    shell: Shell, name: str, arguments: _Arguments, stdin: str | None
) -> tuple[Span, Status]:
    rest = list(arguments)
    valued = _WRAPPERS.get(name, "")
    if name == "eval":
        if None in rest:
            return UNKNOWN, Status.LIKELY
        inner = shell.child()
        status = inner.run(" ".join(word for word in rest if word is not None))
        return inner.clock, status
    while rest:
        word = rest[0]
        if word is not None and re.match(r"-.", word):
            rest.pop(0)
            if len(word) == 2 and word[1] in valued and rest:
                rest.pop(0)
        elif name in ("env", "sudo", "") and word is not None and re.match(r"\w+=", word):
            rest.pop(0)
        else:
            break
    return run_command(shell, rest, stdin) if rest else (NOTHING, Status.YES)


def _interpreter(shell: Shell, name: str, arguments: _Arguments, stdin: str | None) -> Span:
    """Return the time of code given on the command line or as standard input."""
    budget = shell.budget
    with budget:
        if name in _SHELLS:
            code = _code(arguments, "c", joined=True)
            code = stdin if code is None and stdin is not None and _reads_stdin(arguments) else code
            return UNKNOWN if code is None else shell_span(code, budget)
        if _PYTHON.fullmatch(name):
            code = _code(arguments, "c")
            code = stdin if code is None and stdin is not None and _reads_stdin(arguments) else code
            return UNKNOWN if code is None else python_span(code, budget, shell_span)
        if name.lower() in _POWERSHELLS:
            at = next(
                (i for i, a in enumerate(arguments) if a and a.lower() in ("-command", "-c")), None
            )
            code_words = arguments[at + 1 :] if at is not None else ()
            if not code_words or None in code_words:
                return UNKNOWN
            return powershell_span(" ".join(word or "" for word in code_words), budget)
        if name in ("perl", "ruby"):
            code = _code(arguments, "e", joined=True)
            found = _ONE_LINER.fullmatch(code) if code is not None else None
            seconds = seconds_of(found[1]) if found else None
            return UNKNOWN if seconds is None else _exactly(seconds)
    return UNKNOWN


def _code(arguments: _Arguments, letter: str, *, joined: bool = False) -> str | None:
    """Return what follows the option -*letter*, or None."""
    for at, argument in enumerate(arguments):
        if argument is None or not argument.startswith("-"):
            return None
        if argument == f"-{letter}" or (joined and re.fullmatch(rf"-\w+{letter}", argument)):
            return arguments[at + 1] if at + 1 < len(arguments) else None
    return None


def _reads_stdin(arguments: _Arguments) -> bool:
    return all(argument is not None and argument.startswith("-") for argument in arguments)

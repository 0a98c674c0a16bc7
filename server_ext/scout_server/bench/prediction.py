"""`scout bench prediction`: how well the next agent is told, online and from a cold start."""

import gzip
import json
import math
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scout_sdk._errors import ConfigError
from scout_server.policy.sizes import deep_size
from scout_server.policy.transitions import END, Transitions
from scout_server.report import Target, command_line, emit

__all__ = ["datasets", "prediction", "score"]

Sequences = list[list[str]]
_BOUNDS = {"Magentic-One agents": 0.93, "ChatDev roles": 0.76, "CaptainAgent": 0.38}


def datasets(folder: Path) -> dict[str, Sequences]:
    """
    Return the agent sequences of the recorded multi-agent runs under *folder*.

    Magentic-One: the agent that speaks, runs of one agent merged; CaptainAgent: names as logged;
    ChatDev: roles as logged. ConfigError when the recordings are not there.
    """
    raw = folder / "who_and_when" / "who_and_when_raw.tar.gz"
    chats = folder / "chatdev" / "chatdev_sessions.jsonl.gz"
    missing = [str(each.relative_to(folder)) for each in (raw, chats) if not each.is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {' and '.join(missing)}")
    magentic: list[tuple[int, list[str]]] = []
    captain: list[tuple[int, list[str]]] = []
    with tarfile.open(raw) as archive:
        for member in archive:
            if not member.name.endswith(".json"):
                continue
            content = archive.extractfile(member)
            assert content is not None
            history = json.load(content)["history"]
            number = int(Path(member.name).stem)
            if "Hand-Crafted" in member.name:
                roles = [item["role"].split(" (")[0] for item in history]
                speakers = [role for role in roles if role != "human"]
                merged = [a for a, b in zip(speakers, [None, *speakers], strict=False) if a != b]
                magentic.append((number, merged))
            else:
                captain.append((number, [item.get("name") or item["role"] for item in history]))
    with gzip.open(chats, "rt") as lines:
        roles_of = [[m["role"] for m in json.loads(line)["messages"]] for line in lines]
    return {
        "Magentic-One agents": [names for _, names in sorted(magentic)],
        "CaptainAgent": [names for _, names in sorted(captain)],
        "ChatDev roles": roles_of,
    }


Predict = Callable[[int, int, int], Sequence[int]]


def score(sequences: Sequences, order: int) -> dict[str, float]:
    """
    Return online top-1, top-2 and log loss (bits) of the learner cut to *order*; 0 is majority.

    Every step is predicted before it is learnt; the end of a session is learnt, not scored.
    """
    names: dict[str, int] = {}
    for sequence in sequences:
        for name in sequence:
            names.setdefault(name, len(names) + 1)
    learner = Transitions(max(64, len(names)), contexts=4 * max(64, len(names)))
    first = second = steps = 0
    loss = 0.0
    for sequence in sequences:
        symbols = [names[name] for name in sequence]
        earlier = before = now = END
        for symbol in symbols:
            context = (earlier if order > 2 else END, before if order > 1 else END)
            here = now if order > 0 else END
            if now != END:
                steps += 1
                best = learner.top(context[1], here, 2, earlier=context[0])
                best = [each for each in best if each != END] or best
                first += symbol in best[:1]
                second += symbol in best[:2]
            observed = learner.observe(context[1], here, symbol, earlier=context[0])
            if now != END:
                loss += observed
            earlier, before, now = before, now, symbol
        learner.observe(before, now, END, earlier=earlier)
    return {
        "steps": steps,
        "top1": first / steps,
        "top2": second / steps,
        "log loss (bits)": loss / steps / math.log(2),
    }


def state_bytes() -> int:
    """Return the size of a learner for 64 agents whose tables are full."""
    learner = Transitions(64)
    for step in range(20_000):
        earlier, before, now, then = (1 + (step * k + step // 7) % 64 for k in (3, 5, 7, 11))
        learner.observe(before, now, then, earlier=earlier)
    return deep_size(learner)


def prediction(
    data: Annotated[Path, typer.Option(help="Folder with who_and_when/ and chatdev/.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Predict the next agent in recorded multi-agent runs, online and from a cold start.

    Example: scout bench prediction --data traces
    """
    console = Console()
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    for name, sequences in datasets(data).items():
        for label, order in (("scout", 3), ("order 2", 2), ("order 1", 1), ("majority", 0)):
            found = score(sequences, order)
            rows.append({"data": name, "predictor": label, **found})
            if order == 3:
                targets.append(
                    Target.at_least(f"{name}, top-1 from cold", found["top1"], _BOUNDS[name])
                )
    size = state_bytes()
    targets.append(Target.at_most("state for 64 agents (bytes)", size, 25_000))
    emit(console, command_line(), None, {"prediction": rows}, targets, json_output)

"""SWE-agent runs of ThunderAgent: tool, prefill and decode seconds per step."""

from collections.abc import Iterator
from pathlib import Path

from scout_server.sim.traces.convert.source import BROKEN, SourceOptions, lines
from scout_server.sim.traces.jsonl import TraceError
from scout_server.sim.traces.records import HashScope, HashSource, Program, Runs, TraceInfo, Turn

__all__ = ["convert"]

_BLOCK = 16
_SHARED_TOKENS = 400
"""Of the first prompt: the system prompt, the same in every run (assumed)."""


def convert(path: Path, options: SourceOptions) -> tuple[TraceInfo, Iterator[Program]]:
    """
    Return the runs of *path*, one program each, in order of their start within a configuration.

    Configurations were run one after another, and follow one another here. Prompts have no hashes
    in the source: each is assumed to extend the one before, unless it is shorter. A gap is the
    recorded time between two model calls: the tool and the packaging of its result.
    """
    info = TraceInfo(
        source="thunderagent (SWE-agent, GLM-4.5-FP8)",
        block_tokens=_BLOCK,
        scope=HashScope.PROGRAM,
        hashes=HashSource.ASSUMED,
        licence="MIT",
    )
    return info, _programs(path, options)


def _programs(path: Path, options: SourceOptions) -> Iterator[Program]:
    first: dict[str, float] = {}
    found = []
    for line, raw in lines(path, options):
        try:
            program, config, unix = _program(raw, path.name, line)
        except BROKEN as error:
            options.bad(error, path.name, line)
            continue
        first[config] = min(first.get(config, unix), unix)
        found.append((config, unix, program))
    begin = end = 0.0
    last = ""
    for config, unix, program in sorted(found, key=lambda each: each[:2]):
        if config != last:
            begin, last = end, config
        at = begin + unix - first[config]
        end = max(end, at + sum(t.gap_s + (t.service_s or 0.0) for t in program.turns))
        yield Program(
            program=program.program,
            arrival_s=at,
            turns=program.turns,
            workflow=program.workflow,
        )


def _program(raw: dict[str, object], file: str, line: int) -> tuple[Program, str, float]:
    steps = raw.get("steps")
    if not isinstance(steps, list):
        raise TraceError(file, line, "steps", "must be a list")
    turns: list[Turn] = []
    end: float | None = None
    tool: str | None = None
    base = length = 0
    for index, step in enumerate(steps):
        where = f"steps[{index}]"
        if not isinstance(step, dict):
            raise TraceError(file, line, where, "must be an object")
        if "input_tokens" not in step or "llm_reasoning_t" not in step:
            continue  # the container's start, or a step that was cut off
        try:
            tokens, output = int(step["input_tokens"]), int(step["output_tokens"])
            start, took = float(step["llm_reasoning_t"]), float(step["llm_reasoning_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(file, line, where, f"is incomplete: {error!r}") from error
        blocks = -(-max(tokens, 1) // _BLOCK)
        if blocks < length:
            base += length  # a shorter prompt: history was rewritten
        length = max(length, blocks) if blocks >= length else blocks
        runs: Runs = ((base, blocks),)
        turns.append(
            Turn(
                agent="swe-agent",
                input_tokens=max(tokens, 1),
                output_tokens=output,
                hash_runs=runs,
                parents=(len(turns) - 1,) if turns else (),
                gap_s=max(start - end, 0.0) if end is not None else 0.0,
                tool=tool if turns else None,
                calls_tool=True,
                service_s=took,
            )
        )
        end = start + took
        action = str(step.get("action") or "").split()
        tool = action[0].rsplit("/", 1)[-1] if action else "shell"
    if not turns:
        raise TraceError(file, line, "steps", "has no model call")
    config = str(raw.get("config", ""))
    program = Program(
        program=f"{config}/{raw.get('instance', line)}",
        arrival_s=0.0,
        turns=tuple(turns),
        workflow="swe-agent",
    )
    unix = raw.get("t0_unix")
    return program, config, float(unix) if isinstance(unix, int | float) else 0.0

"""A recorded trace (docs/traces.md) as a request sequence for the retention bench."""

from pathlib import Path

from scout_sdk import ConfigError
from scout_server.bench.workloads import Request, Workload
from scout_server.sim.traces import HashScope, TraceReader

__all__ = ["recorded"]


def recorded(path: Path) -> Workload:
    """
    Return the turns of the trace at *path* in the order in which they began.

    A turn begins its gap after the last of its parents has ended; what it took where it was
    recorded is taken for its service. Blocks are whole ones. Those of an output, at least one, are
    what the agent's next prompt in the program goes on with; where it does not go on from there,
    nobody asks for them again. ConfigError when block ids mean something only within a program, or
    no turn has any.
    """
    reader = TraceReader(path)
    if reader.info.scope is not HashScope.GLOBAL:
        msg = f"block ids of {path} have the scope {reader.info.scope.value!r}; needed: 'global'"
        raise ConfigError(msg)
    agents: dict[str | None, int] = {}
    heads: dict[int, list[int]] = {}
    requests: list[Request] = []
    outputs: list[int] = []
    for session, program in enumerate(reader):
        last: dict[int, int] = {}
        ends: list[float] = []
        for turn in program.turns:
            start = max((ends[p] for p in turn.parents), default=program.arrival_s) + turn.gap_s
            service = turn.service_s or 0.0
            ends.append(start + service)
            blocks = [first + n for first, count in turn.hash_runs for n in range(count)]
            # ids begin at 0 and name a partial block too; names of whole blocks begin at 1
            prompt = [
                1 + block for block in blocks[: turn.input_tokens // reader.info.block_tokens]
            ]
            if not prompt:
                continue
            agent = agents.setdefault(turn.agent, len(agents))
            known = heads.setdefault(agent, prompt)
            heads[agent] = known[: _common(known, prompt)]
            before = requests[last[agent]] if agent in last else None
            if before is not None and prompt[: len(before.prompt)] == before.prompt:
                end = len(before.prompt)
                before.output = prompt[end : end + outputs[last[agent]]]
            last[agent] = len(requests)
            outputs.append(max(1, turn.output_tokens // reader.info.block_tokens))
            requests.append(
                Request(
                    start,
                    session,
                    agent,
                    0,
                    prompt,
                    [],
                    tool=turn.tool or "" if turn.calls_tool else "",
                    service=service,
                )
            )
    if not requests:
        raise ConfigError(f"no turn of {path} says which blocks it has")
    fresh = 1 + max(max(request.prompt) for request in requests)
    for request, blocks_out in zip(requests, outputs, strict=True):
        missing = blocks_out - len(request.output)
        request.output += range(fresh, fresh + missing)
        fresh += missing
    requests.sort(key=lambda request: request.time)
    back: dict[int, float] = {}
    for request in reversed(requests):
        request.anchor = len(heads[request.agent])
        request.back = back.get(request.session)
        back[request.session] = request.time
    anchors = [len(heads[agent]) for agent in agents.values()]
    return Workload(f"recorded: {path.name}", requests, anchors)


def _common(one: list[int], two: list[int]) -> int:
    shared = 0
    for first, second in zip(one, two, strict=False):
        if first != second:
            break
        shared += 1
    return shared

"""What a trace says of agent programs; the format itself is shared with the recorders."""

from scout_sdk._trace import (
    FORMAT_VERSION,
    HashScope,
    HashSource,
    Program,
    Runs,
    TraceInfo,
    Turn,
    runs_of,
)

__all__ = [
    "FORMAT_VERSION",
    "HashScope",
    "HashSource",
    "Program",
    "Runs",
    "TraceInfo",
    "Turn",
    "runs_length",
    "runs_of",
    "runs_prefix",
]


def runs_length(runs: Runs) -> int:
    """Return the number of block ids in *runs*."""
    return sum(length for _, length in runs)


def runs_prefix(one: Runs, two: Runs) -> int:
    """Return the number of leading block ids that *one* and *two* have in common."""
    common = 0
    left, right = iter(one), iter(two)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        if a[0] != b[0]:
            return common
        step = min(a[1], b[1])
        common += step
        a = (a[0] + step, a[1] - step) if a[1] > step else next(left, None)
        b = (b[0] + step, b[1] - step) if b[1] > step else next(right, None)
    return common

"""
Lets a measured engine nap where it would spin.

vLLM's processes wait for one another in loops that only yield the processor. With two cores for
engine, worker, HTTP server and load generator, the engine's own threads for requests and replies
then hardly run: requests that arrive while others decode wait for their end, four together take
three times as long, and what happens is left to the scheduler of the machine.
"""

import os
from pathlib import Path

__all__ = ["NAP_VARIABLE", "environ"]

NAP_VARIABLE = "SCOUT_MEASURED_NAP_S"


def environ(seconds: float) -> dict[str, str]:
    """Return what to set for a process whose engine shall nap *seconds* at a time."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {NAP_VARIABLE: str(seconds), "PYTHONPATH": os.pathsep.join(path)}

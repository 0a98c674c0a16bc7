"""Settings of the vLLM extension, and where they come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

__all__ = ["ADDITIONAL_CONFIG_KEY", "VllmSettings", "document_of"]

ADDITIONAL_CONFIG_KEY = "scout"
"""Key of our document in vLLM's `--additional-config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of the vLLM extension."""

    max_body_bytes: Annotated[int, Ge(0), Le(1 << 30)] = 16 << 20
    """Request bodies above this pass unchanged, without hints."""
    utility_timeout_s: Annotated[float, Gt(0), Le(60)] = 2.0
    """How long /v1/scout and /metrics wait for the engine's answer, in seconds."""
    waiting_order: Literal[
        "fcfs", "program-fcfs", "attained-service", "ready-first", "shortest-first"
    ] = "fcfs"
    """Who starts next: `fcfs` leaves vLLM's own queue; the others look at programs."""
    waiting_max_s: Annotated[float, Gt(0), Le(86400)] = 30.0
    """Who has waited this long, in seconds, starts before all that came later."""


def document_of(additional_config: object) -> Mapping[str, object]:
    """Return our document in vLLM's `--additional-config`; empty when there is none."""
    if isinstance(additional_config, Mapping):
        document = additional_config.get(ADDITIONAL_CONFIG_KEY)
        if isinstance(document, Mapping):
            return document
    return {}

"""What makes a scenario impossible: all of it, found before anything runs."""

from collections.abc import Callable, Iterable
from pathlib import Path

from scout_sdk._errors import ConfigError, ScoutError
from scout_server.sim.hardware.fitted import find_profile, load_profile
from scout_server.sim.hardware.specs import find_gpu, find_model
from scout_server.sim.hardware.tables import find_tables
from scout_server.sim.prompts import PromptHasher
from scout_server.sim.scenario import Scenario
from scout_server.sim.simulate import pool_of, reader_of
from scout_server.sim.tools import load_tools
from scout_server.sim.workload import synthetic_info

__all__ = ["problems", "require_possible"]


def problems(scenario: Scenario) -> list[str]:
    """Return why *scenario* cannot run; every reason that can be told without running it."""
    hardware = scenario.hardware
    model, gpu = find_model(hardware.model), find_gpu(hardware.gpu)

    def trace() -> None:
        reader = reader_of(scenario)
        info = reader.info if reader else synthetic_info(scenario.workload, scenario.seed)
        PromptHasher(info, scenario.engine.block_tokens)

    checks: list[Callable[[], object]] = [lambda: pool_of(scenario), trace]
    if hardware.latency == "fitted":
        checks.append(lambda: find_profile(gpu.name, model.name))
    elif hardware.latency == "calibrated":
        checks.append(lambda: load_profile(Path(hardware.profile)))
    elif hardware.latency == "tables":
        checks.append(lambda: find_tables(Path(hardware.tables)))
    if scenario.tools.fitted:
        checks.append(lambda: load_tools(Path(scenario.tools.fitted)))
    wrong = []
    if model.heads % hardware.tensor_parallel:
        wrong.append(
            f"hardware.tensor_parallel: {hardware.tensor_parallel} devices cannot share the"
            f" {model.heads} heads of {model.name} evenly"
        )
    for check in checks:
        try:
            check()
        except (ScoutError, OSError) as error:
            wrong.append(str(error))
    return wrong


def require_possible(scenarios: Iterable[Scenario]) -> None:
    """Raise ConfigError with the problems of all *scenarios*, each said once, if there are any."""
    wrong: dict[str, None] = {}
    for scenario in scenarios:
        wrong.update(dict.fromkeys(problems(scenario)))
    if len(wrong) == 1:
        raise ConfigError(next(iter(wrong)))
    if wrong:
        raise ConfigError("\n".join([f"{len(wrong)} errors", *(f"- {each}" for each in wrong)]))

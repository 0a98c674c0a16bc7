"""Everything that can be set of a simulation, validated at once."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, cast

import pydantic
import yaml
from annotated_types import Ge, Gt, Interval

from scout_sdk._errors import ConfigError
from scout_server.policy import PolicySettings
from scout_server.policy.engine import TaoSettings
from scout_server.replica import BatchSettings
from scout_server.sim.cell import ArrivalSettings
from scout_server.sim.clients import HintSettings
from scout_server.sim.residency import RESIDENCY, ResidencySettings
from scout_server.sim.routing import ROUTERS, RouterSettings
from scout_server.sim.scheduling import SCHEDULERS
from scout_server.sim.tiers import TierSettings
from scout_server.sim.workload import WorkloadSettings

__all__ = [
    "CellSettings",
    "HardwareSettings",
    "Scenario",
    "ToolSettings",
    "TraceSettings",
    "defaults_yaml",
    "load_document",
    "scenario_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """A trace to replay instead of the synthetic workload."""

    path: str = ""
    """File in Scout's trace format; empty: the synthetic workload."""
    skip_bad: bool = False
    """Leave out broken lines and count them, instead of ending the run."""
    programs: Annotated[int, Ge(0)] = 0
    """Most programs to take; 0: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSettings:
    """What one replica runs on."""

    gpu: str = "H100"
    model: str = "llama-3.1-8b"
    tensor_parallel: Annotated[int, Ge(1)] = 1
    latency: str = "fitted"
    """fitted (a shipped profile), roofline (published numbers only), tables (with *tables*),
    calibrated (with *profile*) or aiconfigurator (the tables of that package, if installed)."""
    tables: str = ""
    """Folder of measured layer tables."""
    profile: str = ""
    """File that `scout sim calibrate` wrote."""
    memory_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.9
    kv_blocks: Annotated[int, Interval(ge=0, le=10_000_000)] = 0
    """KV blocks of a replica, whether they would fit or not; 0: what fits beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """The replicas and what stands before them."""

    replicas: Annotated[int, Ge(1)] = 1
    scheduler: str = "fcfs"
    """fcfs, program-fcfs, attained-service, shortest-first or ready-first."""
    admission: str = "none"
    """none: turns go to a replica at once, by *router*; tao: TAO holds and places them."""
    link_gbps: Annotated[float, Gt(0)] = 50.0
    """Between replicas, 10^9 bytes a second."""
    timeline: Annotated[int, Ge(0)] = 30
    """Programs whose timeline is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """Where the durations of gaps come from."""

    fitted: str = ""
    """File that `scout sim fit-tools` wrote; empty: as the trace or workload says."""
    scale: Annotated[float, Gt(0)] = 1.0
    """Recorded gaps are multiplied by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation, completely."""

    name: str = "run"
    seed: int = 1
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    engine: BatchSettings = field(default_factory=lambda: BatchSettings(max_batched_tokens=8192))
    cell: CellSettings = field(default_factory=CellSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    residency: ResidencySettings = field(default_factory=ResidencySettings)
    tiers: TierSettings = field(default_factory=TierSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    tao: TaoSettings = field(default_factory=TaoSettings)
    hints: HintSettings = field(default_factory=HintSettings)
    arrivals: ArrivalSettings = field(default_factory=ArrivalSettings)
    tools: ToolSettings = field(default_factory=ToolSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)


_CONFIG = pydantic.ConfigDict(
    extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
)


@functools.cache
def _model() -> type[pydantic.BaseModel]:
    base = Scenario()
    parts = {f.name: (f.type, getattr(base, f.name)) for f in fields(Scenario)}
    return cast(
        type[pydantic.BaseModel],
        pydantic.create_model("Scenario", __config__=_CONFIG, **parts),  # type: ignore[call-overload]
    )


def _choices(values: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the names in *values*, whatever else is wrong there."""
    from scout_server.sim.hardware.specs import GPUS, MODELS, TIER_DEVICES

    base = Scenario()

    def value_of(place: str) -> object:
        section, _, name = place.partition(".")
        part = values.get(section)
        default: object = getattr(getattr(base, section), name)
        return part.get(name, default) if isinstance(part, Mapping) else default

    wrong = []
    for place, known in (
        ("hardware.gpu", sorted(GPUS)),
        ("hardware.model", sorted(MODELS)),
        ("hardware.latency", ["aiconfigurator", "calibrated", "fitted", "roofline", "tables"]),
        ("cell.scheduler", list(SCHEDULERS)),
        ("cell.admission", ["none", "tao"]),
        ("router.policy", sorted(ROUTERS)),
        ("residency.policy", sorted(RESIDENCY)),
        ("tiers.dram_device", sorted(TIER_DEVICES)),
        ("tiers.cxl_device", sorted(TIER_DEVICES)),
    ):
        value = value_of(place)
        if isinstance(value, str) and value not in known:
            wrong.append(f"{place}: {value!r} is unknown; known: {', '.join(known)}")
    latency = value_of("hardware.latency")
    if latency == "tables" and not value_of("hardware.tables"):
        wrong.append("hardware.tables: a folder is needed when hardware.latency is tables")
    if latency == "calibrated" and not value_of("hardware.profile"):
        wrong.append("hardware.profile: a file is needed when hardware.latency is calibrated")
    return wrong


def scenario_of(values: Mapping[str, object]) -> Scenario:
    """Return the scenario of *values* over the defaults; ConfigError lists everything wrong."""
    wrong: list[str] = []
    model = None
    try:
        model = _model().model_validate(dict(values))
    except pydantic.ValidationError as error:
        for item in error.errors(include_url=False):
            place = ".".join(str(part) for part in item["loc"])
            if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                wrong.append(f"{place}: unknown setting; known: {', '.join(_known(item['loc']))}")
            else:
                wrong.append(f"{place}: {item['msg']}, not {item['input']!r}")
    wrong += _choices(values)
    if wrong:
        msg = "\n".join([f"scenario: {len(wrong)} error(s)", *(f"- {line}" for line in wrong)])
        raise ConfigError(msg)
    return Scenario(**{f.name: getattr(model, f.name) for f in fields(Scenario)})


def _known(place: tuple[int | str, ...]) -> list[str]:
    if len(place) < 2:
        return [f.name for f in fields(Scenario)]
    part = next((f for f in fields(Scenario) if f.name == place[0]), None)
    kind = part.type if part is not None else None
    return sorted(getattr(kind, "__dataclass_fields__", {}))


def load_document(path: Path) -> dict[str, object]:
    """Read a YAML or JSON mapping; ConfigError when it is none."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror or error}"
        raise ConfigError(msg) from error
    except (ValueError, yaml.YAMLError) as error:
        msg = f"{path}: {error}"
        raise ConfigError(msg) from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        msg = f"{path}: the top level is a {type(raw).__name__}, not a mapping"
        raise ConfigError(msg)
    return {str(key): value for key, value in raw.items()}


def plain(scenario: Scenario) -> dict[str, object]:
    """Return *scenario* as JSON would hold it."""
    model = _model()(**{f.name: getattr(scenario, f.name) for f in fields(Scenario)})
    return cast(dict[str, object], model.model_dump(mode="json"))


def defaults_yaml() -> str:
    """Return every setting with its default, as YAML."""
    return yaml.safe_dump(plain(Scenario()), sort_keys=False)

"""
The one schema of everything that can be set, and the one place where it is read.

Each part of the server declares its settings as a frozen dataclass in its own module, documented
field by field; the schema is composed of them by name, without importing a part that is not
installed. The vLLM extension, the embedded engine, the gateway and the simulator read the same
file, and each takes its own sections out of it.
"""

import functools
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast, get_type_hints

import pydantic

from scout_sdk import ConfigError

__all__ = [
    "CONFIG_VARIABLE",
    "SECTIONS",
    "FieldInfo",
    "Section",
    "Settings",
    "describe",
    "load",
    "merge",
]

CONFIG_VARIABLE = "SCOUT_CONFIG"
"""Environment variable that names the configuration file."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Section:
    """One named part of the configuration and where its dataclass is defined."""

    name: str
    target: str
    """`module:Class`; the module must import fast and without optional packages."""

    def load(self) -> type:
        """Import and return the dataclass."""
        module, _, attribute = self.target.partition(":")
        return cast(type, getattr(importlib.import_module(module), attribute))


SECTIONS: tuple[Section, ...] = (
    Section("policy", "scout_server.policy.runtime:PolicySettings"),
    Section("prefetch", "scout_server.policy.prefetch:PrefetchSettings"),
    Section("tenancy", "scout_server.tenancy:TenancySettings"),
    Section("ingress", "scout_server.ingress.settings:IngressSettings"),
    Section("snapshot", "scout_server.snapshot:SnapshotSettings"),
    Section("record", "scout_server.recording:RecordSettings"),
    Section("embedded", "scout_server.embedded.settings:EmbeddedSettings"),
    Section("vllm", "scout_server.vllm.settings:VllmSettings"),
    Section("gateway", "scout_server.gateway.settings:GatewaySettings"),
    Section("ray", "scout_server.ray.settings:RaySettings"),
)
"""Every section, in the order of the documentation."""


class Settings:
    """Validated settings; immutable."""

    def __init__(self, values: Mapping[type, object], document: Mapping[str, object]) -> None:
        self._values = dict(values)
        self._document = dict(document)

    def of(self, kind: type[T]) -> T:
        """Return the section of type *kind*, such as `settings.of(PolicySettings)`."""
        try:
            return cast(T, self._values[kind])
        except KeyError:
            known = ", ".join(section.target for section in SECTIONS)
            msg = f"no section of type {kind.__qualname__}; known: {known}"
            raise ConfigError(msg) from None

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Return every section with every value, as JSON would hold them."""
        return {name: dict(cast(Mapping[str, object], v)) for name, v in self._document.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """One setting, for documentation."""

    section: str
    name: str
    """Dotted where it stands in a group of its section."""
    kind: str
    """Type and allowed values, such as `integer >= 1`."""
    default: object
    meaning: str


def load(
    values: Mapping[str, object] | None = None, *, path: str | os.PathLike[str] | None = None
) -> Settings:
    """
    Return the settings: defaults, then the file, then *values* key by key.

    The file is *path*, else the one that SCOUT_CONFIG names, else none; `.json` is JSON, anything
    else YAML. ConfigError lists everything that is wrong, with the allowed values.
    """
    name = path or os.environ.get(CONFIG_VARIABLE)
    merged = merge(_read(Path(name)) if name else {}, values or {})
    kinds, schema = _schema()
    try:
        text = json.dumps(merged)
    except (TypeError, ValueError) as error:
        msg = f"configuration holds a value that JSON does not know: {error}"
        raise ConfigError(msg) from error
    try:
        model = schema.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, kinds)) from error
    values_by_kind = {kind: getattr(model, name) for name, kind in kinds.items()}
    return Settings(values_by_kind, model.model_dump(mode="json"))


def describe() -> list[FieldInfo]:
    """Return every setting with its type, allowed values, default and meaning."""
    schema = _schema()[1].model_json_schema()
    definitions = schema.get("$defs", {})
    return [
        field
        for section in SECTIONS
        for field in _fields(section.name, "", schema["properties"][section.name], definitions, {})
    ]


def _fields(
    section: str,
    prefix: str,
    schema: Mapping[str, object],
    definitions: Mapping[str, object],
    defaults: Mapping[str, object],
) -> Iterator[FieldInfo]:
    """Yield the settings below *schema*; those of a group within are named `group.setting`."""
    definition = _resolve(schema, definitions)
    given = schema.get("default")
    above = given if isinstance(given, Mapping) else defaults
    for name, field in cast(Mapping[str, dict[str, object]], definition["properties"]).items():
        default = above.get(name, field.get("default"))
        if "properties" in _resolve(field, definitions):
            nested = default if isinstance(default, Mapping) else {}
            yield from _fields(section, f"{prefix}{name}.", field, definitions, nested)
            continue
        yield FieldInfo(
            section=section,
            name=f"{prefix}{name}",
            kind=_kind(field, definitions),
            default=default,
            meaning=" ".join(str(field.get("description", "")).split()),
        )


def _resolve(
    schema: Mapping[str, object], definitions: Mapping[str, object]
) -> Mapping[str, object]:
    if "$ref" not in schema:
        return schema
    return cast(Mapping[str, object], definitions[str(schema["$ref"]).rsplit("/", 1)[-1]])


@functools.cache
def _schema() -> tuple[dict[str, type], type[pydantic.BaseModel]]:
    """Return the sections' types and their common model; making it takes a tenth of a second."""
    kinds = {section.name: section.load() for section in SECTIONS}
    config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
    sections = {name: (kind, kind()) for name, kind in kinds.items()}
    model = pydantic.create_model("Settings", __config__=config, **sections)  # type: ignore[call-overload]
    return kinds, cast(type[pydantic.BaseModel], model)


def _read(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"cannot read the configuration file {path}: {error.strerror or error}"
        raise ConfigError(msg) from error
    try:
        if path.suffix == ".json":
            parsed = json.loads(text)
        else:
            import yaml  # only for those who use it

            try:
                parsed = yaml.safe_load(text)
            except yaml.YAMLError as error:
                msg = f"{path} is not YAML: {error}"
                raise ConfigError(msg) from error
    except json.JSONDecodeError as error:
        msg = f"{path} is not JSON: {error}"
        raise ConfigError(msg) from error
    except ModuleNotFoundError as error:
        msg = f"reading {path} needs pyyaml: pip install 'scout-sdk[server]', or use a .json file"
        raise ConfigError(msg) from error
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        msg = f"{path}: the top level is a {type(parsed).__name__}, not a mapping of sections"
        raise ConfigError(msg)
    return {str(key): value for key, value in parsed.items()}


def merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Return *below* with what *above* sets, key by key at every depth."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(lower if isinstance(lower, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _explain(error: pydantic.ValidationError, kinds: Mapping[str, type]) -> str:
    lines = [_explain_one(dict(item), kinds) for item in error.errors(include_url=False)]
    return "\n".join([f"configuration: {len(lines)} error(s)", *(f"- {line}" for line in lines)])


def _explain_one(item: Mapping[str, object], kinds: Mapping[str, type]) -> str:
    location = cast(tuple[str | int, ...], item["loc"])
    place = ".".join(str(part) for part in location)
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        if len(location) == 1:
            return f"{place}: unknown section; known: {', '.join(kinds)}"
        known = sorted(_settings_of(kinds[str(location[0])], location[1:-1]))
        return f"{place}: unknown setting; known: {', '.join(known)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    given = item.get("input")
    return f"{place}: {message}" + ("" if isinstance(given, Mapping) else f", not {given!r}")


def _settings_of(kind: type, groups: Sequence[str | int]) -> list[str]:
    """Return the names of the settings of *kind*, or of a group within it."""
    for group in groups:
        kind = get_type_hints(kind)[str(group)]
    return list(getattr(kind, "__dataclass_fields__", {}))


def _kind(field: Mapping[str, object], definitions: Mapping[str, object]) -> str:
    field = _resolve(field, definitions)
    if "enum" in field:
        return " | ".join(str(value) for value in cast(list[object], field["enum"]))
    if "const" in field:
        return str(field["const"])
    options = field.get("anyOf")
    if isinstance(options, list):
        return " or ".join(_kind(option, definitions) for option in options)
    if field.get("type") == "array":
        items = field.get("items")
        return f"list of {_kind(items, definitions)}" if isinstance(items, dict) else "list"
    text = str(field.get("type", "mapping"))
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    parts = [f"{sign} {field[key]}" for key, sign in bounds.items() if key in field]
    return " ".join([text, *parts])

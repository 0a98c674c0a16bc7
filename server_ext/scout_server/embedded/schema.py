"""The smallest instance of a JSON schema, for replies that a client wants guided."""

from collections.abc import Callable, Mapping, Sequence

from scout_server.embedded.errors import ApiError

__all__ = ["Choose", "instance"]

Choose = Callable[[Sequence[object]], object]
"""Picks one of the allowed values, deterministically."""

_DEEPEST = 32
_MOST_PARTS = 20_000
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "PT1S",
    "email": "someone@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def instance(schema: object, choose: Choose, given: Mapping[str, object] | None = None) -> object:
    """
    Return an instance of *schema*; ApiError when it cannot be made.

    Only required properties are set (all, where none is required), arrays are as short as allowed.
    *given* sets properties of the outermost object; the caller answers for their validity.
    """
    try:
        return _Maker(schema, choose).make(schema, "value", 0, given or {})
    except ArithmeticError as error:
        raise ApiError("the schema has numbers that are out of range") from error


class _Maker:
    def __init__(self, root: object, choose: Choose) -> None:
        self._root = root
        self._choose = choose
        self._left = _MOST_PARTS

    def _spend(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise ApiError(f"the schema asks for more than {_MOST_PARTS} parts or characters")

    def make(self, schema: object, name: str, depth: int, given: Mapping[str, object]) -> object:
        self._spend(1)
        if depth > _DEEPEST:
            raise ApiError(f"the schema is nested deeper than {_DEEPEST} levels")
        if schema is True or schema == {}:
            return {} if depth == 0 else name
        if not isinstance(schema, Mapping):
            raise ApiError(f"the schema of {name!r} is not an object")
        schema = self._resolve(schema, depth)
        if "const" in schema:
            return schema["const"]
        enum = schema.get("enum")
        if isinstance(enum, Sequence) and not isinstance(enum, str) and enum:
            return self._choose(enum)
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, Sequence) and not isinstance(options, str) and options:
                return self._option(schema, key, options, name, depth, given)
        kind = schema.get("type")
        if isinstance(kind, Sequence) and not isinstance(kind, str):
            kind = next((k for k in kind if k != "null"), "null")
        if kind is None:
            kind = (
                "object" if "properties" in schema else "array" if "items" in schema else "string"
            )
        if kind == "object":
            return self._object(schema, depth, given)
        if kind == "array":
            count = _int(schema.get("minItems"), 0)
            self._spend(max(count, 0))
            return [self.make(schema.get("items", {}), name, depth + 1, {}) for _ in range(count)]
        if kind == "string":
            self._spend(max(_int(schema.get("minLength"), 0), 0))
            return _string(schema, name)
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        if kind == "boolean":
            return self._choose((False, True))
        if kind == "null":
            return None
        raise ApiError(f"the schema of {name!r} has the unknown type {kind!r}")

    def _resolve(self, schema: Mapping[str, object], depth: int) -> Mapping[str, object]:
        for _ in range(_DEEPEST):
            self._spend(1)
            reference = schema.get("$ref")
            if isinstance(reference, str):
                rest = {key: value for key, value in schema.items() if key != "$ref"}
                schema = {**self._lookup(reference), **rest}
                continue
            parts = schema.get("allOf")
            if isinstance(parts, Sequence) and not isinstance(parts, str):
                merged = {key: value for key, value in schema.items() if key != "allOf"}
                for part in parts:
                    if isinstance(part, Mapping):
                        merged = _merge(merged, self._resolve(part, depth + 1))
                schema = merged
                continue
            return schema
        raise ApiError("the schema's references never end")

    def _lookup(self, reference: str) -> Mapping[str, object]:
        found: object = self._root
        if not reference.startswith("#"):
            raise ApiError(f"the schema refers to {reference!r}; only #/... is known")
        for part in reference[1:].strip("/").split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise ApiError(f"the schema refers to {reference!r}, which is not there")
        return found

    def _option(
        self,
        schema: Mapping[str, object],
        key: str,
        options: Sequence[object],
        name: str,
        depth: int,
        given: Mapping[str, object],
    ) -> object:
        rest = {k: v for k, v in schema.items() if k not in (key, "default", "title")}
        wanted = [o for o in options if not (isinstance(o, Mapping) and o.get("type") == "null")]
        option = wanted[0] if wanted else options[0]
        if isinstance(option, Mapping):
            option = _merge(rest, self._resolve(option, depth + 1))
        return self.make(option, name, depth + 1, given)

    def _object(
        self, schema: Mapping[str, object], depth: int, given: Mapping[str, object]
    ) -> dict[str, object]:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        required = schema.get("required")
        if not isinstance(required, Sequence) or isinstance(required, str) or not required:
            required = list(properties)
        made: dict[str, object] = {}
        for key in [*required, *(k for k in properties if k in given and k not in required)]:
            if key in given:
                made[str(key)] = given[str(key)]
            else:
                made[str(key)] = self.make(properties.get(key, {}), str(key), depth + 1, {})
        return made


def _merge(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    merged = {**first, **second}
    for key in ("properties", "$defs"):
        one, two = first.get(key), second.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            merged[key] = {**one, **two}
    one, two = first.get("required"), second.get("required")
    if isinstance(one, Sequence) and isinstance(two, Sequence):
        merged["required"] = list(dict.fromkeys([*one, *two]))
    return merged


def _int(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _string(schema: Mapping[str, object], name: str) -> str:
    if "pattern" in schema:
        raise ApiError(
            f"the schema of {name!r} has a pattern; the embedded engine cannot make a text for it"
        )
    form = schema.get("format")
    if isinstance(form, str) and form in _FORMATS:
        return _FORMATS[form]
    text = name.replace("_", " ")
    shortest = _int(schema.get("minLength"), 0)
    while len(text) < shortest:
        text = f"{text} {name}" if name else "x" * shortest
    longest = _int(schema.get("maxLength"), len(text))
    return text[:longest]


def _number(schema: Mapping[str, object], *, whole: bool) -> int | float:
    low = _limit(schema, "minimum", "exclusiveMinimum", max)
    high = _limit(schema, "maximum", "exclusiveMaximum", min)
    step = schema.get("multipleOf")
    multiple = float(step) if isinstance(step, int | float) and step > 0 else 0.0
    if whole or multiple:
        multiple = max(multiple, 1.0) if whole else multiple
        # The multiple nearest to zero inside the bounds.
        value = 0.0
        if low is not None and (low[0] > 0 or (low[0] == 0 and low[1])):
            value = -(-low[0] // multiple) * multiple
            value += multiple if low[1] and value == low[0] else 0.0
        elif high is not None and (high[0] < 0 or (high[0] == 0 and high[1])):
            value = high[0] // multiple * multiple
            value -= multiple if high[1] and value == high[0] else 0.0
        return int(value) if whole or value == int(value) else value
    if _inside(0.0, low, high):
        return 0
    if low is not None and high is not None:
        return (low[0] + high[0]) / 2
    if low is not None:
        return low[0] + 1 if low[1] else low[0]
    assert high is not None
    return high[0] - 1 if high[1] else high[0]


def _limit(
    schema: Mapping[str, object], closed: str, opened: str, tighter: Callable[..., float]
) -> tuple[float, bool] | None:
    """Return a bound and whether it is exclusive."""
    one, two = schema.get(closed), schema.get(opened)
    if not isinstance(two, int | float) or isinstance(two, bool):
        return (float(one), False) if isinstance(one, int | float) else None
    if not isinstance(one, int | float):
        return float(two), True
    return (float(two), True) if tighter(one, two) == two else (float(one), False)


def _inside(value: float, low: tuple[float, bool] | None, high: tuple[float, bool] | None) -> bool:
    above = low is None or value > low[0] or (value == low[0] and not low[1])
    return above and (high is None or value < high[0] or (value == high[0] and not high[1]))

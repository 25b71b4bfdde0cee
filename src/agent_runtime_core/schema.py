"""Whether a value fits a JSON Schema: the part of the language that people write by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def misfit(value: Any, schema: Mapping[str, Any], path: str = "$") -> str | None:
    """Why `value` does not fit `schema`, or None if it does.

    Knows type, enum, const, properties, required, additionalProperties, items, minimum, maximum,
    minLength, maxLength and anyOf (JSON Schema 2020-12); other keywords are not looked at.
    """
    kinds = schema.get("type")
    if kinds is not None and not _is(value, [kinds] if isinstance(kinds, str) else kinds):
        return f"{path} is {type(value).__name__}, the schema wants {kinds}"
    if "const" in schema and value != schema["const"]:
        return f"{path} is {value!r}, the schema wants {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} is {value!r}, the schema wants one of {schema['enum']!r}"
    if "anyOf" in schema and all(misfit(value, each, path) for each in schema["anyOf"]):
        return f"{path} fits none of the schemas in anyOf"
    if isinstance(value, dict):
        return _object(value, schema, path)
    if isinstance(value, list) and "items" in schema:
        return _first(misfit(item, schema["items"], f"{path}[{i}]") for i, item in enumerate(value))
    return _bounds(value, schema, path)


def _is(value: Any, kinds: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES[kind]) for kind in kinds if kind in _TYPES)


def _first(answers: Any) -> str | None:
    return next((answer for answer in answers if answer is not None), None)


def _object(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{path} lacks {name!r}"
    if schema.get("additionalProperties") is False:
        for name in value:
            if name not in properties:
                return f"{path} has {name!r}, which the schema does not know"
    return _first(misfit(value[name], each, f"{path}.{name}") for name, each in properties.items() if name in value)


def _bounds(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    size, low, high = value, schema.get("minimum"), schema.get("maximum")
    if isinstance(value, str):
        size, low, high = len(value), schema.get("minLength"), schema.get("maxLength")
    elif not isinstance(value, (int, float)):
        return None
    if low is not None and size < low:
        return f"{path} is {value!r:.60}, below {low}"
    if high is not None and size > high:
        return f"{path} is {value!r:.60}, above {high}"
    return None

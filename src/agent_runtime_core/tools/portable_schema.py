"""Complete JSON Schemas for providers that refuse valid but incomplete ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["RESULT", "as_object", "complete", "complete_parameters"]

#: The property that contains an answer whose schema is not that of an object.
RESULT: Final = "result"
_SCHEMAS: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NOT_AT_THE_ROOT: Final = frozenset({"anyOf", "oneOf", "allOf", "enum", "const", "not", "$ref"})
#: A reference into a schema, except into its definitions, which stay at the root.
_ELSEWHERE: Final = re.compile(r"#$|#/(?!(\$defs|definitions)/)")
_DEFINITIONS: Final = ("$defs", "definitions", "$schema")


def complete(schema: Any) -> Any:
    """Return the schema with `items` in each array, without which OpenAI refuses a request.

    The schema itself is not changed.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for keyword in _SCHEMAS:
        if keyword in made:
            made[keyword] = complete(made[keyword])
    for keyword in _LISTS:
        if isinstance(made.get(keyword), (list, tuple)):
            made[keyword] = [complete(each) for each in made[keyword]]
    for keyword in _TABLES:
        if isinstance(made.get(keyword), Mapping):
            made[keyword] = {name: complete(each) for name, each in made[keyword].items()}
    kinds = made.get("type")
    if (kinds == "array" or (isinstance(kinds, (list, tuple)) and "array" in kinds)) and not isinstance(
        made.get("items"), Mapping
    ):
        # `items: false` after prefixItems is refused as well. maxItems says the same.
        made["items"] = _any_of(made.get("prefixItems") or ())
    return made


def complete_parameters(parameters: Any) -> Any:
    """Return the schema of a tool's arguments, complete, and with the properties that OpenAI requires of it."""
    made = complete(parameters)
    if isinstance(made, dict) and made.get("type", "object") == "object" and _NOT_AT_THE_ROOT.isdisjoint(made):
        made = {"type": "object", **made}
        made.setdefault("properties", {})
    return made


def as_object(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the schema of an object, and whether that is a new object with the value in its property `result`.

    Providers accept only the schema of an object as that of an answer.
    """
    if schema.get("type") == "object" and _NOT_AT_THE_ROOT.isdisjoint(schema):
        return complete(schema), False
    inner = {name: each for name, each in schema.items() if name not in _DEFINITIONS}
    outer = {name: _moved(schema[name]) for name in _DEFINITIONS if name in schema}
    wrapped = {
        "type": "object",
        "properties": {RESULT: _moved(inner)},
        "required": [RESULT],
        "additionalProperties": False,
    }
    return complete(wrapped | outer), True


def _moved(tree: Any) -> Any:
    """Return part of a schema with references to its former root changed to the new place."""
    if isinstance(tree, (list, tuple)):
        return [_moved(each) for each in tree]
    if not isinstance(tree, Mapping):
        return tree
    made = {name: _moved(each) for name, each in tree.items()}
    target = made.get("$ref")
    if isinstance(target, str) and _ELSEWHERE.match(target):
        made["$ref"] = f"#/properties/{RESULT}{target[1:]}"
    return made


def _any_of(schemas: Any) -> Any:
    different: list[Any] = []
    for each in schemas:
        if each not in different:
            different.append(each)
    if not different:
        return {}
    return different[0] if len(different) == 1 else {"anyOf": different}

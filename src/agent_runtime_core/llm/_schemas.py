"""JSON schemas in the forms that providers accept: pure functions that leave their argument unchanged.

Providers reject a request if a schema in it contains keywords that they do not know. Such keywords are left out here,
and their meaning is added to the description, so that the model still knows it. The caller of the model checks
arguments and answers against the full schema.

The schemas of tools and of types of answers do not depend on a provider. Only `tools/structured_output.py` puts a value
that is not an object into an object, because it takes the value out again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from .._core.json_schema import referred

Dialect: TypeAlias = Literal["openai", "anthropic", "gemini"]
Schema: TypeAlias = Mapping[str, Any]

# Keywords whose value is a schema, a list of schemas, or a mapping of names to schemas. All other values are data: a
# property named "minimum" is not a keyword, nor is anything inside of "enum" or "default".
_ONE = frozenset(
    {"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames"}
)
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
# These say nothing to a model, or are handled by themselves.
_SILENT = frozenset(
    {"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "discriminator", "deprecated", "readOnly"}
)
# OpenAI refuses these at the root of a tool's parameters.
_NOT_AT_THE_ROOT = ("anyOf", "oneOf", "enum", "const", "not")
_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_ANTHROPIC_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"}
)
_GEMINI_FORMATS = {
    "string": frozenset({"enum", "date-time"}),
    "integer": frozenset({"int32", "int64"}),
    "number": frozenset({"float", "double"}),
}
_GEMINI_BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern")
# Schemas in schemas. Gemini gets copies of definitions, which a schema could nest without end.
_DEEPEST = 40


def dialect_of(base_url: str) -> Dialect:
    """Return the dialect of a server with OpenAI's API."""
    host = urlsplit(base_url).hostname or ""
    return "gemini" if host == "googleapis.com" or host.endswith(".googleapis.com") else "openai"


def tool_parameters(schema: Schema | None, dialect: Dialect) -> dict[str, Any]:
    """Return the schema of a tool's parameters as the provider accepts it; its root is always an object."""
    given = _changed(schema or {}, _modern)
    try:
        root = _as_object(given, given) | {name: given[name] for name in ("$defs", "definitions") if name in given}
    except (_NoEquivalent, RecursionError):  # a reference to nothing, or to itself
        root = _described({"type": "object", "properties": {}}, given)
    if dialect == "openai":
        root = _changed(root, _with_items)
    return _GeminiSchema(root).convert(root) if dialect == "gemini" else root


def output_schema(schema: Schema, dialect: Dialect) -> dict[str, Any] | None:
    """Return the schema of an answer as the provider accepts it; None if the provider has no equivalent.

    Anthropic has no equivalent for an object with names that the schema does not list (`dict[str, int]`), for a value
    of any type, and for a schema that refers to itself. Then the prompt must contain the schema.
    """
    schema = _changed(schema, _modern)
    if dialect == "anthropic":
        return _anthropic_output(schema)
    return _GeminiSchema(schema).convert(schema) if dialect == "gemini" else _changed(schema, _with_items)


def with_schemas(arguments: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return the arguments of a chat completion with tools and response format as the provider accepts them."""
    changed = dict(arguments)
    if tools := arguments.get("tools"):
        changed["tools"] = [_with_parameters(tool, dialect) for tool in tools]
    format_: Any = arguments.get("response_format")
    match format_:
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema} as wanted}:
            sent = output_schema(schema, dialect)
            changed["response_format"] = {**format_, "json_schema": {**wanted, "schema": sent}}
    return changed


def _with_parameters(tool: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        return dict(tool)
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return dict(tool)
    return {**tool, "function": {**function, "parameters": tool_parameters(parameters, dialect)}}


def property_names(schema: Schema) -> list[str]:
    """Return the names of all properties in a schema, at any depth."""
    found: dict[str, None] = {}

    def collect(each: dict[str, Any]) -> dict[str, Any]:
        found.update(dict.fromkeys(each.get("properties") or ()))
        return each

    _changed(schema, collect)
    return list(found)


def with_renamed_properties(schema: Schema, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema with other names of properties; the description of a property shows its real name."""

    def rename(each: dict[str, Any]) -> dict[str, Any]:
        if isinstance(properties := each.get("properties"), Mapping):
            each["properties"] = {
                names.get(name, name): _described(part, {"name": name}) if name in names else part
                for name, part in properties.items()
            }
        if isinstance(required := each.get("required"), list):
            each["required"] = [names.get(name, name) for name in required]
        return each

    renamed: dict[str, Any] = _changed(schema, rename)
    return renamed


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of the schema in which `change` replaced every schema, inner schemas first."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_changed(each, change) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            copy[name] = {key: _changed(each, change) for key, each in value.items()}
        else:
            copy[name] = _changed(value, change) if name in _ONE or name in _SEVERAL else value
    return change(copy)


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of an earlier draft in the words of draft 2020-12, which servers check."""
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        rest = schema.pop("additionalItems", None)
        if rest is not None:
            schema["items"] = rest
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)
    return schema


def _with_items(schema: dict[str, Any]) -> dict[str, Any]:
    if "array" in _kinds(schema) and not isinstance(schema.get("items"), Mapping):
        # OpenAI also refuses `items: false` after `prefixItems`. maxItems says the same.
        no_more = schema.get("items") is False
        schema["items"] = _any_of(schema.get("prefixItems") or ()) if no_more else {}
    return schema


def _any_of(schemas: Sequence[Any]) -> dict[str, Any]:
    different: list[Any] = []
    for each in schemas:
        if each not in different:
            different.append(each)
    if not different:
        return {}
    return different[0] if len(different) == 1 else {"anyOf": different}


def _kinds(schema: Schema) -> list[str]:
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else list(kinds or ())


def _as_object(schema: Schema, top: Schema, within: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema with a plain object as root; alternatives at the root are merged, which all providers need."""
    given, within = _unwrapped(schema, top, within, inline=True)
    parts = [
        (_as_object(part, top, within), name == "allOf")
        for name in ("allOf", "anyOf", "oneOf")
        for part in given.get(name) or ()
        if isinstance(part, Mapping)
    ]
    root = {name: value for name, value in given.items() if name != "allOf" and name not in _NOT_AT_THE_ROOT}
    root["type"] = "object"
    properties: dict[str, Any] = {}
    for part, _ in parts:
        properties |= part["properties"]
    root["properties"] = properties | dict(root.get("properties") or {})
    always = [name for part, all_of in parts if all_of for name in part.get("required") or ()]
    if required := list(dict.fromkeys([*(root.get("required") or ()), *always])):
        root["required"] = required
    return _described(root, {name: given[name] for name in _NOT_AT_THE_ROOT if name in given})


def _unwrapped(
    schema: Schema, root: Schema, within: tuple[str, ...], *, inline: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the schema with its only `allOf` merged, and its `$ref` if there are other keywords or if `inline`.

    Args:
        schema: The schema.
        root: The schema in which references are looked up.
        within: The references that led to the schema.
        inline: Whether to replace every reference.

    Returns:
        The schema, and the references that led to it now.
    """
    found = dict(schema)
    while True:
        parts = found.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            found.pop("allOf")
            found = {**parts[0], **found}
        elif "$ref" in found and (inline or found.keys() - _SILENT - {"$ref", "title"}):
            reference = found.pop("$ref")
            if reference in within:
                raise _NoEquivalent
            within = (*within, reference)
            found = {**_referred(root, reference), **found}
        else:
            return found, within


def _referred(root: Schema, reference: Any) -> Schema:
    """Return the schema that a reference into `root` names."""
    found = referred(root, reference)
    if not isinstance(found, Mapping):
        raise _NoEquivalent
    return found


def _described(schema: dict[str, Any], left: Schema) -> dict[str, Any]:
    """Return the schema with the keywords in `left` as words of its description."""
    words = ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}"
        for name, value in left.items()
        if name not in _SILENT
    )
    if not words:
        return schema
    before = schema.get("description")
    return {**schema, "description": f"{before}\n\n{{{words}}}" if before else f"{{{words}}}"}


class _NoEquivalent(Exception):
    """The provider has no equivalent of the schema."""


def _anthropic_output(schema: Schema) -> dict[str, Any] | None:
    output = _AnthropicOutput(schema)
    try:
        root, within = _unwrapped(schema, schema, (), inline=True)
        converted = output.convert(root, within)
    except (_NoEquivalent, RecursionError):
        return None
    return {**converted, "$defs": output.definitions} if output.definitions else converted


class _AnthropicOutput:
    """Converts a schema to the keywords that Anthropic accepts for answers and strict tools."""

    def __init__(self, root: Schema) -> None:
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._names: dict[str, str] = {}  # of definitions, by reference

    def convert(self, schema: Any, within: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            raise _NoEquivalent
        left, within = _unwrapped(schema, self._root, within, inline=False)
        if "$ref" in left:
            return {"$ref": f"#/$defs/{self._defined(left['$ref'], within)}"}
        kinds = _kinds(left) or [name for key, name in (("properties", "object"), ("items", "array")) if key in left]
        if "allOf" in left or not _TYPES.issuperset(kinds):
            raise _NoEquivalent
        type_ = left.pop("type", None) or next(iter(kinds), None)
        kept = {"type": type_} if type_ else {}
        kept |= {name: left.pop(name) for name in ("title", "description") if name in left}
        for name in ("enum", "const"):
            if name in left and _is_plain(left[name]):
                kept[name] = left.pop(name)
        for name in ("anyOf", "oneOf"):
            if name in left and "anyOf" not in kept:
                kept["anyOf"] = [self.convert(each, within) for each in left.pop(name)]
        if not kept.keys() & {"type", "enum", "const", "anyOf"}:
            raise _NoEquivalent
        if "object" in kinds:
            kept |= self._object(left, within)
        if "array" in kinds:
            kept |= self._array(left, within)
        if left.get("format") in _ANTHROPIC_FORMATS:
            kept["format"] = left.pop("format")
        return _described(kept, left)

    def _object(self, left: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        lists = "properties" in left
        properties, required = left.pop("properties", None) or {}, left.pop("required", None) or ()
        others = left.pop("additionalProperties", None)
        is_open = (isinstance(others, Mapping) and others) or (others is not False and not lists)
        if is_open or left.get("patternProperties") or not set(required) <= properties.keys():
            raise _NoEquivalent
        return {
            "properties": {name: self.convert(each, within) for name, each in properties.items()},
            **({"required": list(required)} if required else {}),
            "additionalProperties": False,
        }

    def _array(self, left: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        items = left.pop("items", None)
        if first := left.get("prefixItems"):
            # Items after the first items, unless there can be none.
            rest = [items] if isinstance(items, Mapping) and items and left.get("maxItems") != len(first) else []
            kept: dict[str, Any] = {"items": _any_of([self.convert(each, within) for each in [*first, *rest]])}
        else:
            kept = {"items": self.convert(items, within)}
        if least := left.get("minItems"):
            kept["minItems"] = 1
            if least == 1:
                left.pop("minItems")
        return kept

    def _defined(self, reference: str, within: tuple[str, ...]) -> str:
        """Return the name of the definition that a reference names; it is converted at its first use."""
        if reference in within:
            raise _NoEquivalent
        if reference not in self._names:
            name = reference.rpartition("/")[2] or "root"
            while name in self._names.values():
                name += "_"
            self._names[reference] = name
            self.definitions[name] = self.convert(_referred(self._root, reference), (*within, reference))
        return self._names[reference]


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(each is None or isinstance(each, (str, int, float)) for each in values)


class _GeminiSchema:
    """Converts a schema to the keywords that every version of Gemini's OpenAI endpoint accepts."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def convert(self, schema: Any, within: tuple[str, ...] = (), depth: int = 0) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            return {}
        try:
            left, within = _unwrapped(schema, self._root, within, inline=True)
        except _NoEquivalent:
            return {"type": "object"}
        if depth > _DEEPEST:
            return {"type": "object"}
        if "const" in left:
            left["enum"] = [left.pop("const")]
        kept: dict[str, Any] = {name: left.pop(name) for name in ("title", "description", "nullable") if name in left}
        kept = self._alternatives(left, within, depth) | kept
        if kind := next((kind for kind in _kinds(left) if kind != "null"), None):
            kept["type"] = kind
        left.pop("type", None)
        self._add_enum(kept, left)
        kept |= {name: left.pop(name) for name in _GEMINI_BOUNDS if name in left}
        if left.get("format") in _GEMINI_FORMATS.get(kept.get("type", ""), ()):
            kept["format"] = left.pop("format")
        if "properties" in left or kept.get("type") == "object":
            kept |= self._object(left, within, depth)
        if kept.get("type") == "array":
            kept["items"] = self.convert(left.pop("items", None), within, depth + 1) or {"type": "string"}
        return _described(kept, left)

    def _alternatives(self, left: dict[str, Any], within: tuple[str, ...], depth: int) -> dict[str, Any]:
        """Return the alternatives of a schema, with null as `nullable`, because Gemini lacks the type "null"."""
        kinds = _kinds(left)
        given = left.pop("anyOf", None) or left.pop("oneOf", None) or ()
        options = [dict(each) for each in given if isinstance(each, Mapping)]
        kept: dict[str, Any] = {}
        if "null" in kinds or {"type": "null"} in options:
            kept["nullable"] = True
            options = [each for each in options if each != {"type": "null"}]
            kinds = [kind for kind in kinds if kind != "null"]
        if len(kinds) > 1 and not options:
            left.pop("type")
            options = [
                {"type": kind, **({"items": left.pop("items")} if kind == "array" and "items" in left else {})}
                for kind in kinds
            ]
        converted = [self.convert(each, within, depth + 1) for each in options]
        if len(converted) == 1:
            return converted[0] | kept
        return kept | ({"anyOf": converted} if converted else {})

    def _add_enum(self, kept: dict[str, Any], left: dict[str, Any]) -> None:
        values = left.get("enum")
        if not isinstance(values, list):
            return
        strings = [value for value in values if value is not None]
        if all(isinstance(value, str) and value for value in strings) and strings:
            left.pop("enum")
            kept |= {"type": "string", "enum": strings}
            if len(strings) < len(values):
                kept["nullable"] = True

    def _object(self, left: dict[str, Any], within: tuple[str, ...], depth: int) -> dict[str, Any]:
        properties, required = left.pop("properties", None) or {}, left.pop("required", None) or ()
        if not isinstance(left.get("additionalProperties"), Mapping):
            left.pop("additionalProperties", None)
        kept: dict[str, Any] = {"type": "object"}
        if properties:
            kept["properties"] = {name: self.convert(each, within, depth + 1) for name, each in properties.items()}
        if known := [name for name in required if name in properties]:
            kept["required"] = known
        return kept

"""Type hints of parameters: convert a hint to JSON Schema, and a JSON value to a value of that type."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
import sys
import typing
from collections import abc
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, Final, Literal, cast

from .._core.codec.tagged import Turn
from .._core.codec.type_hints import unresolved
from .._core.codec.typed import Policy, build, codec_of, is_union
from .._core.json_schema import LARGEST_EXACT, SCALARS, choice, hoisted, misfit, referred
from .._core.pydantic_types import adapter_of, from_json, is_pydantic_dataclass, needs_pydantic, reason_of
from .._core.validation import Path, Shown, is_number, must, not_encodable
from ..errors import InvalidArgument, UnserialisableResult, brief

__all__ = ["FieldDefault", "field_default", "keywords_of"]

_NUMBERS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_LENGTHS: Final = {"min_length": ("minLength", "minItems"), "max_length": ("maxLength", "maxItems")}
_DEEPEST: Final = 5  # metadata inside of metadata


class FieldDefault:
    """The default that `= Field(default=..., description=...)` gives to a parameter.

    Attributes:
        field: The object that was given as the default of the parameter.
        has_factory: Whether a function creates the default.
        required: Whether it names no default.
    """

    def __init__(self, field: Any) -> None:
        self.field = field
        default = getattr(field, "default", ...)
        self._factory = getattr(field, "default_factory", None)
        self.has_factory: bool = callable(self._factory)
        self._default = default
        # pydantic's name for no default; the library must not import it.
        missing = default is ... or type(default).__name__ == "PydanticUndefinedType"
        self.required: bool = missing and not self.has_factory

    def value(self) -> Any:
        """Return the default; a new object if a factory creates it."""
        return self._factory() if self._factory is not None and self.has_factory else self._default


def field_default(default: Any) -> FieldDefault | None:
    """Return the default inside an object like pydantic's `FieldInfo`, or None for any other default."""
    if isinstance(default, type) or not hasattr(default, "description"):
        return None
    if not (hasattr(default, "default") or hasattr(default, "default_factory")):
        return None
    return FieldDefault(default)


def keywords_of(metadata: Iterable[Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema keywords that the metadata of a type adds to its schema; unknown metadata adds none."""
    found: dict[str, Any] = {}
    kinds = _kinds(schema)
    for each in metadata:
        if isinstance(each, str):
            found.setdefault("description", each)
        elif not isinstance(each, type):
            found |= _of_object(each, kinds, _DEEPEST)
    return found


def _of_object(about: Any, kinds: set[str], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nested = getattr(about, "metadata", None)
    if isinstance(nested, (list, tuple)) and depth:
        for each in nested:
            if not isinstance(each, (str, type)):
                found |= _of_object(each, kinds, depth - 1)
    for attribute, keyword in _NUMBERS.items():
        bound = getattr(about, attribute, None)
        if is_number(bound) and math.isfinite(bound):
            found[keyword] = bound
    for attribute, (of_text, of_items) in _LENGTHS.items():
        length = getattr(about, attribute, None)
        if isinstance(length, int) and not isinstance(length, bool):
            if "array" in kinds:
                found[of_items] = length
            if "array" not in kinds or "string" in kinds:
                found[of_text] = length
    pattern = getattr(about, "pattern", None)
    pattern = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if isinstance(pattern, str):
        found["pattern"] = pattern
    return found | _texts(about)


def _texts(about: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword, attributes in {"title": ("title",), "description": ("documentation", "description")}.items():
        for attribute in attributes:  # `documentation` belongs to typing_extensions.Doc
            text = getattr(about, attribute, None)
            if isinstance(text, str) and text:
                found[keyword] = text
    examples = getattr(about, "examples", None)
    if isinstance(examples, (list, tuple)) and examples:
        found["examples"] = list(examples)
    return found


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type", ())
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    for option in schema.get("anyOf", ()):
        found |= _kinds(option)
    return found


__all__ = ["schema_of", "typed", "with_default"]

_ARRAYS: Final = {list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection}
_MAPPINGS: Final = {dict, abc.Mapping}
_NAMED: Final = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
_ABOUT: Final = ("title", "description", "examples")
_WRAPPERS: Final = {typing.Annotated, typing.Required, typing.NotRequired}


def with_default(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the schema of a parameter with its default, if JSON can express it.

    A default of another type than the parameter's, as in `unit: str = None`, is a valid value too.
    """
    plain = value.value if isinstance(value, Enum) else value
    if not _is_plain(plain):
        return schema
    plain = copy.deepcopy(plain)  # the function may change its default later
    if misfit(plain, schema) is not None:
        outside: dict[str, Any] = {key: schema[key] for key in _ABOUT if key in schema}
        inside = {key: each for key, each in schema.items() if key not in outside}
        option = {"type": "null"} if plain is None else {"enum": [plain]}
        schema = {
            "anyOf": [*inside.pop("anyOf"), option] if inside.keys() == {"anyOf"} else [inside, option],
            **outside,
        }
    return {**schema, "default": plain}


# -- type hint to JSON Schema


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON Schema of a type; `where` names it in errors."""
    return hoisted(_schema_of(hint, where, ()))


def _schema_of(hint: Any, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    """Return the JSON Schema of a type; `outer` are the classes that contain it."""
    if needs_pydantic(hint) or is_pydantic_dataclass(hint):
        return _pydantic_schema(hint, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return {}
    if origin is typing.Annotated:
        schema = _schema_of(args[0], where, outer)
        return schema | keywords_of(args[1:], schema)
    if origin in _WRAPPERS:
        return _schema_of(args[0], where, outer)
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if is_union(hint):
        return {"anyOf": [_schema_of(option, where, outer) for option in args]}
    if origin is Literal:
        return _choices(args, where)
    if (origin or hint) in _ARRAYS:
        return _array(origin or hint, args, where, outer)
    if (origin or hint) in _MAPPINGS:
        return _mapping(args, where, outer)
    if isinstance(hint, type):
        return _class(hint, where, outer)
    alias = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    if alias is not None:
        return _schema_of(alias, where, outer)
    raise _no_schema(hint, where)


def _pydantic_schema(hint: Any, where: str) -> dict[str, Any]:
    try:
        schema = cast("dict[str, Any]", adapter_of(hint).json_schema())
    except Exception as error:  # a type in it may have no JSON Schema, or may not be defined
        got = Shown(getattr(hint, "__name__", None) or brief(hint))
        raise must(where, "have a type with a JSON Schema", got, reason_of(error)) from error
    if schema.keys() == {"$ref", "$defs"}:
        # A model that contains itself. Providers need an object at the root.
        return {**referred(schema, schema["$ref"]), "$defs": schema["$defs"]}
    return schema


def _array(origin: Any, args: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [_schema_of(item, where, outer) for item in args]
        return schema | {"prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    schema["items"] = _schema_of(args[0], where, outer) if args else {}
    if origin in (set, frozenset):
        schema["uniqueItems"] = True
    return schema


def _mapping(args: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if not args:
        return {"type": "object"}
    if args[0] is not str:
        raise must(f"{where}: the keys of a dict", "be str", args[0])
    return {"type": "object", "additionalProperties": _schema_of(args[1], where, outer) or True}


def _class(hint: type, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if issubclass(hint, Enum):
        return _choices(tuple(member.value for member in hint), where)
    if hint in outer:
        fix = "The JSON Schema of a tool cannot express that. Use dict"
        raise must(f"{where}: {hint.__name__}", "not contain itself", Shown("a field of its own type"), fix)
    inside = (*outer, hint)
    if typing.is_typeddict(hint):
        fields = _hints(hint, where)
        required = [name for name, field in fields.items() if _is_required(hint, name, field)]
        return _object({name: _schema_of(field, where, inside) for name, field in fields.items()}, required)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, where, inside)
    raise _no_schema(hint, where)


def _dataclass(hint: type, where: str, inside: tuple[Any, ...]) -> dict[str, Any]:
    hints = _hints(hint, where)
    properties: dict[str, Any] = {}
    required = []
    for field in dataclasses.fields(hint):
        if not field.init:
            continue
        properties[field.name] = _schema_of(hints[field.name], where, inside)
        if isinstance(description := field.metadata.get("description"), str):
            properties[field.name]["description"] = description
        if field.default is field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        elif field.default is not dataclasses.MISSING:
            properties[field.name] = with_default(properties[field.name], field.default)
    for name, parameter in inspect.signature(hint).parameters.items():
        if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in properties:
            raise must(
                f"{where}: parameter {brief(name)} of {hint.__name__}",
                "be a field or have a default",
                Shown("a parameter without a default"),
            )
    return _object(properties, required)


def _hints(hint: type, where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(hint, include_extras=True)
    except NameError as error:
        raise unresolved(f"{where}: a type hint of {hint.__name__}", error) from error


def _is_required(hint: Any, name: str, field: Any) -> bool:
    # `__required_keys__` ignores Required and NotRequired under `from __future__ import annotations`.
    marker = typing.get_origin(field)
    return marker is typing.Required or (name in hint.__required_keys__ and marker is not typing.NotRequired)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _choices(values: tuple[Any, ...], where: str) -> dict[str, Any]:
    values = tuple(value.value if isinstance(value, Enum) else value for value in values)
    for value in values:
        if type(value) not in SCALARS:
            raise must(f"{where}: a choice", "be a str, int, float, bool or None", value)
    kinds = {SCALARS[type(value)] for value in values}
    return {"enum": list(values)} | ({"type": kinds.pop()} if len(kinds) == 1 else {})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return type(value) in SCALARS and (not isinstance(value, float) or math.isfinite(value))


def _no_schema(hint: Any, where: str) -> InvalidArgument:
    return must(
        where,
        "have a type with a JSON Schema",
        Shown(getattr(hint, "__name__", None) or brief(hint)),
        "Use str, int, float, bool, list, dict, Literal, an Enum, a dataclass, a TypedDict or a model of pydantic, or "
        "pass a JSON Schema (a tool's parameters=, a dict as output_type)",
    )


# -- JSON value to typed value


def typed(value: Any, hint: Any, name: str | None = None) -> Any:
    """Build the value of type `hint` from a JSON value; `name` is the argument in error messages.

    Builds dataclasses, Enums (by value, else by name), tuples and sets. Converts 3.0 to 3 for int, and 3 to 3.0 for
    float. Other values, and those already built, are returned unchanged; the schema is checked elsewhere.

    Raises:
        InvalidArgument: No value of this type can be built.
    """
    path = None
    if name is not None:
        path = Path(None, None)
        path.step = name
    try:
        return build(value, hint, _FROM_JSON, path)
    except UnserialisableResult as error:
        where = error.path if name is None else error.path.removeprefix("$.")
        raise InvalidArgument(f"{where}: {error.reason}") from error.__cause__


def _special(hint: Any) -> Turn | None:
    if is_pydantic_dataclass(hint):
        return partial(_dataclass_of_pydantic, hint)
    if needs_pydantic(hint):
        return None  # pydantic chooses the member of a union
    if hint is int or hint is float:
        return partial(_number, hint)
    options = tuple(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is Literal:
        return partial(_choice, options)
    return partial(_first_matching, options) if is_union(hint) and len(options) > 1 else None


_FROM_JSON: Final = Policy(enums_by_value=True, special=_special)


def _dataclass_of_pydantic(hint: Any, value: Any, at: Path | None, back: bool) -> Any:
    if isinstance(value, hint):
        return value
    try:
        return from_json(hint, value)
    except Exception as error:  # validators are the user's
        raise not_encodable(at, f"{hint.__name__} could not be constructed: {reason_of(error)}") from error


def _number(hint: type, value: Any, at: Path | None, back: bool) -> Any:
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT:
        return int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise not_encodable(
                at, f"must fit a float (at most {sys.float_info.max:.1e}), got {brief(value)}"
            ) from error
    return value


def _choice(options: tuple[Any, ...], value: Any, at: Path | None, back: bool) -> Any:
    index = choice(value, [each.value if isinstance(each, Enum) else each for each in options])
    return value if index is None else options[index]


def _first_matching(options: tuple[Any, ...], value: Any, at: Path | None, back: bool) -> Any:
    if type(value) in (int, float) and type(value) in options:
        return value
    failure: UnserialisableResult | None = None
    for option in options:
        if _matches(value, option):
            try:
                return codec_of(option, _FROM_JSON).convert(value, at, back)
            except UnserialisableResult as error:
                failure = failure or error
    if failure is not None:
        raise failure
    return value


def _matches(value: Any, hint: Any) -> bool:
    try:
        return misfit(value, schema_of(hint, "$")) is None
    except InvalidArgument:  # no schema can express this type
        return False

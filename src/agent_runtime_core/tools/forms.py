"""One type hint of a parameter: its JSON Schema outward, a value of that type inward."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections import abc
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal

from .._hints import hints_of
from ..errors import InvalidArgument, brief
from ..schema import LARGEST_EXACT, choice, misfit

__all__ = ["give_default", "is_union", "schema_of", "typed"]

_SCALARS: Final[Mapping[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_NUMBERS: Final = {int, float}
_ARRAYS: Final = {list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection}
_MAPPINGS: Final = {dict, abc.Mapping}
_NAMED: Final = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
_WRAPPERS: Final = {typing.Annotated, typing.Required, typing.NotRequired}


def is_union(hint: Any) -> bool:
    """Whether this is `A | B`, Union or Optional."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def give_default(schema: dict[str, Any], value: Any) -> None:
    """Tell a parameter's default where JSON can say it."""
    plain = value.value if isinstance(value, Enum) else value
    if _is_plain(plain):
        schema["default"] = plain


# -- outward


def schema_of(hint: Any, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    """JSON Schema of one type; `outer` are the classes around it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return {}
    if origin is typing.Annotated:
        texts = [extra for extra in args[1:] if isinstance(extra, str)]
        return schema_of(args[0], where, outer) | ({"description": texts[0]} if texts else {})
    if origin in _WRAPPERS:
        return schema_of(args[0], where, outer)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if is_union(hint):
        return {"anyOf": [schema_of(option, where, outer) for option in args]}
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
        return schema_of(alias, where, outer)
    raise _unfit(hint, where)


def _array(origin: Any, args: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [schema_of(item, where, outer) for item in args]
        return schema | {"prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if args:
        schema["items"] = schema_of(args[0], where, outer)
    if origin in (set, frozenset):
        schema["uniqueItems"] = True
    return schema


def _mapping(args: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if not args:
        return {"type": "object"}
    if args[0] is not str:
        raise InvalidArgument(f"{where}: the keys of a JSON object are texts, not {brief(args[0])}")
    return {"type": "object", "additionalProperties": schema_of(args[1], where, outer) or True}


def _class(hint: type, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if issubclass(hint, Enum):
        return _choices(tuple(member.value for member in hint), where)
    if hint in outer:
        raise InvalidArgument(f"{where}: {hint.__name__} contains itself, which a tool's parameters cannot say")
    inside = (*outer, hint)
    if typing.is_typeddict(hint):
        fields = _hints(hint, where)
        required = [name for name, field in fields.items() if _is_required(hint, name, field)]
        return _object({name: schema_of(field, where, inside) for name, field in fields.items()}, required)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, where, inside)
    raise _unfit(hint, where)


def _dataclass(hint: type, where: str, inside: tuple[Any, ...]) -> dict[str, Any]:
    hints = _hints(hint, where)
    properties: dict[str, Any] = {}
    required = []
    for field in dataclasses.fields(hint):
        if not field.init:
            continue
        properties[field.name] = schema_of(hints[field.name], where, inside)
        if field.default is field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        elif field.default is not dataclasses.MISSING:
            give_default(properties[field.name], field.default)
    for name, parameter in inspect.signature(hint).parameters.items():
        if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in properties:
            raise InvalidArgument(f"{where}: {hint.__name__} takes {brief(name)}, which is no field: give it a default")
    return _object(properties, required)


def _hints(hint: type, where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(hint, include_extras=True)
    except NameError as error:
        raise InvalidArgument(
            f"{where}: a type hint of {hint.__name__} cannot be resolved ({error}): "
            f"define {error.name!r} at the top of its module"
        ) from error


def _is_required(hint: Any, name: str, field: Any) -> bool:
    # `__required_keys__` misses what is written as text, as every hint is under `from __future__ import annotations`.
    marker = typing.get_origin(field)
    return marker is typing.Required or (name in hint.__required_keys__ and marker is not typing.NotRequired)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _choices(values: tuple[Any, ...], where: str) -> dict[str, Any]:
    values = tuple(value.value if isinstance(value, Enum) else value for value in values)
    for value in values:
        if type(value) not in _SCALARS:
            raise InvalidArgument(f"{where}: the choice {brief(value)} has no JSON form")
    kinds = {_SCALARS[type(value)] for value in values}
    return {"enum": list(values)} | ({"type": kinds.pop()} if len(kinds) == 1 else {})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return type(value) in _SCALARS and (not isinstance(value, float) or math.isfinite(value))


def _unfit(hint: Any, where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: {getattr(hint, '__name__', hint)} has no JSON Schema here; use str, int, float, bool, list, dict, "
        "Literal, an Enum, a dataclass or a TypedDict, or a JSON Schema (a tool's parameters=, a dict as output_type)"
    )


# -- inward


def typed(value: Any, hint: Any, path: str = "$") -> Any:
    """The value of type `hint` that a JSON tree stands for, InvalidArgument where there is none.

    Builds dataclasses, Enums (by value, else by name), tuples and sets; 3.0 is an int where one is wanted, and 3 a
    float. What it cannot build it leaves as it is, and so what is built already; whether it fits a schema is asked
    elsewhere.
    """
    if hint is Any or hint is object or value is None or (type(value) is hint and hint in _SCALARS):
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in _WRAPPERS:
        return typed(value, args[0], path)
    if hint is int or hint is float:
        return _number(value, hint, path)
    if is_union(hint):
        return _one_of(value, args, path)
    if origin is Literal:
        plain = [each.value if isinstance(each, Enum) else each for each in args]
        index = choice(value, plain)
        return value if index is None else args[index]
    kind = origin or hint
    if kind in _ARRAYS:
        return _items(value, kind, args, path)
    if kind in _MAPPINGS:
        if not args or not isinstance(value, dict):
            return value
        return {name: typed(item, args[1], f"{path}.{name}") for name, item in value.items()}
    if isinstance(kind, type):
        return _instance(value, kind, path)
    alias = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    return value if alias is None else typed(value, alias, path)


def _number(value: Any, hint: type, path: str) -> Any:
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT:
        return int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidArgument(f"{path} is larger than any float") from error
    return value


def _one_of(value: Any, options: tuple[Any, ...], path: str) -> Any:
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return typed(value, options[0], path)
    if type(value) in options and type(value) in _NUMBERS:
        return value
    refusal: InvalidArgument | None = None
    for option in options:
        if not _fits(value, option, path):
            continue
        try:
            return typed(value, option, path)
        except InvalidArgument as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    return value


def _fits(value: Any, hint: Any, path: str) -> bool:
    try:
        return misfit(value, schema_of(hint, path, ())) is None
    except InvalidArgument:  # no schema can say this type
        return False


def _items(value: Any, kind: Any, args: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, list):
        return value
    fixed = kind is tuple and bool(args) and args[-1] is not Ellipsis
    hints = args if fixed else args[:1] * len(value)
    items = [typed(item, hints[i] if i < len(hints) else Any, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind not in (tuple, set, frozenset):
        return items
    try:
        return kind(items)
    except TypeError as error:
        raise InvalidArgument(f"{path}: no {kind.__name__} can hold these: {error}") from error


def _instance(value: Any, cls: Any, path: str) -> Any:
    if typing.is_typeddict(cls) and isinstance(value, dict):
        fields = _fields(cls)
        return {name: typed(item, fields.get(name, Any), f"{path}.{name}") for name, item in value.items()}
    if issubclass(cls, Enum) and not isinstance(value, cls):
        return _member(value, cls, path)
    return _built(value, cls, path) if dataclasses.is_dataclass(cls) else value


def _member(value: Any, cls: type[Enum], path: str) -> Enum:
    members = list(cls)
    index = choice(value, [member.value for member in members])
    if index is not None:
        return members[index]
    if isinstance(value, str) and value in cls.__members__:
        return cls.__members__[value]
    raise InvalidArgument(
        f"{path} is {brief(value)}, {cls.__name__} wants one of {brief([member.value for member in members])}"
    )


def _built(value: Any, cls: Any, path: str) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} is {type(value).__name__}, {cls.__name__} wants object")
    hints, given = _fields(cls), {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.name in value:
            given[field.name] = typed(value[field.name], hints.get(field.name, Any), f"{path}.{field.name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise InvalidArgument(f"{path} lacks {field.name!r}, which {cls.__name__} needs")
    try:
        return cls(**given)
    except Exception as error:  # the constructor is the user's
        raise InvalidArgument(f"{path}: {cls.__name__} would not be built: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=1024)
def _fields(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):
        return {name: Any if hint is None else hint for name, hint in hints_of(cls).items()}

"""A function's parameters, as its type hints and docstring tell them: JSON Schema outward, typed values inward."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from .._forms import convert
from ..errors import InvalidArgument

__all__ = ["arguments_for", "context_parameter", "describe", "parameters_of", "place_context"]

_CONTEXT = "RunContext"
_SCALARS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARRAYS = {list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?|Warnings?):\s*$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def context_parameter(fn: Callable[..., Any]) -> str | None:
    """The name of the parameter annotated `RunContext`, if there is one."""
    return _context_in(_parameters(fn))


def place_context(fn: Callable[..., Any], ctx: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` with `ctx` put where `fn` has its parameter annotated `RunContext`."""
    parameters = _parameters(fn)
    wanted = _context_in(parameters)
    if wanted is None:
        return tuple(args)
    place = list(parameters).index(wanted)
    if place > len(args):
        raise InvalidArgument(f"{_name(fn)} needs {place} argument(s) before {wanted!r}, got {len(args)}")
    return (*args[:place], ctx, *args[place:])


def parameters_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """JSON Schema of the parameters of `fn`; one annotated `RunContext` is left out."""
    told = describe(fn)[1]
    properties: dict[str, Any] = {}
    required: list[str] = []
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    for name, (parameter, hint) in _parameters(fn, strict=True).items():
        if hint is _CONTEXT:
            continue
        where = f"parameter {name!r} of {_name(fn)}"
        if parameter.kind is parameter.VAR_KEYWORD:
            schema["additionalProperties"] = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InvalidArgument(f"{where} cannot be given by name, which is all a model can do")
        properties[name] = _schema(hint, where, ())
        if name in told:
            properties[name]["description"] = told[name]
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            _default(properties[name], parameter.default)
    return schema


def arguments_for(fn: Callable[..., Any], arguments: Mapping[str, Any], ctx: Any = None) -> dict[str, Any]:
    """The keyword arguments to call `fn` with, rebuilt by its type hints; InvalidArgument if they do not fit."""
    signature = _signature(fn)
    if signature is None:
        return dict(arguments)
    parameters = _parameters(fn)
    wanted = _context_in(parameters)
    if wanted in arguments:
        raise InvalidArgument(f"{wanted!r} is not for the caller to give")
    given = {name: _value(parameters, name, value) for name, value in arguments.items()}
    if wanted is not None and ctx is not None:
        given[wanted] = ctx
    elif wanted is not None and parameters[wanted][0].default is inspect.Parameter.empty:
        raise InvalidArgument(f"{_name(fn)} takes a RunContext: give it as ctx=")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise InvalidArgument(str(error)) from None
    return given


def describe(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The docstring's text before its first section, and what its "Args:" say of each parameter."""
    text: list[str] = []
    told: dict[str, str] = {}
    section, current, margin = "", "", 0
    for line in (inspect.getdoc(fn) or "").splitlines():
        heading = _SECTION.match(line)
        depth = len(line) - len(line.lstrip())
        if heading:
            section, current, margin = heading[1], "", 0
        elif not section:
            text.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            margin = margin or depth
            entry = _ENTRY.match(line.strip()) if depth <= margin else None
            if entry:
                current = entry[1]
                told[current] = entry[2]
            elif current:
                told[current] = f"{told[current]} {line.strip()}".strip()
    return "\n".join(text).strip(), {name: about for name, about in told.items() if about}


def _value(parameters: Mapping[str, tuple[inspect.Parameter, Any]], name: str, value: Any) -> Any:
    parameter, hint = parameters.get(name, (None, Any))
    if parameter is None or parameter.kind is parameter.VAR_KEYWORD or not _rebuilds(hint):
        return value
    try:
        return convert(value, hint)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"argument {name!r}: {error}") from error


def _rebuilds(hint: Any) -> bool:
    """Whether a value of this type is more than the JSON tree that tells it."""
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and (
        issubclass(origin, (Enum, tuple, set, frozenset)) or dataclasses.is_dataclass(origin)
    ):
        return True
    if typing.is_typeddict(origin):
        return any(map(_rebuilds, typing.get_type_hints(origin).values()))
    return any(map(_rebuilds, typing.get_args(hint))) if origin is not Literal else False


def _context_in(parameters: Mapping[str, tuple[inspect.Parameter, Any]]) -> str | None:
    return next((name for name, (_, hint) in parameters.items() if hint is _CONTEXT), None)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        # Some builtins tell nobody what they take.
        return None


def _parameters(fn: Callable[..., Any], *, strict: bool = False) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Each parameter with its resolved hint: `_CONTEXT` for the context, Any where there is none.

    A hint that cannot be resolved is an InvalidArgument if `strict`, else Any.
    """
    signature = _signature(fn)
    if signature is None:
        return {}
    hints: dict[str, Any] = {}
    unresolved: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if _is_context(parameter.annotation):
            # Not resolved: its import is often for type checkers only.
            hints[name] = _CONTEXT
        elif parameter.annotation is parameter.empty:
            hints[name] = Any
        else:
            unresolved[name] = parameter.annotation
    hints.update(_resolved(fn, unresolved, strict))
    return {name: (parameter, hints[name]) for name, parameter in signature.parameters.items()}


def _resolved(fn: Callable[..., Any], annotations: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    if not annotations:
        return {}
    holder = types.SimpleNamespace(__annotations__=dict(annotations))
    try:
        hints = typing.get_type_hints(holder, globalns=_globals(fn), include_extras=True)
    except NameError as error:
        if not strict:
            return dict.fromkeys(annotations, Any)
        raise InvalidArgument(
            f"a type hint of {_name(fn)} cannot be resolved ({error}): define {error.name!r} at the top of its module"
        ) from error
    return {name: _CONTEXT if _is_context(hint) else hint for name, hint in hints.items()}


def _globals(fn: Any) -> dict[str, Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    if not hasattr(fn, "__globals__"):
        fn = getattr(fn, "__func__", None) or type(fn).__call__
    return getattr(fn, "__globals__", {})


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        parts = annotation.strip("\"'").replace("Optional[", "").replace("]", "").split("|")
        names = [part.strip().rpartition(".")[2] for part in parts]
    else:
        options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
        names = [option if isinstance(option, str) else getattr(option, "__name__", "") for option in options]
    return _CONTEXT in names


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _schema(hint: Any, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    """JSON Schema of one type; `outer` are the classes around it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is typing.Annotated:
        texts = [extra for extra in args[1:] if isinstance(extra, str)]
        return _schema(args[0], where, outer) | ({"description": texts[0]} if texts else {})
    if origin in (typing.Required, typing.NotRequired):
        return _schema(args[0], where, outer)
    if _is_union(hint):
        return {"anyOf": [_schema(option, where, outer) for option in args]}
    if origin is Literal:
        return _choices(args, where)
    if (origin or hint) in _ARRAYS:
        return _array(origin or hint, args, where, outer)
    if (origin or hint) in (dict, abc.Mapping):
        return _mapping(args, where, outer)
    if isinstance(hint, type):
        return _class(hint, where, outer)
    alias = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    if alias is not None:
        return _schema(alias, where, outer)
    raise _unfit(hint, where)


def _array(origin: Any, args: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [_schema(item, where, outer) for item in args]
        return schema | {"prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if args:
        schema["items"] = _schema(args[0], where, outer)
    if origin in (set, frozenset):
        schema["uniqueItems"] = True
    return schema


def _mapping(args: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if not args:
        return {"type": "object"}
    if args[0] is not str:
        raise InvalidArgument(f"{where}: the keys of a JSON object are texts, not {args[0]!r}")
    return {"type": "object", "additionalProperties": _schema(args[1], where, outer) or True}


def _class(hint: type, where: str, outer: tuple[Any, ...]) -> dict[str, Any]:
    if issubclass(hint, Enum):
        return _choices(tuple(member.value for member in hint), where)
    if hint in outer:
        raise InvalidArgument(f"{where}: {hint.__name__} contains itself, which a tool's parameters cannot say")
    inside = (*outer, hint)
    if typing.is_typeddict(hint):
        fields = typing.get_type_hints(hint, include_extras=True)
        required = [name for name, field in fields.items() if _is_required(hint, name, field)]
        return _object({name: _schema(field, where, inside) for name, field in fields.items()}, required)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        properties: dict[str, Any] = {}
        required = []
        for field in dataclasses.fields(hint):
            if not field.init:
                continue
            properties[field.name] = _schema(hints[field.name], where, inside)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                required.append(field.name)
            else:
                _default(properties[field.name], field.default)
        return _object(properties, required)
    raise _unfit(hint, where)


def _is_required(hint: Any, name: str, field: Any) -> bool:
    # `__required_keys__` misses what is written as text, as every hint is under `from __future__ import annotations`.
    marker = typing.get_origin(field)
    return marker is typing.Required or (name in hint.__required_keys__ and marker is not typing.NotRequired)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _choices(values: tuple[Any, ...], where: str) -> dict[str, Any]:
    values = tuple(value.value if isinstance(value, Enum) else value for value in values)
    for value in values:
        if type(value) not in _SCALARS:
            raise InvalidArgument(f"{where}: the choice {value!r} has no JSON form")
    kinds = {_SCALARS[type(value)] for value in values}
    return {"enum": list(values)} | ({"type": kinds.pop()} if len(kinds) == 1 else {})


def _default(schema: dict[str, Any], value: Any) -> None:
    plain = value.value if isinstance(value, Enum) else value
    if _is_plain(plain):
        schema["default"] = plain


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return type(value) in _SCALARS


def _unfit(hint: Any, where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: {getattr(hint, '__name__', hint)} has no JSON Schema here; use str, int, float, bool, list, dict, "
        "Literal, an Enum, a dataclass or a TypedDict, or give parameters="
    )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__

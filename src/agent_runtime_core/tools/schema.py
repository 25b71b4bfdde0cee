"""The parameters of a function, from its signature and docstring: their JSON Schema, and how arguments are bound."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._core.codec.type_hints import unresolved
from .._core.codec.typed import is_union
from .._core.json_schema import hoisted
from .._core.validation import Shown, must
from ..errors import InvalidArgument, brief
from .annotation_metadata import FieldDefault, field_default, keywords_of
from .annotations import schema_of, typed, with_default
from .docstrings import read_docstring

__all__ = ["Binder", "context_parameter", "describe", "parameters_of", "place_context", "unbound"]

_CONTEXT = "RunContext"
_BLOCKING = "SyncRunContext"
_CONTEXTS = frozenset({_CONTEXT, _BLOCKING})


def context_parameter(fn: Callable[..., Any]) -> str | None:
    """Return the name of the parameter annotated `RunContext` or `SyncRunContext`, or None."""
    return _context_in(_parameters(fn))


def place_context(fn: Callable[..., Any], ctx: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return `args` with `ctx` at the position of the parameter of `fn` that is annotated `RunContext`.

    If a plain function has a parameter that is annotated `SyncRunContext`, it gets that form of the context.
    """
    parameters = _parameters(fn)
    name = _context_in(parameters)
    if name is None:
        return tuple(args)
    position = list(parameters).index(name)
    if position > len(args):
        constraint = f"have {position} argument{'s' * (position != 1)} before {brief(name)}"
        raise must(_name(fn), constraint, len(args))
    return (*args[:position], ctx if _is_async(fn) else _in_form(parameters[name][0], ctx), *args[position:])


def parameters_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema of the parameters of `fn`.

    Parameters that functools.partial has bound, and the one annotated `RunContext`, are left out.

    Raises:
        InvalidArgument: A parameter has no JSON Schema or cannot be passed by name.
    """
    descriptions = describe(unbound(fn))[1]
    bound = _bound(fn)
    properties: dict[str, Any] = {}
    required: list[str] = []
    others: Any = False
    for name, (parameter, hint) in _parameters(fn, strict=True).items():
        if hint is _CONTEXT or name in bound:
            continue
        where = f"parameter {name!r} of {_name(fn)}"
        if name == "self" and not properties and parameter.annotation is parameter.empty:
            got, fix = Shown("the function of a class"), "Pass it from an instance, as in Tool.from_function(shop.buy)"
            raise must(_name(fn), "be a method of an object", got, fix)
        if parameter.kind is parameter.VAR_KEYWORD:
            others = schema_of(hint, where) or True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            kind = "*args" if parameter.kind is parameter.VAR_POSITIONAL else "a positional-only parameter"
            raise must(where, "accept an argument by name", Shown(kind), "A model passes all arguments by name")
        properties[name], is_required = _property(parameter, hint, where, descriptions.get(name))
        if is_required:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": others}
    return hoisted(schema)


def _property(
    parameter: inspect.Parameter, hint: Any, where: str, description: str | None
) -> tuple[dict[str, Any], bool]:
    """Return the schema of one parameter, and whether it has no default."""
    schema = schema_of(hint, where)
    default = parameter.default
    field = field_default(default)
    if field is not None:
        schema |= keywords_of([field.field], schema)
    if description is not None:
        schema["description"] = description
    if default is parameter.empty or (field is not None and field.required):
        return schema, True
    if field is not None and field.has_factory:
        return schema, False
    return with_default(schema, default if field is None else field.value()), False


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_JSON_TYPES = (str, int, float, bool, type(None), list, dict)
_SINGLE = (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)


class Binder:
    """Binds the arguments of calls by a function's signature, which is read once."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.is_async: bool = _is_async(fn)
        self._signature = _signature(fn)
        self._parameters = _parameters(fn)
        self._context = _context_in(self._parameters)
        #: Parameters that a caller must not pass: the bound ones and the context.
        self._reserved = {*_bound(fn), *filter(None, [self._context])}
        #: Parameters whose JSON values need no conversion, with their types.
        self._unconverted = {name: hint for name, (_, hint) in self._parameters.items() if hint in (str, int, bool)}
        hints = {parameter.kind: hint for parameter, hint in self._parameters.values()}
        self._extra_hint = hints.get(inspect.Parameter.VAR_KEYWORD, Any)
        parameters = [] if self._signature is None else self._signature.parameters.values()
        self._named = {each.name for each in parameters if each.kind in _BY_NAME}
        self._needed = {each.name for each in parameters if each.kind in _SINGLE and each.default is each.empty}
        #: Defaults that a JSON value may stand for, although they do not have the annotated type.
        self._defaults = {each.name: each.default for each in parameters if type(each.default) in _JSON_TYPES}
        self._fields: dict[str, FieldDefault] = {}
        for each in parameters:
            field = field_default(each.default)
            if field is not None:
                self._fields[each.name] = field
                if not field.required and not field.has_factory:
                    self._defaults[each.name] = field.value()

    def bind(self, arguments: Mapping[str, Any], ctx: Any = None) -> dict[str, Any]:
        """Return the keyword arguments for a call, converted to their types; InvalidArgument if they do not match."""
        if not self._reserved.isdisjoint(arguments):
            reserved = next(name for name in arguments if name in self._reserved)
            raise must(reserved, "not be an argument of the call", arguments[reserved], "Remove it: it is set already")
        if self._signature is None:
            return dict(arguments)
        context = self._context
        bound = dict(arguments)
        for name, value in arguments.items():
            if self._unconverted.get(name) is not type(value) and not self._is_default(name, value):
                bound[name] = typed(value, self._hint(name), name)
        for name, field in self._fields.items():
            if name not in bound:
                if field.required:
                    raise InvalidArgument(f"missing required argument {name!r}")
                bound[name] = field.value()
        if context is not None and ctx is not None:
            bound[context] = ctx if self.is_async else _in_form(self._parameters[context][0], ctx)
        elif context is not None and self._parameters[context][0].default is inspect.Parameter.empty:
            raise must(_name(self.fn), "be called with a RunContext", None, "Pass ctx=")
        if not self._needed <= bound.keys() <= self._named:
            try:
                self._signature.bind(**bound)
            except TypeError as error:
                raise InvalidArgument(
                    str(error).replace("missing a required argument: ", "missing required argument ")
                ) from None
        return bound

    def _is_default(self, name: str, value: Any) -> bool:
        return name in self._defaults and type(value) is type(self._defaults[name]) and value == self._defaults[name]

    def _hint(self, name: str) -> Any:
        known = self._parameters.get(name)
        return self._extra_hint if known is None else known[1]


def unbound(fn: Any) -> Any:
    """Return the function below functools.partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _bound(fn: Any) -> set[str]:
    """Return the names of the parameters that functools.partial has bound, by name or by position."""
    names: set[str] = set()
    while fn is not None:
        if isinstance(fn, functools.partial):
            left, fn, keywords = _signature(fn), fn.func, fn.keywords
            whole = _signature(fn)
            names |= keywords.keys()
            if left is not None and whole is not None:
                names |= whole.parameters.keys() - left.parameters.keys()
        else:
            fn = getattr(fn, "__wrapped__", None)
    return names


def _is_async(handler: Any) -> bool:
    handler = unbound(handler)
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def describe(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a function and those of its parameters, from its docstring."""
    return read_docstring(inspect.getdoc(fn) or "")


def _context_in(parameters: Mapping[str, tuple[inspect.Parameter, Any]]) -> str | None:
    return next((name for name, (_, hint) in parameters.items() if hint is _CONTEXT), None)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        # Some builtins have no signature.
        return None


def _parameters(fn: Callable[..., Any], *, strict: bool = False) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Return each parameter with its resolved hint: `_CONTEXT` for the context, Any without a hint.

    A hint that cannot be resolved raises InvalidArgument if `strict`; otherwise it is Any.
    """
    signature = _signature(fn)
    if signature is None:
        return {}
    hints: dict[str, Any] = {}
    unresolved: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if _is_context(parameter.annotation):
            # Not resolved, because it is often imported for type checkers only.
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
        raise unresolved(f"a type hint of {_name(fn)}", error) from error
    return {name: _CONTEXT if _is_context(hint) else hint for name, hint in hints.items()}


def _globals(fn: Any) -> dict[str, Any]:
    fn = inspect.unwrap(unbound(fn))
    if not hasattr(fn, "__globals__"):
        fn = getattr(fn, "__func__", None) or type(fn).__call__
    return getattr(fn, "__globals__", {})


def _in_form(parameter: inspect.Parameter, ctx: Any) -> Any:
    """Return the context in the form that the annotation of a parameter names."""
    return getattr(ctx, "blocking_form", ctx) if _BLOCKING in _names_in(parameter.annotation) else ctx


def _is_context(annotation: Any) -> bool:
    return not _CONTEXTS.isdisjoint(_names_in(annotation))


def _names_in(annotation: Any) -> list[str]:
    """Return the names of the classes in an annotation."""
    if isinstance(annotation, str):
        parts = annotation.strip("\"'").replace("Optional[", "").replace("]", "").split("|")
        return [part.strip().rpartition(".")[2] for part in parts]
    options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return [option if isinstance(option, str) else getattr(option, "__name__", "") for option in options]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__

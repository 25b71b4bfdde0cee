"""A function's parameters, as its signature and docstring tell them: JSON Schema outward, arguments inward."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._core.codec.type_hints import unresolved
from .._core.codec.typed import is_union
from ..errors import InvalidArgument, brief
from .annotations import give_default, schema_of, typed

__all__ = ["Binder", "context_parameter", "describe", "parameters_of", "place_context", "unbound"]

_CONTEXT = "RunContext"
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
        raise InvalidArgument(f"{_name(fn)} needs {place} argument(s) before {brief(wanted)}, got {len(args)}")
    return (*args[:place], ctx, *args[place:])


def parameters_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """JSON Schema of the parameters of `fn`, without those already bound and one annotated `RunContext`."""
    told = describe(unbound(fn))[1]
    bound = _bound(fn)
    properties: dict[str, Any] = {}
    required: list[str] = []
    others: Any = False
    for name, (parameter, hint) in _parameters(fn, strict=True).items():
        if hint is _CONTEXT or name in bound:
            continue
        where = f"parameter {name!r} of {_name(fn)}"
        if parameter.kind is parameter.VAR_KEYWORD:
            others = schema_of(hint, where, ()) or True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InvalidArgument(f"{where} cannot be given by name, which is all a model can do")
        properties[name] = schema_of(hint, where, ())
        if name in told:
            properties[name]["description"] = told[name]
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            give_default(properties[name], parameter.default)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": others}


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_GIVEN = (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)


class Binder:
    """What a function's signature says, read once: the arguments of each call are bound by it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.is_async: bool = _is_async(fn)
        self._signature = _signature(fn)
        self._parameters = _parameters(fn)
        self._context = _context_in(self._parameters)
        #: Names that no argument may have: what they stand for is given already.
        self._taken = {*_bound(fn), *filter(None, [self._context])}
        #: Those of a hint that says no more than the type of a value in JSON.
        self._plain = {name: hint for name, (_, hint) in self._parameters.items() if hint in (str, int, bool)}
        hints = {parameter.kind: hint for parameter, hint in self._parameters.values()}
        self._others = hints.get(inspect.Parameter.VAR_KEYWORD, Any)
        parameters = [] if self._signature is None else self._signature.parameters.values()
        self._named = {each.name for each in parameters if each.kind in _BY_NAME}
        self._needed = {each.name for each in parameters if each.kind in _GIVEN and each.default is each.empty}

    def bind(self, arguments: Mapping[str, Any], ctx: Any = None) -> dict[str, Any]:
        """The keyword arguments to call the function with, typed by its hints; InvalidArgument if they do not fit."""
        if not self._taken.isdisjoint(arguments):
            taken = next(name for name in arguments if name in self._taken)
            raise InvalidArgument(f"{brief(taken)} is not for the caller to give")
        if self._signature is None:
            return dict(arguments)
        wanted = self._context
        given = dict(arguments)
        for name, value in arguments.items():
            if self._plain.get(name) is not type(value):
                given[name] = typed(value, self._hint(name), name)
        if wanted is not None and ctx is not None:
            given[wanted] = ctx
        elif wanted is not None and self._parameters[wanted][0].default is inspect.Parameter.empty:
            raise InvalidArgument(f"{_name(self.fn)} takes a RunContext: give it as ctx=")
        if not self._needed <= given.keys() <= self._named:
            try:
                self._signature.bind(**given)
            except TypeError as error:
                raise InvalidArgument(str(error)) from None
        return given

    def _hint(self, name: str) -> Any:
        known = self._parameters.get(name)
        return self._others if known is None else known[1]


def unbound(fn: Any) -> Any:
    """The function that arguments were bound to with functools.partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _bound(fn: Any) -> set[str]:
    """The names of the parameters that functools.partial has bound, by name or by position."""
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
        raise unresolved(f"a type hint of {_name(fn)}", error) from error
    return {name: _CONTEXT if _is_context(hint) else hint for name, hint in hints.items()}


def _globals(fn: Any) -> dict[str, Any]:
    fn = inspect.unwrap(unbound(fn))
    if not hasattr(fn, "__globals__"):
        fn = getattr(fn, "__func__", None) or type(fn).__call__
    return getattr(fn, "__globals__", {})


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        parts = annotation.strip("\"'").replace("Optional[", "").replace("]", "").split("|")
        names = [part.strip().rpartition(".")[2] for part in parts]
    else:
        options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
        names = [option if isinstance(option, str) else getattr(option, "__name__", "") for option in options]
    return _CONTEXT in names


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__

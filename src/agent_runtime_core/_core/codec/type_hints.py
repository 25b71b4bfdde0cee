"""Resolve type hints of functions and classes."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from ...errors import InvalidArgument
from ..validation import must


def returns_of(fn: Callable[..., object]) -> object | None:
    """Return the annotated result type of a function, of a coroutine function after await.

    None if there is no annotation, or it cannot be resolved.
    """
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not isinstance(target, type):
        target = getattr(type(target), "__call__", target)  # noqa: B004 - the method itself, for its annotations
    try:
        target = inspect.unwrap(target)
        annotation = target.__annotations__["return"]
    except (AttributeError, KeyError, NameError, TypeError, ValueError):
        return None
    target = getattr(target, "__func__", target)
    hint = _hint(annotation, getattr(target, "__globals__", {}), _enclosing(target))
    if typing.get_origin(hint) in (collections.abc.Awaitable, collections.abc.Coroutine):
        hint = typing.get_args(hint)[-1]
    return typing.cast("object | None", hint)


def hints_of(cls: type) -> dict[str, Any]:
    """Return the hint of each name that the class or its bases annotate; None for a hint that cannot be resolved."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, annotation in inspect.get_annotations(base).items():
            hints[name] = _hint(annotation, space, dict(vars(base)))
    return hints


def _hint(annotation: Any, space: dict[str, Any], local: dict[str, Any]) -> Any:
    # One after the other, because a name that is imported for type checkers only must not hide the others.
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, space, local)["value"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return None


def unresolved(where: str, error: NameError) -> InvalidArgument:
    fix = f"Define {error.name!r} at the top of its module"
    return must(where, "name a type that is defined", error.name, fix)


def _enclosing(fn: Any) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function uses, so that hints can name local classes."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found

"""Type hints of functions and classes, as far as they can be read here."""

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


def returns_of(fn: Callable[..., object]) -> object | None:
    """What the function gives once awaited, by its annotation; None where there is none that can be read here."""
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
    """The hint of each name annotated in the class or its bases."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, annotation in inspect.get_annotations(base).items():
            hints[name] = _hint(annotation, space, dict(vars(base)))
    return hints


def _hint(annotation: Any, space: dict[str, Any], local: dict[str, Any]) -> Any:
    # One by one: a name that is imported for type checkers only must not hide the others.
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, space, local)["value"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return None


def unresolved(where: str, error: NameError) -> InvalidArgument:
    return InvalidArgument(f"{where} cannot be resolved ({error}): define {error.name!r} at the top of its module")


def _enclosing(fn: Any) -> dict[str, Any]:
    """The names of enclosing functions that this one uses, so that a class made in a function can be named."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found

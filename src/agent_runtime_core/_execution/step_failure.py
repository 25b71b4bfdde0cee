"""Store the error of a failed step in its record, and rebuild the error on a later attempt."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from .._journal.record import Record
from ..errors import AgentRuntimeError, CircuitOpen, StepExecutionError, leaves_of, shortened, text_of

#: Modules whose errors can be constructed from their message alone. Constructors of other classes are not called.
_BUILT_FROM_MESSAGE: Final = frozenset({builtins.__name__, AgentRuntimeError.__module__})

MAX_GROUP_ERRORS: Final = 16  # of a larger group, only the class is stored


def failure_info(error: BaseException) -> dict[str, Any]:
    """Return the message and type of an error, as its record and events have them."""
    return {"error": text_of(error), "type": type(error).__name__}


def cause_info(error: BaseException) -> dict[str, Any]:
    """Return what rebuilding the error needs in addition, for code that continued after it and will again."""
    if not isinstance(error, StepExecutionError):
        return _class_info(error)
    cause = error.__cause__
    nested = {"step": error.step_name, "error": shortened(error.message), "attempts": error.attempts}
    return {"of": nested if cause is None else nested | _class_info(cause)}


def _class_info(error: BaseException) -> dict[str, Any]:
    """Return the class of an error; of a group also its message and the errors inside it, without nested groups."""
    info: dict[str, Any] = {"class": _class_name(error)}
    leaves = leaves_of(error)
    if isinstance(error, BaseExceptionGroup) and len(leaves) <= MAX_GROUP_ERRORS:
        inside = [{"class": _class_name(each), "error": text_of(each)} for each in leaves]
        info["group"] = {"message": shortened(str(error.message)), "errors": inside}
    return info


def _class_name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}:{kind.__qualname__}"


def recorded_error(name: str, failure: Record) -> StepExecutionError:
    """Return the StepExecutionError that the step `name` raised, with its cause if that can be rebuilt.

    If a step inside it failed, the error names that step.
    """
    info = json.loads(failure.info or "{}")
    nested = info.get("of", {"step": name, "attempts": failure.attempt})
    message = nested.get("error", info["error"])
    error = StepExecutionError(nested["step"], message, nested["attempts"])
    error.__cause__ = _rebuilt(nested if "class" in nested else info, message)
    return error


def original_error(name: str, failure: Record) -> Exception:
    """Return the error that the function of the step `name` raised.

    It has the recorded class and message, and no other attributes. If its module is not imported or the class cannot be
    constructed, the result is a StepExecutionError.
    """
    info = json.loads(failure.info or "{}")
    if info.get("type") == CircuitOpen.__name__:
        return CircuitOpen(info["error"], after=info["retry_delay"])
    return _rebuilt(info, info["error"]) or recorded_error(name, failure)


def _rebuilt(info: dict[str, Any], message: str) -> Exception | None:
    """Return an error of the recorded class with this message; None if it cannot be constructed."""
    if "class" not in info:
        return None
    module, _, name = info["class"].partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    if issubclass(found, ExceptionGroup):
        return _rebuilt_group(found, info.get("group"))
    constructors: list[Callable[[str], Any]] = [partial(found.__new__, found)]
    if module in _BUILT_FROM_MESSAGE or issubclass(found, AgentRuntimeError):
        constructors.insert(0, found)
    for construct in constructors:
        with suppress(Exception):  # the class may need other arguments, here or in __str__
            error = construct(message)
            text = str(error)
            if isinstance(error, Exception) and (text == message or (construct is not found and message in text)):
                return error
    return None


def _rebuilt_group(kind: type[ExceptionGroup[Exception]], info: dict[str, Any] | None) -> Exception | None:
    errors = [] if info is None else [_rebuilt(each, each["error"]) for each in info["errors"]]
    inside = [each for each in errors if each is not None]
    if info is None or len(inside) < len(errors):
        return None
    with suppress(Exception):  # a subclass may need other arguments
        return kind.__new__(kind, info["message"], inside)
    return None

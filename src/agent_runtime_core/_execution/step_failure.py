"""What the record of a failed step keeps of its error, and the error that is made of it on a later attempt."""

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

#: Modules whose errors are made of a text alone; those of others are not asked to make themselves.
_MADE_OF_TEXT: Final = frozenset({builtins.__name__, AgentRuntimeError.__module__})

MOST_KEPT: Final = 16  # errors of a group that are kept one by one; of a larger one only its class is


def failure_info(error: BaseException) -> dict[str, Any]:
    """What is told of the failure."""
    return {"error": text_of(error), "type": type(error).__name__}


def cause_info(error: BaseException) -> dict[str, Any]:
    """What the record keeps besides, for code that went on without the step to find the same error again."""
    if not isinstance(error, StepExecutionError):
        return _class_of(error)
    cause = error.__cause__
    of = {"step": error.step_name, "error": shortened(error.message), "attempts": error.attempts}
    return {"of": of if cause is None else of | _class_of(cause)}


def _class_of(error: BaseException) -> dict[str, Any]:
    """The class of an error; of a group also its message and the errors inside it, groups among them left out."""
    told: dict[str, Any] = {"class": _name_of(error)}
    leaves = leaves_of(error)
    if isinstance(error, BaseExceptionGroup) and len(leaves) <= MOST_KEPT:
        inside = [{"class": _name_of(each), "error": text_of(each)} for each in leaves]
        told["group"] = {"message": shortened(str(error.message)), "errors": inside}
    return told


def _name_of(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}:{kind.__qualname__}"


def recorded_error(name: str, failure: Record) -> StepExecutionError:
    """The failure of that step as it was raised: of the step in which it was, and with a cause as `as_raised` gives."""
    told = json.loads(failure.info or "{}")
    of = told.get("of", {"step": name, "attempts": failure.attempt})
    message = of.get("error", told["error"])
    error = StepExecutionError(of["step"], message, of["attempts"])
    error.__cause__ = _rebuilt(of if "class" in of else told, message)
    return error


def original_error(name: str, failure: Record) -> Exception:
    """What the function of that step raised, as far as its record tells; a StepExecutionError of what cannot be made.

    It has the class and the text, where that class is here without an import, and nothing else.
    """
    told = json.loads(failure.info or "{}")
    if told.get("type") == CircuitOpen.__name__:
        return CircuitOpen(told["error"], after=told["retry_delay"])
    return _rebuilt(told, told["error"]) or recorded_error(name, failure)


def _rebuilt(told: dict[str, Any], text: str) -> Exception | None:
    """The error whose class is told, with that text; None where it cannot be made."""
    if "class" not in told:
        return None
    module, _, name = told["class"].partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    if issubclass(found, ExceptionGroup):
        return _rebuilt_group(found, told.get("group"))
    ways: list[Callable[[str], Any]] = [partial(found.__new__, found)]
    if module in _MADE_OF_TEXT or issubclass(found, AgentRuntimeError):
        ways.insert(0, found)
    for made_by in ways:
        with suppress(Exception):  # it takes more to make one, or to tell it
            error = made_by(text)
            said = str(error)
            if isinstance(error, Exception) and (said == text or (made_by is not found and text in said)):
                return error
    return None


def _rebuilt_group(kind: type[ExceptionGroup[Exception]], told: dict[str, Any] | None) -> Exception | None:
    errors = [] if told is None else [_rebuilt(each, each["error"]) for each in told["errors"]]
    inside = [each for each in errors if each is not None]
    if told is None or len(inside) < len(errors):
        return None
    with suppress(Exception):  # a subclass may take more than that
        return kind.__new__(kind, told["message"], inside)
    return None

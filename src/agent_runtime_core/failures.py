"""What the record of a failed step keeps of its error, and the error that is made of it on a later attempt."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from .errors import AgentRuntimeError, CircuitOpen, StepExecutionError, shortened, text_of
from .journal.record import Record

#: Modules whose errors are made of a text alone; those of others are not asked to make themselves.
_MADE_OF_TEXT: Final = frozenset({builtins.__name__, AgentRuntimeError.__module__})


def told_of(error: BaseException) -> dict[str, Any]:
    """What is told of the failure."""
    return {"error": text_of(error), "type": type(error).__name__}


def kept_of(error: BaseException) -> dict[str, Any]:
    """What the record keeps besides, for code that went on without the step to find the same error again."""
    if not isinstance(error, StepExecutionError):
        return {"class": _name_of(error)}
    cause = error.__cause__
    of = {"step": error.step_name, "error": shortened(error.message), "attempts": error.attempts}
    return {"of": of if cause is None else of | {"class": _name_of(cause)}}


def _name_of(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}:{kind.__qualname__}"


def failed_again(name: str, failure: Record) -> StepExecutionError:
    """The failure of that step as it was raised: of the step in which it was, and with a cause as `as_raised` gives."""
    told = json.loads(failure.info or "{}")
    of = told.get("of", {"step": name, "attempts": failure.attempt})
    message = of.get("error", told["error"])
    error = StepExecutionError(of["step"], message, of["attempts"])
    error.__cause__ = _made(of.get("class") or told.get("class"), message)
    return error


def as_raised(name: str, failure: Record) -> Exception:
    """What the function of that step raised, as far as its record tells; a StepExecutionError of what cannot be made.

    It has the class and the text, where that class is here without an import, and nothing else.
    """
    told = json.loads(failure.info or "{}")
    if told.get("type") == CircuitOpen.__name__:
        return CircuitOpen(told["error"], after=told["retry_delay"])
    return _made(told.get("class"), told["error"]) or failed_again(name, failure)


def _made(of: str | None, text: str) -> Exception | None:
    if of is None:
        return None
    module, _, name = of.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
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

"""Store the error of a failed step in its record, and rebuild the error on a later attempt."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from .._core.redaction import Redaction, stored_error_text
from .._journal.record import Record
from ..errors import AgentRuntimeError, CircuitOpen, LimitExceeded, StepExecutionError, described, shortened, text_of
from .stored_errors import Description, class_label, class_of, rebuilt, values_of

#: Modules whose errors can be constructed from their message alone. Constructors of other classes are not called.
_BUILT_FROM_MESSAGE: Final = frozenset({builtins.__name__, AgentRuntimeError.__module__})

#: Describes the error of a call that was cancelled.
CUT_OFF: Final[dict[str, Any]] = {
    "error": "the step was cut off in an earlier attempt", "type": "TimeoutError", "class": "builtins:TimeoutError",
}  # fmt: skip

#: Errors that a step raises as they are: everyone who runs the code of a run knows them.
_UNWRAPPED: Final = (StepExecutionError, LimitExceeded)


def failure_info(error: BaseException, redaction: Redaction | None) -> dict[str, Any]:
    """Return the message and type of an error, as its record and events have them."""
    text = text_of(error)
    return {"error": text if redaction is None else stored_error_text(redaction, text), "type": type(error).__name__}


class Failure:
    """The last error of a step: what its record needs to rebuild it, and what the step raises.

    The step raises what a later execution rebuilds from the record. If the description is complete, that is the error
    itself.

    Args:
        name: The name of the step.
        error: What the function raised.
        info: What `failure_info` returned for it, or for the error of a group that decides.
        attempts: The number of the attempt.
        redaction: Redacts what is recorded; None without `redact_stored`.

    Attributes:
        info: The part of the record from which the error is rebuilt.
    """

    def __init__(
        self, name: str, error: Exception, info: Mapping[str, Any], attempts: int, redaction: Redaction | None
    ) -> None:
        self._redaction = redaction
        self._name, self._error, self._message, self._attempts = name, error, info["error"], attempts
        self._is_complete = True
        self.info: dict[str, Any] = {}
        if type(error) is not StepExecutionError:
            self.info = self._described(error)
            if isinstance(error, _UNWRAPPED):
                self.info["unwrapped"] = True
            return
        # A step inside it failed.
        message = shortened(error.message)
        if redaction is not None:
            message = stored_error_text(redaction, message)
        nested: dict[str, Any] = {"step": error.step_name, "error": message, "attempts": error.attempts}
        if error.recorded_cause:
            nested |= error.recorded_cause
        elif error.__cause__ is not None:
            nested |= self._described(error.__cause__)
        self._is_complete = self._is_complete and message == error.message
        self.info = {"of": nested}

    def _described(self, error: BaseException) -> dict[str, Any]:
        description = Description(error, self._redaction)
        self._is_complete = description.is_complete
        return description.info

    def to_raise(self) -> Exception:
        """Return what `recorded_error` will return."""
        error = self._error
        made = _from_info(self._name, self._attempts, self.info | {"error": self._message})
        if type(made) is type(error):
            described = type(error) is not StepExecutionError or error.recorded_cause or error.__cause__ is None
            return cast("Exception", self._same(error, made)) if described else made
        if (cause := made.__cause__) is not None:
            made.__cause__ = self._same(error, cause)
        return made

    def to_raise_unwrapped(self) -> Exception:
        """Return what `original_error` will return."""
        made = _original(self._name, self._attempts, self.info | {"error": self._message})
        return cast("Exception", self._same(self._error, made))

    def _same(self, error: BaseException, made: BaseException) -> BaseException:
        """Return the error itself if it is equal to its rebuilt form, else that with the traceback of the error."""
        if type(made) is not type(error):
            return made
        if self._is_complete:
            return error
        made.__suppress_context__ = made.__cause__ is not None or error.__cause__ is None
        _copy_tracebacks(error, made)
        return made


def _copy_tracebacks(error: BaseException, made: BaseException) -> None:
    """Give a rebuilt error, its causes and the errors inside it the tracebacks of the original."""
    made.__traceback__ = error.__traceback__
    if isinstance(made, BaseExceptionGroup) and isinstance(error, BaseExceptionGroup):
        for inside, rebuilt_inside in zip(error.exceptions, made.exceptions, strict=False):
            _copy_tracebacks(inside, rebuilt_inside)
    if made.__cause__ is not None and error.__cause__ is not None:
        _copy_tracebacks(error.__cause__, made.__cause__)


def recorded_error(name: str, failure: Record) -> Exception:
    """Return the error that the step `name` raised: a StepExecutionError, with its cause if that can be rebuilt.

    If a step inside it failed, the error names that step. LimitExceeded, and subclasses of StepExecutionError, are
    raised as they are.
    """
    return _from_info(name, failure.attempt, json.loads(failure.info or "{}"))


def original_error(name: str, failure: Record) -> Exception:
    """Return the error that the function of the step `name` raised.

    If the module of its class is not imported, or the class cannot be rebuilt, the result is a StepExecutionError.
    """
    return error_of_call(name, json.loads(failure.info or "{}"), failure.attempt)


def error_of_call(name: str, info: dict[str, Any], attempts: int = 1) -> Exception:
    """Return the error that a call of a step raised, by its record or by what `describe_call` returned for it."""
    if "values" not in info and info.get("type") == CircuitOpen.__name__:  # of 0.6.0, or of a large group
        return CircuitOpen(info["error"], after=info["retry_delay"])
    return _original(name, attempts, info)


def describe_call(name: str, error: BaseException, redaction: Redaction | None) -> dict[str, Any]:
    """Return what `error_of_call` needs to raise the error of a call again.

    Most cancellations are those of a time limit around the call, so a call that was cancelled raises TimeoutError.
    """
    if not isinstance(error, Exception):
        return CUT_OFF
    info = failure_info(error, redaction)
    return info | Failure(name, error, info, 1, redaction).info


def _original(name: str, attempts: int, info: dict[str, Any]) -> Exception:
    return _cause(info, info["error"]) or _from_info(name, attempts, info)


def _from_info(name: str, attempts: int, info: dict[str, Any]) -> Exception:
    nested = info.get("of", {"step": name, "attempts": attempts})
    message = nested.get("error", info["error"])
    about = nested if "of" in info else info
    cause = _cause(about, message)
    if "unwrapped" in info and isinstance(cause, _UNWRAPPED):
        return cause
    return _with_cause(StepExecutionError(nested["step"], message, nested["attempts"]), about, cause)


_DESCRIPTION: Final = ("class", "variable", "values", "group", "cause")


def _with_cause(error: StepExecutionError, about: Mapping[str, Any], cause: BaseException | None) -> StepExecutionError:
    """Set what `error` says about its cause, which is also known if it cannot be rebuilt."""
    error.recorded_cause = {name: about[name] for name in _DESCRIPTION if name in about}
    error.error_type = class_label(about)
    error.error_args, error.error_attributes = values_of(about) or ((), {})
    if cause is not None:  # assigning None would hide the context
        error.__cause__ = cause
    return error


def _cause(info: Mapping[str, Any], message: str) -> Exception | None:
    """Return the described error if it is an Exception; None if it cannot be built."""
    if "values" not in info:
        return _from_message(info, message)
    error = rebuilt(info, message)
    return error if isinstance(error, Exception) else None


# -- records of 0.6.0, which have only classes and messages


def _from_message(info: Mapping[str, Any], message: str) -> Exception | None:
    """Return an error of the recorded class with this message; None if it cannot be constructed."""
    found: Any = class_of(info)
    if found is None or not issubclass(found, Exception):
        return None
    if issubclass(found, ExceptionGroup):
        return _group_from_messages(found, info.get("group"))
    constructors: list[Callable[[str], Any]] = [partial(found.__new__, found)]
    if found.__module__ in _BUILT_FROM_MESSAGE or issubclass(found, AgentRuntimeError):
        constructors.insert(0, found)
    for construct in constructors:
        with described():  # the class may need other arguments, here or in __str__
            error = construct(message)
            text = str(error)
            if isinstance(error, Exception) and (text == message or (construct is not found and message in text)):
                return error
    return None


def _group_from_messages(kind: type[ExceptionGroup[Exception]], info: Mapping[str, Any] | None) -> Exception | None:
    errors = [] if info is None else [_from_message(each, each["error"]) for each in info["errors"]]
    inside = [each for each in errors if each is not None]
    if info is None or len(inside) < len(errors):
        return None
    with described():  # a subclass may need other arguments
        return kind.__new__(kind, info["message"], inside)
    return None

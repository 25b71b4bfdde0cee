"""Store the error of a failed step in its record, and rebuild the error on a later attempt."""

from __future__ import annotations

import builtins
import json
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from types import MemberDescriptorType
from typing import Any, Final, cast

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.redaction import Redaction, stored_error_text, stored_error_value
from .._core.validation import SECRET_NAME
from .._journal.record import Record
from ..errors import (
    AgentRuntimeError,
    CircuitOpen,
    LimitExceeded,
    StepExecutionError,
    UnserialisableResult,
    described,
    leaves_of,
    shortened,
    text_of,
)

# -- descriptions of errors
#
# A description contains the class, the arguments and the attributes of the error, the errors inside a group, and the
# chain of its causes. Values that cannot be stored exactly, that are too large, or whose name says that they are
# secret, are left out. An error is rebuilt without calling the constructor of its class.

MAX_GROUP_ERRORS: Final = 16  # of a larger group, only the class is stored
MAX_CAUSES: Final = 8  # of a longer chain, the later causes are left out
MAX_VALUE: Final = 32_768  # characters of one value as JSON; a string is shortened instead
MAX_VALUES: Final = 16 * MAX_VALUE  # of all values of an error, its causes and the errors inside it
_ROOTS: Final = (BaseException, BaseExceptionGroup, object)  # what they define is stored or set in another way


class Description:
    """What is stored of an error.

    Args:
        error: The error.
        redaction: Redacts what is stored; None without `redact_stored`.

    Attributes:
        info: The description as JSON values.
        is_complete: Nothing was left out, so the error and its rebuilt form are equal.
    """

    def __init__(self, error: BaseException, redaction: Redaction | None = None) -> None:
        self._redaction = redaction
        self.is_complete: bool = True
        self._left = MAX_VALUES
        self._seen: set[int] = set()
        self.info: dict[str, Any] = self._describe(error, MAX_CAUSES)

    def _describe(self, error: BaseException, most_causes: int) -> dict[str, Any]:
        self._seen.add(id(error))
        info = _class_info(type(error))
        if isinstance(error, BaseExceptionGroup):
            if len(leaves_of(error)) > MAX_GROUP_ERRORS:
                self.is_complete = False
                return info
            inside = [
                self._describe(each, most_causes) | {"error": self._message(text_of(each))} for each in error.exceptions
            ]
            info["group"] = {"message": self._message(shortened(str(error.message))), "errors": inside}
        info["values"] = self._values(error)
        cause = error.__cause__
        if cause is not None and most_causes and id(cause) not in self._seen:
            info["cause"] = self._describe(cause, most_causes - 1) | {"error": self._message(text_of(cause))}
        elif cause is not None:
            self.is_complete = False
        return info

    def _message(self, text: str) -> str:
        if self._redaction is None:
            return text
        redacted = stored_error_text(self._redaction, text)
        self.is_complete = self.is_complete and redacted == text
        return redacted

    def _values(self, error: BaseException) -> str:
        """Return the arguments and the attributes of an error as JSON text of the codec."""
        args: list[str] = []
        if not isinstance(error, BaseExceptionGroup):  # its arguments are its message and its errors
            values: tuple[Any, ...] | None = None
            with described():
                values = error.args
            args = [text for each in values or () if (text := self._encoded(each)) is not None]
            if values is None or len(args) < len(values):  # most errors print their only argument
                args = [encode(self._message(text_of(error)))]
        attributes = (
            f"{quote(name)}:{text}"
            for name, value in _attributes(error)
            if (text := self._encoded(value, name)) is not None
        )
        return f'{{"args":[{",".join(args)}],"attributes":{{{",".join(attributes)}}}}}'

    def _encoded(self, value: Any, name: str = "") -> str | None:
        """Return a value as JSON text, or None if it is left out."""
        # Another name could be a tag of the codec.
        stored = not name or (name.isidentifier() and not SECRET_NAME.search(name))
        text = self._text(shortened(value) if type(value) is str else value) if stored else None
        if text is not None and self._redaction is not None:
            redacted = encode(stored_error_value(self._redaction, decode(text)), exact=True)
            self.is_complete = self.is_complete and redacted == text
            text = redacted
        if text is not None and len(text) <= self._left:
            self._left -= len(text)
            self.is_complete = self.is_complete and (type(value) is not str or value == shortened(value))
            return text
        self.is_complete = False
        return None

    def _text(self, value: Any) -> str | None:
        most = MAX_BYTES if type(value) is str else MAX_VALUE
        for exact in (True, False):  # an Enum that is not registered is stored as the value that it equals
            with described():  # the class of the value may define anything
                text = encode(value, max_bytes=most, exact=exact)
                safe = _without_secrets(value)  # after `encode`, which limits size and depth
                if safe is value:
                    return text
                self.is_complete = False
                return encode(safe, max_bytes=most, exact=exact)
            self.is_complete = False
        return None


def _class_info(kind: type[BaseException]) -> dict[str, Any]:
    """Return the name of a class, and if another class uses that name, the variable of its module that holds it.

    Pydantic AI, for example, gives private classes the names of the public classes that they derive from.
    """
    info: dict[str, Any] = {"class": f"{kind.__module__}:{kind.__qualname__}"}
    found = class_of(info)
    # An unrelated class of that name is the same class after a reload of its module.
    if found is not None and found is not kind and issubclass(kind, found):
        module = vars(sys.modules[kind.__module__])
        info["variable"] = next((name for name, value in list(module.items()) if value is kind), "")
    return info


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Return the attributes of an error by name, including those in slots and in structs of built-in classes."""
    for name, value in list(error.__dict__.items()):
        yield str(name), value
    for kind in type(error).__mro__:
        if kind in _ROOTS:
            continue
        for name, member in list(vars(kind).items()):
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    value = member.__get__(error)
                    # A built-in class reads an attribute without a value as None, but may print None.
                    if value is not None or kind.__module__ != builtins.__name__:
                        yield name, value


def _without_secrets(value: Any) -> Any:
    """Return a value without the dict items whose keys are names of secrets; without such items, the same object."""
    kind = type(value)
    if kind is dict:
        kept = {
            key: _without_secrets(item)
            for key, item in value.items()
            if not (isinstance(key, str) and SECRET_NAME.search(key))
        }
        same = len(kept) == len(value) and all(kept[key] is item for key, item in value.items())
        return value if same else kept
    if kind in (list, tuple):
        items = [_without_secrets(item) for item in value]
        return value if all(map(operator.is_, items, value)) else kind(items)
    return value


def class_of(info: Mapping[str, Any]) -> type[BaseException] | None:
    """Return the described class, or None if this process did not import it."""
    module, _, name = str(info.get("class", "")).partition(":")
    found: Any = sys.modules.get(module)
    for part in info.get("variable", name).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def class_label(info: Mapping[str, Any]) -> str:
    """Return the name of the described class as tracebacks print it, or ""."""
    return str(info.get("class", "")).replace(":", ".").removeprefix(f"{builtins.__name__}.")


def values_of(info: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the described arguments and attributes, or None if this process cannot decode them."""
    if "values" not in info:
        return None
    try:
        values = cast("dict[str, Any]", decode(info["values"]))
    except UnserialisableResult:  # of a type that is not registered here
        return None
    return tuple(values["args"]), values["attributes"]


def rebuilt(info: Mapping[str, Any], message: str) -> BaseException | None:
    """Return the described error, or None if it cannot be built, or would have another message.

    Args:
        info: The description.
        message: The message of the error.
    """
    kind, values = class_of(info), values_of(info)
    if kind is None or values is None:
        return None
    error: BaseException | None = None
    if issubclass(kind, BaseExceptionGroup):
        error = _group(kind, info.get("group"), rebuilt)
    else:
        base = next(each for each in kind.__mro__ if each.__module__ == builtins.__name__)
        with described():  # a class of an extension may refuse
            error = base.__new__(kind, *values[0])
            cast("Any", base).__init__(error, *values[0])  # what `args` do not hold: only C code runs here
    if error is None or not _set(error, values[1]) or ("group" not in info and text_of(error) != message):
        return None
    cause = info.get("cause")
    # Assigning None would hide the context.
    if cause is not None and (found := rebuilt(cause, cause["error"])) is not None:
        error.__cause__ = found
    return error


def _set(error: BaseException, attributes: Mapping[str, Any]) -> bool:
    """Set attributes without calling code of the class. Return whether that was possible."""
    try:
        for name, value in attributes.items():
            if isinstance(getattr(type(error), name, None), MemberDescriptorType):
                object.__setattr__(error, name, value)
            else:
                error.__dict__[name] = value
    except (AttributeError, TypeError):  # the class changed since
        return False
    return True


def _group(
    kind: type[BaseExceptionGroup[Any]], info: Mapping[str, Any] | None, read: Callable[..., BaseException | None]
) -> BaseException | None:
    errors = [] if info is None else [read(each, each["error"]) for each in info["errors"]]
    inside = [each for each in errors if each is not None]
    if info is None or len(inside) < len(errors):
        return None
    with described():  # a subclass may need other arguments
        return kind.__new__(kind, info["message"], inside)
    return None


#: Modules whose errors can be constructed from their message alone. Constructors of other classes are not called.
_BUILT_FROM_MESSAGE: Final = frozenset({builtins.__name__, AgentRuntimeError.__module__})

#: Describes the error of a call that was cancelled.
CUT_OFF: Final[dict[str, Any]] = {
    "error": "the step was cut off in an earlier attempt",
    "type": "TimeoutError",
    "class": "builtins:TimeoutError",
}

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

    Most cancellations come from a time limit around the call, so a call that was cancelled raises TimeoutError.
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
        return cast("Exception | None", _group(found, info.get("group"), _from_message))
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

"""Describe an error for its record, and rebuild it from that without calling the constructor of its class.

A description has the class, the arguments and the attributes of the error, the errors inside a group, and the chain of
its causes. Values that cannot be stored exactly, that are too large, or whose name says that they are secret, are left
out.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from json.encoder import encode_basestring_ascii as quote
from types import MemberDescriptorType
from typing import Any, Final, cast

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.redaction import Redaction, stored_error_text, stored_error_value
from .._core.validation import SECRET_NAME
from ..errors import UnserialisableResult, described, leaves_of, shortened, text_of

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
    """Return the name of a class, and if another class has that name, the variable of its module that holds it.

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
    """Return the attributes of an error by name, also those in slots and in the structs of built-in classes."""
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
    """Return a value without the items of its dicts whose keys are names of secrets; the same object if it has none."""
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
    """Return the described class, or None if this process has not imported it."""
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
        error = _group(kind, info.get("group"))
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
    except (AttributeError, TypeError):  # the class has changed since
        return False
    return True


def _group(kind: type[BaseExceptionGroup[Any]], info: Mapping[str, Any] | None) -> BaseException | None:
    errors = [] if info is None else [rebuilt(each, each["error"]) for each in info["errors"]]
    inside = [each for each in errors if each is not None]
    if info is None or len(inside) < len(errors):
        return None
    with described():  # a subclass may need other arguments
        return kind.__new__(kind, info["message"], inside)
    return None

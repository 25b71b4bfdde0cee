"""Query parameters, checked with the rules and messages of the HTTP API, which needs FastAPI for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl

from .._core.arguments import checked_tenant
from .._core.validation import did_you_mean
from .._views.list_query import seconds_of
from .._views.problems import field_path, invalid_fields, safe_text
from ..errors import InvalidArgument

_TRUE: Final = ("1", "on", "t", "true", "y", "yes")
_FALSE: Final = ("0", "off", "f", "false", "n", "no")
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")


class Parameter(NamedTuple):
    """A query parameter.

    Attributes:
        read: Returns the value of a text, or raises ValueError with what it must do.
        default: Its value if it is missing.
        many: Whether it may be repeated. Its value is a list then.
    """

    read: Callable[[str], Any]
    default: Any = None
    many: bool = False


def integer(default: int, least: int, most: int) -> Parameter:
    """Return a parameter that is an integer between two others."""
    return Parameter(lambda text: _within(_number(text, int), least, most), default)


def number(default: float, least: int, most: int) -> Parameter:
    """Return a parameter that is a number between two integers."""
    return Parameter(lambda text: _within(_number(text, float), least, most), default)


def string(least: Literal[0, 1] = 0, most: int | None = None) -> Parameter:
    """Return a parameter that is a text with a number of characters."""

    def read(text: str) -> str:
        if len(text) < least:
            raise ValueError("not be empty")
        if most is not None and len(text) > most:
            raise ValueError(f"have at most {most} characters")
        return text

    return Parameter(read)


def choice(*known: str, default: str | None = None, many: bool = False) -> Parameter:
    """Return a parameter that is one of these words."""
    words = " or ".join(filter(None, (", ".join(map(repr, known[:-1])), repr(known[-1]))))

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"be {words}")
        return text

    return Parameter(read, default, many)


def _boolean(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError("be true or false")
    return text.lower() in _TRUE


def _tenant(text: str) -> str:
    try:
        return checked_tenant(text)
    except InvalidArgument as error:
        raise ValueError(safe_text(str(error)).removeprefix("tenant must ").rstrip(".")) from None


#: True or false, False if it is missing.
BOOLEAN: Final = Parameter(_boolean, False)
#: A time, as wall seconds.
TIME: Final = Parameter(seconds_of)
#: The name of a tenant.
TENANT: Final = Parameter(_tenant)
#: A text that may be repeated.
STRINGS: Final = Parameter(str, many=True)


def checked(query: str, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the values of all parameters. Of one that is repeated and may not be, the last value counts.

    Raises:
        Problem: A value does not fit, or a parameter is unknown.
    """
    sent: dict[str, list[str]] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        sent.setdefault(name, []).append(text)
    values: dict[str, Any] = {}
    wrong: list[dict[str, str]] = []
    for name, each in parameters.items():
        texts = sent.pop(name, None)
        if texts is None:
            values[name] = [] if each.many else each.default
            continue
        found = []
        for position, text in enumerate(texts if each.many else texts[-1:]):
            try:
                found.append(each.read(text))
            except (ValueError, InvalidArgument) as error:
                field = field_path("query", *((name, position) if each.many else (name,)))
                wrong.append({"field": field, "message": _message(field, error)})
        values[name] = found if each.many else next(iter(found), None)
    for name in sent:
        field, hint = field_path("query", name), did_you_mean(name, parameters) if parameters else ""
        wrong.append({"field": field, "message": f"{field} is not a known field. {hint}".rstrip()})
    if wrong:
        raise invalid_fields(wrong)
    return values


def _message(field: str, error: Exception) -> str:
    if isinstance(error, InvalidArgument):  # of a time
        return f"{field} {safe_text(str(error)).removeprefix('the time ')}"
    return f"{field} must {error}."


def _number(text: str, kind: type[int] | type[float]) -> float:
    try:
        if kind is int and not _WHOLE.fullmatch(text):
            raise ValueError
        return kind(text)
    except ValueError:
        raise ValueError("be an integer" if kind is int else "be a number") from None


def _within(value: float, least: int, most: int) -> float:
    if not value <= most:  # or not a number
        raise ValueError(f"be at most {most}")
    if value < least:
        raise ValueError(f"be at least {least}")
    return value

"""Query parameters: their values, limits and schemas, for the local server and for the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from .._core.arguments import MAX_TENANT, checked_tenant
from .._core.clock import TOO_LATE
from .._core.validation import did_you_mean
from ..errors import InvalidArgument
from .list_query import seconds_of
from .problems import field_path, invalid_fields, safe_text

_TRUE: Final = ("1", "on", "t", "true", "y", "yes")
_FALSE: Final = ("0", "off", "f", "false", "n", "no")
_WHOLE: Final = re.compile(r"\s*([+-]?[0-9]{1,4300})(?:\.0+)?\s*")  # Python converts no longer text


#: As a schema: a text without control characters.
PRINTABLE: Final = {"pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
TENANT_TEXT: Final[dict[str, Any]] = {"minLength": 1, "maxLength": MAX_TENANT, **PRINTABLE}
OF_TENANT: Final = "Only runs of this tenant. A caller with a tenant need not send it, and may send no other one."
_STRING: Final = {"type": "string"}
_NULL: Final = {"type": "null"}
#: A time, as a schema.
TIME_FORMS: Final[list[dict[str, Any]]] = [
    {"type": "string", "format": "date-time"}, {"type": "number", "minimum": 0, "exclusiveMaximum": TOO_LATE},
]  # fmt: skip


class Parameter(NamedTuple):
    """A query parameter.

    Attributes:
        read: Returns the value of a text, or raises ValueError with what it must do.
        kind: The JSON Schema of its values.
        default: Its value if it is missing.
        many: Whether it may be repeated. Its value is a list then.
        description: What the OpenAPI document says about it.
        more: Members of the schema that follow the description.
    """

    read: Callable[[str], Any]
    kind: Mapping[str, Any]
    default: Any = None
    many: bool = False
    description: str = ""
    more: Mapping[str, Any] = {}

    def about(self, description: str, **more: Any) -> Parameter:
        """Return the parameter with a description, and with further members of its schema."""
        return self._replace(description=description, more=more)

    def documented(self, name: str) -> dict[str, Any]:
        """Return the parameter as the OpenAPI document has it, under its name."""
        described = {"description": self.description} if self.description else {}
        default = {} if self.default is None else {"default": self.default}
        schema = {**self.kind, **described, **self.more, **default, "title": titled(name)}
        return {"name": name, "in": "query", "required": False, "schema": schema, **described}


def titled(name: str) -> str:
    """Return the title of a parameter in the OpenAPI document, as pydantic makes it."""
    return name.replace("_", " ").title()


def integer(default: int, least: int, most: int) -> Parameter:
    """Return a parameter that is an integer between two others."""
    return _between(int, default, least, most)


def number(default: float, least: int, most: int) -> Parameter:
    """Return a parameter that is a number between two integers."""
    return _between(float, default, least, most)


def _between(kind: type[int] | type[float], default: float, least: int, most: int) -> Parameter:
    name = "integer" if kind is int else "number"
    schema = {"type": name, "maximum": most, "minimum": least}
    return Parameter(lambda text: _within(_number(text, kind), least, most), schema, default)


def string(least: int = 0, most: int | None = None, **more: Any) -> Parameter:
    """Return a parameter that is a text with a number of characters, and with `more` in the schema of the text."""

    def read(text: str) -> str:
        if len(text) < least:
            raise ValueError("not be empty")
        if most is not None and len(text) > most:
            raise ValueError(f"have at most {most} characters")
        return text

    limits = {name: value for name, value in (("minLength", least or None), ("maxLength", most)) if value is not None}
    return Parameter(read, {"anyOf": [{**_STRING, **limits, **more}, _NULL]})


def choice(*known: str, default: str | None = None, many: bool = False) -> Parameter:
    """Return a parameter that is one of these words."""
    words = " or ".join(filter(None, (", ".join(map(repr, known[:-1])), repr(known[-1]))))

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"be {words}")
        return text

    schema = {"enum": [*known], **_STRING}
    return Parameter(read, {"type": "array", "items": schema} if many else schema, default, many)


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
BOOLEAN: Final = Parameter(_boolean, {"type": "boolean"}, False)
#: A time, as wall seconds.
TIME: Final = Parameter(seconds_of, {"anyOf": [*TIME_FORMS, _NULL]})
#: The name of a tenant.
TENANT: Final = Parameter(_tenant, {"anyOf": [_STRING, _NULL]}).about(OF_TENANT, **TENANT_TEXT)
#: A text that may be repeated.
STRINGS: Final = Parameter(str, {"anyOf": [{"type": "array", "items": _STRING}, _NULL]}, many=True)


def checked(query: Iterable[tuple[str, str]], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the values of all parameters. Of a repeated parameter that may not be repeated, the last value counts.

    Args:
        query: The names and texts of a query, decoded.
        parameters: The known parameters by their names.

    Raises:
        Problem: A value does not fit, or a parameter is unknown.
    """
    sent: dict[str, list[str]] = {}
    for name, text in query:
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
    if kind is int:
        if (found := _WHOLE.fullmatch(text)) is None:
            raise ValueError("be an integer")
        return int(found[1])
    try:
        return float(text)
    except ValueError:
        raise ValueError("be a number") from None


def _within(value: float, least: int, most: int) -> float:
    if not value <= most:  # or not a number
        raise ValueError(f"be at most {most}")
    if value < least:
        raise ValueError(f"be at least {least}")
    return value

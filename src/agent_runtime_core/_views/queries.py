"""Queries: their parameters, the filter of the list of runs, and cursors, which are bound to a filter."""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime as _dt
import hashlib
import heapq
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .._core.arguments import MAX_TENANT, checked_seconds, checked_tenant, checked_time
from .._core.clock import TOO_LATE
from .._core.ids import stored_id
from .._core.validation import did_you_mean, must
from ..errors import InvalidArgument
from ..queue.base import RunQueue
from ..queue.contents import ContentFilter
from ..queue.records import RunFilter, RunRow
from ..status import RunStatus
from .problems import field_path, invalid, invalid_fields, safe_text

#: Most items of a page of a list.
MAX_LIMIT: Final = 200
#: States of the filter: the statuses, and two that a run has besides its status.
STATES: Final = (*(each.value for each in RunStatus), "retrying", "in_doubt")
_LOST_PLUS: Final = re.compile(r"(:\d\d(?:\.\d+)?) (\d\d:?\d\d)$")

Position = tuple[float, int]

_CHECK: Final = 12  # bytes of the checksum
_LARGEST: Final = 2**53
_LONGEST: Final = 2000  # characters: no cursor of this module is longer
Filter = Mapping[str, Any]
_TRUE: Final = ("1", "on", "t", "true", "y", "yes")
_FALSE: Final = ("0", "off", "f", "false", "n", "no")
_WHOLE: Final = re.compile(r"\s*([+-]?[0-9]{1,4300})(?:\.0+)?\s*")  # Python converts no text with more digits
#: As a schema: a text without control characters.
PRINTABLE: Final = {"pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
TENANT_TEXT: Final[dict[str, Any]] = {"minLength": 1, "maxLength": MAX_TENANT, **PRINTABLE}
OF_TENANT: Final = "Only runs of this tenant. A caller with a tenant need not send it, and may send no other one."
_STRING: Final = {"type": "string"}
_NULL: Final = {"type": "null"}
#: A time, as a schema.
TIME_FORMS: Final[list[dict[str, Any]]] = [
    {"type": "string", "format": "date-time"},
    {"type": "number", "minimum": 0, "exclusiveMaximum": TOO_LATE},
]


def seconds_of(value: Any) -> Any:
    """Return a time as wall seconds: RFC 3339 with an offset, or seconds since 1970."""
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, str):
        return checked_seconds("the time", value)
    try:
        # The + of an offset is a space in a query, unless it is percent-encoded.
        time = _dt.datetime.fromisoformat(_LOST_PLUS.sub(r"\1+\2", value))
    except ValueError:
        raise must("the time", "be a time of RFC 3339 or seconds since 1970", value) from None
    return max(checked_time("the time", time) or 0.0, 0.0)  # nothing is older, and 30 days before year 1 is no time


def check_order(since: float | None, until: float | None) -> None:
    """Raise Problem 422 for a time that ends before it starts."""
    if since is not None and until is not None and since > until:
        raise invalid("since", InvalidArgument("since must not be after until"))


def filters_of(query: Mapping[str, Any]) -> list[RunFilter]:
    """Return filters whose runs together are the runs of a query.

    Args:
        query: The checked parameters of `GET /runs`.

    Raises:
        Problem: `since` is after `until`, or `parent` can be no run id.
    """
    check_order(query["since"], query["until"])
    try:
        parent = None if query["parent"] is None else stored_id(query["parent"], query["tenant"] or "")
    except InvalidArgument as error:
        raise invalid("parent", error) from None
    contents = ContentFilter(
        tuple(query["metadata"]), query["tag"], query["error_type"], query["code_version"], query["search"]
    )
    base = RunFilter(
        agent=query["agent"], since=query["since"] or 0.0, until=query["until"], prefix=query["q"], parent=parent,
        conversation=query["conversation"], tenant=query["tenant"], newest_first=True, without_input=True,
        min_attempts=query["min_attempts"], contents=contents,
    )  # fmt: skip
    statuses = tuple(each for each in query["state"] if each in RunStatus.__members__.values())
    found = [base._replace(statuses=statuses)] if statuses else []
    if "retrying" in query["state"]:
        found.append(base._replace(retrying=True))
    if "in_doubt" in query["state"]:
        found.append(base._replace(in_doubt=True))
    return found or [base]


def page_start(cursor: str | None, bound: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return where the page of a cursor starts; None without a cursor, for the first page. See `Found.position`.

    Raises:
        Problem: The cursor is not one of a list with this filter.
    """
    if cursor is None:
        return None
    kinds = (float, int), int, *([] if bound["sort"] is None else [(float, int)])
    return tuple(position_in(cursor, bound, *kinds))


def position_in(cursor: str, bound: Mapping[str, Any], *types: Any) -> list[Any]:
    """Return the values in a cursor, as `position_of` does.

    Raises:
        Problem: The cursor is not one of this list.
    """
    try:
        return position_of(cursor, bound, *types)
    except InvalidArgument as error:
        raise invalid("cursor", error) from None


async def newest_of(queue: RunQueue, filters: Sequence[RunFilter], before: Position | None, limit: int) -> list[RunRow]:
    """Return the newest rows before a position that match one of the filters, each once."""
    lists = [await queue.find_runs(each._replace(before=before, limit=limit)) for each in filters]
    if len(lists) == 1:
        return lists[0]
    merged: dict[str, RunRow] = {}
    for row in heapq.merge(*lists, key=lambda row: (row.created_at, row.arrival), reverse=True):
        merged.setdefault(row.run_id, row)
    return [*merged.values()][:limit]


def metadata_pair(text: str) -> tuple[str, str]:
    """Return the key and the value in KEY=VALUE."""
    key, found, value = text.partition("=")
    if not found or not key:
        raise ValueError("be KEY=VALUE")
    return key, value


def cursor_of(position: Sequence[float | str], wanted: Filter) -> str:
    """Return the cursor for a position in the list with this filter, a mapping of JSON values."""
    text = json.dumps(list(position), separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(_checksum(text, wanted) + text).decode().rstrip("=")


def position_of(cursor: str, wanted: Filter, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the position of a cursor, which consists of one value of each kind.

    Raises:
        InvalidArgument: The cursor is of another filter, or not one of `cursor_of`.
    """
    try:
        data = base64.b64decode(cursor[:_LONGEST] + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found = json.loads(data[_CHECK:]) if data[:_CHECK] == _checksum(data[_CHECK:], wanted) else None
    except (binascii.Error, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) != len(kinds) or not all(map(_fits, found, kinds)):
        raise must("cursor", "be `next` of a page with the same filter", cursor, "Leave it out for the first page")
    return found


def _fits(value: Any, kind: type | tuple[type, ...]) -> bool:
    # Anybody can compute the checksum, and a store cannot compare every number.
    return isinstance(value, kind) and (not isinstance(value, int | float) or abs(value) <= _LARGEST)


def _checksum(text: bytes, wanted: Filter) -> bytes:
    # Not a secret: a forged position shows nothing that the same caller could not list.
    bound = json.dumps(wanted, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text + b"\0" + bound, digest_size=_CHECK, person=b"arc.cursor").digest()


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
        """Return the parameter as the OpenAPI document contains it, under its name."""
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
#: A condition on the metadata that may be repeated.
_PAIR: Final = {"type": "string", "pattern": "^[^=]+="}
METADATA: Final = Parameter(metadata_pair, {"anyOf": [{"type": "array", "items": _PAIR}, _NULL]}, many=True)
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

"""Encode models as JSON text, and decode them. Export models as lines of JSON that other programs can read."""

from __future__ import annotations

import base64
import dataclasses
import datetime as _dt
import json
from collections.abc import AsyncIterator, Mapping
from enum import Enum
from typing import Any, Final, TypeVar, cast

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.codec.typed import Policy, build
from .._core.ids import HALF
from ..errors import StorageCorrupt
from .documents.base import Document
from .models import Task

M = TypeVar("M")

_STORED: Final = Policy(enums_by_value=True)


def text_of(model: Any, *, leave_out: frozenset[str] = frozenset(), max_bytes: int = MAX_BYTES) -> str:
    """Return a model as JSON, without the fields in `leave_out`.

    Raises:
        UnserialisableResult: A field is not JSON-serializable, or the text is longer than `max_bytes`.
    """
    return encode(_plain(model, leave_out), max_bytes=max_bytes)


def _plain(model: Any, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        field.name: _plain_value(getattr(model, field.name))
        for field in dataclasses.fields(model)
        if field.init and field.name not in leave_out
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if _is_model(value):
        return _plain(value)
    if isinstance(value, list) and any(map(_is_model, value)):
        return [_plain_value(each) for each in value]
    return value


def _is_model(value: object) -> bool:
    return type(value).__module__ == Task.__module__


def model_of(cls: type[M], text: str, **more: Any) -> M:
    """Decode the text that `text_of` wrote, and add the fields of `more`. Fields of a later version are dropped.

    Raises:
        StorageCorrupt: The text does not hold such a model.
    """
    try:
        return cast(M, build({**cast("dict[str, Any]", decode(text)), **more}, cls, _STORED))
    except (TypeError, ValueError) as error:
        raise StorageCorrupt(
            f"a stored {cls.__name__} cannot be read ({type(error).__name__}). Restore a backup."
        ) from error


def line(kind: str, model: Any) -> str:
    """Return a model as a JSON object on one line. Its first field is "type"."""
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    text = json.dumps({"type": kind, **fields}, default=json_form, ensure_ascii=False)
    if HALF.search(text):  # a lone surrogate cannot be written to a file
        text = json.dumps({"type": kind, **fields}, default=json_form)
    return text


def json_form(value: Any) -> Any:
    """Return a string or list for a value that JSON lacks. It cannot be decoded again.

    It is a function for `default=` of `json.dumps`.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, _dt.datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=_dt.UTC)).isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.isoformat() if isinstance(value, _dt.date | _dt.time) else str(value)


async def merge_by_rank(sources: Mapping[str, AsyncIterator[list[Document]]]) -> AsyncIterator[tuple[str, Document]]:
    """Yield the documents of several sources in order of rank. Each source is sorted by rank.

    Of documents with the same rank, the document of the first source comes first.
    """
    pages: dict[str, list[Document]] = {name: [] for name in sources}
    open_ = set(sources)
    while True:
        for name in [each for each in sources if each in open_ and not pages[each]]:
            page = await anext(sources[name], None)
            if page is None:
                open_.discard(name)
            else:
                pages[name] = page[::-1]
        ready = [name for name in sources if pages[name]]
        if not ready:
            return
        first = min(ready, key=lambda name: pages[name][-1].rank)
        yield first, pages[first].pop()

"""Export models as lines of JSON that other programs can read."""

from __future__ import annotations

import base64
import dataclasses
import datetime as _dt
import json
from collections.abc import AsyncIterator, Mapping
from enum import Enum
from typing import Any

from .._core.ids import HALF
from .documents.base import Document


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

    Of documents with the same rank, that of the first source comes first.
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

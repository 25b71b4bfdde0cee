"""Models as lines of JSON for those who know nothing of this library."""

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
    """One JSON object on one line, with its type first."""
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    text = json.dumps({"type": kind, **fields}, default=json_form, ensure_ascii=False)
    if HALF.search(text):  # which no file takes
        text = json.dumps({"type": kind, **fields}, default=json_form)
    return text


def json_form(value: Any) -> Any:
    """What JSON can hold of a value that has no form there: as text, or a list. For `default=`; not to be read back."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, _dt.datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=_dt.UTC)).isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.isoformat() if isinstance(value, _dt.date | _dt.time) else str(value)


async def in_order_of_time(sources: Mapping[str, AsyncIterator[list[Document]]]) -> AsyncIterator[tuple[str, Document]]:
    """Documents of several sources, each in order of rank, in one order; of equal ones the source named first."""
    waiting: dict[str, list[Document]] = {name: [] for name in sources}
    open_ = set(sources)
    while True:
        for name in [each for each in sources if each in open_ and not waiting[each]]:
            page = await anext(sources[name], None)
            if page is None:
                open_.discard(name)
            else:
                waiting[name] = page[::-1]
        ready = [name for name in sources if waiting[name]]
        if not ready:
            return
        first = min(ready, key=lambda name: waiting[name][-1].rank)
        yield first, waiting[first].pop()

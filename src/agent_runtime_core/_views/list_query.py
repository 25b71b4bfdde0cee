"""The filter of the list of runs, and the pages that several filters make together."""

from __future__ import annotations

import contextlib
import datetime as _dt
import heapq
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .._core.arguments import checked_seconds, checked_time
from .._core.ids import stored_id
from .._core.validation import must
from ..errors import InvalidArgument
from ..queue.base import RunQueue
from ..queue.records import RunFilter, RunRow
from ..status import RunStatus
from .cursors import position_of
from .problems import invalid

#: Most items of a page of a list.
MAX_LIMIT: Final = 200
#: States of the filter: the statuses, and two that a run has besides its status.
STATES: Final = (*(each.value for each in RunStatus), "retrying", "in_doubt")
_LOST_PLUS: Final = re.compile(r"(:\d\d(?:\.\d+)?) (\d\d:?\d\d)$")

Position = tuple[float, int]


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
    """Return filters whose runs together are those of a query.

    Args:
        query: The checked parameters of `GET /runs`: "state" (a list), "agent", "since", "until", "q", "parent",
            "conversation" and "tenant".

    Raises:
        Problem: `since` is after `until`, or `parent` can be no run id.
    """
    check_order(query["since"], query["until"])
    try:
        parent = None if query["parent"] is None else stored_id(query["parent"], query["tenant"] or "")
    except InvalidArgument as error:
        raise invalid("parent", error) from None
    base = RunFilter(
        agent=query["agent"], since=query["since"] or 0.0, until=query["until"], prefix=query["q"], parent=parent,
        conversation=query["conversation"], tenant=query["tenant"], newest_first=True,
    )  # fmt: skip
    statuses = tuple(each for each in query["state"] if each in RunStatus.__members__.values())
    found = [base._replace(statuses=statuses)] if statuses else []
    if "retrying" in query["state"]:
        found.append(base._replace(retrying=True))
    if "in_doubt" in query["state"]:
        found.append(base._replace(in_doubt=True))
    return found or [base]


def page_start(cursor: str | None, bound: Mapping[str, Any]) -> Position | None:
    """Return where the page of a cursor starts; None without one, for the first page.

    Raises:
        Problem: The cursor is not one of a list with this filter.
    """
    if cursor is None:
        return None
    created_at, number = position_in(cursor, bound, (float, int), int)
    return created_at, number


def position_in(cursor: str, bound: Mapping[str, Any], *types: Any) -> list[Any]:
    """Return the values in a cursor, as `position_of` does.

    Raises:
        Problem: The cursor is not one of this list.
    """
    try:
        return position_of(cursor, bound, *types)
    except InvalidArgument as error:
        raise invalid("cursor", error) from None


async def newest_of(
    queue: RunQueue, filters: Sequence[RunFilter], before: Position | None, limit: int, *, metadata: bool = False
) -> list[RunRow]:  # fmt: skip
    """Return the newest rows before a position that match one of the filters, each once: light, or with `metadata`."""
    lists = [
        await queue.find(each._replace(before=before, limit=limit, light=not metadata, without_input=metadata))
        for each in filters
    ]
    if len(lists) == 1:
        return lists[0]
    merged: dict[str, RunRow] = {}
    for row in heapq.merge(*lists, key=lambda row: (row.created_at, row.arrival), reverse=True):
        merged.setdefault(row.run_id, row)
    return [*merged.values()][:limit]

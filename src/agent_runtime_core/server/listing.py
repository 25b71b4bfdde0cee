"""Pages of runs that a caller may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .._views.list_query import Position, newest_of
from .._views.runs import list_items
from ..queue.records import RunFilter, RunRow
from .access import Caller
from .state import ServerState, is_visible, row_without_input

_MAX_READ: Final = 10_000  # rows that one request reads to fill a page


@dataclass(frozen=True)
class RunPage:
    """Light runs, and where the next page starts."""

    items: list[dict[str, Any]]
    next: Position | None


async def visible_page(
    state: ServerState, caller: Caller, filters: Sequence[RunFilter], before: Position | None, limit: int
) -> RunPage:  # fmt: skip
    """Return the next page, filled up with runs that the caller may see.

    A caller that may see few of very many runs gets a page that is not full, with the position to continue from.
    """
    found: list[RunRow] = []
    left = _MAX_READ
    while True:
        rows = await newest_of(state.runner.queue, filters, before, limit + 1, metadata=caller.may is not None)
        more = len(rows) > limit
        for number, row in enumerate(rows[:limit], 1):
            before = (row.created_at, row.arrival)
            if await is_visible(state, caller, row, "read"):
                found.append(row)
            if len(found) == limit:
                more = number < len(rows)
                break
        left -= len(rows)
        if not more or len(found) == limit or left <= 0:
            items = await list_items(state.runner, found)
            if caller.limited:
                await _hide_parents(state, caller, items)
            return RunPage(items, before if more else None)


async def _hide_parents(state: ServerState, caller: Caller, items: list[dict[str, Any]]) -> None:
    for parent_id in {each["parent"] for each in items} - {None}:
        parent = await row_without_input(state.runner.queue, parent_id)
        if parent is None or not await is_visible(state, caller, parent, "read"):
            for each in items:
                each["parent"] = None if each["parent"] == parent_id else each["parent"]

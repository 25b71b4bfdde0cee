"""Which runs a caller may see, and pages that are filled with these runs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

from ..errors import UnknownRun
from ..queue.base import MAX_LISTED, RunQueue
from ..queue.records import RunFilter, RunRow
from ..runner.run_client import RunClient
from ..runner.settings import RunInfo
from .problems import Problem
from .runs import row_named, run_view

#: The fields of a run that need the scope read, as other callers get them.
_UNREAD: Final[dict[str, Any]] = {
    **dict.fromkeys(("steps", "children", "questions", "actions", "why", "tags"), ()),
    **dict.fromkeys(("next_step", "parent", "worker", "error_info", "input", "metadata"), None),
}

_Position = TypeVar("_Position")
_Item = TypeVar("_Item")


class Viewer(Protocol):
    """Who reads: a `Caller` of the HTTP API, or the person who inspects a file."""

    @property
    def scopes(self) -> Set[str]:
        """What the caller may do."""

    @property
    def may(self) -> Callable[[str, RunInfo], bool] | None:
        """Returns whether the caller may see a run. None allows every run."""

    @property
    def tenant(self) -> str | None:
        """The caller sees the runs of this tenant only. None: of all tenants."""

    @property
    def limited(self) -> bool:
        """Whether some runs may be hidden from the caller."""


async def visible_row(queue: RunQueue, caller: Viewer, run_id: str, verb: str) -> RunRow:
    """Return the row of the run with that id or run key.

    Args:
        queue: The queue of the run.
        caller: Who asks.
        run_id: The id or key of the run, decoded.
        verb: What the caller wants: "read", "act" or "delete".

    Raises:
        Problem: 422 if runs of several tenants use that key, and the request names no tenant.
        UnknownRun: No run is stored under this id, the text can be no id, or the caller may not see the run.
    """
    try:
        row = await row_named(queue, run_id, caller.tenant)
    except Problem:
        if caller.may is None:
            raise
        row = None  # the names of the tenants are not for a caller that may see some runs only
    if row is None or not await is_visible(queue, caller, row, verb):
        raise no_such_run()
    return row


async def visible_schedule(runner: RunClient, caller: Viewer, id: str, verb: str) -> RunRow:
    """Return the row of the schedule with that id in the caller's tenant. It is visible like a run with its metadata.

    Raises:
        UnknownRun: No schedule is stored under this id, or the caller may not see it.
    """
    row = await runner.schedules.row(id, tenant=caller.tenant)
    if row is None or not await is_visible(runner.queue, caller, row, verb):
        raise UnknownRun("no schedule has this id")
    return row


def no_such_run() -> UnknownRun:
    """Return the error for a run that does not exist for the caller."""
    return UnknownRun("no run has this id")


async def is_visible(queue: RunQueue, caller: Viewer, row: RunRow, verb: str) -> bool:
    """Whether a caller may read, act on or delete a run.

    The row must have its metadata. It may lack its input, as rows of lists do: a page would load the inputs of all
    runs. If `may` reads the input of such a row, the answer does not count: this input is loaded, and `may` is called
    again.
    """
    if caller.tenant not in (None, row.tenant):
        return False
    if caller.may is None:
        return True
    if row.arrival and row.input == _NOT_READ:
        if (answer := _answer_without_input(caller, verb, row)) is not None:
            return answer
        found = await queue.find(RunFilter(after=row.arrival - 1, limit=1))
        if not found or found[0].run_id != row.run_id:  # it was deleted since
            return False
        row = found[0]
    return _answer(caller, verb, RunInfo.of(row))


def visible_to(queue: RunQueue, caller: Viewer) -> Callable[[RunRow], Awaitable[bool]] | None:
    """Return what returns whether a caller may read a run; None for a caller that may read all."""
    return partial(is_visible, queue, caller, verb="read") if caller.limited else None


def _answer(caller: Viewer, verb: str, run: RunInfo) -> bool:
    assert caller.may is not None
    answer = caller.may(verb, run)
    if inspect.isawaitable(answer):  # it would be true for each run
        raise TypeError("may must return True or False, not an awaitable")
    return bool(answer)


_NOT_READ: Final = "{}"  # the input of a row that was read without it, or of a run without an input


def _answer_without_input(caller: Viewer, verb: str, row: RunRow) -> bool | None:
    """Return the answer of `may`; None if it needs the input."""
    run = cast("_RunWithoutInput", _RunWithoutInput.of(row))
    del run.__dict__["input"]
    answer = None
    try:
        answer = _answer(caller, verb, run)
    except _InputNeeded:
        return None
    except Exception:
        if not run.needs_input:
            raise
    return None if run.needs_input else answer


class _InputNeeded(BaseException):
    """Ends a call of `may` that reads an input. It is no `Exception`, so that `may` does not handle it as its error."""


class _RunWithoutInput(RunInfo):
    """A run whose input was not read. An access to `input` raises, and is noted for a `may` that catches everything."""

    needs_input: ClassVar[bool] = False

    def __getattr__(self, name: str) -> Any:
        if name != "input":
            raise AttributeError(name)
        self.__dict__["needs_input"] = True
        raise _InputNeeded


async def row_without_input(queue: RunQueue, run_id: str) -> RunRow | None:
    """Return the row of a run without its input."""
    found = await queue.find(RunFilter(prefix=run_id, without_input=True))  # a run key may begin with the id
    return next((row for row in found if row.run_id == run_id), None)


async def children_without_input(queue: RunQueue, run_id: str) -> list[RunRow]:
    """Return the rows of the child runs of a run without their inputs."""
    return await queue.find(RunFilter(parent=run_id, without_input=True, limit=MAX_LISTED))


async def visible_view(runner: RunClient, caller: Viewer, row: RunRow, *, new: bool = False) -> dict[str, Any]:
    """Return a run as the caller may see it: without the ids of hidden runs, and without what the scope read shows.

    A `new` run has nothing yet that the caller has not sent.
    """
    found = await run_view(runner, row, new=new, visible=visible_to(runner.queue, caller))
    if "read" not in caller.scopes and not new:
        return found | _UNREAD
    if caller.limited:
        related = await children_without_input(runner.queue, row.run_id)
        if row.parent_id is not None:
            parent = await row_without_input(runner.queue, row.parent_id)
            related += [] if parent is None else [parent]
        visible = await _visible(runner.queue, caller, related)
        found["children"] = [each for each in found["children"] if each["run_id"] in visible]
        found["parent"] = row.parent_id if row.parent_id in visible else None
    return found


async def hide_children(queue: RunQueue, caller: Viewer, row: RunRow, items: Iterable[dict[str, Any]]) -> None:
    """Remove the ids of child runs that the caller may not see from rows of a timeline."""
    if not caller.limited or not any(each["child_run_id"] for each in items):
        return
    visible = await _visible(queue, caller, await children_without_input(queue, row.run_id))
    for each in items:
        each["child_run_id"] = each["child_run_id"] if each["child_run_id"] in visible else None


async def hide_parents(queue: RunQueue, caller: Viewer, items: Iterable[dict[str, Any]]) -> None:
    """Remove the ids of parent runs, and sources of forks, that the caller may not see from items of a list."""
    if not caller.limited:
        return
    for name in ("parent", "fork_of"):
        for run_id in {each[name] for each in items} - {None}:
            row = await row_without_input(queue, run_id)
            if row is None or not await is_visible(queue, caller, row, "read"):
                for each in items:
                    each[name] = None if each[name] == run_id else each[name]


async def _visible(queue: RunQueue, caller: Viewer, rows: Sequence[RunRow]) -> set[str]:
    """Return the ids of the runs that the caller may read."""
    return {each.run_id for each in rows if await is_visible(queue, caller, each, "read")}


async def visible_page(
    queue: RunQueue, caller: Viewer, verb: str, limit: int, most: int, position: _Position | None,
    read: Callable[[_Position | None], Awaitable[Sequence[tuple[RunRow, _Item, _Position]]]], batch: int,
) -> tuple[list[_Item], _Position | None]:  # fmt: skip
    """Return the next page, filled up with items of runs that the caller may see, and where the page after it starts.

    A caller that may see few of very many runs gets a page that is not full, with the position to continue from.

    Args:
        queue: The queue of the runs.
        caller: Who asks.
        verb: What the caller wants with the runs.
        limit: How many items at most.
        most: How many items are read at most.
        position: Where the page starts; None for the first page.
        read: Returns the items after a position, one more than `batch`, each with its row and its position.
        batch: How many items of each read are looked at.
    """
    found: list[_Item] = []
    while True:
        page = await read(position)
        more = len(page) > batch
        for number, (row, item, position) in enumerate(page[:batch], 1):  # noqa: B007 - the next page starts there
            if await is_visible(queue, caller, row, verb):
                found.append(item)
            if len(found) == limit:
                more = number < len(page)
                break
        most -= len(page)
        if not more or len(found) == limit or most <= 0:
            return found, position if more else None


def refuse_limited(caller: Viewer, *, by_tenant: bool = False) -> None:
    """Raise Problem 403 for a caller that may see some runs only: totals and workers count all runs.

    With `by_tenant`, the totals cover the caller's tenant.
    """
    if caller.limited and (caller.may is not None or not by_tenant):
        raise Problem.of(403, "Totals and workers are not shown to a caller that may see some of the runs only.")

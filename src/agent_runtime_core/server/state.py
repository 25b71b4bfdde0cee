"""What the routes of one application share."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from starlette.requests import HTTPConnection

from .._views.runs import row_named
from ..errors import UnknownRun
from ..orchestrator import Orchestrator
from ..queue.base import MAX_LISTED, RunQueue
from ..queue.records import RunFilter, RunRow
from ..registry import Registry
from ..runner.runner import AgentRunner
from ..runner.settings import RunInfo
from ..tracing.prometheus import PrometheusSink
from ..turns.manager import TurnManager
from .access import Access, Caller
from .errors import Problem
from .limits import Limits
from .pending import PendingRuns
from .settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass
class ServerState:
    """The parts of a server. It owns none of them except the limits.

    Args:
        runner: Every route calls it.
        orchestrator: Plans the prompts of `POST /runs`, or None.
        turns: Starts the turns of `POST /turns` and of the socket, or None.
        access: Authenticates requests.
        settings: The settings.
        limits: Counts requests and streams.
        metrics: What `/metrics` returns, or None.
    """

    runner: AgentRunner
    orchestrator: Orchestrator | None
    turns: TurnManager | None
    access: Access
    settings: ServerSettings
    limits: Limits
    metrics: PrometheusSink | None = None
    #: Set when the server shuts down: new requests get 503, and streams end.
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    #: Until when the last check of the store counts, in boot time, and its result; see `health`.
    store_check: tuple[float, str] = (0.0, "")
    #: The limit of pending runs.
    pending: PendingRuns = field(default_factory=PendingRuns)

    @property
    def registry(self) -> Registry:
        """The agents of this process."""
        return self.runner.registry


def state_of(connection: HTTPConnection) -> ServerState:
    """Return the state of the application that handles this request or socket."""
    return cast("ServerState", cast("FastAPI", connection.app).state.server)


async def visible_row(state: ServerState, caller: Caller, run_id: str, verb: str) -> RunRow:
    """Return the row of the run with that id or run key.

    Args:
        state: The server.
        caller: Who asks.
        run_id: The id or key of the run, decoded.
        verb: What the caller wants: "read", "act" or "delete".

    Raises:
        Problem: 422 if runs of several tenants have that key, and the request names no tenant.
        UnknownRun: No run has this id, the text can be no id, or the caller may not see the run.
    """
    try:
        row = await row_named(state.runner.queue, run_id, caller.tenant)
    except Problem:
        if caller.may is None:
            raise
        row = None  # the names of the tenants are not for a caller that may see some runs only
    if row is None or not await is_visible(state, caller, row, verb):
        raise no_such_run()
    return row


def no_such_run() -> UnknownRun:
    """Return the error for a run that does not exist for the caller."""
    return UnknownRun("no run has this id")


async def is_visible(state: ServerState, caller: Caller, row: RunRow, verb: str) -> bool:
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
        found = await state.runner.queue.find(RunFilter(after=row.arrival - 1, limit=1))
        if not found or found[0].run_id != row.run_id:  # it was deleted since
            return False
        row = found[0]
    return _answer(caller, verb, RunInfo.of(row))


def _answer(caller: Caller, verb: str, run: RunInfo) -> bool:
    assert caller.may is not None
    answer = caller.may(verb, run)
    if inspect.isawaitable(answer):  # it would be true for each run
        raise TypeError("may must return True or False, not an awaitable")
    return bool(answer)


_NOT_READ: Final = "{}"  # the input of a row that was read without it, or of a run without an input


def _answer_without_input(caller: Caller, verb: str, row: RunRow) -> bool | None:
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

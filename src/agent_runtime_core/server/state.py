"""What the routes of one application share."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from starlette.requests import HTTPConnection

from .._views.runs import row_named
from ..errors import UnknownRun
from ..orchestrator import Orchestrator
from ..queue.records import RunRow
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
    if row is None or not is_visible(caller, row, verb):
        raise UnknownRun("no run has this id")
    return row


def is_visible(caller: Caller, row: RunRow, verb: str) -> bool:
    """Whether a caller may read, act on or delete a run. The row must have its metadata."""
    if caller.tenant not in (None, row.tenant):
        return False
    if caller.may is None:
        return True
    answer = caller.may(verb, RunInfo.of(row))
    if inspect.isawaitable(answer):  # it would be true for each run
        raise TypeError("may must return True or False, not an awaitable")
    return bool(answer)

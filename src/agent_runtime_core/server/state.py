"""What the routes of one application share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from starlette.requests import HTTPConnection

from ..orchestrator import Orchestrator
from ..registry import Registry
from ..runner.runner import AgentRunner
from ..tracing.prometheus import PrometheusSink
from ..turns.manager import TurnManager
from .access import Access
from .limits import Limits, PendingRuns
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

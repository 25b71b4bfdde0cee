"""What a run's context and the runner that drives it have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .._core.clock import Clock
from .._core.context_vars import current_run
from .._core.per_loop import PerLoop
from .._core.run_tasks import Monitor
from ..interfaces import AgentRuntime, RunResult
from ..limits import RunLimits
from ..persistence.fencing import Claim
from ..queue.records import RunRow
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from .result_codec import Before

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager


class Chronicle(Protocol):
    """Keeps what outlives a run: its part of a conversation, and what is to be audited."""

    async def fence(self, claim: Claim) -> None:
        """Have the claims before this one refused by the stores."""

    async def load(self, ctx: Any) -> None:
        """Give the run what was said before."""

    async def keep(self, result: RunResult) -> None:
        """Append what the run said; it has not ended yet, and may come here again."""

    def before(self, result: RunResult) -> Before | None:
        """The messages of a result that need not be recorded."""

    async def recall(self, text: str) -> RunResult:
        """A recorded result, with the messages that it names."""

    async def tell(self, result: RunResult | None) -> None:
        """Write what happened; `result` is that of a run that has ended."""


class Slots(Protocol):
    """How many runs of a worker go on at once; one that only waits uses no slot."""

    def leave(self, place: Place) -> None:
        """The run only waits: its slot is free."""

    def retake(self, place: Place) -> None:
        """Count a run that works again, also where no slot is free."""

    async def back(self, place: Place) -> bool:
        """Until the run has a slot again; False where it is to be given back instead."""


@dataclass(repr=False, eq=False)
class Services:
    """What a runner lends to the contexts it makes."""

    clock: Clock
    tools: ToolRegistry
    #: Finds out which runs with open waits only wait, in each event loop.
    monitor: PerLoop[Monitor]
    #: Seconds a wait stays in place before the run is parked; None: always in place.
    park_after: float | None = None
    #: Runs a child in this process: (agent, its run id, input, the parent's id, `recover`); None: workers do.
    call_agent: Callable[[AgentRuntime | str, str, dict[str, Any], str, str], Awaitable[RunResult]] | None = None
    #: RunLimits that no agent loop of these runs may go beyond.
    limits: RunLimits | None = None
    #: Where traces of these runs go, if anywhere.
    tracer: Tracer | None = None
    #: Gives the stores that `ctx.persistence` is; it is asked when they are needed.
    persistence: Callable[[], PersistenceManager] | None = None
    #: Makes what keeps a run's part of its conversation and of an audit store; None for a run without either.
    chronicle: Callable[[RunRow], Chronicle | None] | None = None
    #: Is called with each run whose part of its conversation is kept by neither the runner nor the agent.
    not_kept: Callable[[RunRow], None] | None = None
    #: Those that runs leave while they wait in place, so that their worker can do something else.
    slots: Slots | None = None
    #: Hears of each piece of an answer (run id, sequence, bytes), and says what to wait for before the next.
    told: Callable[[str, int, int], asyncio.Future[None] | None] | None = None


@dataclass(repr=False, eq=False)
class Place:
    """What a context shares with the runner that drives it."""

    cancelled: bool = False
    parked: bool = False
    sealed: bool = False
    refusal: Callable[[], Exception] | None = None  # of a run that has ended, or of a block of somebody's own
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Any] | None = None
    stopped: bool = False  # the task was told to stop
    tracked: bool = False  # the contexts of the run's tasks name this place
    clearing: bool = False  # its tasks are being ended
    queued: set[asyncio.Task[Any]] = field(default_factory=set)  # tasks of the run that wait for others of it
    away: bool = False  # it uses no slot of its worker
    waited: float = 0.0  # seconds spent waiting in place
    waiting_since: float | None = None
    _notified: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_here(self) -> bool:
        """Whether the present task is the one that the run began in."""
        return self.task is None or asyncio.current_task() is self.task

    async def unsealed(self) -> None:
        """Nothing gets past a park or an end: what is called then is refused or never returns, and writes nothing."""
        if self.sealed:
            await self.refuse()

    async def refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal()
        if self.clearing and current_run() is self:
            await asyncio.sleep(0)
            raise asyncio.CancelledError  # else a `finally` block would wait here until its task is abandoned
        await asyncio.get_running_loop().create_future()

    def waits(self, now: float) -> None:
        if self.waiting_since is None:
            self.waiting_since = now

    def goes_on(self, now: float) -> None:
        if self.waiting_since is not None:
            self.waited += now - self.waiting_since
            self.waiting_since = None

    def stop(self) -> None:
        """Cancel the task, and wake whoever waits for it: it may not listen."""
        self.stopped = True
        self.wake()
        if self.task is not None:
            self.task.cancel()

    def wake(self) -> None:
        """Have the runner look at its task."""
        # A task that is collected after its event loop was closed must not print an error at exit.
        with contextlib.suppress(RuntimeError):
            self._notified.set()

    async def woken(self) -> None:
        """Wait for the next `wake`, or one since the last time."""
        await self._notified.wait()
        self._notified.clear()

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
from ..errors import JournalMismatch
from ..interfaces import AgentRuntime, RunResult
from ..limits import Budget, RunLimits
from ..persistence.fencing import FencedWrites
from ..queue.records import RunRow
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from .result_codec import OmittedHistory
from .step_policy import AlreadyDone

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager


class RunRecorder(Protocol):
    """Keeps what outlives a run: its part of a conversation, and what is to be audited."""

    async def fence(self, claim: FencedWrites) -> None:
        """Have the claims before this one refused by the stores."""

    async def load(self, ctx: Any) -> None:
        """Give the run what was said before."""

    async def save(self, result: RunResult) -> None:
        """Append what the run said; it has not ended yet, and may come here again."""

    def omitted_history(self, result: RunResult) -> OmittedHistory | None:
        """The messages of a result that need not be recorded."""

    async def restore(self, text: str) -> RunResult:
        """A recorded result, with the messages that it names."""

    async def audit(self, result: RunResult | None) -> None:
        """Write what happened; `result` is that of a run that has ended."""


class Slots(Protocol):
    """How many runs of a worker go on at once; one that only waits uses no slot."""

    def release(self, place: RunControl) -> None:
        """The run only waits: its slot is free."""

    def reclaim(self, place: RunControl) -> None:
        """Count a run that works again, also where no slot is free."""

    async def regain(self, place: RunControl) -> bool:
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
    run_child: Callable[[AgentRuntime | str, str, dict[str, Any], str, str], Awaitable[RunResult]] | None = None
    #: RunLimits that no agent loop of these runs may go beyond.
    limits: RunLimits | None = None
    #: Where traces of these runs go, if anywhere.
    tracer: Tracer | None = None
    #: Gives the stores that `ctx.persistence` is; it is asked when they are needed.
    persistence: Callable[[], PersistenceManager] | None = None
    #: Makes what keeps a run's part of its conversation and of an audit store; None for a run without either.
    recorder: Callable[[RunRow], RunRecorder | None] | None = None
    #: Is called with each run whose part of its conversation is kept by neither the runner nor the agent.
    not_kept: Callable[[RunRow], None] | None = None
    #: Those that runs leave while they wait in place, so that their worker can do something else.
    slots: Slots | None = None
    #: Hears of each piece of an answer (run id, sequence, bytes), and says what to wait for before the next.
    backpressure: Callable[[str, int, int], asyncio.Future[None] | None] | None = None


class ContextWaits(Protocol):
    """The waits of a context that its journal asks for."""

    async def review(self, name: str, key: str, start: int, read: Callable[[Any], Any], /) -> AlreadyDone | None:
        """Park until a person has reviewed a step in doubt."""

    async def approve(
        self, name: str, details: Any, schema: dict[str, Any] | None, timeout: float | None, key: str | None, /
    ) -> Any:
        """Ask for a decision and wait for the answer."""

    async def regain_slot(self) -> None:
        """Wait until the run has a slot again."""


class RunningContext(Protocol):
    """What the journal of a run asks its context for."""

    @property
    def waits(self) -> ContextWaits: ...

    @property
    def budget(self) -> Budget: ...


def _no_context() -> None:
    return None


@dataclass(repr=False, eq=False)
class RunControl:
    """What the context, the journal and the runner of one claim share."""

    #: Returns the context while it exists: a weak reference, set by the context. The context refers to this control,
    #: so with a strong reference each ended run would wait for the garbage collector.
    context: Callable[[], RunningContext | None] = _no_context
    cancelled: bool = False
    parked: bool = False
    closed: bool = False
    lost: bool = False  # another worker has the run, or it has finished
    release_requested: bool = False  # the worker stops the run so that another one resumes it
    refusal: Callable[[], Exception] | None = None  # of a run that has ended, or of a block of somebody's own
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Any] | None = None
    cancel_requested: bool = False  # the task was told to stop
    tracked: bool = False  # the contexts of the run's tasks name this place
    clearing: bool = False  # its tasks are being ended
    queued: set[asyncio.Task[Any]] = field(default_factory=set)  # tasks of the run that wait for others of it
    without_slot: bool = False  # it uses no slot of its worker
    paused_seconds: float = 0.0  # seconds spent waiting in place
    paused_at: float | None = None
    _notified: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_main_task(self) -> bool:
        """Whether the present task is the one that the run began in."""
        return self.task is None or asyncio.current_task() is self.task

    async def review(self, name: str, key: str, start: int, read: Callable[[Any], Any]) -> AlreadyDone | None:
        """Wait until a person has reviewed the step in doubt that the record `start` started.

        Args:
            name: The name of the step.
            key: Its key.
            start: The number of the record of its start.
            read: Makes the result of the step from that in the answer.

        Returns:
            The result; None to run the step again.

        Raises:
            JournalMismatch: The journal has no context.
        """
        context = self.context()
        if context is None:
            raise JournalMismatch(
                f"step {name!r} is in doubt and on_in_doubt='review' needs a run context: open the run with a runner"
            )
        return await context.waits.review(name, key, start, read)

    async def approve(self, name: str, details: Any, key: str) -> Any:
        """Ask for a decision and wait for the answer."""
        context = self.context()
        assert context is not None  # a guarded step runs in one
        return await context.waits.approve(name, details, None, None, key)

    async def regain_slot(self) -> None:
        """Wait until the run has a slot again."""
        context = self.context()
        if context is not None:
            await context.waits.regain_slot()

    def add_recorded_usage(self, usage: dict[str, Any]) -> None:
        """Count in the budget what recorded steps have used whose code does not run again."""
        context = self.context()
        if context is not None:
            context.budget.recalled(usage)

    async def ensure_open(self) -> None:
        """Nothing gets past a park or an end: what is called then is refused or never returns, and writes nothing."""
        if self.closed:
            await self.raise_closed()

    async def raise_closed(self) -> None:
        if self.refusal is not None:
            raise self.refusal()
        if self.clearing and current_run() is self:
            await asyncio.sleep(0)
            raise asyncio.CancelledError  # else a `finally` block would wait here until its task is abandoned
        await asyncio.get_running_loop().create_future()

    def pause_timer(self, now: float) -> None:
        if self.paused_at is None:
            self.paused_at = now

    def resume_timer(self, now: float) -> None:
        if self.paused_at is not None:
            self.paused_seconds += now - self.paused_at
            self.paused_at = None

    def cancel_task(self) -> None:
        """Cancel the task, and wake whoever waits for it: it may not listen."""
        self.cancel_requested = True
        self.notify()
        if self.task is not None:
            self.task.cancel()

    def notify(self) -> None:
        """Have the runner look at its task."""
        # A task that is collected after its event loop was closed must not print an error at exit.
        with contextlib.suppress(RuntimeError):
            self._notified.set()

    async def notified(self) -> None:
        """Wait for the next `wake`, or one since the last time."""
        await self._notified.wait()
        self._notified.clear()

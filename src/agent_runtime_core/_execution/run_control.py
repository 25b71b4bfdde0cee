"""What the context, the journal and the runner of a claim share, and the services that a runner lends to contexts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from .._core.clock import Clock
from .._core.context_vars import claimed_run
from .._core.ids import checked
from .._core.per_loop import PerLoop
from .._core.run_tasks import Monitor, tasks_of
from ..errors import JournalMismatch, StepCancelledError
from ..interfaces import AgentRuntime, RunResult
from ..limits import Budget, RunLimits
from ..persistence.fencing import FencedWrites
from ..queue.records import RunRow
from ..tools.registry import ToolRegistry
from ..tracing.tracer import Tracer
from .result_codec import OmittedHistory
from .step import CANCEL_HOOK, AlreadyDone, StepScope

if TYPE_CHECKING:
    from ..persistence.manager import PersistenceManager


class RunRecorder(Protocol):
    """Saves what persists across runs: the messages of a run in its conversation, and its audit log."""

    async def fence(self, claim: FencedWrites) -> None:
        """Make the stores reject writes of earlier claims."""

    async def load(self, ctx: Any, reader: Any = None) -> None:
        """Load the earlier messages of the conversation into the context of the run.

        Args:
            ctx: The context.
            reader: The agent, if it is a `HistoryReader`.
        """

    async def save(self, result: RunResult) -> None:
        """Append the messages of the run to its conversation.

        The run is not finished yet, so this may be called again.
        """

    async def keep(
        self, result: RunResult, sent: Sequence[dict[str, Any]], *, rejected: bool, unanswered: bool
    ) -> None:
        """Append the complete turns of a run that did not succeed to its conversation, and the user's messages.

        Args:
            result: The result of the run.
            sent: The messages that were sent to the run while it was executed.
            rejected: Whether the provider rejected the request, so that it would reject the messages again.
            unanswered: Whether to append messages of the user that no complete turn follows.
        """

    def omitted_history(self, result: RunResult) -> OmittedHistory | None:
        """Return the messages of a result that its record can leave out; None if there are none."""

    async def restore(self, text: str) -> RunResult:
        """Return a recorded result, with the messages that its record only names."""

    async def audit(self, result: RunResult | None) -> None:
        """Write the audit log; `result` is None if the run is not finished."""


class Slots(Protocol):
    """Limits how many runs of a worker execute at the same time. A run that only waits uses no slot."""

    def release(self, control: RunControl) -> None:
        """Free the slot of a run that only waits."""

    def reclaim(self, control: RunControl) -> None:
        """Count a run that works again, even if no slot is free."""

    async def regain(self, control: RunControl) -> bool:
        """Wait for a slot. Returns False if the run must be released to the queue instead."""


@dataclass(repr=False, eq=False)
class Services:
    """What a runner lends to its contexts."""

    clock: Clock
    tools: ToolRegistry
    #: Finds the runs that only wait, in each event loop.
    monitor: PerLoop[Monitor]
    #: Seconds that a run waits in memory before it is parked. If None, it is never parked.
    park_after: float | None = None
    #: Runs a child in this process: (agent, its run id, input, the parent's id, `recover`). If None, workers run it.
    run_child: Callable[[AgentRuntime | str, str, dict[str, Any], str, str, str], Awaitable[RunResult]] | None = None
    #: Limits for the agent loops of these runs.
    limits: RunLimits | None = None
    #: Receives the traces of these runs.
    tracer: Tracer | None = None
    #: Returns the stores of `ctx.persistence`. Called at their first use.
    persistence: Callable[[], PersistenceManager] | None = None
    #: Returns the recorder of a run; None for a run without a conversation and an audit log.
    recorder: Callable[[RunRow], RunRecorder | None] | None = None
    #: Called with each run whose messages neither the runner nor the agent appends to its conversation.
    not_kept: Callable[[RunRow], None] | None = None
    #: Enters the lifespan of an agent; returns what to call when the run needs it no more.
    enter_lifespan: Callable[[AgentRuntime], Awaitable[Callable[[], None] | None]] | None = None
    #: The slots of the worker. A run that only waits releases its slot to another run.
    slots: Slots | None = None
    #: Returns where the run with that id publishes the pieces of its answer.
    backpressure: Callable[[str], TextOutlet] | None = None
    #: The agents that have emitted a type of the runner. The runner warns of each agent once.
    warned_agents: set[str] = field(default_factory=set)


class TextOutlet(Protocol):
    """Slows a run down to the speed of the readers of its answer."""

    #: Characters of a text that may be published together.
    longest: int

    def pieces(self, text: str) -> list[str]:
        """Return a text in pieces that are published one after another."""

    def published(self, sequence: int, size: int) -> asyncio.Future[None] | None:
        """Count a published piece, in bytes, and return what to await before the next piece, if anything."""


class ContextWaits(Protocol):
    """The waits of a context that its journal uses."""

    async def review(
        self, name: str, key: str, start: int, read: Callable[[Any], Any], tool: dict[str, Any] | None, /
    ) -> AlreadyDone | None:
        """Park until a person reviews a step in doubt."""

    async def approve(
        self, name: str, details: Any, schema: dict[str, Any] | None, timeout: float | None, key: str | None, /
    ) -> Any:
        """Ask for a decision and wait for the answer."""

    async def pause(self, seconds: float, reason: str, /) -> None:
        """Wait for a time, of which nothing is recorded."""

    async def regain_slot(self) -> None:
        """Wait until the run gets a slot again."""


class RunningContext(Protocol):
    """What the journal of a run uses of its context."""

    @property
    def waits(self) -> ContextWaits: ...

    @property
    def budget(self) -> Budget: ...


def _no_context() -> None:
    return None


class Stop(Enum):
    """Why somebody other than the code of an attempt ends the attempt. `outcomes.of_stop` decides what follows.

    From the stop on, every call of the context that starts or writes something raises the stop. What the code raises or
    returns after it does not count; only a cancelled run keeps a result that its code returns immediately.
    """

    #: The worker drains, the runner is closed, or the caller of `execute` left: another execution resumes the run.
    RELEASE = "release"
    #: Another worker claimed the run, it is finished, or its store is gone: nothing is written any more.
    LOST = "lost"
    #: The attempt used up `run_timeout_seconds`.
    TIME_LIMIT = "time limit"
    #: The attempt recorded nothing for `stall_timeout_seconds`.
    STALLED = "stalled"
    #: The deadline of the run was reached.
    DEADLINE = "deadline"
    #: The run was cancelled.
    CANCEL = "cancel"
    #: Code of another version wrote the journal: the run is left to a worker whose code fits.
    OTHER_CODE = "code of another version"
    #: A document is encrypted with a key that this process lacks: the run is left to a worker with the key.
    MISSING_KEY = "missing key"
    #: The store of the claim does not answer, and the lease may end before it does: this process resumes the attempt.
    OUTAGE = "outage"


_QUIET_REFUSALS = 100  # refused calls after which each further one takes a while
_REFUSAL_SECONDS = 0.05


class MailEvent(asyncio.Event):
    """Set when the mailbox of a run may have new messages."""

    @cached_property
    def listeners(self) -> list[Callable[[], None]]:
        """Functions that are called each time it is set."""
        return []

    def set(self) -> None:
        super().set()
        for listener in tuple(self.listeners):
            listener()


@dataclass(repr=False, eq=False)
class RunControl:
    """What the context, the journal and the runner of one claim share."""

    #: Returns the context while it exists: a weak reference, set by the context. The context refers to this control,
    #: so with a strong reference each ended run would wait for the garbage collector.
    context: Callable[[], RunningContext | None] = _no_context
    stopped: Stop | None = None  # the first cause that stopped the attempt; `LOST` replaces every other
    why: Exception | None = None  # the error behind `OTHER_CODE` and `MISSING_KEY`
    #: Whether other code than this worker's wrote a record, by its claim id; None if no other worker may execute
    #: the run.
    is_of_other_code: Callable[[str], bool] | None = None
    cancelled: bool = False  # it is `CANCEL`
    lost: bool = False  # it is `LOST`: another worker claimed the run, or it is finished
    parked: bool = False
    closed: bool = False  # the claim ended
    refuses: bool = False  # the attempt is stopped, or the claim ended: calls of the context must ask `refuse`
    release_requested: bool = False  # a drain or `close` does not wait any longer
    #: Why the attempt was stopped when its code ended; unset while the code runs. The code ends before the loop knows.
    stopped_before_end: tuple[Stop | None] | None = None
    cancel_hook: StepScope | None = None  # the agent's `cancel` hook runs: it may use the context
    #: Returns the error for calls after the run ended or its `open_run` block was left; None while it is parked.
    refusal: Callable[[], Exception] | None = None
    task: asyncio.Task[Any] | None = None
    cancel_requested: bool = False  # the task was cancelled
    tracked: bool = False  # the contexts of the run's tasks refer to this control
    clearing: bool = False  # the tasks of the run are being cancelled
    leaving: bool = False  # the block of `open_run` is being left
    queued: frozenset[asyncio.Task[Any]] = frozenset()  # tasks of the run that wait for other tasks of it
    without_slot: bool = False  # the run uses no slot of its worker
    paused_seconds: float = 0.0  # time that does not count against the time limit
    paused_at: float | None = None  # monotonic time since which the timer is paused
    stall_clock: Clock | None = None  # measures the time without progress; None without a stall limit
    active_at: float = float("inf")  # monotonic time of the last progress, or of the end of the last wait
    _refused: int = 0  # calls that were refused because the attempt is stopped
    _notified: bool = False  # since the runner last waited
    _waiter: asyncio.Future[None] | None = None  # of the runner, while it waits
    _mail: MailEvent | None = None

    @property
    def mail(self) -> MailEvent:
        """Set when there is a new message in the mailbox."""
        if self._mail is None:
            self._mail = MailEvent()
        return self._mail

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the run, after its start."""
        return None if self.task is None else self.task.get_loop()

    @property
    def in_main_task(self) -> bool:
        """Whether the calling code runs in the main task of the run."""
        return CANCEL_HOOK.get() is None if self.task is None else asyncio.current_task() is self.task

    @property
    def is_ending(self) -> bool:
        """Whether the attempt ends or is stopped, so that the next attempt takes up the waits that end now."""
        ended = self.task is not None and self.task.done()
        return ended or self.leaving or self.refuses or self.cancel_requested

    def other_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the unfinished tasks of the run but the current task."""
        return tasks_of(asyncio.get_running_loop(), self)

    async def review(
        self, name: str, key: str, start: int, read: Callable[[Any], Any], tool: dict[str, Any] | None = None
    ) -> AlreadyDone | None:
        """Wait until a person reviews the step in doubt that the record `start` started.

        Args:
            name: The name of the step.
            key: Its key.
            start: The number of the record of its start.
            read: Makes the result of the step from the result in the answer.
            tool: The tool call that the step is.

        Returns:
            The result; None to run the step again.

        Raises:
            JournalMismatch: The journal belongs to no context.
        """
        context = self.context()
        if context is None:
            raise JournalMismatch(
                f"step {name!r} is in doubt, and on_in_doubt='review' needs a run context. Open the run with a runner"
            )
        return await context.waits.review(name, key, start, read, tool)

    async def approve(self, name: str, details: Any, key: str) -> Any:
        """Ask for a decision and wait for the answer."""
        context = self.context()
        assert context is not None  # a guarded step runs in one
        return await context.waits.approve(name, details, None, None, key)

    async def regain_slot(self) -> None:
        """Wait until the run gets a slot again."""
        context = self.context()
        if context is not None:
            await context.waits.regain_slot()

    def add_recorded_usage(self, usage: dict[str, Any]) -> None:
        """Count usage of recorded steps in the budget, because their code does not run again."""
        context = self.context()
        if context is not None:
            context.budget.recalled(usage)

    # -- the end of the attempt

    def stop(self, cause: Stop) -> None:
        """Stop the attempt, unless it is stopped already. This does not cancel its task."""
        if self.stopped is None or cause is Stop.LOST:
            self.stopped, self.cancelled, self.lost = cause, cause is Stop.CANCEL, cause is Stop.LOST
        self.refuses = True

    def leave(self, cause: Stop, why: Exception) -> None:
        """Stop the attempt so that another worker continues the run, even if the code catches the error `why`."""
        if self.stopped is None:
            self.why = why
            self.stop(cause)

    def lacks_key(self, error: Exception) -> None:
        """Stop the attempt, whose code needs contents that this process cannot decrypt."""
        self.leave(Stop.MISSING_KEY, error)

    def withdraw(self) -> None:
        """Take the stop of an ended attempt back: no other worker continues the run."""
        self.stopped, self.refuses, self.is_of_other_code = None, self.closed, None

    def close(self) -> None:
        """Refuse all later calls of the context, because the claim ended."""
        self.closed = self.refuses = True

    def resume_after_outage(self, now: float) -> None:
        """Accept calls of the next context. The writes of contexts before it are refused, as their claim id is old.

        Args:
            now: Monotonic time.
        """
        self.resume_timer(now)
        if self.stopped is Stop.OUTAGE:
            self.stopped, self.refuses, self.cancel_requested = None, self.closed, False

    def code_ended(self) -> None:
        """Note that the code of the attempt returned or raised, in a task or a thread: a later stop changes nothing."""
        if self.stopped_before_end is None:
            self.stopped_before_end = (self.stopped,)

    async def ensure_open(self) -> None:
        """Return only while the run may write; see `refuse`."""
        if self.refuses:
            await self.refuse()

    async def refuse(self, step: str | None = None) -> None:
        """Raise the stop of the attempt, or what `refusal` returns once the claim ended.

        Returns in the agent's `cancel` hook, which may use the context. Once the run is parked, this never returns, so
        the calling code writes nothing.

        Args:
            step: The name of the step that would start; None for other calls.

        Raises:
            StepCancelledError: The step must not start, because the run is cancelled.
            asyncio.CancelledError: The attempt is stopped.
        """
        if self.cancel_hook is not None and CANCEL_HOOK.get() is self.cancel_hook and not self.closed:
            return
        if self.closed and self.refusal is not None:
            raise self.refusal()
        if self.stopped is not None or (self.clearing and claimed_run() is self):
            # Code that ignores the stop and repeats a call forever must leave the event loop to others.
            self._refused += 1
            await asyncio.sleep(0 if self._refused < _QUIET_REFUSALS else _REFUSAL_SECONDS)
            raise StepCancelledError(step) if step is not None and self.cancelled else asyncio.CancelledError
        await asyncio.get_running_loop().create_future()

    def cut_off(self) -> bool:
        """Return whether an error that a step raises now comes after the stop of its attempt, and so is no failure."""
        return self.stopped is not None and (self.cancel_hook is None or CANCEL_HOOK.get() is not self.cancel_hook)

    def pause_timer(self, now: float) -> None:
        """Stop counting time against the run's time limit."""
        if self.paused_at is None:
            self.paused_at = now

    def resume_timer(self, now: float) -> None:
        """Count time against the run's time limit again."""
        if self.paused_at is not None:
            self.paused_seconds += now - self.paused_at
            self.paused_at = None
            self.active_at = now

    def paused_for(self, now: float) -> float:
        """Return the seconds until `now` that do not count against time limits, because the run only waited."""
        return self.paused_seconds + (0.0 if self.paused_at is None else max(0.0, now - self.paused_at))

    def note_progress(self) -> None:
        """Restart the time for which the attempt may record nothing."""
        if self.stall_clock is not None:
            self.active_at = self.stall_clock.monotonic()

    def cancel_task(self) -> None:
        """Cancel the task. Also notify the runner, because the task may ignore the cancellation."""
        self.cancel_requested = True
        self.notify()
        if self.task is not None:
            self.task.cancel()

    def notify(self) -> None:
        """Make the runner check the task."""
        self._notified = True
        if self._waiter is not None and not self._waiter.done():
            # A task that is collected after its event loop was closed would print an error at exit.
            with contextlib.suppress(RuntimeError):
                self._waiter.set_result(None)

    async def notified(self) -> None:
        """Wait for the next `notify`; return immediately if one came since the last wait. Only the runner waits."""
        if not self._notified:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._notified = False


def with_traceparent(
    metadata: Mapping[str, Any] | None, tracer: Tracer | None, traceparent: str | None = None
) -> Mapping[str, Any] | None:
    """Return the metadata of a new run with the span that it belongs to: the current span, if none is passed.

    Raises:
        InvalidArgument: `traceparent` is no W3C traceparent.
    """
    if traceparent is not None:
        checked(traceparent)
    elif tracer is not None and not (metadata and "traceparent" in metadata):
        traceparent = tracer.current_traceparent()
    if traceparent is None or not (metadata is None or isinstance(metadata, Mapping)):
        return metadata
    return {**(metadata or {}), "traceparent": traceparent}

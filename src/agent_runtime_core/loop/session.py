"""The state that model calls and tool calls of a loop share: conversation, budget, time and recorded steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import arguments_digest
from .._core.context_vars import start_helper, start_soon
from .._core.log import log
from .._execution.mailbox import message_of
from .._execution.recorded_calls import RecordedCalls
from .._execution.run_control import RunControl
from ..errors import AgentRuntimeError, LimitExceeded, StepCancelledError
from ..interfaces import LLMClient
from ..limits import Budget, RunLimits
from ..tools.registry import ToolRegistry
from .state import CancellationToken, Hooks, TurnState

T = TypeVar("T")

#: The finish_reason of a model call that a message interrupted.
INTERRUPTED = "interrupted"


def was_interrupted(answer: Mapping[str, Any]) -> bool:
    """Return whether this answer is what was streamed of a call that a message interrupted.

    Some providers may use the same finish_reason for their own answers.
    """
    metadata = answer["message"].get("metadata")
    return answer["finish_reason"] == INTERRUPTED and isinstance(metadata, Mapping) and metadata.get("partial") is True


def joins_history(answer: Mapping[str, Any]) -> bool:
    """Return whether the message of an answer is added to the conversation: providers reject an empty message."""
    return not was_interrupted(answer) or bool(answer["message"]["content"].strip())


class ReceivedMessages:
    """Takes the messages for a loop, before its model calls.

    The record of a model call names the messages that were taken for it, and contains their text. So they are in the
    history once: after a crash before that record they are taken again, and after it they come from the record.

    Args:
        ctx: The context of the run. A context without an `inbox` receives no messages.
        steps: The recorded calls of the loop.
        budget: The budget of the loop.
        messages: Its conversation.

    Attributes:
        current: The messages that were taken for the present model call, at the end of the conversation.
    """

    def __init__(self, ctx: Any, steps: RecordedCalls, budget: Budget, messages: list[dict[str, Any]]) -> None:
        self._steps, self._budget, self._messages = steps, budget, messages
        # A loop inside a step takes none: on a resume the step is not executed, and its messages would be lost.
        inside_step = getattr(ctx, "step_id", None) is not None
        inbox = getattr(ctx, "inbox", None)
        # A custom context may have another attribute of that name.
        self._inbox: Any = None if inside_step or not hasattr(inbox, "on_arrival") else inbox
        self._run: object = getattr(ctx, "run_id", None)
        self._stored: Sequence[Any] = ()
        self.current: list[dict[str, Any]] = []

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the current messages in the mailbox of the run."""
        return [each.seq for each in self._stored] if self._stored else ()

    async def take(self) -> None:
        """Add the new messages to the conversation, for a model call without a record."""
        self._stored, self.current = () if self._inbox is None else await self._inbox.take(), []
        if self._stored:
            self.current = [message_of(each) for each in self._stored]
            self._messages += self.current

    def replay(self, recorded: Mapping[str, Any]) -> None:
        """Add the messages that the record of a model call contains."""
        self._stored = ()
        self.current = (recorded.get("asked") or {}).get("received") or []
        self._messages += self.current

    def give_back(self, key: str) -> None:
        """Remove the current messages from the conversation, because the model call was not recorded."""
        if self._stored:
            del self._messages[-len(self.current) :]
            self._inbox.put_back(self._stored, ("model", f"k:{key}"))
            self._stored, self.current = (), []

    async def has_more(self, key: str) -> bool:
        """Return whether messages arrived for another model call, the step `key`, after the answer of the model.

        A resumed run does what it did before: if there are later records in its journal, the loop ended here, or the
        record of that call is there.
        """
        if self._steps.has_ended("model", key):
            return True
        if self._inbox is None or self._steps.is_replaying:
            return False
        with contextlib.suppress(LimitExceeded):
            self._budget.before_turn()
            return bool(await self._inbox.has_new())
        return False  # the answer of the run exists: the run must not fail because another call would exceed a limit

    async def unless_interrupted(self, work: Awaitable[T]) -> T | None:
        """Return the result of a model call, or None if a message interrupted it.

        A call that no other may follow is not interrupted: the run would end without an answer.
        """
        if self._inbox is None or self._budget.is_last_turn:
            return await work
        watch: asyncio.Task[None] | None = None

        def begin() -> None:  # only when a message arrives: most calls get none
            nonlocal watch
            if watch is None:
                watch = start_helper(self._watch(call))

        try:
            async with asyncio.Timeout(None) as call:
                stop = self._inbox.on_arrival(begin)
                try:
                    return await work
                finally:
                    stop()
                    if watch is not None:
                        watch.cancel()
        except Exception:
            if call.expired():  # some clients raise a separate error when they are cancelled
                return None
            raise

    async def _watch(self, call: asyncio.Timeout) -> None:
        """End the call when a message interrupts it."""
        try:
            await self._inbox.interrupted()
        except AgentRuntimeError as error:  # the loop takes the message after the call
            log.warning(
                "run %s: a message could not interrupt the model call (%s). The model receives it after the call",
                self._run,
                error,
            )
        else:
            call.reschedule(asyncio.get_running_loop().time())


class Cancelled(Exception):
    """The cancellation token was cancelled."""


class LoopSession:
    """One conversation of a loop with a model."""

    def __init__(
        self, ctx: Any, client: LLMClient, tools: ToolRegistry, limits: RunLimits, hooks: Hooks,
        cancellation: CancellationToken | None, messages: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        self.ctx: Any = ctx
        self.client: LLMClient = client
        self.tools: ToolRegistry = tools
        self.hooks: Hooks = hooks
        self.budget: Budget = Budget(limits, getattr(ctx, "budget", None))
        self.cancellation: CancellationToken | None = cancellation
        self.messages: list[dict[str, Any]] = messages
        #: Those messages since the last model call that are not answers to it.
        self.new_messages: list[dict[str, Any]] = messages
        self.clock: Clock = getattr(ctx, "clock", SYSTEM)
        self.traced: bool = bool(getattr(ctx, "traced", False))  # whether calls are traced
        self.steps: RecordedCalls = RecordedCalls(ctx)
        #: Distinguishes the steps of this loop from the steps of other loops in the run.
        self._initial_count: int = len(messages)
        self.name: str = self.steps.loop_name(lambda: self._digest)
        #: The messages that are sent to the run while the loop runs.
        self.received: ReceivedMessages = ReceivedMessages(ctx, self.steps, self.budget, messages)
        #: Whether the last answer was copied from the run that was forked, which paid for it.
        self.copied: bool = False
        control = getattr(ctx, "control", None)
        self._control: RunControl | None = control if isinstance(control, RunControl) else None
        self._work_started = 0.0  # when the present period of work began
        self._turn_seconds = 0.0  # seconds of work in this turn before that
        self._limit_passed: LimitExceeded | None = (
            None  # a time limit that work exceeded because it ignored its cancellation
        )

    @property
    def _digest(self) -> str | None:
        """The digest of what the loop was called with, by which it is recognized if it is called again."""
        return arguments_digest(self.messages[: self._initial_count], [each.name for each in self.tools.list_tools()])

    def leave(self) -> None:
        """Keep the name for the next loop if this loop was cut off inside a guarded tool call, which is in doubt.

        A loop with the same messages and tools is then the same loop again. It resumes with the call in doubt, as it
        does in the next execution of the run. Under another name, it would make the call again.
        """
        self.steps.leave_loop(self.name, lambda: self._digest)

    @property
    def run(self) -> Any:
        """The run's id as the user passed it, for log messages."""
        return getattr(self.ctx, "run_key", None) or getattr(self.ctx, "run_id", None)

    def state(self, state: TurnState) -> None:
        """Report a new state to the hook."""
        if self.hooks.on_state is not None:
            self.hooks.on_state(state)

    def check(self, what: str) -> None:
        """Raise if the token or the run was cancelled, or if a time limit is exceeded; `what` is the next call."""
        if self.cancellation is not None and self.cancellation.cancelled:
            raise Cancelled
        if self.ctx.cancelled():
            raise StepCancelledError(what)
        if self._limit_passed is not None:
            raise self._limit_passed

    def raise_if_late(self) -> None:
        """Raise LimitExceeded if work of this turn ended after its time limit."""
        if self._limit_passed is not None:
            raise self._limit_passed

    # -- time: nothing asks for the seconds of work if there is no time limit

    def begin_turn(self) -> None:
        """Start the time of a turn."""
        if self.budget.timed:
            self._turn_seconds, self._work_started = 0.0, self._now()

    def stop_timer(self) -> None:
        """Stop counting work time: the loop waits."""
        if self.budget.timed:
            now = self._now()
            self.add_work_time(now - self._work_started)
            self._work_started = now

    def start_timer(self) -> None:
        """Count work time again."""
        if self.budget.timed:
            self._work_started = self._now()

    end_turn = stop_timer

    def add_work_time(self, seconds: float) -> None:
        """Add seconds of work, which may come from an earlier execution."""
        if self.budget.timed:
            self._turn_seconds += seconds
            self.budget.add_seconds(seconds)

    def in_time(self, work: Awaitable[Any]) -> Awaitable[Any]:
        """Return the result of `work`, unless a time limit passes or the token is cancelled.

        Work that ignores its cancellation keeps its result; the next `raise_if_late` raises.
        """
        return work if self.cancellation is None and not self.budget.timed else self._in_time(work)

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        remaining = self.budget.remaining(*self._times())
        try:
            async with asyncio.timeout(None) as limit:
                with self._expiring(limit, remaining):
                    result = await self.unless_cancelled(work)
        except TimeoutError:
            if limit.expired():
                raise self.budget.time_limit_error(*self._times()) from None
            raise
        if limit.expired():
            self._limit_passed = self.budget.time_limit_error(*self._times())
        return result

    @contextmanager
    def _expiring(self, limit: asyncio.Timeout, seconds: float | None) -> Iterator[None]:
        """Have `limit` expire after so many seconds in which the run does not only wait."""
        loop, counted = asyncio.get_running_loop(), self._paused()
        timer: asyncio.TimerHandle | None = None

        def due() -> None:
            nonlocal timer, counted
            waited, counted = self._paused() - counted, self._paused()
            if waited > 0:
                timer = loop.call_later(waited, due)
            else:
                limit.reschedule(loop.time())

        if seconds is not None:
            timer = loop.call_later(max(seconds, 0), due)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _paused(self) -> float:
        """Return for how many seconds the run only waited, including waits inside a tool."""
        return 0.0 if self._control is None else self._control.paused_for(self.clock.monotonic())

    def _now(self) -> float:
        """Return the time of a clock that does not advance while the run only waits."""
        now, control = self.clock.monotonic(), self._control
        if control is None:
            return now
        return now - (control.paused_seconds if control.paused_at is None else control.paused_for(now))

    def _times(self) -> tuple[float, float]:
        """Return the seconds of the present period of work, and the seconds of this turn."""
        elapsed = self._now() - self._work_started
        return elapsed, self._turn_seconds + elapsed

    async def unless_cancelled(self, work: Awaitable[Any]) -> Any:
        """Return the result of `work`, unless the token is cancelled first."""
        return await (work if self.cancellation is None else _await_or_cancel(self.cancellation, work))


async def _await_or_cancel(token: CancellationToken, work: Awaitable[Any]) -> Any:
    task = start_soon(work)
    watch = start_helper(token.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

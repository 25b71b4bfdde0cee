"""Call agent hooks and stores under the time limit of their run."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from .._core.clock import Clock
from .._core.context_vars import start_soon
from .._core.log import log
from .._core.timeouts import contain, done_in_time, ended_in_time
from .._execution.run_control import RunControl
from .._execution.sync_context import is_async, run_plain
from ..errors import deciding_error
from ..interfaces import AgentRuntime
from ..queue.records import RunRow
from .outcomes import TimeLimitReached

T = TypeVar("T")


#: Seconds a call may take at least when the run is leaving, and again to stop after it was cancelled.
LEAVE_SECONDS = 0.75
MIN_CHECK_SECONDS = 0.05  # seconds between two checks of the time limit


class GuardedCalls:
    """Awaits calls for no longer than a run may take.

    Args:
        row: The run. Only its names and its deadline are used, which stay the same for all attempts.
        clock: The clock of the run.
        control: Cancellation, release and paused time of the run.
        grace: Seconds in which a run must stop once it is asked to.
        stall: Seconds for which an attempt may record nothing; None for no limit.
    """

    def __init__(
        self, row: RunRow, clock: Clock, control: RunControl, grace: float, stall: float | None = None
    ) -> None:
        self.row: RunRow = row
        self.clock: Clock = clock
        self.control: RunControl = control
        self.grace: float = grace
        self.stall: float | None = stall
        #: When the time limit of the attempt is reached, by the monotonic clock, if the run never waits in memory.
        self.time_limit_at: float = float("inf")

    def time_left(self) -> float:
        """Return the seconds until a limit of the attempt or the run's deadline, whichever is first.

        Time that the run waits in memory does not count against the time limit.
        """
        control, clock, deadline = self.control, self.clock, self.row.deadline
        if control.paused_at is None:
            left = self.time_limit_at + control.paused_seconds - clock.monotonic()
        else:
            left = max(self.time_limit_at + control.paused_seconds - control.paused_at, MIN_CHECK_SECONDS)
        if self.stall is not None:
            left = min(left, self.stall_left(self.stall))
        return left if deadline is None else min(left, deadline - clock.wall())

    def stall_left(self, limit: float) -> float:
        """Return the seconds for which the attempt may still record nothing. A wait restores all of them."""
        if self.control.paused_at is not None:
            return max(limit, MIN_CHECK_SECONDS)
        return self.control.active_at + limit - self.clock.monotonic()

    def time_allowed(self, within: bool) -> float:
        """Return the seconds that a call may take from now on, apart from the time limit of the attempt."""
        control = self.control
        if control.lost or (within and control.parked):
            return 0.0
        if control.release_requested:  # the worker waited for the grace already
            return LEAVE_SECONDS
        return float("inf") if within and not control.cancelled else max(self.grace, LEAVE_SECONDS)

    async def call(
        self, work: Coroutine[Any, Any, T], what: str, *, within: bool = True,
        context: contextvars.Context | None = None,
    ) -> T:  # fmt: skip
        """Await `work` in a separate task.

        Args:
            work: The call.
            what: How messages name it.
            within: The call is part of the attempt and uses the time that is left of it. Other calls use the grace.
            context: The context in which it runs.

        Raises:
            TimeLimitReached: It took longer than its time, or than the grace of a run that must stop.
        """
        try:
            task = start_soon(work, context=context)
        except RuntimeError:  # the event loop is stopped
            work.close()
            raise
        now, until = self.clock.monotonic, float("inf")

        def left() -> float:
            nonlocal until
            until = min(until, now() + self.time_allowed(within))
            seconds = min(until - now(), self.time_left()) if within else until - now()
            if seconds <= 0:
                self.control.cancel_hook = None  # the hook is stopped, too: from now on its context refuses
            return seconds

        task.add_done_callback(lambda _: self.control.notify())
        if not await ended_in_time(task, left, what, self.wait, LEAVE_SECONDS):
            raise TimeLimitReached(f"{what} took too long, and is not awaited any longer")
        try:
            return task.result()
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # mostly a cancellation, and not of the task that waits here
            if isinstance(cause := deciding_error(error), KeyboardInterrupt):
                raise cause from error
            raise RuntimeError(f"{what} ended with {type(error).__name__}, and was not cancelled") from error

    async def wait(self, _: object, seconds: float) -> None:
        """Wait until the run is notified, for at most so many seconds."""
        # One future and one timer: asyncio.wait would cost a short run more than the rest of its bookkeeping.
        if self.row.deadline is not None:  # the wall clock may jump past it
            seconds = min(seconds, self.clock.wall_check)
        timer = self.clock.call_later(max(seconds, MIN_CHECK_SECONDS), self.control.notify)
        try:
            await self.control.notified()
        except asyncio.CancelledError:  # the caller leaves
            self.control.cancel_hook = None
            raise
        finally:
            timer.cancel()

    async def pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the run must stop or its deadline is reached."""
        if (deadline := self.row.deadline) is not None:
            seconds = min(seconds, deadline - self.clock.wall())
        sleep = start_soon(self.clock.sleep_for(seconds))
        sleep.add_done_callback(lambda _: self.control.notify())
        try:
            await done_in_time(
                sleep, lambda: float(not self.control.cancel_requested), lambda *_: self.control.notified()
            )
        finally:
            sleep.cancel()

    async def hook(
        self, agent: AgentRuntime, name: str, args: tuple[Any, ...], context: contextvars.Context, *,
        within: bool = True,
    ) -> Any:  # fmt: skip
        """Call a hook of the agent.

        Returns:
            The answer; None if the agent does not define the hook, or it fails.

        Raises:
            TimeLimitReached: As `call`.
        """
        hook = getattr(agent, name, None)
        if hook is None or getattr(hook, "__func__", None) is getattr(AgentRuntime, name):
            return None
        what = f"{name}() of agent {self.row.agent!r}"
        try:
            return await self.call(
                contain(partial(_answer, agent, hook, args), what), what, within=within, context=context
            )
        except TimeLimitReached as late:
            log.warning("run %s continues without a hook: %s", self.row.run_key or self.row.run_id, late)
            raise
        except Exception:  # a hook that fails does not change the outcome
            log.exception("%s failed in run %s", what, self.row.run_key or self.row.run_id)
            return None


async def _answer(agent: AgentRuntime, hook: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not is_async(hook) and not is_async(agent.run):  # its other hooks may be plain too, and block
        return await run_plain(hook, *args)
    answer = hook(*args)
    return await answer if inspect.isawaitable(answer) else answer

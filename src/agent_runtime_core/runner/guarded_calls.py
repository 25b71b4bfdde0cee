"""What a drive waits for beside the agent's code, hooks of the agent and stores that the runner was given; how long."""

from __future__ import annotations

import contextvars
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from .._core.context_vars import RUN, start_soon
from .._core.timeouts import ended_in_time
from .._execution.context import Context
from ..errors import LeaseLost, deciding_error
from ..interfaces import AgentRuntime
from ..persistence.fencing import CURRENT_CLAIM
from .claim import HeldClaim

T = TypeVar("T")

log: logging.Logger = logging.getLogger("agent_runtime_core")

LEAVE_SECONDS = 0.75  # seconds, however short the grace or when it is over, and as many again to let go when cut short
MIN_CHECK_SECONDS = 0.05  # seconds between two looks at the clock
#: The runs with a concurrency key that this task is part of, by key: what it executes must not wait for them.
HELD_CONCURRENCY_KEYS: ContextVar[Mapping[str, str]] = ContextVar("agent_runtime_core_turns")
#: The ids of all runs that this task is part of, the outermost first.
ENCLOSING_RUNS: ContextVar[tuple[str, ...]] = ContextVar("agent_runtime_core_within")


class TimeLimitReached(Exception):
    """It was not waited for any longer."""


class GuardedCalls(HeldClaim):
    """A claim, and what is waited for under it for no longer than its run may take."""

    time_limit_at: float = float("inf")  # when the attempt's time is up by the boot clock, if it does not wait in place

    @property
    def _label(self) -> str:
        return f"run {self.row.run_key or self.row.run_id} of agent {self.row.agent!r}"

    def _time_left(self) -> float:
        """Seconds until the attempt's time is up, in which waiting in place does not count, or the run's deadline."""
        place, clock, deadline = self.control, self.clock, self.row.deadline
        if place.paused_at is None:
            left = self.time_limit_at + place.paused_seconds - clock.boot()
        else:
            left = max(self.time_limit_at + place.paused_seconds - place.paused_at, MIN_CHECK_SECONDS)
        return left if deadline is None else min(left, deadline - clock.wall())

    @property
    def _is_leaving(self) -> bool:
        """Whether the run goes no further under this claim, whatever comes of the attempt."""
        return self.control.cancelled or self.release_requested or self.lost or self.control.parked

    def time_allowed(self, within: bool) -> float:
        """Seconds from now that what is waited for may take, beside the time of the attempt."""
        if within and (self.lost or self.control.parked):
            return 0.0
        if self.release_requested:  # its worker has waited for the grace already
            return LEAVE_SECONDS
        return float("inf") if within and not self.control.cancelled else max(self.config.grace_seconds, LEAVE_SECONDS)

    def _context(self) -> contextvars.Context:
        """Where code of this run knows whose claim it writes under and whose turn it is part of."""
        around = contextvars.copy_context()
        around.run(CURRENT_CLAIM.set, self._fenced_writes())
        around.run(RUN.set, self.control)
        around.run(ENCLOSING_RUNS.set, (*ENCLOSING_RUNS.get(()), self.row.run_id))
        if self.row.lane is not None:
            around.run(HELD_CONCURRENCY_KEYS.set, {**HELD_CONCURRENCY_KEYS.get({}), self.row.lane: self.row.run_id})
        return around

    async def call(
        self, work: Coroutine[Any, Any, T], what: str, *, within: bool = True, around: contextvars.Context | None = None
    ) -> T:
        """The result of `work`; Cut if it takes longer than what is left of the attempt, or than the grace of a run
        that was told to stop. What is not `within` the attempt has the grace alone."""
        try:
            task = start_soon(work, context=around)
        except RuntimeError:  # the loop turns no more
            work.close()
            raise
        boot, until = self.clock.boot, float("inf")

        def time_left() -> float:
            nonlocal until
            until = min(until, boot() + self.time_allowed(within))
            return min(until - boot(), self._time_left()) if within else until - boot()

        task.add_done_callback(lambda _: self.control.notify())
        if not await ended_in_time(task, time_left, what, self._wait, LEAVE_SECONDS):
            raise TimeLimitReached(f"{what} took too long, and is not waited for any longer")
        try:
            return task.result()
        except (Exception, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a cancellation, mostly: not of the task that waits here
            if isinstance(cause := deciding_error(error), (SystemExit, KeyboardInterrupt)):
                raise cause from error
            raise RuntimeError(f"{what} ended with {type(error).__name__}, and was not cancelled") from error

    async def _wait(self, _: object, seconds: float) -> None:
        """Wait until the run wakes its runner, at most so many seconds."""
        # One future and one timer: asyncio.wait would cost a run more than all else here.
        timer = self.clock.call_later(max(seconds, MIN_CHECK_SECONDS), self.control.notify)
        try:
            await self.control.notified()
        finally:
            timer.cancel()

    async def hook(self, name: str, ctx: Context, *args: Any, within: bool = True) -> Any:
        """What a hook of the agent answers, None where it has none of its own or that fails; Cut."""
        hook = getattr(self.agent, name, None)
        if hook is None or getattr(hook, "__func__", None) is getattr(AgentRuntime, name):
            return None
        what = f"{name}() of agent {self.row.agent!r}"
        try:
            return await self.call(_called(hook, ctx, *args), what, within=within, around=self._context())
        except TimeLimitReached as late:
            log.warning("run %s goes on without a hook: %s", self.row.run_id, late)
            raise
        except Exception:  # a hook that fails changes nothing of what it was asked about
            log.exception("%s failed", what)
            return None

    async def _audited(self) -> None:
        """Have an audit store told what happened: one that fails, or does not answer, keeps no run from returning."""
        if self.recorder is None:
            return
        try:
            await self.call(self.recorder.audit(self.result), f"the audit of {self._label}", within=False)
        except Exception as error:  # noqa: BLE001 - an audit that fails changes nothing of the run
            if isinstance(cause := deciding_error(error), LeaseLost):
                raise cause from None
            log.warning("what run %s did is not audited: %s", self.row.run_id, error)


async def _called(hook: Callable[..., Any], *args: Any) -> Any:
    answer = hook(*args)
    return await answer if inspect.isawaitable(answer) else answer

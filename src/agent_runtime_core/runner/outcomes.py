"""What comes of an attempt: the end of its run, another one in its place, or a later one by the queue."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Coroutine, Mapping
from copy import copy
from typing import Any

from .._core.clock import aware
from .._core.codec.json import encode
from .._core.context_vars import start_soon
from .._core.timeouts import done_in_time
from .._execution.context import Context
from .._execution.result_codec import error_payload
from .._execution.step_scope import Identity
from .._journal.record import Record
from ..errors import (
    EffectAlreadyDone,
    IdempotencyConflict,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    MissingDependency,
    NotSupported,
    OutputMismatch,
    Postponed,
    ProviderError,
    RateLimited,
    StepCancelledError,
    StepInDoubt,
    StorageBusy,
    StorageFull,
    UnknownPrice,
    UnserialisableResult,
    brief,
    deciding_error,
    holds,
    shortened,
    text_of,
)
from ..interfaces import ErrorInfo, RunResult, describe
from ..queue.records import RunRow
from ..retry import run_backoff
from ..status import RunStatus
from .guarded_calls import GuardedCalls, TimeLimitReached

log: logging.Logger = logging.getLogger("agent_runtime_core")

_DEFERRED = "deferred_seconds"
#: The run goes on when they are over.
OUTAGES = (LeaseLost, StorageBusy, StorageFull)
#: Another attempt would only fail the same way.
FINAL_ERRORS = (
    JournalMismatch, StepInDoubt, EffectAlreadyDone, UnserialisableResult, InvalidArgument, NotSupported,
    LimitExceeded, UnknownPrice, OutputMismatch, MissingDependency, IdempotencyConflict,
)  # fmt: skip


class RetryHere:
    """Another attempt follows here."""


#: A result, another attempt, or None for a run that goes on elsewhere or later.
Outcome = RunResult | RetryHere | None


class Ends(GuardedCalls):
    """What an attempt came to, told to the store."""

    deferred_seconds: float = 0.0  # seconds of the attempt's time that earlier deferrals have used
    completed_steps: Mapping[Identity, Record] = {}  # steps, waits and values that are recorded
    completed_at_start: int = 0  # how many they were when the attempt began

    def _restart_timer(self) -> bool:
        """Give the attempt the time that deferrals have used, if the run has recorded a step since; False if not."""
        if not self.deferred_seconds or len(self.completed_steps) <= self.completed_at_start:
            return False
        self.time_limit_at: float = self.time_limit_at + self.deferred_seconds
        self.deferred_seconds = 0.0
        return True

    async def _returned(self, ctx: Context, result: Any) -> Outcome:
        if self.control.cancelled:  # it looked, and ended by itself
            return await self._cancelled(ctx, result)
        if not isinstance(result, RunResult):
            error = InvalidArgument(f"agent {self.row.agent!r} returned {brief(result)}, not a RunResult")
            return await self._raised(ctx, error)
        if result.error is not None:
            if not isinstance(result.error, ErrorInfo):
                said = f"the error that agent {self.row.agent!r} returned is an ErrorInfo, not {brief(result.error)}"
                return await self._raised(ctx, InvalidArgument(said))
            return await self._failed(result, result.error)
        if self.recorder is not None:
            if (refusal := await self._stored(self.recorder.save(result))) is not None:
                return await self._raised(ctx, refusal)
        elif ctx.conversation_id is not None and not ctx.owns_conversation and self.services.not_kept is not None:
            self.services.not_kept(self.row)
        try:
            return await self.end(RunStatus.SUCCEEDED, result)
        except UnserialisableResult as error:
            return await self._raised(ctx, error)

    async def _stopped(self, ctx: Context) -> Outcome:
        """The task was cancelled, by one of us or by the agent's own code."""
        if self._is_leaving:
            return await self._out_of_time(ctx)
        error = ErrorInfo("CancelledError", "the agent's own code cancelled it")
        return await self._failed(partial_result(ctx), error)

    async def _cancelled(self, ctx: Context, given: Any = None) -> RunResult:
        """End the run as cancelled, with what the agent has `given` where it ended by itself."""
        with contextlib.suppress(TimeLimitReached):
            await self.hook("cancel", ctx, within=False)
        if isinstance(given, RunResult) and isinstance(given.final_messages, list):
            given = copy(given)
            given.usage, given.error = given.usage or ctx.usage, None
            try:
                return await self.end(RunStatus.CANCELLED, given, {})
            except UnserialisableResult as refusal:
                log.warning(
                    "the result that %s returned when it was cancelled is not stored: %s",
                    self._label, type(refusal).__name__,
                )  # fmt: skip
        return await self.end(RunStatus.CANCELLED, partial_result(ctx), {})

    async def _out_of_time(self, ctx: Context) -> RunResult | None:
        """The end of an attempt that got no answer until it was told to stop, or until its time was up."""
        if self.lost or self.control.parked:
            return None
        if self.control.cancelled:
            return await self._cancelled(ctx)
        if self.release_requested:
            await self.release()
            return None
        return await self._timed_out(ctx)

    async def _timed_out(self, ctx: Context) -> RunResult:
        if self.row.deadline is not None and self.clock.wall() >= self.row.deadline:
            return await self._past_deadline(self.row.deadline, ctx)
        limit = self.config.run_timeout_seconds
        message = f"the attempt took more than {limit:g} s"
        if self.deferred_seconds:
            cause = deferral(self.row)
            message += (
                f", {self.deferred_seconds:.3g} s of which it was deferred by {cause['type']}: {cause['message']}"
            )
        return await self._late("TimedOut", message, {"timeout_seconds": limit}, ctx)

    async def _late(
        self, kind: str, message: str, info: dict[str, Any], ctx: Context | None = None, **details: Any
    ) -> RunResult:
        result = RunResult() if ctx is None else partial_result(ctx)
        result.error = ErrorInfo(kind, message, retriable=False, details=details)
        return await self.end(RunStatus.TIMED_OUT, result, info)

    async def _raised(self, ctx: Context, error: BaseException) -> Outcome:
        if self.control.cancelled and holds(error, StepCancelledError):
            return await self._cancelled(ctx)
        if isinstance(error, TimeLimitReached):
            return await self._out_of_time(ctx)
        cause = deciding_error(error)
        if isinstance(cause, Postponed):
            return await self._postponed(ctx, cause, cause.after)
        if isinstance(cause, RateLimited) and cause.retriable:
            # Asked for longer than any attempt is waited for, it is a failure: `execute` would wait in its place.
            after = cause.retry_after or 0.0
            if 0 < after <= self.config.retry_backoff_max:
                return await self._postponed(ctx, cause, after)
        try:
            info = await self.hook("on_error", ctx, error)
        except TimeLimitReached:
            if self._is_leaving:
                return await self._out_of_time(ctx)
            info = None
        if info is not None and not isinstance(info, ErrorInfo):
            log.error(
                "on_error() of agent %r must return an ErrorInfo or None, got %s", self.row.agent, type(info).__name__
            )
            info = None
        if info is None:
            info = describe(error)
        if isinstance(cause, FINAL_ERRORS) or (isinstance(cause, ProviderError) and not cause.retriable):
            info.retriable = False
        partial = cause.result if isinstance(cause, LimitExceeded | OutputMismatch) else None
        return await self._failed(partial if isinstance(partial, RunResult) else partial_result(ctx), info)

    async def _postponed(self, ctx: Context, error: BaseException, seconds: float) -> Outcome:
        """Defer the run without using an attempt, or end it if it could not resume within its limits of time.

        Time deferred and time worked since the last recorded step count together against `run_timeout_seconds`.
        """
        limit, cause, kind = self.config.run_timeout_seconds, text_of(error), type(error).__name__
        left = (
            limit
            if len(self.completed_steps) > self.completed_at_start
            else self.time_limit_at + self.control.paused_seconds - self.clock.boot()
        )
        deadline = self.row.deadline
        at_most = left if deadline is None else min(left, deadline - self.clock.wall())
        if deadline is not None and at_most < left and seconds >= at_most:
            message = (
                f"the run cannot resume before its deadline, {aware(deadline):%Y-%m-%d %H:%M:%S} UTC: {kind} defers it "
                f"for {seconds:.3g} s ({cause})"
            )
            return await self._late("DeadlineExceeded", message, {"deadline": deadline}, ctx, cause=kind)
        if seconds >= left:
            message = (
                f"the run cannot resume within run_timeout_seconds={limit:g}: {kind} defers it for {seconds:.3g} s, "
                f"and {max(left, 0):.3g} s are left ({cause}). Raise run_timeout_seconds, or resume the run later"
            )
            return await self._late("TimedOut", message, {"timeout_seconds": limit}, ctx, cause=kind)
        after = self._with_jitter(seconds)
        after = after if after < at_most else seconds
        log.info("%s deferred for %.3g s: %s", self._label, after, kind)
        info = ErrorInfo(kind, cause, details={_DEFERRED: limit - left + after})
        return await self._again(after, recordable(info), stalls=self.row.stalls, parked=1, reason=kind)

    async def _failed(self, result: RunResult, error: ErrorInfo) -> Outcome:
        error = recordable(error)
        if not error.retriable or self.row.failures + 1 >= self.config.max_retries:
            result.error = error
            try:
                return await self.end(RunStatus.FAILED, result, error_payload(error) or {})
            except UnserialisableResult as refusal:  # what it gave besides; that it failed is told all the same
                error.details = {**error.details, "left_out": str(refusal)}
                return await self.end(RunStatus.FAILED, RunResult(error=error), error_payload(error) or {})
        delay = run_backoff(self.config.retry_backoff_base, self.row.attempt, self.config.retry_backoff_max)
        log.info(
            "attempt %d of %s failed: %s, next attempt in %.3g s", self.row.attempt, self._label, error.type, delay
        )
        return await self._again(delay, error, stalls=0, failures=self.row.failures + 1)

    async def _again(
        self, seconds: float, error: ErrorInfo, *, parked: int = 0, reason: str = "", **counters: int
    ) -> RetryHere | None:
        """Make another attempt after so many seconds, here or by the queue; a `parked` run resumes in it."""
        text = encode(error_payload(error))
        if self.inline:
            await self.renew(error=text, **counters)
            if parked:
                self.replace_row(parked=parked, reason=reason)
            else:
                self._next_attempt()
            await self._pause(seconds)
            return RetryHere()
        due_at = self.clock.wall() + seconds if seconds else 0.0
        await self._release_with(
            self._run_update("pending", error=text, due_at=due_at, parked=parked, reason=reason, **counters)
        )
        return None

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless told to stop, and until the run's deadline at most."""
        if (deadline := self.row.deadline) is not None:
            seconds = min(seconds, deadline - self.clock.wall())
        sleep = start_soon(self.clock.sleep(seconds))
        sleep.add_done_callback(lambda _: self.control.notify())
        try:
            await done_in_time(
                sleep, lambda: float(not self.control.cancel_requested), lambda *_: self.control.notified()
            )
        finally:
            sleep.cancel()

    async def _past_deadline(self, deadline: float, ctx: Context | None = None) -> RunResult:
        return await self._late("DeadlineExceeded", "the run's deadline has passed", {"deadline": deadline}, ctx)

    async def _stored(self, doing: Coroutine[Any, Any, None]) -> Exception | None:
        """Have stores do something under the claim of this run; what is wrong with it, if anything is.

        That a store is away, or the claim lost, is no fault of the run, and raised.
        """
        try:
            await self.call(doing, f"a store of {self._label}", around=self._context())
        except Exception as error:  # noqa: BLE001 - a store of the application may raise anything
            if isinstance(cause := deciding_error(error), OUTAGES):
                raise cause from None
            return error
        return None


def deferral(row: RunRow) -> dict[str, Any]:
    """Return the error that deferred the run since its last recorded step, as it is stored; empty if none did."""
    error = row.decoded("error", json.loads) if row.error else {}
    details = error.get("details") if isinstance(error, dict) else None
    return error if isinstance(details, dict) and _DEFERRED in details else {}


def deferred_seconds(row: RunRow) -> float:
    """Return the part of `run_timeout_seconds` that deferrals and the attempts between them have used."""
    return float(found["details"][_DEFERRED]) if (found := deferral(row)) else 0.0


def recordable(error: ErrorInfo) -> ErrorInfo:
    """The error as a record can hold it: what has no JSON form, or is too long, is left out."""
    try:
        encode(error_payload(error))
    except UnserialisableResult as refusal:
        kind, message, stack = (shortened(str(each)) for each in (error.type, error.message, error.stack))
        return ErrorInfo(kind, message, stack, bool(error.retriable), {"left_out": str(refusal)})
    return error


def partial_result(ctx: Context) -> RunResult:
    """The result of a run that has none, with what its agent loops used."""
    return RunResult(usage=ctx.usage)

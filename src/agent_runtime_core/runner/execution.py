"""One claimed run, driven until it is ended, parked, given back or lost."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from .._core.codec.json import decode, decode_known
from .._core.context_vars import start_soon
from .._core.ids import known_uuid
from .._core.run_tasks import tasks_of
from .._core.timeouts import done_in_time, is_abandoned, wait_cancelled
from .._execution.context import Context
from .._execution.result_codec import error_payload
from .._execution.step_journal import RunJournal, StepJournal
from .._execution.step_scope import Identity
from .._journal.record import ATTEMPT, RESUMED, Record
from ..errors import (
    AgentRuntimeError,
    InvalidArgument,
    LeaseLost,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageFull,
    UnserialisableResult,
    brief,
    deciding_error,
)
from ..interfaces import ErrorInfo, RunResult, describe
from ..queue.records import LIMITS, RowChanged, RunRow
from ..status import RunStatus
from .outcomes import Ends, Outcome, RetryHere, deferred_seconds

log: logging.Logger = logging.getLogger("agent_runtime_core")

_RUNNING = RunStatus.RUNNING.value
MAX_CRASHES_WITHOUT_PROGRESS = 3  # crashes in a row without a new record, after which a run is dead


def _finished_error(run: str) -> StorageClosed:
    return StorageClosed(f"run {run} has ended: await what it began before it returns, and call its context in it")


def is_crash_suspect(row: RunRow) -> bool:
    """Whether the next crash would be the run's last, unless it got further since the one before."""
    return row.stalls == MAX_CRASHES_WITHOUT_PROGRESS - 1


class RunExecution(Ends):
    """The attempts that are made under one claim, and what comes of them."""

    tracing: bool = False

    async def run(self) -> RunResult | None:
        """The run's result, or None where it has none yet: parked, given back, or lost to another worker."""
        self.started = True
        self._log_claim()
        try:
            self._register()
            self._trace_start()
            return await self._run()
        except (LeaseLost, RowChanged):
            log.warning(
                "%s: claim %s was lost, because another worker claimed the run or it has finished",
                self._label, self.writer.guard.token,
            )  # fmt: skip
            return None
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            # After an error of our own a worker keeps the lease: it is the pause before the run is tried again.
            if self.inline or not isinstance(error, Exception):
                await self.try_release()
            elif isinstance(error, StorageBusy | StorageFull):  # what is damaged is no better later
                await self.release_after(error)
            raise
        except GeneratorExit:  # its loop turns no more: there is nobody to wait for
            self.lost = True
            raise
        finally:
            self.control.closed = True
            if self.result is not None:
                self.control.refusal = partial(_finished_error, self.row.run_key or self.row.run_id)
            self.control.task = None  # which knows this place: else each run would wait for the garbage collector
            self.heartbeat.drop(self.row.run_id, self.row.claim_id)
            self._trace_end()
            if not self.lost:
                await self._audited()

    def _log_claim(self) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("%s claimed by %s, attempt %d", self._label, self.row.worker, self.row.attempt)

    def _trace_start(self) -> None:
        tracer, row = self.services.tracer, self.row
        if tracer is None:
            return
        self.tracing = True
        input_ = cast("dict[str, Any]", decode_known(row.input))
        about = {
            "agent_key": row.agent, "attempt": row.attempt, "conversation_id": input_.get("conversation_id"),
            "metadata": decode_known(row.metadata), "input": input_.get("messages") or input_,
        }  # fmt: skip
        tracer.start_run(known_uuid(row.run_id), about)

    def _trace_end(self) -> None:
        tracer, result = self.services.tracer, self.result
        if tracer is None or not self.tracing:
            return
        self.tracing = False
        if result is None:
            outcome = "waiting" if self.control.parked else "lost" if self.lost else "given back"
            tracer.end_run(known_uuid(self.row.run_id), outcome)
            return
        about = {"output": result.final_output, "usage": result.usage, "error": error_payload(result.error)}
        tracer.end_run(known_uuid(self.row.run_id), (result.status or RunStatus.FAILED).value, about)

    # -- attempts

    async def _run(self) -> RunResult | None:
        while True:
            # A run at its very first claim has no journal: nothing to read, nothing to wait for. One that was claimed
            # before, and given back without a trace, may have one; one that was forked off has, and its mark counts it.
            row = self.row
            anew = row.attempt == 1 and row.generation == 1 and row.mark < 0
            first = anew and not row.parked and row.started_at == row.claimed_at
            records = await self.writer.open(fresh=first)
            # A claim that was given up knows that it is: it is those that were taken over that may write yet.
            if self.recorder is not None and (row.stalls or row.generation > 1):
                await self.recorder.fence(self._fenced_writes())
            book = StepJournal(self.writer, records, self.control)
            self.check_journal_length(book)
            early = await self.end_without_running(book)
            if early is not None:
                return early
            await self._begin(book)
            outcome = await self._attempt(book)
            if not isinstance(outcome, RetryHere):
                return outcome

    def check_journal_length(self, book: RunJournal) -> None:
        """Refuse a journal that was longer when the row was last written, and have the next one who writes it say how
        long it is: each record has a checksum, and nothing else tells of those that are not found any more.

        One on another engine than the row may have been in the memory of a process that is gone.
        """
        row = self.row
        if book.view.ends < row.mark and self.backends.together:
            raise StorageCorrupt(
                f"run {row.run_id}: the ends of {row.mark} steps were recorded and {book.view.ends} are found; it is "
                "left as it is: restore a backup"
            )
        if book.view.ends and not row.stalls:  # else it is written with the crashes in a row, which it tells apart
            self.replace_row(mark=book.view.ends)

    async def end_without_running(self, book: RunJournal) -> RunResult | None:
        """How the run ends without running any code, if it does."""
        row = self.row
        if book.view.end_record is not None and book.view.end_record.attempt == row.generation:
            return await self.finish_interrupted_end(book.view.end_record)
        if row.stalls and await self._is_poison(book.view.ends):
            dead = ErrorInfo(
                "Poisoned", f"{MAX_CRASHES_WITHOUT_PROGRESS} crashes in a row without progress", retriable=False
            )
            return await self.end(
                RunStatus.DEAD, RunResult(usage=book.view.usage(), error=dead), error_payload(dead) or {}
            )
        now = self.clock.wall()
        if row.cancel_at is not None or self.control.cancelled:
            return await self.end(RunStatus.CANCELLED, RunResult(), {})
        if row.expires_at is not None and now > row.expires_at and book.view.length == 0:
            return await self._late(
                "Expired", f"the run was not begun within {row.expires_at - row.created_at:g} s", {}
            )
        if row.deadline is not None and now >= row.deadline:
            return await self._past_deadline(row.deadline)
        return None

    async def _is_poison(self, recorded: int) -> bool:
        """Count a crash as one more in a row, or as the first since the run got further; a wake-up is none."""
        stalls = self._crashes_without_progress(recorded)
        if stalls >= MAX_CRASHES_WITHOUT_PROGRESS and not self.inline:
            return True
        await self.update(stalls=stalls, mark=recorded)
        return False

    def _crashes_without_progress(self, recorded: int) -> int:
        """The crashes of the run since it last got further, where so many of its steps are recorded."""
        row = self.row
        return int(not row.parked) if recorded > max(row.mark, 0) else row.stalls

    async def release_suspect(self) -> None:
        """Put the run back for a moment in which it can be alone; one that got further is suspected no more."""
        try:
            if is_crash_suspect(self.row):
                with contextlib.suppress(AgentRuntimeError):
                    recorded = StepJournal(self.writer, await self.backends.state.records(self.row.run_id)).view.ends
                    if (stalls := self._crashes_without_progress(recorded)) < self.row.stalls:
                        self.replace_row(stalls=stalls, mark=recorded)
        finally:
            await self.release_unstarted()

    async def _begin(self, book: RunJournal) -> None:
        row = self.row
        kind, info = (RESUMED, {"reason": row.reason}) if row.parked else (ATTEMPT, None)
        self.attempt_recorded = True
        if log.isEnabledFor(logging.INFO):
            log.info("%s %s, attempt %d", self._label, "resumed" if row.parked else "started", row.attempt)
        record = book.records.boundary(kind, self.row.agent, attempt=row.attempt, nev=1, info=info)
        await self.writer.status(_RUNNING, record)

    async def _attempt(self, book: RunJournal) -> Outcome:
        """One attempt of the agent's `run`, and what came of it."""
        self.deferred_seconds: float = deferred_seconds(self.row)
        self.time_limit_at: float = (
            self.clock.boot() + self.config.run_timeout_seconds - self.deferred_seconds - self.control.paused_seconds
        )
        self.completed_steps: Mapping[Identity, Record] = book.view.completed
        self.completed_at_start: int = len(book.view.completed)
        try:
            ctx = Context(self.row, book, self.services, self.control, await self._overrides())
        except UnserialisableResult as unknown:
            if self.inline:
                raise
            # Unlike others of this kind it may be over with the next attempt: another worker may know the type.
            return await self._failed(RunResult(), describe(unknown))
        if self.recorder is not None and (refusal := await self._stored(self.recorder.load(ctx))) is not None:
            return await self._raised(ctx, refusal)
        self.control.task = task = self._start_agent(ctx)
        if self.control.cancelled or self.lost or self.release_requested:
            task.cancel()
        try:
            on_time = await self._finishes_in_time(task)
        except asyncio.CancelledError:
            # The caller of execute() was cancelled: the run goes back, unless that was meant for it.
            self.control.cancel_task()
            await self._cancel_agent(task)
            if self.control.cancelled:
                with contextlib.suppress(LeaseLost, RowChanged):
                    await self._cancelled(ctx)
            raise
        if self.lost or self.control.parked or self.control.cancelled or not on_time or task.cancelled():
            await self._cancel_agent(task)
        elif waiting := ctx.waiting_tasks:
            # The run never answers these waits. Left to the garbage collector, their `finally` blocks could not await.
            await self.cancel_all(waiting)
        if self.lost or self.control.parked:
            return None
        if not on_time:
            return await self._out_of_time(ctx)
        if task.cancelled():
            return await self._stopped(ctx)
        error = task.exception()
        if error is None:
            return await self._returned(ctx, task.result())
        if (at := error.__traceback__) is not None and at.tb_next is not None:
            error.__traceback__ = at.tb_next  # it begins in the agent's own code, and not in `_entered`
        cause = deciding_error(error)
        if isinstance(cause, (LeaseLost, KeyboardInterrupt, SystemExit)):
            raise cause
        if isinstance(cause, asyncio.CancelledError):
            return await self._stopped(ctx)
        return await self._raised(ctx, error)

    async def _overrides(self) -> dict[str, Any]:
        """Return the limits that `resume` and `requeue` set for this run, the last value of each."""
        row, found = self.row, dict[str, Any]()
        if row.generation > 1 and row.mail_seq:  # no other run can have any
            for mail in await self.backends.queue.mail(row.run_id):
                if mail.kind == LIMITS:
                    found |= cast("dict[str, Any]", decode(mail.payload))
        return found

    def _start_agent(self, ctx: Context) -> asyncio.Task[Any]:
        self.control.tracked = True
        return start_soon(self._run_agent(ctx), context=self._context())

    async def _run_agent(self, ctx: Context) -> Any:
        try:
            work: Any = self.agent.run(ctx)
            if not inspect.isawaitable(work):
                said = f"run() of agent {self.row.agent!r} gave {brief(work)} and nothing to await: write async def run"
                raise InvalidArgument(said)
            try:
                result = await work
            except Exception as error:
                await ctx.journal.unconfirmed.resolve_at_end(error)
                raise
            await ctx.journal.unconfirmed.resolve_at_end(None)
            return result
        finally:
            self.control.notify()  # a turn of the loop before the callbacks of the task

    async def _cancel_agent(self, task: asyncio.Task[Any]) -> None:
        """End all tasks of a run that goes no further here, so that their `finally` blocks run on this loop.

        The main task is cancelled first, because it may end the others itself. Until all have ended, calls on the
        context of a parked or lost run raise CancelledError. Otherwise a `finally` block that makes such a call would
        not end within the grace.
        """
        place = self.control
        place.clearing = True
        try:
            if not task.done():
                if not place.cancel_requested:
                    place.cancel_task()
                if not is_abandoned(task):
                    await wait_cancelled((task,), self._label)
            left = [each for each in tasks_of(task.get_loop(), place) if not is_abandoned(each)]
            if left:
                await self.cancel_all(left)
        finally:
            place.clearing = False

    async def cancel_all(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel these tasks of the run and wait for their `finally` blocks."""
        for each in tasks:
            # asyncio.gather cancels its tasks and does not wait for them. A second cancellation would interrupt
            # their `finally` blocks.
            if not each.cancelling():
                each.cancel()
        for each in await wait_cancelled(tasks, f"a task of {self._label}"):
            each.cancel()  # it may have continued after an earlier cancellation

    async def _finishes_in_time(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the attempt; False when its time under the claim is up, or when it will not stop."""
        place = self.control
        task.add_done_callback(lambda _: place.notify())  # it may never have begun
        while not await done_in_time(task, lambda: 0.0 if place.cancel_requested else self._time_left(), self._wait):
            if place.cancel_requested:  # it does not stop at once: it has a grace, and is abandoned after that
                await self._cancel_agent(task)
                return task.done()
            if not self._restart_timer():
                return False
        return True

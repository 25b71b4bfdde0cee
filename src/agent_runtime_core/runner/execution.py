"""Execute a claimed run until it is finished, parked, released, or lost to another worker."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar, Token
from copy import copy
from functools import partial
from types import CoroutineType
from typing import Any, cast

from .._core.codec.json import decode
from .._core.context_vars import ACTIVE_RUN, RUN, restore, start_soon
from .._core.log import LOGGED_RUN, LoggedRun, log
from .._core.run_tasks import tasks_of
from .._core.timeouts import contained, is_abandoned, wait_cancelled
from .._core.validation import must
from .._engines.outages import OUTAGE, StoreOutage
from .._engines.payloads import UNREADABLE
from .._execution.context import Context
from .._execution.result_codec import decode_result
from .._execution.run_control import RunControl, RunRecorder, Services, Stop
from .._execution.step import CANCEL_HOOK, Identity, StepScope
from .._execution.step_journal import RunJournal, StepJournal
from .._execution.sync_context import in_agent, run_agent
from .._journal.record import ATTEMPT, RESUMED, Record, is_copied
from ..errors import (
    AgentRuntimeError,
    JournalMismatch,
    LeaseLost,
    RedactionFailed,
    StorageClosed,
    StorageCorrupt,
    UnserialisableResult,
    deciding_error,
)
from ..interfaces import AgentRuntime, ErrorInfo, RunResult, describe
from ..persistence.fencing import CURRENT_CLAIM
from ..queue.records import LIMITS, RowChanged, RunRow, unreadable
from ..status import RunStatus
from . import outcomes
from .backends import Backends
from .claim import OUTAGE_DELAY, OUTAGE_PAUSE, HeldClaim, crashes_without_progress, error_name, is_crash_suspect
from .completion_hooks import HistoryReader
from .finding import VERSION
from .guarded_calls import GuardedCalls
from .heartbeat import Heartbeat
from .left_runs import LeftRuns, version_mismatch
from .outcomes import (
    JITTER,
    AskAgent,
    AttemptFacts,
    Cancelled,
    Decision,
    End,
    Left,
    NothingToDo,
    NotSaved,
    Released,
    Retry,
    RetryHere,
    StoreAway,
    TimeLimitReached,
    deferred_seconds,
    no_usage,
    redacted_end,
    redacted_retry,
    with_counted_usage,
    without_result,
)
from .pools import given_back_ops
from .run_conversation import RunConversation, UnreadMessages
from .run_tracing import RunTracing
from .settings import RunnerConfig

_RUNNING = RunStatus.RUNNING.value
_EARLIER = ("", "")  # calls of earlier claims
#: The runs with a concurrency key that this task is part of, by key and tenant: what it executes must not wait for
#: them.
HELD_CONCURRENCY_KEYS: ContextVar[Mapping[tuple[str, str], str]] = ContextVar(
    "agent_runtime_core_held_concurrency_keys"
)
#: The ids of all runs that this task is part of, the outermost first.
ENCLOSING_RUNS: ContextVar[tuple[str, ...]] = ContextVar("agent_runtime_core_enclosing_runs")


def _finished_error(run: str) -> StorageClosed:
    return StorageClosed(
        f"run {run!r} has finished. Await all its tasks before run() returns, and use ctx only inside it"
    )


class RunExecution:
    """The attempts that are made under one claim.

    It executes the agent, asks `outcomes` what the outcome means, and carries the decision out.

    Args:
        row: The run as it was claimed.
        agent: Its agent.
        backends: Where the run is stored.
        config: The settings of the runner, with the time limits of the agent.
        heartbeat: Extends the lease.
        services: What the runner lends to contexts.
        inline: The run is executed in its caller's task.
        own_limits: The names of the settings in `config` that are the agent's.
    """

    def __init__(
        self, row: RunRow, agent: AgentRuntime, backends: Backends, config: RunnerConfig, heartbeat: Heartbeat,
        services: Services, *, inline: bool = False, own_limits: Collection[str] = (),
        left_runs: LeftRuns | None = None,
    ) -> None:  # fmt: skip
        self.left_runs: LeftRuns | None = left_runs
        self.agent: AgentRuntime = agent
        self.config: RunnerConfig = config
        self.services: Services = services
        self.backends: Backends = backends
        self.inline: bool = inline
        in_memory = inline or services.park_after is None or services.park_after > 0
        self.claim: HeldClaim = HeldClaim(
            row, agent, backends, config, heartbeat, services.tracer, waits_in_memory=in_memory, inline=inline
        )
        self.control: RunControl = self.claim.control
        self.calls: GuardedCalls = GuardedCalls(
            row, self.claim.clock, self.control, config.grace_seconds, config.stall_timeout_seconds
        )
        self._own_limits: Collection[str] = own_limits
        make = services.recorder
        self.recorder: RunRecorder | None = None if make is None else make(row)
        self._conversation: RunConversation | None = None
        if self.recorder is not None:
            self._conversation = RunConversation(
                self.recorder, self.calls, self.claim.label, self._context, keep_unanswered=config.keep_unanswered,
                reader=agent if isinstance(agent, HistoryReader) else None,
            )  # fmt: skip
        self._leave_lifespan: Callable[[], None] | None = None
        self.started: bool = False  # something was done under this claim
        self.result: RunResult | None = None
        self.tracing: RunTracing | None = None
        if services.tracer is not None:
            self.tracing = RunTracing(self.claim, services.tracer, getattr(agent, "trace_operation", None))
        self._deferred_seconds = 0.0  # of the attempt's time limit, used by earlier deferrals
        self._completed: Mapping[Identity, Record] = {}  # steps, waits and values that are recorded
        self._completed_at_start = 0

    async def run(self) -> RunResult | None:
        """Execute the run.

        Returns:
            The run's result; None if there is none yet, because it is parked, released, or lost to another worker.
        """
        self.started = True
        await self.require_readable()
        token = self.log_claim()
        try:
            if self.left_runs is not None and await self.left_runs.leave_again(self.claim, self.agent):
                return None
            self.claim.register()
            return await self._run()
        except (LeaseLost, RowChanged):
            log.warning(
                "%s: claim %s was lost, because another worker claimed the run or it has finished",
                self.claim.label,
                self.claim.writer.guard.token,
            )
            return None
        except (Exception, asyncio.CancelledError, KeyboardInterrupt) as error:
            # After an internal error a worker keeps the lease: its end is the pause before the next attempt.
            if self.inline or not isinstance(error, Exception) or isinstance(error, OUTAGE):
                await self.claim.try_release()
            elif isinstance(error, UNREADABLE):  # by this process; a damaged store does not get better with time
                await self.claim.release_after(error, self._jitter())
            raise
        except GeneratorExit:  # the event loop is stopped: nothing can be awaited
            self.control.stop(Stop.LOST)
            self.claim.abandon()
            raise
        finally:
            self.control.close()
            if self.result is None and self.left_runs is not None:
                self.left_runs.executed(self.claim.row.claim_id, self.agent)
            if self.result is not None:
                self.control.refusal = partial(_finished_error, self.claim.row.run_key or self.claim.row.run_id)
            self.control.task = None  # a circle of references, which would keep each run for the garbage collector
            self.claim.unregister()
            if self.tracing is not None:
                self.tracing.end(self.result, self.control)
            if self._leave_lifespan is not None:
                self._leave_lifespan()
            if self.recorder is not None and not self.control.lost:
                await self._audit(self.recorder)
            restore(LOGGED_RUN, token)

    async def require_readable(self) -> None:
        """Release the claim if this process cannot decode the contents of the run, and raise why.

        An inline run is released immediately. The worker that claims it again is perhaps the same, which must not
        repeat that without a pause.
        """
        if (error := unreadable(self.claim.row)) is not None:
            await self.claim.release_unstarted(None if self.inline else error, self._jitter())
            raise error

    @property
    def logged(self) -> LoggedRun:
        """The fields of this run in log records."""
        row = self.claim.row
        return LoggedRun(row.run_id, row.attempt, row.tenant)

    def log_claim(self) -> Token[LoggedRun | None]:
        """Log that the run was claimed. From here on, log records of the current task are about this run."""
        token = LOGGED_RUN.set(self.logged)
        if log.isEnabledFor(logging.INFO):
            row = self.claim.row
            log.info("%s claimed by %s, attempt %d", self.claim.label, row.worker, row.attempt)
        return token

    async def _audit(self, recorder: RunRecorder) -> None:
        """Have the audit store record what happened. If it fails or is slow, the run returns nevertheless."""
        try:
            await self.calls.call(recorder.audit(self.result), f"the audit of {self.claim.label}", within=False)
        except Exception as error:  # noqa: BLE001 - an audit store may raise anything, and decides nothing
            if isinstance(cause := deciding_error(error), LeaseLost):
                raise cause from None
            log.warning("audit log of %s is incomplete: %s", self.claim.label, error)

    # -- attempts

    async def _run(self) -> RunResult | None:
        pause, resumed, other = OUTAGE_PAUSE / 2, False, None
        while True:
            try:
                decision = await self._start_attempt(resumed=resumed)
            except OUTAGE as error:
                if self.inline or self.control.release_requested:
                    raise
                decision = StoreAway(error)
            if isinstance(decision, StoreAway):
                pause = OUTAGE_PAUSE if self._has_progressed() else min(2 * pause, OUTAGE_DELAY)
                await self.calls.pause(pause)
                if await self.claim.outlast_outage() and decision.error is not None:
                    # Another store than the claim's failed.
                    other = StoreOutage.of(self.services, self.claim.clock, "of this runner")
                    other.noticed(decision.error)
                if self.services.slots is not None:
                    self.services.slots.reclaim(self.control)
            else:
                if other is not None:
                    other.answered()
                if not isinstance(decision, RetryHere):
                    return self.result
            resumed = True

    async def _start_attempt(self, *, resumed: bool) -> Decision:
        # At its very first claim a run has no journal, so nothing is read. A run that was claimed before and released
        # may have a journal; so does a fork, whose mark counts its records.
        row, writer = self.claim.row, self.claim.writer
        is_first = not (row.failures or row.crashes) and row.generation == 1 and row.min_step_count < 0
        fresh = is_first and not row.parked and row.started_at == row.claimed_at and not resumed
        records = await writer.open(fresh=fresh)
        trace = None if self.tracing is None else self.tracing.start(records)
        # Only claims that were taken over may still write. A claim that was released does not.
        if self.recorder is not None and (row.crashes_in_row or row.generation > 1):
            await self.recorder.fence(self.claim.fenced_writes())
        journal = StepJournal(writer, records, self.control)
        if row.crashes_in_row or row.reason:
            await self._give_back_earlier()
        if journal.view.pools:
            writer.reservations[_EARLIER] = [*journal.view.pools]
        journal.trace = trace
        if not fresh:
            self.check_journal_length(journal)
        if await self.end_without_running(journal) is not None:
            return NothingToDo()
        if not fresh and (other := await self._version_mismatch(records)) is not None:
            if self.left_runs is None:
                raise other
            await self.left_runs.leave(self.claim, self.agent, other, pinned=True)
            return NothingToDo()
        if self.control.stopped is Stop.RELEASE:  # for example in the pause before the next attempt
            await self.claim.release()
            return Released()
        await self.record_start(journal, records)
        return await self._attempt(journal)

    async def _give_back_earlier(self) -> None:
        """Give back what an interrupted execution has reserved in pools: this execution may not make the same calls."""
        claim = self.claim
        if claim.is_takeover and (
            ops := await given_back_ops(self.backends.queue, claim.row.run_id, claim.clock.wall())
        ):
            await claim.writer.write(queue=ops)

    async def _version_mismatch(self, records: Sequence[Record]) -> JournalMismatch | None:
        row = self.claim.row
        mail = await self.backends.queue.mail(row.run_id) if row.generation > 1 and row.mail_seq else ()
        why = version_mismatch(self.agent, records, mail)
        return None if why is None else JournalMismatch(why)

    def check_journal_length(self, journal: RunJournal) -> None:
        """Reject a journal that was longer when the row was last written.

        Each record contains a checksum, but only the row's `mark` shows that records are missing. A journal on another
        engine than the row is not checked: it may have been in the memory of a process that ended.
        """
        row = self.claim.row
        if journal.view.ends < row.min_step_count and self.backends.together:
            raise StorageCorrupt(
                f"run {row.run_id}: the ends of {row.min_step_count} steps were recorded and {journal.view.ends} are "
                "found; it was not modified. Restore a backup"
            )
        if journal.view.ends and not row.crashes_in_row:  # else the count is written together with the crash counter
            self.claim.replace_row(min_step_count=journal.view.ends)

    async def end_without_running(self, journal: RunJournal) -> RunResult | None:
        """Finish the run without executing any code, if it must not or need not start.

        Returns:
            The run's result; None if it may start.
        """
        row = self.claim.row
        self._completed, self._completed_at_start = journal.view.completed, len(journal.view.completed)
        if self.left_runs is not None:
            self.control.is_of_other_code = partial(self.left_runs.is_of_other_code, self.agent)
        if journal.view.end_record is not None and journal.view.end_record.attempt == row.generation:
            return await self._finish_interrupted_end(journal.view.end_record)
        crashes = 0
        if row.crashes_in_row:
            crashes = crashes_without_progress(row, journal.view.ends)
            if crashes < self.config.max_crashes or self.inline:
                await self.claim.update(crashes_in_row=crashes, min_step_count=journal.view.ends)
        facts = self._facts(self.control.stopped, journal.view.usage, row)  # as it was claimed
        # A claim does not count a run that is too late by the clock of the store, so the run must not start here.
        if row.claimed_at and row.claimed_at > facts.now:
            facts = facts._replace(now=row.claimed_at)
        end = outcomes.before_start(facts, crashes, journal.view.length)
        if isinstance(end, Cancelled):
            return await self._end_cancelled_before_start(journal)
        return None if end is None else await self.end(end)

    async def _end_cancelled_before_start(self, journal: RunJournal) -> RunResult | None:
        """Call the `cancel` hook for an execution that could not do so itself, and finish the run.

        Returns:
            The run's result; None if it was released before the hook had ended.
        """
        self.control.stop(Stop.CANCEL)
        try:
            ctx = Context(self.claim.row, journal, self.services, self.control, await self.limit_overrides())
        except UnserialisableResult:  # the input can be read by another worker only, which may be gone
            return await self.end(End(RunStatus.CANCELLED, RunResult(), {}))
        await self._apply(Cancelled(), ctx)
        return self.result

    async def _finish_interrupted_end(self, ended: Record) -> RunResult:
        text = ended.result or "{}"
        result = decode_result(text)
        await self.claim.finish_interrupted_end(ended, result)
        self.result = result if self.recorder is None else await self.recorder.restore(text)
        self.result.run_key = self.claim.row.run_key
        self.claim.log_end(ended.name, "" if result.error is None else result.error.type)
        return self.result

    async def release_suspect(self) -> None:
        """Release a crash suspect until it can run alone. A run that made progress is a suspect no longer."""
        try:
            if is_crash_suspect(self.claim.row, self.config.max_crashes):
                with contextlib.suppress(AgentRuntimeError):
                    row = self.claim.row
                    recorded = StepJournal(self.claim.writer, await self.backends.state.records(row.run_id)).view.ends
                    if (in_row := crashes_without_progress(row, recorded)) < row.crashes_in_row:
                        self.claim.replace_row(crashes_in_row=in_row, min_step_count=recorded)
        finally:
            await self.release_unstarted()

    async def release_unstarted(self) -> None:
        """Release a claim under which nothing ran."""
        self.started = True
        await self.claim.release_unstarted()

    async def record_start(self, journal: RunJournal, records: Sequence[Record]) -> None:
        """Record that the attempt started, or resumes what is in these records."""
        row = self.claim.row
        # Without a tenant the record has the form of releases without tenants.
        started = {"tenant": row.tenant} if row.tenant else {}
        if (version := getattr(self.agent, "code_version", None)) is not None:
            started[VERSION] = version
        # An outage may have kept the first record of the run from its journal.
        has_begun = row.parked and any(each.kind == ATTEMPT and not is_copied(each) for each in records)
        kind, info = (RESUMED, {"reason": row.reason}) if has_begun else (ATTEMPT, started or None)
        self.claim.attempt_recorded = True
        if log.isEnabledFor(logging.INFO):
            log.info("%s %s, attempt %d", self.claim.label, "resumed" if row.parked else "started", row.attempt)
        record = journal.records.boundary(kind, row.agent, attempt=row.attempt, nev=1, info=info)
        if kind == ATTEMPT and VERSION in started:
            # Durable before the code runs. After a crash, a worker of another version would begin the run again.
            await self.claim.writer.status(_RUNNING)
            await self.claim.writer.append(record)
        else:
            await self.claim.writer.status(_RUNNING, record)

    async def _attempt(self, journal: RunJournal) -> Decision:
        """Execute the agent's `run` once, and carry out what its outcome means."""
        row, control = self.claim.row, self.control
        self._deferred_seconds = deferred_seconds(row) if row.error else 0.0
        control.active_at = now = self.claim.clock.monotonic()
        self.calls.time_limit_at = (
            now + self.config.run_timeout_seconds - self._deferred_seconds - control.paused_seconds
        )
        try:
            overrides = await self.limit_overrides() if row.mail_seq else None
            ctx = Context(row, journal, self.services, control, overrides)
        except UnserialisableResult as unknown:
            if self.inline:
                raise
            # Another attempt may succeed, unlike after other errors of this class: another worker may know the type.
            return await self._apply(outcomes.failed(RunResult(), describe(unknown), self._facts(None)), None)
        if self._conversation is not None and (refusal := await self._conversation.load(ctx)) is not None:
            return await self._apply_error(refusal, ctx)
        control.stopped_before_end, control.tracked = None, True
        control.task = task = start_soon(self._run_agent(ctx), context=self._context(of_code=True))
        if control.stopped is not None:
            control.cancel_task()
        try:
            await asyncio.sleep(0)
            on_time = task.done() or await self._finishes_in_time(task)  # if the agent waited for nothing: no timer
        except asyncio.CancelledError:
            # The caller of execute() was cancelled: the run is released, unless the run itself was cancelled.
            control.stop(Stop.RELEASE)
            control.cancel_task()
            await self._cancel_agent(task)
            if control.cancelled:
                with contextlib.suppress(LeaseLost, RowChanged):
                    await self._apply(Cancelled(), ctx)
            raise
        if control.parked or control.stopped is not None or not on_time or task.cancelled():
            await self._cancel_agent(task)
        elif waiting := ctx.waiting_tasks:
            # Nothing will end these waits. Left to the garbage collector, their `finally` blocks could not await.
            await self.cancel_all(waiting)
        if control.stall_clock is not None:
            control.note_progress()  # the code ended; what follows is the runner's work
        return await self._apply(self._decide(task, ctx), ctx)

    def _decide(self, task: asyncio.Task[Any], ctx: Context) -> Decision:
        # A stop after the end of the code changes nothing: what the code returned or raised counts.
        ended = self.control.stopped_before_end
        stop = ended[0] if ended is not None and not self.control.lost else self.control.stopped
        facts = self._facts(stop, lambda: ctx.usage)
        if facts.parked:
            return NothingToDo()
        if stop is None and task.cancelled():
            stop = self.control.stopped
        if stop is not None:
            return outcomes.of_stop(stop, facts, self._returned_in_time(task))
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return outcomes.of_result(task.result(), facts)
        if (at := error.__traceback__) is not None and at.tb_next is not None:
            error.__traceback__ = in_agent(at.tb_next)  # begins in the agent's own code, and not in `_run_agent`
        cause = deciding_error(error)
        if isinstance(cause, (LeaseLost, KeyboardInterrupt, *OUTAGE, *UNREADABLE)):
            raise cause
        if isinstance(cause, JournalMismatch):  # of a framework, which the context did not raise
            ctx.journal.leave(cause)
            if (stop := self.control.stopped) is not None:
                return outcomes.of_stop(stop, facts)
        if isinstance(cause, asyncio.CancelledError):
            error = asyncio.CancelledError("the agent's own code cancelled it")
        return outcomes.of_error(error, facts)

    def _returned_in_time(self, task: asyncio.Task[Any]) -> RunResult | None:
        """Return the result of code that noticed the cancellation of its run and returned before it was interrupted."""
        if self.control.cancel_requested or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return result if isinstance(result := task.result(), RunResult) else None

    def _facts(
        self, stop: Stop | None, usage: Callable[[], dict[str, Any]] = no_usage, row: RunRow | None = None
    ) -> AttemptFacts:
        claim, control = self.claim, self.control
        return AttemptFacts(
            row or claim.row, claim.clock.wall(), self.config,
            time_left=self.calls.time_limit_at + control.paused_seconds - claim.clock.monotonic(),
            progressed=self._has_progressed(),
            deferred_seconds=self._deferred_seconds, inline=self.inline, jitter=self._jitter, usage=usage,
            stop=stop, parked=control.parked, own_limits=self._own_limits,
            stall_left=float("inf") if self.calls.stall is None else self.calls.stall_left(self.calls.stall),
        )  # fmt: skip

    def _has_progressed(self) -> bool:
        return len(self._completed) > self._completed_at_start

    def _jitter(self) -> float:
        """Return a random share, so that runs which one failure delayed together do not resume together."""
        return self.claim.clock.random.uniform(0, JITTER)

    # -- carrying a decision out

    async def _apply(self, decision: Decision, ctx: Context | None) -> Decision:
        """Carry a decision out; return the last decision, which may follow from a hook or a store."""
        while isinstance(decision, AskAgent):
            assert ctx is not None
            decision = await self._ask_agent(decision.error, ctx)
        match decision:
            case Cancelled():
                assert ctx is not None
                if not await self._end_cancelled(decision.returned, ctx):
                    return await self._apply(Released(), ctx)
            case End():
                return await self._end_or_fail(decision, ctx)
            case Released():
                await self.claim.release()
            case Left():
                return await self._leave(decision.cause, ctx)
            case Retry():
                await self._retry(redacted_retry(self.claim.writer.redaction, decision))
        return decision

    async def _leave(self, cause: Stop, ctx: Context | None) -> Decision:
        """Leave the run to another worker; if none can execute it, decide as about any other error."""
        why, control = self.control.why, self.control
        assert why is not None
        if cause is Stop.MISSING_KEY:
            raise why
        if self.left_runs is None or not await self.left_runs.leave(self.claim, self.agent, why):
            control.withdraw()
            return await self._apply(AskAgent(why), ctx)
        return Left(cause)

    async def _apply_error(self, error: BaseException, ctx: Context) -> Decision:
        stop = self.control.stopped if isinstance(error, TimeLimitReached) else None
        return await self._apply(outcomes.of_error(error, self._facts(stop, lambda: ctx.usage)), ctx)

    async def _ask_agent(self, error: BaseException, ctx: Context) -> Decision:
        """Have the agent's `on_error` describe the error, and decide."""
        try:
            info = await self.calls.hook(self.agent, "on_error", (ctx, error), self._context(of_code=True))
        except TimeLimitReached:
            if (stop := self.control.stopped) is not None:
                return outcomes.of_stop(stop, self._facts(stop, lambda: ctx.usage))
            info = None
        if info is not None and not isinstance(info, ErrorInfo):
            got = type(info).__name__
            log.error("on_error() of agent %r must return an ErrorInfo or None, got %s", self.claim.row.agent, got)
            info = None
        info = describe(error) if info is None else info
        return outcomes.of_failure(error, info, self._facts(None, lambda: ctx.usage))

    async def _call_cancel_hook(self, ctx: Context) -> bool:
        """Call the agent's `cancel` hook, in which the context works.

        Its calls are counted separately: the code of the run, which may be resumed later, does not make them.

        Returns:
            False if the worker left before the end of the hook, so that another worker must call it again.
        """
        key = f"cancel:{self.claim.row.generation}"
        self.control.cancel_hook = ctx.journal.keys.cancel_hook = scope = StepScope(ctx.journal.token, "cancel", key, 1)
        context = self._context(of_code=True)
        context.run(CANCEL_HOOK.set, scope)
        if ctx.journal.slot_released:  # the run only waited
            ctx.waits.reclaim_slot()
        try:
            await self.calls.hook(self.agent, "cancel", (ctx,), context, within=False)
        except TimeLimitReached:
            return not self.control.release_requested
        finally:
            self.control.cancel_hook = ctx.journal.keys.cancel_hook = None
        return True

    async def _end_cancelled(self, returned: RunResult | None, ctx: Context) -> bool:
        """Finish a cancelled run after its hook. Returns False if the hook must be called again."""
        if not await self._call_cancel_hook(ctx):
            return False
        if returned is not None and isinstance(returned.final_messages, list):
            returned = copy(with_counted_usage(returned, ctx.usage))
            returned.error = None
            try:
                await self.end(End(RunStatus.CANCELLED, returned, {}), ctx)
                return True
            except (UnserialisableResult, RedactionFailed) as refusal:
                log.warning(
                    "result of %s after its cancellation was dropped, because it cannot be stored: %s",
                    self.claim.label,
                    type(refusal).__name__,
                )
        await self.end(End(RunStatus.CANCELLED, RunResult(usage=ctx.usage), {}), ctx)
        return True

    async def _end_or_fail(self, end: End, ctx: Context | None) -> Decision:
        """Finish the run. If a success cannot be saved, decide again; a failure is stored without its result."""
        succeeded = end.status == RunStatus.SUCCEEDED
        try:
            await self.end(end, ctx)
        except NotSaved as refused:
            assert ctx is not None
            return await self._apply_error(refused.reason, ctx)
        except (UnserialisableResult, RedactionFailed) as refusal:
            if succeeded and ctx is not None:
                return await self._apply_error(refusal, ctx)
            if end.status != RunStatus.FAILED:
                raise
            await self.end(without_result(end, refusal), ctx)
        return end

    async def end(self, end: End, ctx: Context | None = None) -> RunResult:
        """Finish the run as the policy decided, and return its result.

        Args:
            end: The decision.
            ctx: The context of the run; None if its code was not started.

        Raises:
            NotSaved: The run succeeded, but its messages cannot be saved.
        """
        claim = self.claim
        end = redacted_end(claim.writer.redaction, end, claim.row.run_id)
        unread = UnreadMessages(claim, ctx, self._completed.values())
        while True:
            result = await unread.added_to(end.result)
            try:
                await self._save_conversation(end.status, result, unread.sent, ctx)
                omitted = None if self.recorder is None else self.recorder.omitted_history(result)
                self.result = await claim.end(end.status, result, end.event, omitted, unread.cursor)
                return self.result
            except RowChanged:
                if not await unread.arrived():
                    raise

    async def _retry(self, retry: Retry) -> None:
        """Wait for the next attempt in this process, or queue it."""
        claim, row, kind = self.claim, self.claim.row, retry.error.type
        if retry.deferred:
            log.info("%s deferred for %.3g s: %s", claim.label, retry.delay, error_name(kind))
        else:
            name = error_name(kind)
            log.warning(
                "attempt %d of %s failed: %s, next attempt in %.3g s", row.attempt, claim.label, name, retry.delay
            )
        in_row = row.crashes_in_row if retry.deferred else 0
        if isinstance(retry, RetryHere):
            await claim.renew(failures=retry.failures, crashes_in_row=in_row, error=retry.error_text)
            if retry.deferred:
                claim.replace_row(parked=1, reason=kind)
            else:
                claim.attempt_recorded = False
                claim.replace_row(parked=0)
            await self.calls.pause(retry.delay)
            LOGGED_RUN.set(self.logged)
            return
        due_at = claim.clock.wall() + retry.delay if retry.delay else 0.0
        reason = kind if retry.deferred else ""
        update = claim.run_update(
            "pending", due_at=due_at, crashes_in_row=in_row, parked=int(retry.deferred), reason=reason
        )
        await claim.release_with(update._replace(failures=retry.failures, error=retry.error_text))

    async def _save_conversation(
        self, status: RunStatus, result: RunResult, sent: Sequence[dict[str, Any]], ctx: Context | None
    ) -> None:
        """Append the messages of the run to its conversation, or report that this runner stores none."""
        report = self.services.not_kept
        if self._conversation is not None:
            await self._conversation.save(status, result, sent)
        elif ctx is None or report is None or status != RunStatus.SUCCEEDED:
            return
        elif ctx.conversation_id and not ctx.owns_conversation:
            report(self.claim.row)

    # -- the agent's task

    async def limit_overrides(self) -> dict[str, Any]:
        """Return the limits that `resume` and `requeue` set for this run, the last value of each."""
        row, found = self.claim.row, dict[str, Any]()
        if row.generation > 1 and row.mail_seq:  # no other run can have any
            for message in await self.backends.queue.mail(row.run_id):
                if message.kind == LIMITS:
                    found |= cast("dict[str, Any]", decode(message.payload))
        return found

    def _context(self, *, of_code: bool = False) -> contextvars.Context:
        """Return a context in which code knows the claim it writes under, and the runs it is part of.

        Args:
            of_code: For code of the agent, and not for a store that the runner calls.
        """
        context, row = contextvars.copy_context(), self.claim.row
        context.run(CURRENT_CLAIM.set, self.claim.fenced_writes(of_code=of_code))
        context.run(RUN.set, self.control)
        context.run(ACTIVE_RUN.set, self.control)
        context.run(ENCLOSING_RUNS.set, (*ENCLOSING_RUNS.get(()), row.run_id))
        if row.concurrency_key is not None:
            held, group = HELD_CONCURRENCY_KEYS.get({}), (row.concurrency_key, row.tenant)
            context.run(HELD_CONCURRENCY_KEYS.set, {**held, group: row.run_id})
        return context

    async def _run_agent(self, ctx: Context) -> Any:
        try:
            if self._leave_lifespan is None and self.services.enter_lifespan is not None:
                self._leave_lifespan = await self.services.enter_lifespan(self.agent)
            work: Any = run_agent(self.agent, ctx, self.control.code_ended)
            # Of a coroutine function that something replaced.
            if type(work) is not CoroutineType and not inspect.isawaitable(work):
                fix = "Await the wrapped function in async def run, or leave out functools.wraps"
                raise must(f"run() of agent {self.claim.row.agent!r}", "return an awaitable", work, fix)
            try:
                if self.tracing is None:
                    result = await work
                else:
                    with self.tracing.current():
                        result = await work
            except Exception as error:
                await ctx.journal.unconfirmed.resolve_at_end(error)
                raise
            if ctx.journal.unconfirmed.pending:
                await ctx.journal.unconfirmed.resolve_at_end(None)
            return result
        except BaseException as error:
            if (failure := contained(error, f"run() of agent {self.claim.row.agent!r}")) is error:
                raise
            raise failure from error
        finally:
            self.control.code_ended()
            self.control.notify()  # one iteration of the event loop before the callbacks of the task

    async def _cancel_agent(self, task: asyncio.Task[Any]) -> None:
        """End all tasks of a run that stops here, so that their `finally` blocks run in this event loop.

        The main task is cancelled first, because it may end the others itself. Until all have ended, calls on the
        context of a parked or lost run raise CancelledError. Otherwise a `finally` block that makes such a call would
        not end within the grace.
        """
        control = self.control
        control.clearing = True
        try:
            if not task.done():
                if not control.cancel_requested:
                    control.cancel_task()
                if not is_abandoned(task):
                    await wait_cancelled((task,), self.claim.label)
            left = [each for each in tasks_of(task.get_loop(), control) if not is_abandoned(each)]
            if left:
                await self.cancel_all(left)
        finally:
            control.clearing = False

    async def cancel_all(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel these tasks of the run and wait for their `finally` blocks."""
        for each in tasks:
            # asyncio.gather cancels its tasks and does not wait for them. A second cancellation would interrupt
            # their `finally` blocks.
            if not each.cancelling():
                each.cancel()
        for each in await wait_cancelled(tasks, f"a task of {self.claim.label}"):
            each.cancel()  # it may have continued after an earlier cancellation

    async def _finishes_in_time(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the attempt; return False if its time is up, or if it does not stop."""
        control, calls = self.control, self.calls
        task.add_done_callback(lambda _: control.notify())  # `_run_agent` may never have begun
        while not task.done():
            if control.cancel_requested:  # it gets a grace, and is abandoned after that
                await self._cancel_agent(task)
                return task.done()
            if (left := calls.time_left()) > 0:
                await calls.wait(None, left)
            elif not self._restart_timer():
                control.stop(outcomes.passed_limit(self._facts(control.stopped)))
                return False
        return True

    def _restart_timer(self) -> bool:
        """Add the time that deferrals used, if the run recorded a step since; return False if not."""
        if not self._deferred_seconds or len(self._completed) <= self._completed_at_start:
            return False
        self.calls.time_limit_at += self._deferred_seconds
        self._deferred_seconds = 0.0
        return True

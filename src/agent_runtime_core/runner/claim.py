"""Extend, renew and release a claim on a run, or finish the run under it; run crash suspects alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

from .._core.clock import Clock, aware
from .._core.codec.json import encode
from .._core.context_vars import claimed_run
from .._core.ids import known_uuid, new_ulid
from .._core.log import log
from .._engines.base import Committer, Guard, Op
from .._engines.outages import OUTAGE, StoreOutage
from .._execution.claim_writer import ClaimWriter
from .._execution.result_codec import OmittedHistory, encode_result, error_payload
from .._execution.run_control import RunControl, Stop
from .._journal.record import ENDED, Record, with_outcome
from ..errors import AgentRuntimeError, LeaseLost, StorageBusy
from ..interfaces import AgentRuntime, RunResult
from ..persistence.fencing import CURRENT_CLAIM, FencedWrites
from ..queue.rate_limits import counted_rate
from ..queue.records import LIVE, ClaimRequest, RowChanged, RunRow, RunUpdate
from ..status import RunStatus
from ..tracing.tracer import Tracer
from .backends import Backends
from .completion_hooks import CompletionHook, call_on_end, completion_operations
from .heartbeat import Heartbeat, LeasedRun
from .settings import RunnerConfig

#: Seconds between setting `ctx.cancelled()` and cancelling the task, so that code which checks it can return by itself.
NOTICE_SECONDS = 0.05
OUTAGE_DELAY = 5.0  # seconds before a run is claimed again whose contents this process could not read
_OUTAGE = "outage"  # reason of the row of a run that continues after an outage of its store
OUTAGE_PAUSE = 0.25  # seconds between two attempts to write during an outage


class _AttemptWrites(FencedWrites):
    """The claim of one attempt, for stores other than the run's own.

    Args:
        writer: The writer of this attempt, and not of a later attempt.
        control: Says whether the claim has ended.
        queue_engine: The engine of the queue.
        of_code: For the code of the run, which writes nothing once the attempt is stopped.
    """

    def __init__(self, writer: ClaimWriter, control: RunControl, queue_engine: Committer, of_code: bool) -> None:
        self._writer, self._control, self._queue_engine, self._of_code = writer, control, queue_engine, of_code

    def guard(self) -> Guard:
        return self._writer.guard

    async def admit(self, guard: Guard) -> None:
        if self._control.closed or not guard.token:
            raise LeaseLost(*guard)
        if self._of_code:
            await self._control.ensure_open()


class HeldClaim(LeasedRun):
    """A claim on a run, in the process that owns it.

    Args:
        row: The run as it was claimed.
        agent: The run's agent. None if its key is not registered any more; then the claim is only released.
        backends: Where the run is stored.
        config: Times of the runner.
        heartbeat: Extends the lease.
        tracer: Receives the run's events.
        waits_in_memory: The run may wait without being parked. Such time does not count, so the lease never ends.
        inline: The run is executed in the task of its caller, who is told of an outage.
    """

    def __init__(
        self, row: RunRow, agent: AgentRuntime, backends: Backends, config: RunnerConfig, heartbeat: Heartbeat,
        tracer: Tracer | None, *, waits_in_memory: bool, inline: bool = False,
    ) -> None:  # fmt: skip
        self.row: RunRow = row
        self.inline: bool = inline
        self._outlasted_until = 0.0  # monotonic time until which outages are taken off the time limit
        self.backends: Backends = backends
        self.config: RunnerConfig = config
        self.clock: Clock = backends.queue.clock
        self.control: RunControl = RunControl()
        if config.stall_timeout_seconds is not None:
            self.control.stall_clock = self.clock
        #: The row is being changed by this process: that it no longer says "running" is no lost lease.
        self.leaving: bool = False
        self.attempt_recorded: bool = row.parked == 1  # the journal has the start of this attempt
        #: The rate limit that has counted this claim as a start; "" if none has.
        self.counted_rate: str = "" if row.rate is None else counted_rate(row)
        #: How a worker claims its next run in the commit that ends this one, and how it starts what it claimed.
        self.next_claim: Callable[[], ClaimRequest | None] | None = None
        self.start_claimed: Callable[[list[RunRow]], None] | None = None
        self._longest = float("inf") if waits_in_memory else config.run_timeout_seconds + config.grace_seconds
        self._heartbeat = heartbeat
        self._queue_commits = backends.queue.commits
        self._tracer = tracer
        self._hook = agent if isinstance(agent, CompletionHook) else None
        #: A new claim id extends no lease, so only the heartbeat and later claims change this.
        self.extended_at: float = self.clock.boot()
        self.writer: ClaimWriter = self._new_writer()

    def _new_writer(self) -> ClaimWriter:
        writer = ClaimWriter(self.row, *self.backends, self.clock)
        if self.control.stall_clock is not None:
            writer.on_write = self.control.note_progress
        writer.outlast = None if self.inline else self._outlast
        if self._tracer is not None:
            writer.on_events = partial(self._tracer.events, known_uuid(self.row.run_id))
        return writer

    @property
    def label(self) -> str:
        """The run and its agent, as messages name them."""
        return f"run {self.row.run_key or self.row.run_id} of agent {self.row.agent!r}"

    @property
    def is_takeover(self) -> bool:
        """Whether an execution before this one was interrupted, and could not write any more."""
        return self.row.crashes_in_row > 0 or self.row.reason == _OUTAGE

    def fenced_writes(self, *, of_code: bool = False) -> FencedWrites:
        """Return the claim of the present attempt, for stores other than the run's own.

        Args:
            of_code: For the code of the run, which writes nothing once the attempt is stopped.
        """
        return _AttemptWrites(self.writer, self.control, self._queue_commits, of_code)

    # -- lease

    def register(self) -> None:
        """Let the heartbeat extend the lease, and report cancellation, mailbox messages and a lost lease."""
        self.reported_at: float = self.clock.monotonic()
        self.answered_at: float = self.reported_at
        self.ends: float = self.reported_at + self._longest
        self.seen: int = self.row.mail_seq
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.owner: asyncio.Task[Any] | None = asyncio.current_task()
        self._heartbeat.hold(self)

    def unregister(self) -> None:
        """Stop extending the lease."""
        self._heartbeat.drop(self.row.run_id, self)

    def abandon(self) -> None:
        """Let the heartbeat release the claim: its event loop has stopped, so nothing can be awaited here."""
        self._heartbeat.abandon(self)

    def cancel(self) -> None:
        """Stop the run, because it was cancelled."""
        if self.control.stopped is not None or self.control.closed or self.leaving:
            return
        self.control.stop(Stop.CANCEL)
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._interrupt)

    def _interrupt(self) -> None:
        if not self.control.closed and not self.leaving:
            self.control.cancel_task()

    def lose(self, claim_id: str) -> None:
        """Stop the run, because another worker has claimed it or it has finished."""
        if claim_id == self.row.claim_id and not self.control.lost and not self.control.closed and not self.leaving:
            self.control.stop(Stop.LOST)
            self.control.close()
            self.control.cancel_task()

    def stop_for_outage(self, claim_id: str) -> None:
        """Stop the code, because the store does not answer and the lease may end. The claim may still be valid."""
        if claim_id != self.row.claim_id or self.control.closed or self.leaving:
            return
        if self.control.stopped is None and not self.inline:
            self.control.stop(Stop.OUTAGE)
            self.control.cancel_task()
        elif self.control.stopped is not Stop.OUTAGE:
            self.backends.queue.live_claims.owe_release(self.row.run_id, self.unchanged_release())
            self.lose(claim_id)

    async def _outlast(self, began: float) -> bool:
        """Wait before a commit is repeated that an outage has failed; return False if the commit must fail.

        The code of the run does not learn of an outage that ends before the lease may end. The end or release of a
        run is repeated until the store answers, because the store rejects it if another worker owns the run by then.
        The time does not count against the time limits of the run: it cannot record anything.
        """
        control, now = self.control, self.clock.monotonic()
        control.note_progress()
        if control.paused_at is None:
            control.paused_seconds += now - max(began, self._outlasted_until)
        self._outlasted_until = now
        if control.lost or control.release_requested:
            return False
        is_late = control.stopped is Stop.OUTAGE or now - self.answered_at > self.config.silence_seconds
        if is_late and not self.leaving:
            if claimed_run() is control:  # code, which could catch the error before the heartbeat has stopped it
                self.stop_for_outage(self.row.claim_id)
                await control.ensure_open()
            return False
        await self.clock.sleep_for(OUTAGE_PAUSE)
        return True

    def publish_heartbeat(self) -> None:
        """Publish that an attempt goes on. Not before or after it: a separate event bus would show it after the end."""
        if self.attempt_recorded and not self.control.closed and not self.leaving:
            now = self.clock.wall()
            self.writer.publish_heartbeat(now, encode({"timestamp": aware(now).isoformat()}))

    def request_release(self) -> None:
        """Stop the run so that another worker resumes it. No attempt is used."""
        self.control.release_requested = True
        self.control.stop(Stop.RELEASE)
        self.control.cancel_task()

    # -- the next attempt, in this process

    async def update(self, **changes: Any) -> None:
        """Change counters of the row under this claim."""
        before = self.row
        update = self.run_update("running", **{"crashes_in_row": before.crashes_in_row, **changes})
        row: RunRow = (await self.writer.update_run(update))[0]
        # The deadline of an `execute` applies to this call only; the stored row has its own.
        self.row = row.with_values(parked=before.parked, reason=before.reason, deadline=before.deadline)

    async def renew(self, **changes: Any) -> None:
        """Continue under a new claim id, so that unconfirmed writes of the last attempt are refused."""
        self.leaving = True  # until the heartbeat knows the new claim
        ticket = new_ulid(self.clock)
        try:
            await self.update(renew=ticket, **changes)
        except (StorageBusy, asyncio.CancelledError):
            # If the new claim was committed, no process knows of it.
            await self.backends.queue.try_give_back((ticket,))
            raise
        self.writer.revoke()  # code of the failed attempt that still runs must not write into the next one
        self.writer = self._new_writer()
        self.register()
        self.leaving = False
        self._heartbeat.look(asyncio.get_running_loop())  # a cancellation that arrived in between was ignored

    async def outlast_outage(self) -> bool:
        """Wait until the store answers, and continue under a new claim id, as the same attempt.

        That is possible until another worker has claimed the run, even if the lease has ended.

        Returns:
            Whether the store has answered immediately.
        """
        row, began = self.row, self.clock.monotonic()
        await self.renew(failures=row.failures, crashes_in_row=row.crashes_in_row)
        self.control.resume_after_outage(self.clock.monotonic())
        self.replace_row(parked=int(self.attempt_recorded), reason=_OUTAGE)
        log.info("%s continues after an outage of its store, attempt %d", self.label, row.attempt)
        return StoreOutage.of(self._queue_commits, self.clock).failed_at < began

    def replace_row(self, **values: Any) -> None:
        """Continue with the row as a worker would claim it now."""
        self.row = self.row.with_values(**values)

    # -- release

    def run_update(self, status: str, *, crashes_in_row: int = 0, **changes: Any) -> RunUpdate:
        """Return the change of the row that leaves this claim."""
        row = self.row
        if status in LIVE:
            # The reason of the last failure or deferral, and its duration, must survive a release of the claim.
            changes = {"error": row.error, **changes}
        else:
            # A count of 0 or more says that the journal has this end. An end that only the queue knows leaves -1.
            changes["min_step_count"] = max(row.min_step_count, 0)
        kept = {"failures": row.failures, "crashes": row.crashes, "min_step_count": row.min_step_count, **changes}
        return RunUpdate(row.claim_id, status, self.clock.wall(), crashes_in_row=crashes_in_row, **kept)

    def unchanged_release(self) -> RunUpdate:
        """Return the change of the row that releases the claim: no attempt is used, and the next attempt resumes."""
        return self.run_update(
            "pending", parked=int(self.attempt_recorded), crashes_in_row=self.row.crashes_in_row, reason="handed back",
            take_back=self._uncounted_rate(),
        )  # fmt: skip

    def _uncounted_rate(self) -> str:
        """Return the rate limit that takes the start of this claim back, because nothing ran; "" without one."""
        return "" if self.attempt_recorded else self.counted_rate

    async def release_with(self, update: RunUpdate) -> None:
        """Release the claim with this change of the row."""
        self.leaving = True
        if update.due_at:
            self.backends.queue.delayed_runs.remember(self.row.run_id, update.claim_id, update.due_at)
        await self.writer.update_run(update)

    async def release(self) -> None:
        """Release the claim as if the run had not been claimed."""
        await self.release_with(self.unchanged_release())

    async def release_after(self, error: Exception, jitter: float) -> None:
        """Release the claim for some seconds, because its contents cannot be read here: that is no crash of the run.

        Only the queue is written to.
        """
        self.leaving = True
        await self._release_in_queue(self._deferred(self.unchanged_release(), error, jitter))

    def _deferred(self, update: RunUpdate, error: Exception, jitter: float) -> RunUpdate:
        return update._replace(due_at=self.clock.wall() + OUTAGE_DELAY * (1 + jitter), reason=type(error).__name__)

    async def try_release(self) -> None:
        """Release the claim if the store allows it, so that the next worker need not wait for the lease to expire.

        Falls back to the queue alone where another engine does not know the claim, or has ended it already.
        """
        if self.control.lost:
            return
        self.writer.outlast = None
        with contextlib.suppress(AgentRuntimeError, RowChanged):
            await self.release()
            return
        await self._release_in_queue(self.unchanged_release())

    async def release_unstarted(self, error: Exception | None = None, jitter: float = 0.0, due_at: float = 0.0) -> None:
        """Release a claim under which nothing ran: only the queue knows it, and the row stays as it was.

        With an error, the run is claimed again after some seconds; with `due_at`, at that time.
        """
        row = self.row
        update = self.run_update(
            "pending", crashes_in_row=row.crashes_in_row, parked=row.parked, reason=row.reason, due_at=due_at,
            take_back=self._uncounted_rate(),
        )  # fmt: skip
        await self._release_in_queue(update if error is None else self._deferred(update, error, jitter))

    async def _release_in_queue(self, update: RunUpdate) -> None:
        await self.backends.queue.try_release(self.row.run_id, update)

    # -- end

    async def end(
        self, status: RunStatus, result: RunResult, event: dict[str, Any] | None, omitted: OmittedHistory | None,
        cursor: int = -1,
    ) -> RunResult:  # fmt: skip
        """Finish the run.

        Args:
            status: The final status.
            result: What the run returned.
            event: The payload of the last event; None for the result itself.
            omitted: The part of the conversation that the stored result refers to instead of holding it.
            cursor: The number of the last mailbox message that the result takes into account; -1: do not check.

        Returns:
            A copy of the result with status and run id.

        Raises:
            RowChanged: There are later messages; nothing was written.
        """
        row, writer, name = self.row, self.writer, status._value_
        result = copy(result)  # the agent may return the same object from all of its runs
        result.status, result.run_id, result.run_key = status, known_uuid(row.run_id), row.run_key
        text = encode_result(result, omitted)
        info = with_outcome(encode(event) if event else None, _outcome(result, event))
        record = Record(
            writer.next_seq(), ENDED, name, "", row.generation, row.claim_id, self.clock.wall(), text, info=info, nev=1
        )
        reason = "" if result.error is None else result.error.type
        update = self.run_update(name, crashes_in_row=row.crashes_in_row, reason=reason, cursor=cursor)
        has_relatives = row.parent_id is not None or status is RunStatus.CANCELLED
        ops = await self._notify_relatives(name, text) if has_relatives else []
        if writer.reservations:
            ops += writer.given_back()
        events = [] if self._hook is None else await self._completion_operations(self._hook, result)
        records = [writer.merge_begin_and_end(record)]
        self.leaving = True
        request = None if self.next_claim is None else self.next_claim()
        if request is None:
            await writer.update_run(update, records, ops, events=events)
        else:
            await self._end_and_claim_next(request, update, records, ops, events)
        self.log_end(name, reason)
        return result

    async def finish_interrupted_end(self, ended: Record, result: RunResult) -> None:
        """Finish a run whose journal contains its end and whose row does not: the claim before was lost in between.

        The caller logs the end.
        """
        events = [] if self._hook is None else await self._completion_operations(self._hook, result)
        ops = await self._notify_relatives(ended.name, encode_result(result) if self.row.parent_id else "")
        if self.writer.reservations:
            ops += self.writer.given_back()
        await self.writer.update_run(self.run_update(ended.name), ops=ops, events=events)

    def log_end(self, status: str, error: str) -> None:
        """Log how the run finished: the type of its error, and no message, which may hold contents."""
        row = self.row
        run = row.run_key or row.run_id
        if status in (RunStatus.SUCCEEDED, RunStatus.CANCELLED):
            log.info("run %s of agent %r finished: %s", run, row.agent, status)
            return
        error = error_name(error)
        words = {"failed": "failed", "timed_out": "timed out"}.get(status, "is dead")
        log.warning("run %s of agent %r %s: %s in attempt %d", run, row.agent, words, error, row.attempt)

    async def _completion_operations(self, hook: CompletionHook, result: RunResult) -> list[Op]:
        """Return what the agent adds to the commit of this end."""
        token = CURRENT_CLAIM.set(self.fenced_writes())
        try:
            operations = await completion_operations(hook, self.row, result)
            await call_on_end(hook, self.row, result)
        finally:
            CURRENT_CLAIM.reset(token)
        return operations

    async def _end_and_claim_next(
        self, request: ClaimRequest, update: RunUpdate, records: Sequence[Record], ops: list[Op], events: Sequence[Op]
    ) -> None:
        """End the run, and in the same commit claim the worker's next run."""
        try:
            claim = Op("queue.claim", (request,))
            claimed = (await self.writer.update_run(update, records, [*ops, claim], events=events))[-1]
        except (*OUTAGE, asyncio.CancelledError) as error:
            # Whether the next run was claimed is unknown: it is given back. Then this end is committed for certain.
            await self.backends.queue.try_give_back(request.tickets)
            if isinstance(error, asyncio.CancelledError):
                raise
            await self.writer.update_run(update, records, ops, events=events)
        else:
            assert self.start_claimed is not None
            self.start_claimed(claimed)

    async def _notify_relatives(self, status: str, payload: str) -> list[Op]:
        """Return messages to the parent run and, for a cancelled run, to its live children.

        Children may have been submitted after the caller of `cancel` looked for them.
        """
        row, queue = self.row, self.backends.queue
        ops = []
        if row.parent_id is not None:
            ops.append(queue.ended_op(row, row.parent_id, payload))
        if status == RunStatus.CANCELLED:
            live = [child for child in await queue.children(row.run_id) if child.status in LIVE]
            ops += [queue.post_op(child.run_id, "cancel", "", "null", f"cancel:{child.generation}") for child in live]
        return ops


def _outcome(result: RunResult, event: dict[str, Any] | None) -> str:
    """Return the error and the usage of a result, for the `info` of its record: lists of runs do not read the result.

    The event of a run that failed is its error, which is in that `info` already.
    """
    if result.error is None and not result.usage:
        return "{}"
    error = None if event and "type" in event else error_payload(result.error)
    return encode({name: value for name, value in (("error", error), ("usage", result.usage)) if value})


def error_name(kind: str) -> str:
    """Return the type of an error for the log. An agent may put any text into the type of its ErrorInfo."""
    return kind if kind.replace(".", "_").isidentifier() else "unnamed error"


ISOLATION_TIMEOUT = 30.0  # seconds after the last start for which a crash suspect has the worker to itself


def is_crash_suspect(row: RunRow, max_crashes: int) -> bool:
    """Return whether the next crash would be the run's last, unless it made progress since its last crash.

    A run that has not crashed is none, even with `max_crashes` 1: a worker would execute all runs one at a time.
    """
    return row.crashes_in_row > 0 and row.crashes_in_row == max_crashes - 1


def crashes_without_progress(row: RunRow, recorded: int) -> int:
    """Return how often the run crashed in a row since its last recorded step.

    Args:
        row: The run.
        recorded: How many finished steps its journal contains.
    """
    if recorded <= max(row.min_step_count, 0):
        return row.crashes_in_row
    return int(not row.parked)  # the claim of a parked run that was resumed is no crash


class _Execution(Protocol):
    @property
    def claim(self) -> HeldClaim: ...


class CrashSuspects:
    """Decides which runs a worker may start while one of them may crash it.

    Args:
        clock: The clock of the worker.
        busy: Returns how many runs use a slot of the worker.
        max_crashes: Returns the setting of that name of the worker's runner.
    """

    def __init__(self, clock: Clock, busy: Callable[[], int], max_crashes: Callable[[], int]) -> None:
        self._clock = clock
        self._busy = busy
        self._max_crashes = max_crashes
        self._started: list[_Execution] = []  # were suspects when they started, and have not ended
        self._recently_seen = False  # one has ended here since the last claim that returned none
        self._last_start = 0.0

    def claimed(self, rows: Iterable[RunRow]) -> None:
        """Note what a claim returned."""
        if self._recently_seen and not any(self._is_suspect(row) for row in rows):
            self._recently_seen = False

    def starts(self, execution: _Execution) -> None:
        """Note that a run starts."""
        if (row := execution.claim.row).crashes_in_row and self._is_suspect(row):
            self._started.append(execution)
        self._last_start = self._clock.boot()

    def ended(self, execution: _Execution) -> None:
        """Note that a run uses no slot of the worker any more."""
        if execution in self._started:
            self._started.remove(execution)
        if not self._recently_seen and (row := execution.claim.row).crashes_in_row:
            self._recently_seen = self._is_suspect(row)

    def may_start(self, row: RunRow) -> bool:
        """Return whether `row` may start on this worker now.

        A crash suspect runs alone, so that a crash can be attributed to it. Isolation ends after `ISOLATION_TIMEOUT`
        seconds, so a long run cannot block the worker; two suspects still never run together, except parent and child.
        """
        if not row.crashes_in_row and not self._started:  # as almost always
            return True
        running = self._running()
        if not self._is_suspect(row):
            return not running or self.is_isolated()
        return self.is_isolated() and all(each.claim.row.run_id == row.parent_id for each in running)

    def startable(self, rows: list[RunRow]) -> list[RunRow]:
        """Return which of these claimed runs may start: the first suspect alone, or all that are none."""
        allowed = [row for row in rows if self.may_start(row)]
        return [row for row in allowed if self._is_suspect(row)][:1] or allowed

    def is_isolated(self) -> bool:
        """Return whether no other run uses a slot, or the last start was `ISOLATION_TIMEOUT` seconds ago."""
        return self._busy() == 0 or self._clock.boot() - self._last_start > ISOLATION_TIMEOUT

    def is_careful(self) -> bool:
        """Return whether the worker starts runs one at a time, because it executes or has just released a suspect."""
        return self._recently_seen or bool(self._started and self._running())

    def claimable(self, free: int) -> int:
        """Return for how many of its free slots the worker claims runs; after a suspect, runs start one at a time."""
        if not self.is_careful():
            return free
        if self._busy() == 0:
            return min(free, 1)
        return free if self.is_isolated() else 0

    def _is_suspect(self, row: RunRow) -> bool:
        return is_crash_suspect(row, self._max_crashes())

    def _running(self) -> list[_Execution]:
        """Return the suspects that execute now; a run that has made progress is a suspect no longer."""
        return [each for each in self._started if self._is_suspect(each.claim.row)]

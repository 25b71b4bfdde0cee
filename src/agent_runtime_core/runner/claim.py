"""A claim on a run as its process holds it: kept alive, and left in one of many ways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

from .._core.clock import Clock, aware
from .._core.codec.json import encode
from .._core.ids import known_uuid, new_ulid
from .._engines.base import Op
from .._execution.claim_writer import ClaimWriter
from .._execution.result_codec import OmittedHistory, decode_result, encode_result
from .._execution.run_control import RunControl, RunRecorder, Services
from .._journal.record import ENDED, Record
from ..errors import AgentRuntimeError, StorageBusy
from ..interfaces import AgentRuntime, RunResult
from ..persistence.fencing import CURRENT_CLAIM, FencedWrites
from ..queue.records import LIVE, ClaimRequest, RowChanged, RunRow, RunUpdate
from ..status import RunStatus
from .backends import Backends
from .completion_hooks import CompletionHook, call_on_end, completion_operations
from .heartbeat import Heartbeat, LeasedRun
from .settings import RunnerConfig

log: logging.Logger = logging.getLogger("agent_runtime_core")

NOTICE_SECONDS = (
    0.05  # seconds that code which looks at ctx.cancelled() has to end by itself before its task is cancelled
)
OUTAGE_DELAY = 5.0  # seconds until a run is taken up again that a store kept from going on, or a little more
JITTER = 0.2  # of the time until a run is taken up again, added by chance


class HeldClaim:
    """One claim on one run. `inline`: attempts go on here, each under a claim id of its own, and not by the queue."""

    def __init__(
        self, row: RunRow, agent: AgentRuntime, backends: Backends, config: RunnerConfig, heart: Heartbeat,
        services: Services, *, inline: bool = False,
    ) -> None:  # fmt: skip
        self.row: RunRow = row
        self.agent: AgentRuntime = agent
        self.config: RunnerConfig = config
        self.heartbeat: Heartbeat = heart
        self.services: Services = services
        self.backends: Backends = backends
        self.inline: bool = inline
        self.clock: Clock = backends.queue.clock
        self.writer: ClaimWriter = self._new_writer()
        self.control: RunControl = RunControl()
        self.started: bool = False  # whether anything was done under this claim
        self.lost: bool = False
        self.release_requested: bool = False
        #: The row is being left: that it is no longer running is our own doing, and nothing to be told of.
        self.leaving: bool = False
        #: How a worker claims its next run in the commit that ends this one, and starts what it got.
        self.next_claim: Callable[[], ClaimRequest | None] | None = None
        self.start_claimed: Callable[[list[RunRow]], None] | None = None
        self.result: RunResult | None = None
        make = services.recorder
        self.recorder: RunRecorder | None = None if make is None else make(row)
        self.attempt_recorded: bool = row.parked == 1  # whether this attempt is in the journal
        self.completion_hook: CompletionHook | None = agent if isinstance(agent, CompletionHook) else None

    def _new_writer(self) -> ClaimWriter:
        ledger = ClaimWriter(self.row, *self.backends, self.clock)
        tracer = self.services.tracer
        if tracer is not None:
            ledger.on_event = partial(tracer.event, known_uuid(self.row.run_id))
        return ledger

    def _fenced_writes(self) -> FencedWrites:
        """The claim of the present attempt, for stores that are not the run's own."""
        ledger, place = self.writer, self.control
        return FencedWrites(lambda: ledger.guard, self.backends.queue.commits, lambda: place.closed)

    # -- kept alive

    def _register(self) -> None:
        row, config = self.row, self.config
        now = self.clock.boot()
        ends = now + config.run_timeout_seconds + config.grace_seconds
        if self.inline or self.services.park_after is None or self.services.park_after > 0:
            ends = float("inf")  # waiting in place does not count, and the watch on time is the loop's
        loop = asyncio.get_running_loop()
        lose = partial(self._lose, row.claim_id)
        self.heartbeat.hold(
            LeasedRun(row, self.control, loop, ends, self._cancel, lose, self._publish_heartbeat, now, row.mail_seq)
        )

    def _cancel(self) -> None:
        place = self.control
        if place.cancelled or place.closed or self.leaving:
            return
        place.cancelled = True
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._interrupt)

    def _interrupt(self) -> None:
        if not self.control.closed and not self.leaving:
            self.control.cancel_task()

    def _lose(self, claim_id: str) -> None:
        if claim_id == self.row.claim_id and not self.lost and not self.control.closed and not self.leaving:
            self.lost = self.control.closed = True
            self.control.cancel_task()

    def _publish_heartbeat(self) -> None:
        if not self.control.closed and not self.leaving:  # on a bus of its own it would come after the end
            now = self.clock.wall()
            self.writer.publish_heartbeat(now, encode({"timestamp": aware(now).isoformat()}))

    def request_release(self) -> None:
        """Stop the run and give it back for another worker, at no cost to it."""
        self.release_requested = True
        self.control.cancel_task()

    # -- kept, for another attempt

    async def update(self, **changes: Any) -> None:
        """Change counters of the row under this claim."""
        before = self.row
        how = self._run_update("running", **{"stalls": before.stalls, **changes})
        row: RunRow = (await self.writer.update_run(how))[0]
        # The deadline of an `execute` applies to this call only; the stored row has its own.
        self.row = row.with_values(parked=before.parked, reason=before.reason, deadline=before.deadline)

    async def renew(self, **changes: Any) -> None:
        """Go on under a new claim: what the last attempt asked for, and got no answer to, is not to land any more."""
        self.leaving = True  # until the heart knows
        ticket = new_ulid(self.clock)
        try:
            await self.update(renew=ticket, **changes)
        except (StorageBusy, asyncio.CancelledError):
            # If it came to that, nobody else knows of the new claim.
            with contextlib.suppress(AgentRuntimeError):
                await self.backends.queue.give_back((ticket,))
            raise
        self.new_writer()
        self._register()
        self.leaving = False
        self.heartbeat.look(asyncio.get_running_loop())  # a request to cancel that came meanwhile was not heeded

    def replace_row(self, **values: Any) -> None:
        """Go on with the row as a worker would claim it now."""
        self.row = self.row.with_values(**values)

    def new_writer(self) -> None:
        """What the failed attempt left running may not write beside the next one."""
        self.writer.revoke()
        self.writer = self._new_writer()

    def _next_attempt(self) -> None:
        """It is not in the journal yet, and was never parked."""
        self.attempt_recorded = False
        self.replace_row(parked=0)

    # -- left to others

    def _run_update(self, status: str, *, stalls: int = 0, **changes: Any) -> RunUpdate:
        row = self.row
        if status in LIVE:
            # Why the last attempt failed or was deferred, and for how long, must survive a release of the claim.
            changes = {"error": row.error, **changes}
        else:
            # Of an end that was told to the queue alone, nothing is in the journal; that this one is, its mark tells.
            changes["mark"] = max(row.mark, 0)
        return self.backends.queue.unchanged_update(row, row.claim_id)._replace(status=status, stalls=stalls, **changes)

    async def _release_with(self, how: RunUpdate) -> None:
        self.leaving = True
        await self.writer.update_run(how)

    def unchanged_release(self) -> RunUpdate:
        """Release the claim as if it had never been: no attempt is used, and the next one resumes."""
        return self._run_update(
            "pending", parked=int(self.attempt_recorded), stalls=self.row.stalls, reason="handed back"
        )

    async def release(self) -> None:
        await self._release_with(self.unchanged_release())

    def _with_jitter(self, seconds: float) -> float:
        """That many seconds and up to a fifth more: what one failure put off together does not come back together."""
        return seconds * (1 + self.clock.random.uniform(0, JITTER))

    async def release_after(self, error: Exception) -> None:
        """Give the run back for later: that a store was away is no crash of the run.

        Only the queue is told: it may be another store, and answer.
        """
        self.leaving = True
        how = self._run_update(
            "pending", due_at=self.clock.wall() + self._with_jitter(OUTAGE_DELAY), parked=int(self.attempt_recorded),
            stalls=self.row.stalls, reason=type(error).__name__,
        )  # fmt: skip
        with contextlib.suppress(AgentRuntimeError, RowChanged):
            await self.backends.queue.settle(self.row.run_id, how)

    async def try_release(self) -> None:
        """Give the run back if that can be: whoever takes it up again need not wait for the lease to run out.

        Where another engine does not know the claim yet, or its end already, the queue alone is told.
        """
        if self.lost:
            return
        with contextlib.suppress(AgentRuntimeError, RowChanged):
            await self.release()
            return
        with contextlib.suppress(AgentRuntimeError, RowChanged):
            await self.backends.queue.settle(self.row.run_id, self.unchanged_release())

    async def release_unstarted(self) -> None:
        """Give back a claim that was never entered: only the queue knows of it, and the run is as it was before."""
        self.started = True
        row = self.row
        how = self._run_update("pending", stalls=row.stalls, parked=row.parked, reason=row.reason)
        with contextlib.suppress(AgentRuntimeError, RowChanged):
            await self.backends.queue.settle(row.run_id, how)

    # -- ended

    async def end(self, status: RunStatus, result: RunResult, event: dict[str, Any] | None = None) -> RunResult:
        """End the run; `event` is what its last event tells, which for a success is the result itself."""
        row = self.row
        result = copy(result)  # the agent may give the same one to all of its runs
        result.status, result.run_id = status, known_uuid(row.run_id)
        before = None if self.recorder is None else self.recorder.omitted_history(result)
        text, info, name = encode_result(result, before), encode(event) if event else None, status.value
        record = Record(
            self.writer.next_seq(), ENDED, name, "", row.generation, row.claim_id, self.clock.wall(),
            text, info=info, nev=1,
        )  # fmt: skip
        reason = "" if result.error is None else result.error.type
        how = self._run_update(name, stalls=row.stalls, reason=reason)
        ops = await self.notify_relatives(name, result, before)
        events = [] if self.completion_hook is None else await self.completion_operations(self.completion_hook, result)
        await self.end_and_claim_next(how, [self.writer.merge_begin_and_end(record)], ops, events)
        self.result = result
        self._log_end(name, reason)
        return result

    def _log_end(self, status: str, error: str) -> None:
        """Log how the run finished: type of its error and no message, which may hold contents."""
        row = self.row
        run, extra = row.run_key or row.run_id, {"run_id": row.run_id}
        if status in (RunStatus.SUCCEEDED, RunStatus.CANCELLED):
            log.info("run %s of agent %r finished: %s", run, row.agent, status, extra=extra)
            return
        if not error.replace(".", "_").isidentifier():  # an agent may put any text into the type of its ErrorInfo
            error = "unnamed error"
        words = {"failed": "failed", "timed_out": "timed out"}.get(status, "is dead")
        log.warning(
            "run %s of agent %r %s: %s in attempt %d", run, row.agent, words, error, row.attempt,
            extra=extra,
        )  # fmt: skip

    async def completion_operations(self, agent: CompletionHook, result: RunResult) -> list[Op]:
        """What the agent adds to this end, which it is told of."""
        token = CURRENT_CLAIM.set(self._fenced_writes())
        try:
            said = await completion_operations(agent, self.row, result)
            await call_on_end(agent, self.row, result)
        finally:
            CURRENT_CLAIM.reset(token)
        return said

    async def end_and_claim_next(
        self, how: RunUpdate, records: Sequence[Record], ops: list[Op], events: Sequence[Op] = ()
    ) -> None:
        """End the run, and in the same commit claim the next one for the worker, if it wants one."""
        self.leaving = True
        want = self.next_claim() if self.next_claim is not None else None
        if want is None:
            await self.writer.update_run(how, records, ops, events=events)
            return
        try:
            claim = Op("queue.claim", (want,))
            claimed = (await self.writer.update_run(how, records, [*ops, claim], events=events))[-1]
        except (StorageBusy, asyncio.CancelledError) as error:
            # Whether the next one was claimed is not known: it goes back, and this end is made sure of.
            with contextlib.suppress(AgentRuntimeError):
                await self.backends.queue.give_back(want.tickets)
            if isinstance(error, asyncio.CancelledError):
                raise
            await self.writer.update_run(how, records, ops, events=events)
        else:
            assert self.start_claimed is not None
            self.start_claimed(claimed)

    async def notify_relatives(self, status: str, result: RunResult, before: OmittedHistory | None = None) -> list[Op]:
        """The run that called this one hears of its end, and those that a cancelled one called end with it: they may
        have come after whoever cancelled it had looked for them."""
        row, queue = self.row, self.backends.queue
        ops = []
        if row.parent_id is not None:
            payload, msg_id = encode_result(result, before), f"end:{row.run_id}:{row.generation}"
            ops.append(queue.post_op(row.parent_id, "child", row.run_id, payload, msg_id))
        if status == RunStatus.CANCELLED:
            live = [child for child in await queue.children(row.run_id) if child.status in LIVE]
            ops += [queue.post_op(child.run_id, "cancel", "", "null", f"cancel:{child.generation}") for child in live]
        return ops

    async def finish_interrupted_end(self, ended: Record) -> RunResult:
        """The journal is finished but the row is not: an earlier claim fell between the two."""
        result = decode_result(ended.result or "{}")
        events = [] if self.completion_hook is None else await self.completion_operations(self.completion_hook, result)
        ops = await self.notify_relatives(ended.name, result)
        await self.writer.update_run(self._run_update(ended.name), ops=ops, events=events)
        self.result = result if self.recorder is None else await self.recorder.restore(ended.result or "{}")
        self._log_end(ended.name, "" if result.error is None else result.error.type)
        return self.result

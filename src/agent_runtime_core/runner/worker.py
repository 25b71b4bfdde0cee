"""The working loop of a runner: claim, drive, wait for more, drain when told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from .._core.arguments import checked_int
from .._core.context_vars import start_helper
from .._core.per_loop import call_in_loop
from .._core.validation import is_number
from ..errors import AgentRuntimeError, InvalidArgument, StorageClosed, brief
from ..queue.records import ClaimRequest, RunRow
from .concurrency import ConcurrencySlots
from .crash_suspects import ISOLATION_TIMEOUT, CrashSuspects
from .settings import SHUTDOWN_SECONDS
from .signals import SHARED

if TYPE_CHECKING:
    from .._execution.run_control import RunControl
    from ..interfaces import AgentRuntime
    from ..queue.base import RunQueue
    from ..queue.blocking_claims import BlockingClaims
    from ..registry import Registry
    from .execution import RunExecution
    from .settings import RunnerConfig

log: logging.Logger = logging.getLogger("agent_runtime_core")

MAINTENANCE_INTERVAL = 0.1  # seconds a busy worker goes on without looking at expired leases and timers
EXTRA_WAIT = 2.0  # seconds a claim stands for longer than until the next look
MAX_CLAIM = 1000  # runs claimed in one go, however many slots are free
RELEASE_SECONDS = 0.5  # seconds to give back what did not


class Worker:
    """One runner's slots, and the runs in them."""

    def __init__(
        self,
        queue: RunQueue,
        config: RunnerConfig,
        registry: Callable[[], Registry],
        new_execution: Callable[..., RunExecution],
    ) -> None:
        self.queue = queue
        self.config = config
        self._registry = registry  # a turn manager replaces the registry of its runner
        self._new_execution = new_execution
        self.slots: ConcurrencySlots = ConcurrencySlots(queue.clock, self.wake)
        self._executions: dict[asyncio.Task[Any], RunExecution] = {}
        self._unstopped: set[asyncio.Task[Any]] = (
            set()
        )  # did not stop when they were told to; what they had was given back
        self._suspects = CrashSuspects(queue.clock, lambda: self.slots.busy)
        self._stopping = False
        self._looked = -MAINTENANCE_INTERVAL  # when the loop last claimed with an eye to leases and timers
        self._hurry = False
        self._claims_due = False  # whether the last claim made what is due ready
        self._wake_event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_ended: Future[None] | None = None  # done when the loop has ended
        self._closed = False
        self._blocking_claims: BlockingClaims | None = None  # where claims of the loop can stand
        self._poll = 1.0  # seconds between its looks, at most

    async def once(self) -> bool:
        rows = await self._claim(1) if self._suspects.claimable(1) else []
        if not rows:
            return False
        task = self._start(rows[0]) if self._suspects.may_start(rows[0]) else self._release_unstarted(rows[0])
        try:
            await task
        finally:
            put_back = [each for each, drive in self._executions.items() if drive.row is rows[0]]
            if put_back:
                await asyncio.wait(put_back)
        return True

    async def _claim(self, count: int) -> list[RunRow]:
        stands: dict[str, Any] = {}
        if self._blocking_claims is not None and not self._executions and not self._stopping:
            stands = {"blocking": self._blocking_claims, "wait_seconds": self._poll + EXTRA_WAIT}
        rows: list[RunRow] = await self.queue.claim_rows(
            self.config.worker_id, self.config.lease_ttl_seconds, agent_keys=self._registry().keys(), limit=count,
            **stands,
        )  # fmt: skip
        self._suspects.claimed(rows)
        return rows

    def _execution_of(self, row: RunRow) -> RunExecution:
        agent = self._registry().get(row.agent)
        return self._new_execution(row, cast("AgentRuntime", agent), inline=False)

    def _start(self, row: RunRow) -> asyncio.Task[Any]:
        drive = self._execution_of(row)
        if drive.agent is None:  # it was taken out of the registry while the claim was under way
            return self._follow(start_helper(drive.release_unstarted()), drive)
        if self._wake_event is not None:
            claim = drive.claim
            claim.next_claim, claim.start_claimed = partial(self._next_after, drive.control), self._start_all
        self._suspects.starts(drive)
        return self._follow(start_helper(drive.run()), drive)

    def start_delivered(self, rows: list[RunRow]) -> None:
        """A claim that stood got these: they are begun, or go back where there is no slot for them any more."""
        for row in rows:
            if self._stopping or self.slots.free <= 0:
                drive = self._execution_of(row)
                _ = self._follow(start_helper(drive.release_unstarted()), drive)
            else:
                self._start_all([row])
        if not rows:
            self.wake()

    def _release_unstarted(self, row: RunRow) -> asyncio.Task[Any]:
        drive = self._execution_of(row)
        return self._follow(start_helper(drive.release_suspect()), drive)

    def _follow(self, task: asyncio.Task[Any], drive: RunExecution) -> asyncio.Task[Any]:
        self.slots.take(drive.control)
        self._executions[task] = drive
        task.add_done_callback(self._ended)
        return task

    def _start_all(self, rows: list[RunRow]) -> None:
        for row in rows:
            _ = self._start(row) if self._suspects.may_start(row) else self._release_unstarted(row)

    async def _begin(self, rows: list[RunRow]) -> None:
        """Start those that may begin, or the first suspect among them, when the others are back: a run that is held
        by a process which dies counts that as a crash of its own."""
        may = self._suspects.startable(rows)
        begin = {row.run_id for row in may}
        back = [self._release_unstarted(row) for row in rows if row.run_id not in begin]
        try:
            if back:
                await asyncio.wait(back)
        finally:
            self._start_all(may)  # unless a suspect was given meanwhile

    def _next_after(self, place: RunControl) -> ClaimRequest | None:
        """What a run in this place claims, which may have no slot to give."""
        return None if place.without_slot else self._next_claim()

    def _next_claim(self) -> ClaimRequest | None:
        """What a run that ends claims for its slot; now and then nothing, so that the loop looks at all that is due."""
        now, slots = self.queue.clock.boot(), self.slots
        if (
            self._stopping
            or self._wake_event is None
            or slots.busy > slots.count
            or now - self._looked > MAINTENANCE_INTERVAL
        ):
            return None
        if slots.waiting or self._suspects.is_careful():  # its own slot is not free yet
            return None
        return self.queue.claim_request(
            self.config.worker_id, self.config.lease_ttl_seconds, self._registry().keys(), ready_only=True
        )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unstopped.discard(task)
        drive = self._executions.pop(task, None)
        if drive is None:
            return
        self._forget(drive)
        if task.cancelled() and not drive.started:
            # Its loop ends, say, and not a line of it ran that could have given the run back.
            _ = self._follow(start_helper(drive.release_unstarted()), drive)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a run could not be driven: %s; it is claimed again later", error, exc_info=error)

    def _forget(self, drive: RunExecution) -> None:
        self._suspects.ended(drive)
        self.slots.release(drive.control)
        self.wake()

    def wake(self) -> None:
        if self._wake_event is not None:
            self._wake_event.set()

    # -- the loop

    async def loop(self, poll_interval: float, concurrency: int, handle_signals: bool) -> None:
        if self._closed:
            raise StorageClosed("this runner was closed: make another one")
        if self._wake_event is not None and self._loop is not None and not self._loop.is_closed():
            raise InvalidArgument("this runner works already: give it a greater concurrency, or make another one")
        checked_int("concurrency", concurrency)
        if not is_number(poll_interval) or not poll_interval > 0:
            raise InvalidArgument(f"poll_interval is a number of seconds above 0, not {brief(poll_interval)}")
        self.slots.resize(concurrency)
        self._loop, wake, over = asyncio.get_running_loop(), asyncio.Event(), Future[None]()
        self._wake_event, self._loop_ended, self._poll = wake, over, poll_interval
        shared = SHARED.stopping(self) if handle_signals else contextlib.nullcontext()
        with shared, contextlib.ExitStack() as undo:
            try:
                if (stop_listening := self.queue.listen("work", self._wake_from_thread)) is not None:
                    undo.callback(stop_listening)
                self._blocking_claims = self.queue.blocking_claims(self.start_delivered)
                await self._work(wake)
            finally:
                # Not at the beginning: whoever said stop before the first step was heard too.
                self._wake_event, self._stopping, self._hurry = None, False, False
                self.slots.resize()
                over.set_result(None)

    async def _work(self, wake: asyncio.Event) -> None:
        try:
            while not self._stopping:
                wake.clear()
                if not await self.claim_for_free_slots():
                    await self._sleep(wake, self._poll)
            await self.stop_claiming()
            await self.drain()
        except (Exception, asyncio.CancelledError):
            # Whoever cancels the loop does not wait: what is running is given back now.
            self._stopping = self._hurry = True
            await self.stop_claiming()
            await self.drain()
            raise

    async def stop_claiming(self) -> None:
        """Nothing is claimed from now on: no claim stands any more."""
        standing, self._blocking_claims = self._blocking_claims, None
        if standing is not None:
            await standing.close()

    async def claim_for_free_slots(self) -> bool:
        """Claim for the free slots; True if something was claimed."""
        free = self._suspects.claimable(min(self.slots.free, MAX_CLAIM))
        self._claims_due = False
        if free <= 0:
            return False
        with self.slots.reserve(free):
            return await self._claim_for(free)

    async def _claim_for(self, free: int) -> bool:
        self._looked = self.queue.clock.boot()
        try:
            rows = await self._claim(free)
        except StorageClosed:
            if self._stopping:
                return False
            raise  # there is nothing to wait for
        except AgentRuntimeError as error:
            log.warning("could not claim: %s", error)
            return False
        self._claims_due = bool(self._registry().keys())
        await self._begin(rows)  # told to stop meanwhile or not: what is claimed has to be driven, or handed back
        return bool(rows) and len(rows) == free and not self._stopping

    async def _sleep(self, wake: asyncio.Event, poll_interval: float) -> None:
        """Until something may be claimable: a bell, a free slot, a timer that is due, or the next poll."""
        if self.slots.free <= 0:
            await wake.wait()  # nothing can be claimed before a slot is free
            return
        # What was just claimed begins before this asks the store for anything.
        timer = start_helper(self._until_due(poll_interval))
        timer.add_done_callback(lambda timer: None if timer.cancelled() else wake.set())
        try:
            await wake.wait()
        finally:
            timer.cancel()
        if timer.done() and not timer.cancelled():
            timer.result()

    async def _until_due(self, poll_interval: float) -> None:
        clock, seconds = (
            self.queue.clock,
            min(poll_interval, ISOLATION_TIMEOUT) if self._suspects.is_careful() else poll_interval,
        )
        if self._claims_due:  # else what is due stays so, and there is no hurry to fail at it again
            with contextlib.suppress(AgentRuntimeError):
                due = await self.queue.next_due()
                if due is not None:
                    seconds = min(seconds, max(due - clock.wall(), 0.001))
        await clock.sleep(seconds)

    def _wake_from_thread(self) -> None:
        if self._loop is not None and self.slots.busy < self.slots.count:
            call_in_loop(self._loop, self.wake)

    # -- stopping

    def stop(self) -> None:
        self._hurry = self._stopping
        self._stopping = True
        if self._loop is not None:
            call_in_loop(self._loop, self.wake)

    async def close(self) -> None:
        """Give back what runs, and have the loop end if it is going, so that nothing is claimed after this."""
        self._closed = True
        # What was left in a loop that is closed never ends, and can be told nothing: its leases run out.
        self._executions = {task: drive for task, drive in self._executions.items() if not task.get_loop().is_closed()}
        going, grace = self._wake_event is not None, self.config.grace_seconds
        if going and not self._stopping:  # a second word would cut the grace short
            self.stop()
        over, loop = self._loop_ended, self._loop
        if not going or over is None or loop is None or loop.is_closed():
            await self.drain()
            return
        patience = SHUTDOWN_SECONDS + RELEASE_SECONDS + 0.5
        if loop is asyncio.get_running_loop():
            await self.drain()
        else:
            patience += grace  # its tasks are for its own thread to stop, which does so
        # What closes may be a run of this very loop, or one that does not end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.shield(asyncio.wrap_future(over))

    async def drain(self) -> None:
        """Let running work finish for the grace time, then give it back."""
        grace = self.config.grace_seconds
        clock = self.queue.clock
        self.slots.stop_waiting()
        until = clock.boot() + grace
        while self._executions and not self._hurry and clock.boot() < until:
            await asyncio.wait(self._executions, timeout=min(0.1, grace), return_when=asyncio.FIRST_COMPLETED)
        until = clock.boot() + SHUTDOWN_SECONDS
        while self._executions:
            # Each time anew: a run that ends may have claimed the next one before it could hear of the end.
            for drive in self._executions.values():
                if not drive.control.release_requested:
                    drive.claim.request_release()
            left = max(until - clock.boot(), 0)
            done, _ = await asyncio.wait(self._executions, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await self._cancel_all()

    async def _cancel_all(self) -> None:
        """Give back what has not stopped: whatever it goes on with, it is no longer this worker's."""
        left, self._executions = self._executions, {}
        self._unstopped.update(left)
        backs = [start_helper(drive.claim.try_release()) for drive in left.values()]
        try:
            await asyncio.wait(backs, timeout=RELEASE_SECONDS)
        finally:
            for drive in left.values():
                log.warning("run %s of agent %r did not stop: it is given back", drive.row.run_id, drive.row.agent)
                drive.control.lost = drive.control.closed = True
                drive.claim.unregister()
                self._forget(drive)
            for task in (*backs, *left):
                task.cancel()

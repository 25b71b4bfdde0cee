"""Claim runs and execute them, as many as there are slots; hold the lifespans of their agents; drain on shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from .._core.arguments import checked_int
from .._core.clock import Clock
from .._core.context_vars import start_helper
from .._core.log import about_run, log
from .._core.per_loop import call_in_loop
from .._core.timeouts import contained, place_of
from .._core.validation import Shown, is_number, must
from .._engines.outages import OUTAGE, StoreOutage
from .._engines.payloads import UNREADABLE
from .._execution.run_control import RunControl, Stop
from ..errors import AgentRuntimeError, StorageClosed, StorageMoved
from ..interfaces import AgentRuntime
from ..queue.live_claims import cause_of
from ..queue.records import SCHEDULE, ClaimRequest, RunRow
from .claim import ISOLATION_TIMEOUT, CrashSuspects
from .schedules import MOST_AT_ONCE
from .settings import SHUTDOWN_SECONDS
from .signals import SHARED

if TYPE_CHECKING:
    from ..interfaces import AgentRuntime
    from ..queue.base import RunQueue
    from ..queue.blocking_claims import BlockingClaims
    from ..registry import Registry
    from .execution import RunExecution
    from .processes import ListedProcess
    from .settings import RunnerConfig


MAINTENANCE_INTERVAL = 0.1  # seconds after which a busy worker checks expired leases and timers again
EXTRA_WAIT = 2.0  # seconds that a blocking claim waits longer than until the next poll
MAX_CLAIM = 1000  # runs in one claim, even if more slots are free
UNREADABLE_INTERVAL = 60.0  # seconds between two reports of runs that this process cannot decode
RELEASE_SECONDS = 0.5  # seconds to release runs that did not stop
REGAIN_TIMEOUT = 5.0  # seconds that a run waits for a slot before it is released to the queue
_UNRELEASED = "its store is away: another worker takes it over when its lease has ended"
UNLIMITED = sys.maxsize  # slots while no `run_loop` sets their number


class ConcurrencySlots:
    """The slots of a worker.

    A run that waits releases its slot. When it continues it gets the next free slot, in order of arrival and before
    newly claimed runs. After `REGAIN_TIMEOUT` seconds without a slot it is released to the queue.

    Args:
        clock: The clock of the worker.
        notify: Called when a slot becomes free.
    """

    def __init__(self, clock: Clock, notify: Callable[[], None]) -> None:
        self.count: int = UNLIMITED
        self.busy: int = 0  # runs that use a slot; runs that only wait use none
        self.waiting: dict[RunControl, list[asyncio.Future[bool]]] = {}  # runs that wait for a slot; none is free then
        self.draining: bool = False  # runs do not wait for a slot any more
        self._reserved = 0  # slots for the runs of a claim that is being made
        self._clock = clock
        self._notify = notify

    @property
    def free(self) -> int:
        """The slots that are neither used nor reserved."""
        return self.count - self.busy - self._reserved

    def take(self, control: RunControl) -> None:
        """Have the run use a slot."""
        control.without_slot = False
        self.busy += 1

    def release(self, control: RunControl) -> None:
        """Free the slot of a run that only waits, or ended."""
        if not control.without_slot:
            control.without_slot = True
            self.busy -= 1
            self._grant_free_slots()
            self._notify()

    async def regain(self, control: RunControl) -> bool:
        """Wait until the run gets a slot again; return False if it must be released to the queue instead."""
        if not control.without_slot:
            return True
        if self.free > 0:
            self.take(control)
            return True
        return not self.draining and await self._wait_for_slot(control)

    def reclaim(self, control: RunControl) -> None:
        """Count a run that works again, even if no slot is free: its code runs already and cannot be delayed."""
        if control.without_slot:
            self.take(control)
            for future in self.waiting.pop(control, ()):
                _grant(future, True)

    async def _wait_for_slot(self, control: RunControl) -> bool:
        future = asyncio.get_running_loop().create_future()
        futures = self.waiting.setdefault(control, [])
        futures.append(future)
        timer = start_helper(self._clock.sleep(REGAIN_TIMEOUT))
        timer.add_done_callback(lambda _: _grant(future, False))
        try:
            return bool(await future)
        finally:
            timer.cancel()
            futures.remove(future)
            if not futures and self.waiting.get(control) is futures:
                del self.waiting[control]

    def _grant_free_slots(self) -> None:
        while self.waiting and self.free > 0:
            control = next(iter(self.waiting))
            futures = [future for future in self.waiting.pop(control) if not future.done()]
            if futures:  # else no run waits that would release the slot
                self.take(control)
            for future in futures:
                _grant(future, True)

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve slots for the runs of a claim while the block makes it."""
        self._reserved = count
        try:
            yield
        finally:
            self._reserved = 0
            self._grant_free_slots()

    def stop_waiting(self) -> None:
        """Have the runs that wait for a slot released to the queue."""
        self.draining = True
        for futures in self.waiting.values():
            _grant(next((future for future in futures if not future.done()), futures[0]), False)

    def resize(self, count: int = UNLIMITED) -> None:
        """Set how many runs may use a slot."""
        self.count, self.draining = count, False
        self._grant_free_slots()


def _grant(future: asyncio.Future[bool], has_slot: bool) -> None:
    if not future.done():
        future.set_result(has_slot)


class Worker:
    """The worker of one runner.

    Args:
        queue: The queue that runs are claimed from.
        config: Settings of the runner.
        registry: Returns the agents whose runs are claimed. A turn manager replaces the registry of its runner.
        new_execution: Creates the execution of a claimed run.
        process: The row of the runner, which the loop stores and renews.
        leave_lifespans: Called when the loop is drained.
        fire: Fires the ticks of a schedule whose row was claimed.
    """

    def __init__(
        self,
        queue: RunQueue,
        config: RunnerConfig,
        registry: Callable[[], Registry],
        new_execution: Callable[..., RunExecution],
        process: ListedProcess,
        leave_lifespans: Callable[[], Awaitable[None]],
        fire: Callable[[RunRow], Coroutine[Any, Any, None]],
    ) -> None:
        self.queue = queue
        self.config = config
        self._registry = registry
        self._new_execution = new_execution
        self._process = process
        self._leave_lifespans = leave_lifespans
        self._fire = fire
        self._firing: set[asyncio.Task[Any]] = set()
        self._busy: asyncio.Task[Any] | None = None  # ends when a worker without a free slot looks for schedules
        self.slots: ConcurrencySlots = ConcurrencySlots(queue.clock, self._wake_for_free_slot)
        self._executions: dict[asyncio.Task[Any], RunExecution] = {}
        #: Tasks that did not stop on shutdown, referred to until they end. Their runs were released.
        self._unstopped: set[asyncio.Task[Any]] = set()
        self._outage = StoreOutage.of(queue.commits, queue.clock)
        self._suspects = CrashSuspects(queue.clock, lambda: self.slots.busy, lambda: self.config.max_crashes)
        self._stopping = False
        self._looked = -MAINTENANCE_INTERVAL  # when the loop last claimed, which checks leases and timers too
        self._ticked = self._looked  # when the loop last claimed schedules alone
        self._reported = -UNREADABLE_INTERVAL  # when a run that cannot be decoded was last reported
        self._hurry = False  # release active runs without waiting for the grace
        #: The turn that this worker has served last; None: runs take no turns.
        self._turn: str | None = None if config.take_turns is None else ""
        self._claims_due = False  # the last claim succeeded, and so made due runs ready
        self._wake_event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_ended: Future[None] | None = None  # done when the loop ends
        self._closed = False
        self._blocking_claims: BlockingClaims | None = None  # claims of the loop that wait in the store
        self._poll = 1.0  # longest time in seconds between two claims of the loop

    async def once(self) -> bool:
        """Claim and execute one run; return False if there was none."""
        rows = await self._claim(1) if self._suspects.claimable(1) else []
        while rows and rows[0].agent == SCHEDULE:
            await self._fire(rows[0])
            rows = await self._claim(1)
        if not rows:
            return False
        task = self._start(rows[0]) if self._suspects.may_start(rows[0]) else self._release_unstarted(rows[0])
        try:
            await task
        finally:
            releases = [each for each, execution in self._executions.items() if execution.claim.row is rows[0]]
            if releases:
                await asyncio.wait(releases)
        return True

    async def _claim(self, count: int) -> list[RunRow]:
        if (overdue := await self._claim_overdue()) is not None:
            self.wake()  # there may be more, and others
            return [overdue]
        options: dict[str, Any] = {}
        if self._blocking_claims is not None and not self._executions and not self._stopping:
            options = {"blocking": self._blocking_claims, "wait_seconds": self._poll + EXTRA_WAIT}
        keys = self._registry().keys()
        rows = await self._claim_of([*keys, SCHEDULE] if keys else keys, count, **options)
        self._suspects.claimed([row for row in rows if row.agent != SCHEDULE])
        return rows

    async def _claim_of(self, keys: Sequence[str], count: int, **options: Any) -> list[RunRow]:
        config = self.config
        if self._turn is not None:
            options["after_turn"] = self._turn
        rows: list[RunRow] = await self.queue.claim_rows(
            config.worker_id, config.lease_ttl_seconds, agent_keys=keys, limit=count, **options
        )
        if self._turn is not None and rows:
            self._turn = rows[-1].turn or ""
        return rows

    async def _claim_overdue(self) -> RunRow | None:
        """Claim a run that this process delayed or parked, if the wall clock was set back since.

        The store would make it ready when the wall clock gets there.
        """
        queue, config = self.queue, self.config
        if (delayed := queue.delayed_runs.overdue()) is None:
            return None
        row = await queue.row(delayed.run_id)
        is_running = row is not None and row.status == "running"  # the commit that delays it is under way
        if row is None or cause_of(row) != delayed.cause or row.origin or not (is_running or row.due_at):
            queue.delayed_runs.forget(delayed.run_id, delayed.cause)
            return None
        if is_running or self._registry().get(row.agent) is None:
            return None
        outcome, claimed = await queue.take(row, config.worker_id, config.lease_ttl_seconds, insert=False, reopen=False)
        if outcome != "claimed" or claimed is None:  # another run may have its concurrency slot
            return None
        if claimed.rate is not None and not claimed.parked:  # ready now: only a claim in order counts its start
            execution = self._execution_of(claimed)
            execution.claim.counted_rate = ""
            await execution.release_unstarted()
            return None
        self._suspects.claimed([claimed])
        return claimed

    def _execution_of(self, row: RunRow) -> RunExecution:
        agent: Any = self._registry().get(row.agent)
        return self._new_execution(row, agent, inline=False)

    def _start(self, row: RunRow) -> asyncio.Task[Any]:
        self.queue.delayed_runs.forget(row.run_id)
        execution = self._execution_of(row)
        if execution.agent is None:  # it was unregistered while the claim was being made
            return self._follow(start_helper(execution.release_unstarted()), execution)
        if self._wake_event is not None:
            claim = execution.claim
            claim.next_claim, claim.start_claimed = partial(self._next_after, execution.control), self._start_all
        self._suspects.starts(execution)
        return self._follow(start_helper(execution.run()), execution)

    def start_delivered(self, rows: list[RunRow]) -> None:
        """Start the runs of a blocking claim, or release them if no slot is free any more."""
        for row in rows:
            if row.agent == SCHEDULE or not (self._stopping or self.slots.free <= 0):
                self._start_all([row])
            else:
                execution = self._execution_of(row)
                _ = self._follow(start_helper(execution.release_unstarted()), execution)
        if not rows:
            self.wake()

    def _release_unstarted(self, row: RunRow) -> asyncio.Task[Any]:
        execution = self._execution_of(row)
        return self._follow(start_helper(execution.release_suspect()), execution)

    def _follow(self, task: asyncio.Task[Any], execution: RunExecution) -> asyncio.Task[Any]:
        self.slots.take(execution.control)
        self._executions[task] = execution
        task.add_done_callback(self._ended)
        return task

    def _start_all(self, rows: list[RunRow]) -> None:
        for row in rows:
            if row.agent == SCHEDULE:
                self._firing.add(task := start_helper(self._fire(row)))
                task.add_done_callback(self._firing.discard)
            else:
                _ = self._start(row) if self._suspects.may_start(row) else self._release_unstarted(row)

    async def _start_claimed(self, rows: list[RunRow]) -> None:
        """Start the runs that may start, after the others were released.

        If the process crashes, that counts as a crash of every run that it claimed.
        """
        self._start_all([row for row in rows if row.agent == SCHEDULE])
        rows = [row for row in rows if row.agent != SCHEDULE]
        startable = self._suspects.startable(rows)
        starting = {row.run_id for row in startable}
        releases = [self._release_unstarted(row) for row in rows if row.run_id not in starting]
        try:
            if releases:
                await asyncio.wait(releases)
        except asyncio.CancelledError:
            self._start_all(startable)  # not after a GeneratorExit: the event loop is stopped, and starts no task
            raise
        self._start_all(startable)  # checked again: a suspect may have started in between

    def _next_after(self, control: RunControl) -> ClaimRequest | None:
        """Return what the worker claims when this run ends; None if the run uses no slot that would become free."""
        return None if control.without_slot else self._next_claim()

    def _next_claim(self) -> ClaimRequest | None:
        """Return what the worker claims in the commit that ends a run, or None if the loop is to claim.

        That is so every `MAINTENANCE_INTERVAL` seconds, because only the loop's claims check leases and timers.
        """
        now, slots = self.queue.clock.boot(), self.slots
        if (
            self._stopping
            or self._wake_event is None
            or slots.busy > slots.count
            or now - self._looked > MAINTENANCE_INTERVAL
        ):
            return None
        if self._turn is not None:  # claims at the same time would all take the same turn
            return None
        if slots.waiting or self._suspects.is_careful():  # the slot of the run that ends is not free yet
            return None
        return self.queue.claim_request(
            self.config.worker_id, self.config.lease_ttl_seconds, self._registry().keys(), ready_only=True
        )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unstopped.discard(task)
        execution = self._executions.pop(task, None)
        if execution is None:
            return
        self._forget(execution)
        if task.cancelled() and not execution.started:
            # Cancelled before it ran, as when the event loop ends: its own code could not release the run.
            _ = self._follow(start_helper(execution.release_unstarted()), execution)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(execution, error)

    def _report(self, execution: RunExecution, error: BaseException) -> None:
        label, extra = execution.claim.label, about_run(*execution.logged)
        if isinstance(error, OUTAGE):  # the worker leaves: otherwise the run would wait for its store
            self._outage.noticed(error)
            log.warning("%s did not stop before the worker ended; %s", label, _UNRELEASED, extra=extra)
        elif not isinstance(error, UNREADABLE):
            log.error(
                "execution of %s failed: %s; it is claimed again later", label, error, exc_info=error, extra=extra
            )
        elif (now := self.queue.clock.boot()) - self._reported >= UNREADABLE_INTERVAL:
            # There may be many such runs, and each is claimed every few seconds.
            self._reported = now
            log.error("%s is left to a worker that can read it: %s", label, error, extra=extra)

    def _forget(self, execution: RunExecution) -> None:
        self._suspects.ended(execution)
        if execution.control.without_slot:
            self._wake_for_free_slot()
        else:
            self.slots.release(execution.control)

    def _wake_for_free_slot(self) -> None:
        if self.slots.busy < self.slots.count:  # else the commit that ended a run claimed another for its slot
            self.wake()

    def wake(self) -> None:
        """Have the loop claim again, because a slot is free or a run arrived."""
        if self._wake_event is not None:
            self._wake_event.set()

    # -- the loop

    async def loop(self, poll_interval: float, concurrency: int, handle_signals: bool) -> None:
        """Claim and execute runs until the worker is stopped; see `AgentRunner.run_loop`."""
        if self._closed:
            raise StorageClosed("this runner was closed. Create another runner")
        if self._wake_event is not None and self._loop is not None and not self._loop.is_closed():
            fix = "Raise its concurrency, or create another runner"
            raise must("run_loop", "run once per runner", Shown("a second call"), fix)
        checked_int("concurrency", concurrency)
        if not is_number(poll_interval) or not poll_interval > 0:
            raise must("poll_interval", "be a number of seconds above 0", poll_interval)
        self.slots.resize(concurrency)
        self._loop, wake, ended = asyncio.get_running_loop(), asyncio.Event(), Future[None]()
        self._wake_event, self._loop_ended, self._poll = wake, ended, poll_interval
        shared = SHARED.stopping(self) if handle_signals else contextlib.nullcontext()
        with shared, contextlib.ExitStack() as undo:
            try:
                if (stop_listening := self.queue.listen("work", self._wake_from_thread)) is not None:
                    undo.callback(stop_listening)
                self._blocking_claims = self.queue.blocking_claims(self.start_delivered)
                self._process.slots = concurrency
                try:
                    await self._work(wake)
                finally:
                    await self._leave_lifespans()
            finally:
                # Not at the start: `stop()` may have been called before the first iteration.
                self._wake_event, self._stopping, self._hurry = None, False, False
                self.slots.resize()
                ended.set_result(None)

    async def _work(self, wake: asyncio.Event) -> None:
        try:
            while not self._stopping:
                wake.clear()
                if self._outage.is_full or not self._process.seconds_left():
                    await self._process.renew()  # shows whether the store can be written
                if not await self.claim_for_free_slots():
                    await self._sleep(wake, self._poll)
            await self._finish()
        except (Exception, asyncio.CancelledError):
            # The loop was cancelled or failed: active runs are released without waiting for the grace.
            self._stopping = self._hurry = True
            await self._finish()
            raise

    async def _finish(self) -> None:
        if self._busy is not None:
            self._busy.cancel()
        self._process.slots = 0  # a heartbeat during the grace shows that nothing is claimed any more
        await self.stop_claiming()
        await self.drain()
        await self._process.leave()

    async def stop_claiming(self) -> None:
        """Withdraw the claims that wait in the store, so that nothing is claimed from now on."""
        claims, self._blocking_claims = self._blocking_claims, None
        if claims is not None:
            await claims.close()

    async def claim_for_free_slots(self) -> bool:
        """Claim runs for the free slots; return True if all of them were filled, so that more runs may be ready."""
        free = self._suspects.claimable(min(self.slots.free, MAX_CLAIM))
        self._claims_due = False
        if free <= 0:
            if self.slots.free <= 0 and self.queue.clock.boot() - max(self._looked, self._ticked) >= self._poll:
                await self._claim_schedules()
            return False
        with self.slots.reserve(free):
            return await self._claim_for(free)

    async def _claim_schedules(self) -> None:
        """Claim schedules, which need no slot."""
        self._ticked = self.queue.clock.boot()
        self._start_all(await self._claimed(self._claim_of([SCHEDULE], MOST_AT_ONCE)) or [])

    async def _claimed(self, claim: Awaitable[list[RunRow]]) -> list[RunRow] | None:
        """Return the rows of a claim; None after an error that may pass."""
        try:
            return await claim
        except OUTAGE as error:
            self._outage.noticed(error)
        except AgentRuntimeError as error:
            # Polling again would fail forever in a store that is closed or was moved.
            is_over = isinstance(error, StorageClosed) or (isinstance(error, StorageMoved) and error.to is not None)
            if is_over and not self._stopping:
                raise
            if not is_over:
                log.warning("claiming runs failed: %s; retrying", error)
        return None

    async def _claim_for(self, free: int) -> bool:
        self._looked, began = self.queue.clock.boot(), self.queue.clock.monotonic()
        rows = await self._claimed(self._claim(free))
        if rows is None:
            return False
        self._outage.answered(wrote=bool(rows) or not self.queue.keeps_processes, began=began)
        self._claims_due = bool(self._registry().keys())
        await self._start_claimed(rows)  # also after `stop()`: claimed runs must be executed or released
        return bool(rows) and len(rows) == free and not self._stopping

    async def _sleep(self, wake: asyncio.Event, poll_interval: float) -> None:
        """Wait until a run may be claimable: for a notification, a free slot, a due run, or the next poll."""
        if self.slots.free <= 0:  # only schedules can be claimed before a slot is free
            if self._busy is None or self._busy.done():  # not a timer for each run that ends
                self._busy = start_helper(self.queue.clock.sleep_for(poll_interval))
                self._busy.add_done_callback(lambda busy: None if busy.cancelled() else wake.set())
            await wake.wait()
            return
        # In a separate task, so that runs which were just claimed start before the store is read.
        timer = start_helper(self._until_due(poll_interval))
        timer.add_done_callback(lambda timer: None if timer.cancelled() else wake.set())
        try:
            await wake.wait()
        finally:
            timer.cancel()
        if timer.done() and not timer.cancelled():
            timer.result()

    async def _until_due(self, poll_interval: float) -> None:
        clock, seconds = self.queue.clock, min(poll_interval, max(self._process.seconds_left(), 0.001))
        if self._suspects.is_careful():
            seconds = min(seconds, ISOLATION_TIMEOUT)
        if self._claims_due:  # after a failed claim, due runs would make the loop retry without a pause
            with contextlib.suppress(AgentRuntimeError):
                due = await self.queue.next_due()
                if due is not None:
                    seconds = min(seconds, max(due - clock.wall(), 0.001))
            seconds = min(seconds, max(self.queue.delayed_runs.seconds_left(), 0.001))
        await clock.sleep_for(seconds)

    def _wake_from_thread(self) -> None:
        if self._loop is not None and self.slots.busy < self.slots.count:
            call_in_loop(self._loop, self.wake)

    # -- stopping

    def stop(self) -> None:
        """Stop claiming and drain; a second call skips the grace. Thread-safe."""
        self._hurry = self._stopping
        self._stopping = True
        if self._loop is not None:
            call_in_loop(self._loop, self.wake)

    async def close(self) -> None:
        """Release active runs and end the loop, so that nothing is claimed any more."""
        self._closed = True
        # Tasks of a closed event loop never end, and cannot be cancelled: their leases expire.
        self._executions = {
            task: execution for task, execution in self._executions.items() if not task.get_loop().is_closed()
        }
        running, grace = self._wake_event is not None, self.config.grace_seconds
        if running and not self._stopping:  # a second call would skip the grace
            self.stop()
        ended, loop = self._loop_ended, self._loop
        if not running or ended is None or loop is None or loop.is_closed():
            await self.drain()
            return
        at_most = SHUTDOWN_SECONDS + RELEASE_SECONDS + 0.5
        if loop is asyncio.get_running_loop():
            await self.drain()
        else:
            at_most += grace  # the thread of that loop stops its tasks
        # At most so long: the caller may be a run of this loop, or a run may not end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await asyncio.shield(asyncio.wrap_future(ended))

    async def drain(self) -> None:
        """Let active runs finish for `grace_seconds`, then release them."""
        grace = self.config.grace_seconds
        clock = self.queue.clock
        self.slots.stop_waiting()
        until = clock.monotonic() + grace
        while self._executions and not self._hurry and clock.monotonic() < until:
            await asyncio.wait(self._executions, timeout=min(0.1, grace), return_when=asyncio.FIRST_COMPLETED)
        until = clock.monotonic() + SHUTDOWN_SECONDS
        if self._firing:
            await asyncio.wait(self._firing, timeout=RELEASE_SECONDS)
        while self._executions:
            # Repeated, because a run that ends may claim the next run before.
            for execution in self._executions.values():
                if not execution.control.release_requested:
                    execution.claim.request_release()
            left = max(until - clock.monotonic(), 0)
            done, _ = await asyncio.wait(self._executions, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await self._cancel_all()

    async def _cancel_all(self) -> None:
        """Release the runs that have not stopped. What their code still does is refused by the stores."""
        left, self._executions = self._executions, {}
        self._unstopped.update(left)
        releases = [start_helper(execution.claim.try_release()) for execution in left.values()]
        try:
            await asyncio.wait(releases, timeout=RELEASE_SECONDS)
        finally:
            is_away = self._outage.since is not None
            for execution in left.values():
                agent = execution.control.task
                log.warning(
                    "%s did not stop when it was cancelled; %s. It is in %s",
                    execution.claim.label,
                    _UNRELEASED if is_away else "released to the queue",
                    "its end" if agent is None or agent.done() else place_of(agent),
                    extra=about_run(*execution.logged),
                )
                execution.control.stop(Stop.LOST)
                execution.control.close()
                execution.claim.unregister()
                self._forget(execution)
            for task in (*releases, *left):
                task.cancel()


class _Lifespan:
    """One entered lifespan.

    A separate task enters and leaves it, because the task of a run ends earlier, and because cancel scopes, such as the
    scopes of anyio, must be left by the task that entered them.
    """

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.runs = 0  # which use it now
        self.ended: Future[None] = Future()
        self._leave = asyncio.Event()
        self._entered: asyncio.Future[None] = self.loop.create_future()
        self._task = start_helper(self._hold())
        self._task.add_done_callback(self._end)

    @property
    def over(self) -> bool:
        """Whether no run may enter it any more."""
        return self._leave.is_set() or self.ended.done()

    async def entered(self) -> None:
        """Wait until it is entered; raise what entering it raised. A cancelled caller leaves the others waiting."""
        await asyncio.shield(self._entered)

    def leave(self) -> None:
        """Have its task leave it, from any thread."""
        call_in_loop(self.loop, self._leave.set)

    def cancel(self) -> None:
        """Cancel its task, from any thread."""
        call_in_loop(self.loop, self._task.cancel)

    async def _hold(self) -> None:
        key = self.agent.key
        try:
            async with _manager(self.agent):
                if not self._entered.done():
                    self._entered.set_result(None)
                # The end of the event loop cancels this task: code after the `yield` is then executed too.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._leave.wait()
                self._leave.set()
        except BaseException as raised:
            if isinstance(
                error := contained(raised, f"lifespan() of agent {key!r}"), (GeneratorExit, KeyboardInterrupt)
            ):
                raise
            if not self._entered.done():
                self._refuse(error)
            else:
                log.error("leaving the lifespan of agent %r failed: %s", key, error, exc_info=error)

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._entered.cancel()
            return
        self._entered.set_exception(error)
        self._entered.exception()  # every run that waited for it may be gone

    def _end(self, _: asyncio.Task[None]) -> None:
        if not self._entered.done():  # cancelled before it began
            self._entered.cancel()
        self.ended.set_result(None)


class Lifespans:
    """The lifespans of the agents of one runner, each entered once per event loop.

    Args:
        grace: Returns how many seconds leaving one may take.
    """

    def __init__(self, grace: Callable[[], float]) -> None:
        self._grace = grace
        self._held: dict[tuple[asyncio.AbstractEventLoop, int], _Lifespan] = {}

    async def enter(self, agent: AgentRuntime) -> Callable[[], None] | None:
        """Wait until the lifespan of an agent is entered.

        Returns:
            What the run calls when it needs the lifespan no more; None for an agent without a lifespan.
        """
        given = getattr(type(agent), "lifespan", None)  # agents of other base classes have none
        if given is None or given is AgentRuntime.lifespan:
            return None
        key = (asyncio.get_running_loop(), id(agent))
        held = self._held.get(key)
        if held is None or held.over:
            self._held = {key: each for key, each in self._held.items() if not each.loop.is_closed()}
            held = self._held[key] = _Lifespan(agent)
        held.runs += 1
        try:
            await held.entered()
        except BaseException:
            held.runs -= 1
            raise

        def release() -> None:
            held.runs -= 1

        return release

    async def leave(self, *, idle_only: bool = False) -> None:
        """Leave the lifespans, the last first; each may take the grace, and is cancelled after that.

        Args:
            idle_only: Only lifespans of this event loop that no run uses.
        """
        if not self._held:  # a coroutine of `run_loop` may be closed when no event loop runs any more
            return
        here, grace = asyncio.get_running_loop(), self._grace()
        for key, held in reversed(list(self._held.items())):
            if idle_only and (held.runs or held.loop is not here):
                continue
            if self._held.get(key) is held:
                del self._held[key]
            if held.loop.is_closed():
                continue
            held.leave()
            if not await _ends(held, grace):
                log.warning("the lifespan of agent %r is not left after %g s: cancelled", held.agent.key, grace)
                held.cancel()
                await _ends(held, SHUTDOWN_SECONDS)


def _manager(agent: AgentRuntime) -> contextlib.AbstractAsyncContextManager[Any]:
    manager = agent.lifespan()
    if not isinstance(manager, contextlib.AbstractAsyncContextManager):
        fix = "Decorate it with contextlib.asynccontextmanager"
        raise must(f"lifespan() of agent {agent.key!r}", "return an async context manager", manager, fix)
    return manager


async def _ends(held: _Lifespan, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.shield(asyncio.wrap_future(held.ended))
    return held.ended.done()

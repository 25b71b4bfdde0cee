"""Wait in place, then park the run; leave its slot and regain it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from .._core.clock import Duration
from .._core.context_vars import start_helper
from .._core.log import log
from .._core.run_tasks import FIRST_PAUSE, RunTasks, scan
from ..queue.records import MailboxMessage, RowChanged, RunRow, RunUpdate
from .mailbox import MailboxReader
from .run_control import RunControl, Services
from .step import CANCEL_HOOK, CURRENT_STEP, StepScope
from .step_journal import RunJournal

T = TypeVar("T")

#: The outcome of a wait that reached its time limit.
TIMED_OUT: Final = object()

#: Returns the message that ends a wait, None while there is none.
Find = Callable[[], MailboxMessage | None]

#: What the tasks of a run join, and what of it is done.
Joins = tuple[frozenset[asyncio.Future[Any]], frozenset[asyncio.Future[Any]]]


class Parking:
    """The open waits of one run under one claim.

    A wait starts in place: it holds its claim, but not its slot of the worker. After `Services.park_after` seconds it
    parks the run, which ends the claim. A run leaves its slot, and is parked, only while none of its tasks works; the
    `Monitor` scans the tasks for that.
    """

    def __init__(
        self, journal: RunJournal, row: RunRow, services: Services, control: RunControl, mailbox: MailboxReader
    ) -> None:
        self._journal, self._row, self._services, self._control = journal, row, services, control
        self._mailbox = mailbox
        self._writer, self._clock = journal.writer, services.clock
        #: The tasks that are inside a wait: what ends it, and its time limit.
        self.active_waits: dict[asyncio.Task[Any], tuple[Find, Duration | None]] = {}
        #: Where time limits of waits end by the monotonic clock, by their ends in wall seconds.
        self._monotonic_ends = self._writer.queue.delayed_runs.wait_ends(row.run_id)
        self._idle_event: asyncio.Future[None] | None = None  # resolved by the next scan that finds the run waiting
        self._commits = 0  # ends of waits, and parks, that are being committed
        self._regaining_slot = 0  # tasks that wait for a slot of the worker
        self._releasing_claim = False
        self._around: dict[asyncio.Task[Any], set[StepScope]] = {}  # the steps around each wait that is inside a step
        self._warned = False  # that a wait inside a step holds the slot
        self._active_at = 0.0  # when a task of the run was last known to work, by the monotonic clock
        self._followed: set[asyncio.Future[Any]] = set()  # futures whose end leads to a scan
        self._joins: tuple[Joins, float] | None = None  # what tasks join, and since when, by the time of the loop

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Inside the block the run is not waiting: what it waited for is being committed."""
        self._commits += 1
        try:
            yield
        finally:
            self._commits -= 1
            self._request_scan()

    # -- waiting

    def limit(self, until: float, seconds: float) -> Duration:
        """Return the time limit of a wait that lasts so many seconds, and ends at `until` by the wall clock."""
        limit = Duration(self._clock, seconds, until, self._monotonic_ends.get(until))
        self._monotonic_ends[until] = limit.monotonic_end
        return limit

    async def wait(self, find: Find, limit: Duration | None, reason: str) -> Any:
        """Wait for a message, in place and then parked.

        Args:
            find: Returns the message once it is there. It is consumed before this returns.
            limit: The time limit, None for none.
            reason: What the run waits for, as the parked run shows it.

        Returns:
            The message, or `TIMED_OUT`.
        """
        task = self._enter(find, limit)
        try:
            return await self._wait_active(find, limit, reason)
        except asyncio.CancelledError:
            self._close(task)
            if self._journal.slot_released and not (self._control.cancel_requested or self._control.closed):
                await self.regain_slot()  # code of the run cancelled this wait, and works from now on
            raise
        finally:
            self._close(task)

    def can_park(self) -> bool:
        """Return whether a wait of the calling code may park the run: it is in no step, and in no `cancel` hook."""
        return not self._steps_around() and CANCEL_HOOK.get() is None

    async def join(self, child: Awaitable[T]) -> T:
        """Await a child run that this process executes. The run only waits for it, as for a child of a worker."""
        task = self._enter(lambda: None, None)
        self._request_scan()
        try:
            return await child
        finally:
            self._close(task)
            if self._journal.slot_released:
                self.reclaim_slot()

    def _enter(self, find: Find, limit: Duration | None) -> asyncio.Task[Any]:
        """Add a wait of the calling task."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self.active_waits[task] = (find, limit)
        if around := self._steps_around():
            self._around[task] = around
            self._count_time()
        self._journal.on_idle = self._request_scan
        return task

    def _close(self, task: asyncio.Task[Any]) -> None:
        """Remove the wait of that task."""
        if self.active_waits.pop(task, None) is None:
            return
        self._request_scan()
        if self._around.pop(task, None) is not None:
            self._count_time()
        if not self.active_waits:
            self._journal.on_idle = None  # else journal and parking refer to each other after the run
            self._control.resume_timer(self._clock.monotonic())
            self._services.monitor.here().forget(self)

    async def _wait_active(self, find: Find, limit: Duration | None, reason: str) -> Any:
        now, park_after = self._clock.monotonic, self._services.park_after
        around = self._steps_around()
        stays = park_after is None or around or CANCEL_HOOK.get() is not None
        park_at = None if park_after is None or stays else now() + park_after
        warn_at = None if park_after is None or not around or reason.startswith("child ") else now() + park_after
        while True:
            await self._mailbox.read()
            if self._control.closed:  # another wait parked the run
                await asyncio.get_running_loop().create_future()
            if self._journal.slot_released and self._has_finished(find, limit):
                await self.regain_slot()
            message = find()
            if message is not None:
                self._mailbox.consume(message)  # immediately: another wait may look for the same name during the commit
                return message
            left = None if limit is None else limit.left()
            if left is not None and left <= 0:
                return TIMED_OUT
            if warn_at is not None and now() >= warn_at:
                warn_at = None
                self._warn_of_slot(reason)
            if warn_at is not None:
                early = warn_at - now()
                await self._wait_in_place(early if left is None else min(left, early))
            elif park_at is None:
                await self._wait_in_place(left)
            elif (early := park_at - now()) > 0:
                await self._wait_in_place(early if left is None else min(left, early))
            elif not self._only_waits():
                await self._wait_in_place(left, or_idle=True)
            elif self._journal.unconfirmed.pending:
                await self._journal.unconfirmed.resolve()
            else:
                cursor = self._mailbox.cursor
                await self._park(reason)
                await self._mailbox.read()
                if self._mailbox.cursor == cursor:
                    park_at = None  # no new message: the run is being cancelled, and the heartbeat will report it

    def _steps_around(self) -> set[StepScope]:
        """Return the steps of the run that the calling code is in. They cannot be parked."""
        found: set[StepScope] = set()
        scope = CURRENT_STEP.get()
        while scope is not None:
            if scope.token is self._journal.token and not scope.between_steps:
                found.add(scope)
            scope = scope.outer
        return found

    def _count_time(self) -> None:
        """Suspend the time limit of the run while each of its running steps is inside a wait."""
        around = {scope for scopes in self._around.values() for scope in scopes}
        if around and len(around) >= self._journal.running_steps:
            self._control.pause_timer(self._clock.monotonic())
        elif not self._journal.slot_released and not self._regaining_slot:
            self._control.resume_timer(self._clock.monotonic())

    def _warn_of_slot(self, reason: str) -> None:
        """Log, once for each claim, that a wait inside a step holds the slot of the worker."""
        scope = CURRENT_STEP.get()
        if not self._warned and scope is not None:
            self._warned = True
            log.warning(
                "run %s waits for %.120s inside %.120s: it is not parked, and holds a slot of its worker. To wait "
                "without a slot, set requires_confirmation of the tool, or ask between steps or in on_tool_call",
                self._row.run_id,
                reason,
                f"step {scope.name!r}",
            )

    def _has_finished(self, find: Find, limit: Duration | None) -> bool:
        return find() is not None or (limit is not None and limit.left() <= 0)

    async def _wait_in_place(self, seconds: float | None, *, or_idle: bool = False) -> None:
        """Return when a message arrives, after `seconds`, or when the run only waits.

        It may return early, after a jump of the wall clock.
        """
        helpers: list[asyncio.Task[Any]] = [start_helper(self._mailbox.arrived.wait())]
        if seconds is not None:
            helpers.append(start_helper(self._sleep_until(self._clock.monotonic() + seconds)))
        ends: set[asyncio.Future[Any]] = {*helpers}
        if or_idle:
            if self._idle_event is None:
                self._idle_event = asyncio.get_running_loop().create_future()
            ends.add(self._idle_event)
        self._request_scan()
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for helper in helpers:
                helper.cancel()

    async def _sleep_until(self, at: float) -> None:
        """Sleep until `at` by the monotonic clock, which may have passed it before this task started."""
        if (left := at - self._clock.monotonic()) > 0:
            await self._clock.sleep_for(left)

    # -- whether the run only waits: the `TaskOwner` of the monitor

    @property
    def run(self) -> RunControl:
        """What the contexts of the run's tasks name."""
        return self._control

    @property
    def is_open(self) -> bool:
        """Whether the run is executed here while waits are open."""
        return bool(self.active_waits) and self._control.tracked and not self._control.closed

    def may_release_slot(self) -> bool:
        """Return whether the run can be waiting at all.

        It cannot while a step is in flight, the end of a wait is being committed, the run waits for a slot, or a wait
        ended and its task did not continue yet.
        """
        if not self.is_open or self._journal.running_steps or self._commits or self._regaining_slot:
            return False
        return not any(
            _is_cancelled(task) or self._has_finished(find, limit) for task, (find, limit) in self.active_waits.items()
        )

    def waiting_tasks(self) -> Collection[asyncio.Task[Any]]:
        """Return the tasks that are inside a wait of the run."""
        return self.active_waits.keys()

    def check_tasks(self, tasks: RunTasks) -> bool:
        """Take the outcome of a scan; False to be scanned again soon."""
        if not tasks.only_wait(self._main_task):
            self._active_at, self._joins = self._clock.monotonic(), None
            if self._journal.slot_released:
                self.reclaim_slot()
            self._follow(tasks.working)
            return False
        self._follow(tasks.joined)
        now, joins = asyncio.get_running_loop().time(), _joins(tasks)
        if self._joins is None or self._joins[0] != joins:
            self._joins = joins, now
        if not self._joins_are_stable(tasks, now):
            return False
        self._release_slot()
        if self._idle_event is not None:
            self._idle_event.set_result(None)
            self._idle_event = None
        return True

    def _only_waits(self) -> bool:
        """Return whether the run only waits at this moment."""
        if not self.may_release_slot():
            return False
        loop = asyncio.get_running_loop()
        tasks = scan(loop, {self._control: self.waiting_tasks()})[self._control]
        return tasks.only_wait(self._main_task) and self._joins_are_stable(tasks, loop.time())

    @property
    def _main_task(self) -> asyncio.Task[Any] | None:
        """The task that must wait: the main task of the run, or after its end a task of the `cancel` hook."""
        task = self._control.task
        in_hook = self._control.cancel_hook is not None and task is not None and task.done()
        return next(iter(self.active_waits), None) if in_hook else task

    def _joins_are_stable(self, tasks: RunTasks, now: float) -> bool:
        """Return False if a task may be about to continue, because some of what it joins ended a moment ago."""
        if not tasks.ended:
            return True
        return self._joins is not None and self._joins[0] == _joins(tasks) and now - self._joins[1] >= FIRST_PAUSE / 2

    def _request_scan(self) -> None:
        """Have the tasks of the run scanned, because one entered or left a wait or something else of the run ended."""
        if self.is_open:
            self._active_at = self._clock.monotonic()
            self._services.monitor.here().request(self)

    def _follow(self, futures: Iterable[asyncio.Future[Any]]) -> None:
        """Have all tasks scanned when any of these ends."""
        for future in futures:
            if future not in self._followed:
                self._followed.add(future)
                future.add_done_callback(self._future_done)

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        self._followed.discard(future)
        self._request_scan()

    # -- the slot of the worker

    def _release_slot(self) -> None:
        """Free the slot and pause the time limit, because the run only waits."""
        if not self._journal.slot_released:
            self._journal.slot_released = True
            self._control.pause_timer(self._active_at)
            if self._services.slots is not None:
                self._services.slots.release(self._control)

    def reclaim_slot(self) -> None:
        """Count the run as active again, even if no slot is free: its code runs already."""
        self._journal.slot_released = False
        self._control.resume_timer(self._clock.monotonic())
        if self._services.slots is not None:
            self._services.slots.reclaim(self._control)

    async def regain_slot(self) -> None:
        """Wait for a free slot. If there is none for long, the run is released to the queue and this never returns."""
        control, slots = self._control, self._services.slots
        if CANCEL_HOOK.get() is not None:  # a hook that began is not released
            self.reclaim_slot()
            return
        control.pause_timer(self._clock.monotonic())
        self._regaining_slot += 1
        try:
            if slots is not None and not await slots.regain(control):
                await self._release_claim()
        finally:
            self._regaining_slot -= 1
            if not control.without_slot:
                self._journal.slot_released = False
            if not control.without_slot or not self.active_waits:
                control.resume_timer(self._clock.monotonic())
            self._request_scan()

    # -- ends of the claim

    async def _park(self, reason: str) -> None:
        """Park the run until a message arrives or the first of its waits reaches its time limit.

        Returns only if a message or a request to cancel arrived before the commit.
        """
        limits = [limit for _, limit in self.active_waits.values() if limit is not None]
        ends = [limit.until for limit in limits]
        if self._row.deadline is not None:
            ends.append(self._row.deadline)
        due = min(ends, default=0.0)
        update = self._run_update("waiting", reason)._replace(due_at=due, cursor=self._mailbox.cursor)
        try:
            await self._end_claim(update, limits)
        except RowChanged:
            self._writer.queue.delayed_runs.forget(self._row.run_id)
            await self._writer.status("running")

    async def _release_claim(self) -> None:
        """Release the run to the queue as pending: what it waited for is there."""
        if self._releasing_claim:  # by another wait
            await asyncio.get_running_loop().create_future()
        self._releasing_claim = True
        try:
            await self._end_claim(self._run_update("pending", "handed back"))
        finally:
            self._releasing_claim = False

    def _run_update(self, status: str, reason: str) -> RunUpdate:
        update = self._writer.queue.unchanged_update(self._row, self._row.claim_id)
        return update._replace(status=status, parked=1, reason=reason)

    async def _end_claim(self, update: RunUpdate, limits: Sequence[Duration] = ()) -> None:
        self._writer.queue.delayed_runs.remember_waits(self._row.run_id, update.claim_id, limits)
        with self.committing():
            await self._writer.update_run(update)
        control = self._control
        control.parked = True
        control.close()
        control.cancel_task()
        await asyncio.get_running_loop().create_future()


def _joins(tasks: RunTasks) -> Joins:
    return frozenset(tasks.joined), frozenset(tasks.ended)


def _is_cancelled(task: asyncio.Task[Any]) -> bool:
    """Return whether a task was cancelled and did not continue yet."""
    awaited = task._fut_waiter  # type: ignore[attr-defined]
    return bool(task._must_cancel) or (awaited is not None and awaited.cancelled())  # type: ignore[attr-defined]

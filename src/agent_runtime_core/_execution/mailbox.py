"""The mailbox of a run, and waiting for what comes into it: in place at first, then parked, so that a run which waits
for days holds no worker."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, cast

from .._core.codec.json import MAX_WHOLE, encode
from .._core.context_vars import start_helper
from .._core.run_tasks import FIRST_PAUSE, RunTasks, scan
from .._journal.record import Record
from ..queue.records import MailboxMessage, RowChanged, RunRow, RunUpdate
from ..state.base import APPROVED
from .effects import effect_row
from .run_control import RunControl, Services
from .run_writer import OUTCOME_UNKNOWN
from .step_journal import RunJournal
from .step_scope import CURRENT_STEP

#: What a wait comes to whose time is over.
TIMED_OUT: Final = object()

_ANSWER = "arc.answer:"

#: What the tasks of a run join, and what of it has ended.
Joins = tuple[frozenset[asyncio.Future[Any]], frozenset[asyncio.Future[Any]]]


def answer_id(request_id: str, message_id: str | None = None) -> str:
    """The id of a message that answers this question and no other."""
    return f"{_ANSWER}{request_id}" if message_id is None else f"{_ANSWER}{request_id}:{message_id}"


def answered_request(msg_id: str) -> str | None:
    """The question that a message with this id answers; None for one that may answer any."""
    return msg_id.removeprefix(_ANSWER).partition(":")[0] if msg_id.startswith(_ANSWER) else None


class Mailbox:
    """The messages to one run, as one of its claims takes them, and the waits for them."""

    def __init__(self, book: RunJournal, row: RunRow, services: Services, place: RunControl) -> None:
        self._book, self._row, self._services, self._place = book, row, services, place
        self._clock = services.clock
        self._ledger = book.writer
        self._unread: dict[tuple[str, str], deque[MailboxMessage]] = defaultdict(
            deque
        )  # what no wait took yet, by kind and name
        self._cursor = 0
        self._looking = asyncio.Lock()
        #: The open waits by the task that is inside: see `_wait`.
        self._active_waits: dict[asyncio.Task[Any], tuple[Callable[[], MailboxMessage | None], float | None]] = {}
        self._writing = 0  # ends of waits, and parks, that are being committed
        self._returning = 0  # tasks that wait for a slot of the run
        self._active_at = 0.0  # when code of the run was last known to work, by the boot clock
        self._parking_when_idle: list[asyncio.Future[None]] = []  # waits that park the run as soon as it only waits
        self._followed: set[asyncio.Future[Any]] = set()  # after whose end the tasks are scanned
        self._joins: tuple[Joins, float] | None = None  # what tasks join, and since when, by the time of the loop
        self._given_back = False
        self._rejected: set[int] = set()  # messages that were told of as no answer
        #: Messages that went to waits before this claim.
        self._used = {
            mail
            for record in book.view.completed.values()
            if record.info is not None and (mail := _consumed_number(record))
        }

    # -- records of waits

    async def _replayed(self, name: str, key: str) -> Record | None:
        book = self._book
        if book.unconfirmed.pending:
            await book.unconfirmed.resolve()
        record = book.view.completed.get((name, key))
        if record is not None:
            book.advance(record)
        return record

    async def _begin(self, name: str, key: str, seconds: float | None) -> float | None:
        """When the wait is over at the latest: as first recorded, or from now."""
        book = self._book
        if (name, key) in book.view.started:
            return book.view.wait_deadlines.get((name, key))
        until = None if seconds is None else self._clock.wall() + seconds
        record = book.records.started(name, key, quiet=True, info={"until": until, **self._task_info()})
        # For the next try of the step that this wait is in, too.
        book.view.started[name, key], book.view.wait_deadlines[name, key] = record.seq, until
        await self._ledger.buffer(record)
        return until

    def _task_info(self) -> dict[str, Any]:
        return {"beside": True} if self._book.in_child_task() else {}

    async def _end(
        self,
        name: str,
        key: str,
        value: Any,
        mail: MailboxMessage | None = None,
        *,
        late: bool = False,
        mark: str | None = None,
        approval: str | None = None,
    ) -> Record:
        """Record what a wait has come to; `approval` is the digest of its details, if it is one that was answered."""
        book = self._book
        info: dict[str, Any] = {"mail": mail.seq} if mail is not None else {"late": True} if late else {}
        if approval is not None:
            info["approval"] = approval
            self._ledger.effects[name, key] = effect_row(book, name, key, approval, APPROVED)
        record = book.value_record(name, key, encode(value, max_bytes=MAX_WHOLE), encode(info) if info else None, mark)
        self._writing += 1
        try:
            await book.write((record,), (), CURRENT_STEP.get())
        except BaseException as error:
            if mail is not None and not isinstance(error, OUTCOME_UNKNOWN):
                self._return(mail)
            raise
        finally:
            self._writing -= 1
            self._changed()
        book.view.started.pop((name, key), None)
        book.view.wait_deadlines.pop((name, key), None)
        book.advance()
        return book.view.completed[name, key]

    # -- the mailbox

    async def _read_new(self) -> None:
        async with self._looking:  # who came first looks first, and nothing is read twice
            heard, new = self._place.mail, None
            heard.clear()
            try:
                new = await self._ledger.queue.mail(self._row.run_id, self._cursor)
            finally:
                if new is None or new:  # another wait may just have looked in vain, and is about to listen
                    heard.set()
            for mail in new:
                if mail.seq not in self._used:
                    self._unread[mail.kind, mail.name].append(mail)
                self._cursor = mail.seq

    def _find(
        self, kind: str, name: str, fits: Callable[[MailboxMessage], bool] = lambda mail: True
    ) -> MailboxMessage | None:
        return next((mail for mail in self._unread.get((kind, name), ()) if fits(mail)), None)

    def _consume(self, mail: MailboxMessage) -> None:
        self._unread[mail.kind, mail.name].remove(mail)

    def _return(self, mail: MailboxMessage) -> None:
        """Have a message that was taken be found again, in its turn."""
        there = self._unread[mail.kind, mail.name]
        there.insert(bisect([each.seq for each in there], mail.seq), mail)

    # -- waiting itself

    async def _wait_for_message(
        self, found: Callable[[], MailboxMessage | None], until: float | None, reason: str
    ) -> Any:
        """Until there is such a message, or `until` (wall seconds): the message, or LATE."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._active_waits[task] = (found, until)
        self._book.on_idle = self._changed
        try:
            return await self._wait_registered(found, until, reason)
        except asyncio.CancelledError:
            self._close(task)
            if self._book.slot_released and not (self._place.cancel_requested or self._place.closed):
                await self.regain_slot()  # code of the run cancelled this wait, and works from now on
            raise
        finally:
            self._close(task)

    def _close(self, task: asyncio.Task[Any]) -> None:
        """The wait of that task has ended."""
        if self._active_waits.pop(task, None) is None:
            return
        self._changed()
        if not self._active_waits:
            self._place.resume_timer(self._clock.boot())
            self._services.monitor.here().forget(self)

    async def _wait_registered(
        self, found: Callable[[], MailboxMessage | None], until: float | None, reason: str
    ) -> Any:
        boot, park_after = self._clock.boot, self._services.park_after
        park_at = None if park_after is None or CURRENT_STEP.get() is not None else boot() + park_after
        while True:
            await self._read_new()
            if self._place.closed:  # another wait has parked the run
                await asyncio.get_running_loop().create_future()
            if self._book.slot_released and self._has_finished(found, until):
                await self.regain_slot()
            mail = found()
            if mail is not None:
                self._consume(mail)  # at once: another wait may look for one of that name while this is recorded
                return mail
            left = None if until is None else until - self._clock.wall()
            if left is not None and left <= 0:
                return TIMED_OUT
            if park_at is None:
                await self._pause(left)
            elif (early := park_at - boot()) > 0:
                await self._pause(early if left is None else min(left, early))
            elif not self._only_waits():
                await self._pause(left, or_idle=True)
            elif self._book.unconfirmed.pending:
                await self._book.unconfirmed.resolve()
            else:
                cursor = self._cursor
                await self._park(reason)
                await self._read_new()
                if self._cursor == cursor:
                    park_at = None  # no news, so it is being cancelled: the heart is about to say so

    def _has_finished(self, found: Callable[[], MailboxMessage | None], until: float | None) -> bool:
        return found() is not None or (until is not None and until <= self._clock.wall())

    async def _pause(self, seconds: float | None, *, or_idle: bool = False) -> None:
        """Return when mail comes, after `seconds` on the injected clock, or when the run only waits."""
        helpers: list[asyncio.Task[Any]] = [start_helper(self._place.mail.wait())]
        if seconds is not None:
            helpers.append(start_helper(self._until(self._clock.boot() + seconds)))
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if or_idle:
            self._parking_when_idle.append(idle)
        self._changed()
        try:
            await asyncio.wait({*helpers, idle}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in helpers:
                task.cancel()
            if idle in self._parking_when_idle:
                self._parking_when_idle.remove(idle)

    # -- whether the run only waits; see `run_tasks`

    @property
    def run(self) -> RunControl:
        """What the contexts of the run's tasks name."""
        return self._place

    @property
    def is_open(self) -> bool:
        """Whether the run is driven here and has open waits."""
        return bool(self._active_waits) and self._place.tracked and not self._place.closed

    def may_release_slot(self) -> bool:
        """Return whether the run can be waiting at all.

        It cannot while a step is in flight, an end of a wait is being recorded, the run comes back to a slot, or a
        wait has ended and its task has not continued yet.
        """
        if not self.is_open or self._book.running_steps or self._writing or self._returning:
            return False
        return not any(
            _is_cancelled(task) or self._has_finished(found, until)
            for task, (found, until) in self._active_waits.items()
        )

    def waiting_tasks(self) -> Collection[asyncio.Task[Any]]:
        """Return the tasks that are inside a wait of the run."""
        return self._active_waits.keys()

    def check_tasks(self, tasks: RunTasks) -> bool:
        """Take the outcome of a scan; False to be scanned again soon."""
        if not tasks.only_wait(self._place.task):
            self._active_at, self._joins = self._clock.boot(), None
            if self._book.slot_released:
                self._reclaim_slot()
            self._follow(tasks.working)
            return False
        self._follow(tasks.joined)
        now, joins = asyncio.get_running_loop().time(), _joins(tasks)
        if self._joins is None or self._joins[0] != joins:
            self._joins = joins, now
        if not self._joins_are_stable(tasks, now):
            return False
        self._release_slot()
        for idle in self._parking_when_idle:
            if not idle.done():
                idle.set_result(None)
        self._parking_when_idle.clear()
        return True

    def _only_waits(self) -> bool:
        """Return whether the run only waits at this moment."""
        if not self.may_release_slot():
            return False
        loop = asyncio.get_running_loop()
        tasks = scan(loop, {self._place: self.waiting_tasks()})[self._place]
        return tasks.only_wait(self._place.task) and self._joins_are_stable(tasks, loop.time())

    def _joins_are_stable(self, tasks: RunTasks, now: float) -> bool:
        """Return False if a task may be about to continue, because some of what it joins ended a moment ago."""
        if not tasks.ended:
            return True
        return self._joins is not None and self._joins[0] == _joins(tasks) and now - self._joins[1] >= FIRST_PAUSE / 2

    def _changed(self) -> None:
        """Have the tasks of the run scanned: a task entered a wait or left one, or something else ended."""
        if self.is_open:
            self._active_at = self._clock.boot()
            self._services.monitor.here().request(self)

    def _follow(self, futures: Iterable[asyncio.Future[Any]]) -> None:
        """Have the tasks scanned when one of these ends."""
        for future in futures:
            if future not in self._followed:
                self._followed.add(future)
                future.add_done_callback(self._future_done)

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        self._followed.discard(future)
        self._changed()

    def _release_slot(self) -> None:
        """The run only waits: its slot is free and its time limit is suspended."""
        if not self._book.slot_released:
            self._book.slot_released = True
            self._place.pause_timer(self._active_at)
            if self._services.slots is not None:
                self._services.slots.release(self._place)

    def _reclaim_slot(self) -> None:
        """Count the run as active again: a timer of its own code, for example, ended what its main task joined."""
        self._book.slot_released = False
        self._place.resume_timer(self._clock.boot())
        if self._services.slots is not None:
            self._services.slots.reclaim(self._place)

    async def regain_slot(self) -> None:
        """Have a slot again; where there is none for long, the run goes back to the queue, and this never returns."""
        place, slots = self._place, self._services.slots
        place.pause_timer(self._clock.boot())
        self._returning += 1
        try:
            if slots is not None and not await slots.regain(place):
                await self._release_claim()
        finally:
            self._returning -= 1
            if not place.without_slot:
                self._book.slot_released = False
            if not place.without_slot or not self._active_waits:
                place.resume_timer(self._clock.boot())
            self._changed()

    async def _until(self, at: float) -> None:
        """Until `at` by the boot clock, which may have moved on before this began."""
        if (left := at - self._clock.boot()) > 0:
            await self._clock.sleep(left)

    async def _park(self, reason: str) -> None:
        """Give the run back as waiting, until the first of its waits is over. Returns only if a message or a request
        to cancel came before the commit."""
        ends = [until for _, until in self._active_waits.values()]
        due = min((at for at in (*ends, self._row.deadline) if at is not None), default=0.0)
        try:
            await self._close_and_update(self._run_update("waiting", reason)._replace(due_at=due, cursor=self._cursor))
        except RowChanged:
            await self._ledger.status("running")

    async def _release_claim(self) -> None:
        """Give the run back as pending: what it waited for is there."""
        if self._given_back:  # by another wait
            await asyncio.get_running_loop().create_future()
        self._given_back = True
        try:
            await self._close_and_update(self._run_update("pending", "handed back"))
        finally:
            self._given_back = False

    def _run_update(self, status: str, reason: str) -> RunUpdate:
        row = self._row
        return self._ledger.queue.unchanged_update(row, row.claim_id)._replace(status=status, parked=1, reason=reason)

    async def _close_and_update(self, how: RunUpdate) -> None:
        self._writing += 1
        try:
            await self._ledger.update_run(how)
        finally:
            self._writing -= 1
            self._changed()
        place = self._place
        place.parked = place.closed = True
        place.cancel_task()
        await asyncio.get_running_loop().create_future()


def _joins(tasks: RunTasks) -> Joins:
    return frozenset(tasks.joined), frozenset(tasks.ended)


def _is_cancelled(task: asyncio.Task[Any]) -> bool:
    """Return whether a task was cancelled and has not continued yet."""
    awaited = task._fut_waiter  # type: ignore[attr-defined]
    return bool(task._must_cancel) or (awaited is not None and awaited.cancelled())  # type: ignore[attr-defined]


def _consumed_number(record: Record) -> int:
    info = record.info
    return int(json.loads(info).get("mail", 0)) if info is not None and '"mail"' in info else 0

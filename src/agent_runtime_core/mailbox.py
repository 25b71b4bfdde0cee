"""The mailbox of a run, and waiting for what comes into it: in place at first, then parked, so that a run which waits
for days holds no worker."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from ._json import MAX_WHOLE, encode
from .book import Book
from .journal.record import Record
from .ledger import UNHEARD
from .place import Place, Services
from .queue.row import Mail, Moved, RunRow, Settle
from .uses import FRAME

#: What a wait comes to whose time is over.
LATE: Final = object()

_ANSWER = "arc.answer:"


def answer_id(request_id: str, message_id: str | None = None) -> str:
    """The id of a message that answers this question and no other."""
    return f"{_ANSWER}{request_id}" if message_id is None else f"{_ANSWER}{request_id}:{message_id}"


def answered(msg_id: str) -> str | None:
    """The question that a message with this id answers; None for one that may answer any."""
    return msg_id.removeprefix(_ANSWER).partition(":")[0] if msg_id.startswith(_ANSWER) else None


class Mailbox:
    """The messages to one run, as one of its claims takes them, and the waits for them."""

    def __init__(self, book: Book, row: RunRow, services: Services, place: Place) -> None:
        self._book, self._row, self._services, self._place = book, row, services, place
        self._clock = services.clock
        self._ledger = book.ledger
        self._mail: dict[tuple[str, str], deque[Mail]] = defaultdict(deque)  # what no wait took yet, by kind and name
        self._cursor = 0
        self._looking = asyncio.Lock()
        self._under_way: dict[object, tuple[Callable[[], Mail | None], float | None]] = {}  # waits: see `_wait`
        self._writing = 0  # ends of waits, and parks, that are being committed
        self._rest = asyncio.Event()  # something that went on beside the waits has ended
        self._pausing = 0  # waits that wait in place
        self._leaving: asyncio.Task[None] | None = None  # while something goes on beside them
        self._given_back = False
        self._unfit: set[int] = set()  # messages that were told of as no answer
        #: Messages that went to waits before this claim.
        self._used = {mail for record in book.done.values() if record.info is not None and (mail := _consumed(record))}

    # -- records of waits

    async def _replayed(self, name: str, key: str) -> Record | None:
        book = self._book
        if book.questions:
            await book.settle()
        record = book.done.get((name, key))
        if record is not None:
            book.passed(record)
        return record

    async def _begin(self, name: str, key: str, seconds: float | None) -> float | None:
        """When the wait is over at the latest: as first recorded, or from now."""
        book = self._book
        if (name, key) in book.begun:
            return book.until.get((name, key))
        until = None if seconds is None else self._clock.wall() + seconds
        record = book.started(name, key, quiet=True, info={"until": until, **self._apart()})
        # For the next try of the step that this wait is in, too.
        book.begun[name, key], book.until[name, key] = record.seq, until
        await self._ledger.note(record)
        return until

    def _apart(self) -> dict[str, Any]:
        return {"beside": True} if self._book.is_apart() else {}

    async def _end(
        self, name: str, key: str, value: Any, mail: Mail | None = None, *, late: bool = False, mark: str | None = None
    ) -> Record:
        book = self._book
        info: dict[str, Any] = {"mail": mail.seq} if mail is not None else {"late": True} if late else {}
        record = book.noted(name, key, encode(value, max_bytes=MAX_WHOLE), encode(info) if info else None, mark)
        self._writing += 1
        try:
            await book.write((record,), (), FRAME.get())
        except BaseException as error:
            if mail is not None and not isinstance(error, UNHEARD):
                self._put_back(mail)
            raise
        finally:
            self._writing -= 1
            self._rest.set()
        book.begun.pop((name, key), None)
        book.until.pop((name, key), None)
        book.passed()
        return book.done[name, key]

    # -- the mailbox

    async def _look(self) -> None:
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
                    self._mail[mail.kind, mail.name].append(mail)
                self._cursor = mail.seq

    def _find(self, kind: str, name: str, fits: Callable[[Mail], bool] = lambda mail: True) -> Mail | None:
        return next((mail for mail in self._mail.get((kind, name), ()) if fits(mail)), None)

    def _take(self, mail: Mail) -> None:
        self._mail[mail.kind, mail.name].remove(mail)

    def _put_back(self, mail: Mail) -> None:
        """Have a message that was taken be found again, in its turn."""
        there = self._mail[mail.kind, mail.name]
        there.insert(bisect([each.seq for each in there], mail.seq), mail)

    # -- waiting itself

    async def _wait(self, found: Callable[[], Mail | None], until: float | None, reason: str) -> Any:
        """Until there is such a message, or `until` (wall seconds): the message, or LATE."""
        this = object()
        self._under_way[this] = (found, until)
        try:
            return await self._waited(found, until, reason)
        finally:
            del self._under_way[this]
            self._rest.set()
            if not self._under_way:
                self._place.goes_on(self._clock.boot())

    async def _waited(self, found: Callable[[], Mail | None], until: float | None, reason: str) -> Any:
        boot, park_after = self._clock.boot, self._services.park_after
        park_at = None if park_after is None or FRAME.get() is not None else boot() + park_after
        passed = -1
        while True:
            await self._look()
            if self._book.idle and self._is_over(found, until):
                await self.come_back()
            if self._place.sealed:  # another wait has parked the run
                await asyncio.get_running_loop().create_future()
            mail = found()
            if mail is not None:
                self._take(mail)  # at once: another wait may look for one of that name while this is recorded
                return mail
            left = None if until is None else until - self._clock.wall()
            if left is not None and left <= 0:
                return LATE
            if park_at is not None and (early := park_at - boot()) > 0:
                await self._pause(early if left is None else min(left, early))
            elif park_at is None or not self._idle():
                await self._pause(left, or_idle=park_at is not None)
            elif passed != self._book.boundary:
                # What was started together with this may wait too, and what has just ended beside it goes on.
                passed = self._book.boundary
                await _turns()
            elif self._book.questions:
                await self._book.settle()
            else:
                cursor = self._cursor
                await self._park(reason)
                await self._look()
                if self._cursor == cursor:
                    park_at = None  # no news, so it is being cancelled: the heart is about to say so

    def _idle(self) -> bool:
        """Whether the run does nothing but wait: no step is in flight, and no wait beside this one is over."""
        if self._book.running or self._writing:
            return False
        return not any(self._is_over(found, until) for found, until in self._under_way.values())

    def _is_over(self, found: Callable[[], Mail | None], until: float | None) -> bool:
        return found() is not None or (until is not None and until <= self._clock.wall())

    async def _until_idle(self) -> None:
        self._book.at_rest = self._rest.set
        while not self._idle():
            self._rest.clear()
            await self._rest.wait()
            await _turns()  # what comes after that which has ended

    async def _pause(self, seconds: float | None, *, or_idle: bool = False) -> None:
        """Until mail comes, or `seconds` on the injected clock, or the run does nothing but wait.

        The worker's slot is free while it does not.
        """
        waits: list[asyncio.Task[Any]] = [asyncio.ensure_future(self._place.mail.wait())]
        if seconds is not None:
            waits = [*waits, asyncio.ensure_future(self._until(self._clock.boot() + seconds))]
        if or_idle:
            waits = [*waits, asyncio.ensure_future(self._until_idle())]
        self._pausing += 1
        self._leave_slot()
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pausing -= 1
            if not self._pausing and self._leaving is not None:
                self._leaving.cancel()
            for task in waits:
                task.cancel()

    def _leave_slot(self) -> None:
        """Leave the slot of the run, now or as soon as it does nothing but wait."""
        book, slots = self._book, self._services.slots
        if book.idle or not self._pausing or self._leaving is not None:
            return
        if not self._idle():
            self._leaving = asyncio.ensure_future(self._until_idle())
            self._leaving.add_done_callback(self._left)
            return
        book.idle = True
        self._place.waits(self._clock.boot())
        if slots is not None:
            slots.leave(self._place)

    def _left(self, leaving: asyncio.Task[None]) -> None:
        self._leaving = None
        if leaving.cancelled() or leaving.exception() is None:
            self._leave_slot()

    async def come_back(self) -> None:
        """Have a slot again; where there is none for long, the run goes back to the queue, and this never returns."""
        place, slots = self._place, self._services.slots
        place.waits(self._clock.boot())
        try:
            if slots is not None and not await slots.back(place):
                await self._give_back()
        finally:
            if not place.away:
                self._book.idle = False
            if not place.away or not self._pausing:
                place.goes_on(self._clock.boot())
            self._leave_slot()

    async def _until(self, at: float) -> None:
        """Until `at` by the boot clock, which may have moved on before this began."""
        if (left := at - self._clock.boot()) > 0:
            await self._clock.sleep(left)

    async def _park(self, reason: str) -> None:
        """Give the run back as waiting, until the first of its waits is over. Returns only if a message or a request
        to cancel came before the commit."""
        ends = [until for _, until in self._under_way.values()]
        due = min((at for at in (*ends, self._row.deadline) if at is not None), default=0.0)
        try:
            await self._seal(self._how("waiting", reason)._replace(due_at=due, cursor=self._cursor))
        except Moved:
            await self._ledger.status("running")

    async def _give_back(self) -> None:
        """Give the run back as pending: what it waited for is there."""
        if self._given_back:  # by another wait
            await asyncio.get_running_loop().create_future()
        self._given_back = True
        try:
            await self._seal(self._how("pending", "handed back"))
        finally:
            self._given_back = False

    def _how(self, status: str, reason: str) -> Settle:
        row = self._row
        return Settle(
            row.claim_id, status, self._clock.wall(), parked=1, reason=reason,
            failures=row.failures, crashes=row.crashes, stalls=row.stalls, mark=row.mark,
        )  # fmt: skip

    async def _seal(self, how: Settle) -> None:
        self._writing += 1
        try:
            await self._ledger.settle(how)
        finally:
            self._writing -= 1
            self._rest.set()
        place = self._place
        place.parked = place.sealed = True
        place.stop()
        await asyncio.get_running_loop().create_future()


async def _turns() -> None:
    """Let other tasks of this loop go on: a few turns, for one task's end reaches another by way of callbacks."""
    for _ in range(5):
        await asyncio.sleep(0)


def _consumed(record: Record) -> int:
    info = record.info
    return int(json.loads(info).get("mail", 0)) if info is not None and '"mail"' in info else 0

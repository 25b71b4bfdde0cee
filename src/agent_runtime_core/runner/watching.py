"""Following runs from outside: until their ends, or event by event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextvars import Context
from functools import partial

from .._contexts import outside_run, start_soon
from .._core.per_loop import PerLoop, call_in_loop
from ..errors import StorageBusy, StorageClosed
from ..events.base import Event, EventBus
from ..queue.base import RunQueue
from ..queue.row import LIVE, RunRow

LOOK_EVERY = 1.0  # seconds between looks at runs that are waited for, behind the bell
PAUSE = 0.005  # seconds between looks at more than one of them, however often the bell rings,
PATIENCE = 4  # or so many times what the last look took,
EACH = 0.0002  # though no more for each of them: a store that was slow once is no reason to look at few of them late
AT_ONCE = 500  # runs that are asked about in one read

_End = asyncio.Future[RunRow]


class Watch:
    """Tells whoever waits for the end of a run of it, on every event loop, until it is closed."""

    def __init__(self, queue: RunQueue) -> None:
        self._queue = queue
        self._in: PerLoop[_Waits] = PerLoop(partial(_Waits, queue), _Waits.rest)
        self._lock = threading.Lock()
        self._closed = False

    async def until_ended(self, run_id: str, at_most: float | None = None) -> RunRow | None:
        """The run's row once it has ended; None after `at_most` seconds."""
        waits = self._here()
        end = waits.add(run_id)
        try:
            await asyncio.wait({end}, timeout=at_most)
            if end.done():
                return end.result()
        finally:
            waits.drop(run_id, end)
        row = await self._queue.must_get(run_id)
        return None if row.status in LIVE else row

    def _here(self) -> _Waits:
        with self._lock:
            if self._closed:
                raise closed()
            return self._in.here()

    def close(self) -> None:
        """Tell all who wait that nobody looks any more."""
        with self._lock:
            self._closed = True
        for loop, waits in self._in.items():
            call_in_loop(loop, waits.give_up)


def closed() -> StorageClosed:
    return StorageClosed("this runner was closed: make another one")


class _Waits:
    """The runs that are waited for in one event loop: one bell, one timer and one look at a time for all of them."""

    def __init__(self, queue: RunQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue, self._loop = queue, loop
        self._waiting: dict[str, set[_End]] = {}
        self._due: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._at_all = False  # whether the look that is due, or under way, is at all of them
        self._rung = False
        self._rested = self._poll = 0.0  # when the next look at all of them may be, and when it has to be
        self._timer: asyncio.TimerHandle | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._context: Context | None = None  # what is done for all of them is not done in that of who rings

    def add(self, run_id: str) -> _End:
        """What is told of the end of that run, which is looked at now, and whenever the bell rings."""
        if not self._waiting:
            self._rung, self._context = False, outside_run()
            self._stop_listening = self._queue.listen("done", self._ring)
            self._poll = self._loop.time() + LOOK_EVERY
        end: _End = self._loop.create_future()
        self._waiting.setdefault(run_id, set()).add(end)
        self._look((run_id,))
        self._set_timer()
        return end

    def drop(self, run_id: str, end: _End) -> None:
        ends = self._waiting.get(run_id, set())
        ends.discard(end)
        if not ends and self._waiting.pop(run_id, None) is not None and not self._waiting:
            self.rest()

    def give_up(self) -> None:
        for run_id in tuple(self._waiting):
            self._tell(run_id, closed())

    def rest(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._stop_listening is not None:
            self._stop_listening()
        self._timer = self._stop_listening = self._context = None

    # -- when to look

    def _ring(self) -> None:
        """Some run has ended; called from any thread."""
        if not self._rung:
            self._rung = True
            call_in_loop(self._loop, self._heard, context=self._context)

    def _heard(self) -> None:
        if self._waiting and self._rung and not self._at_all and self._loop.time() >= self._rested:
            self._look_at_all()
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        if not self._waiting or self._at_all:
            return  # it is set when that look is over
        at = self._rested if self._rung else self._poll
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look_at_all, context=self._context)

    def _look_at_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # What rings from now on may be behind what is read.
        self._timer, self._rung, self._at_all = None, False, True
        self._look(self._waiting)

    def _look(self, run_ids: Iterable[str]) -> None:
        self._due.update(run_ids)
        if self._due and (self._looking is None or self._looking.done()):
            looking = self._look_on()
            self._looking = start_soon(looking, name="agent-runtime-ends", context=self._context)
            self._looking.add_done_callback(self._looked)

    def _looked(self, looking: asyncio.Task[None]) -> None:
        if looking is self._looking and looking.cancelled():  # by whoever cancels all tasks there are, and goes on
            self._at_all, self._poll = False, self._loop.time() + LOOK_EVERY
            self._set_timer()

    # -- looking

    async def _look_on(self) -> None:
        while self._due:
            await self._look_once()

    async def _look_once(self) -> None:
        at_all, began = self._at_all, self._loop.time()
        due = [run_id for run_id in self._due if run_id in self._waiting]
        self._due.clear()
        for start in range(0, len(due), AT_ONCE):
            await self._read(due[start : start + AT_ONCE])
        if at_all:
            now = self._loop.time()
            pause = max(PAUSE, min(PATIENCE * (now - began), EACH * len(due))) if len(due) > 1 else 0.0
            self._rested, self._poll = now + min(pause, LOOK_EVERY), now + LOOK_EVERY
            self._at_all = False
            self._set_timer()

    async def _read(self, run_ids: Sequence[str]) -> None:
        if len(run_ids) == 1:
            await self._see(run_ids[0])
            return
        try:
            news = await self._queue.news(run_ids)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is for those who wait
            for run_id in run_ids:
                self._tell(run_id, error)
            return
        over = [run_id for run_id in run_ids if run_id not in news or news[run_id].status not in LIVE]
        await asyncio.gather(*map(self._see, over))

    async def _see(self, run_id: str) -> None:
        try:
            row = await self._queue.must_get(run_id)
        except Exception as error:  # noqa: BLE001 - the same
            self._tell(run_id, error)
            return
        if row.status not in LIVE:
            self._tell(run_id, row)

    def _tell(self, run_id: str, what: RunRow | Exception) -> None:
        ends = self._waiting.pop(run_id, None)
        if ends is None:
            return
        for end in ends:
            if end.done():
                continue
            if isinstance(what, Exception):
                end.set_exception(what)
                end.exception()  # who waited for it may be gone
            else:
                end.set_result(what)
        if not self._waiting:
            self.rest()


async def events_until_ended(watch: Watch, bus: EventBus, run_id: str, since: int) -> AsyncGenerator[Event, None]:
    """The run's events from `since` on, replayed and then live, until the run has ended."""
    events = bus.subscribe(run_id, since)
    ended = start_soon(_surely_ended(watch, run_id))
    upcoming: asyncio.Task[Event] | None = None
    cursor = since

    def over() -> bool:
        return ended.done() and ended.result() is None

    try:
        while True:
            upcoming = upcoming or start_soon(anext(events))
            await asyncio.wait({upcoming} if over() else {upcoming, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                if over() and cursor >= await bus.head(run_id):
                    return
                await asyncio.wait({upcoming})
            event, upcoming = upcoming.result(), None
            cursor = event.sequence + 1
            yield event
            if over() and cursor >= await bus.head(run_id):
                return
    finally:
        left = [ended] if upcoming is None else [ended, upcoming]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await events.aclose()


async def _surely_ended(watch: Watch, run_id: str) -> None:
    """Return once the run has ended: that the queue did not answer is no end."""
    while True:
        try:
            await watch.until_ended(run_id)
        except StorageBusy:
            await asyncio.sleep(LOOK_EVERY)
        else:
            return

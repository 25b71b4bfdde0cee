"""Subscriptions of one event loop: they share one reader for each run, and a bounded window of events.

A subscriber that is slower than the window reads the log for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakValueDictionary

from .._core.context_vars import start_helper
from ..errors import StorageClosed
from .event import PAGE_BYTES, Event, EventPage

WINDOW = 1024  # most events in the window of a run
WINDOW_BYTES = 262_144  # most bytes of payloads in the window, without the last page
PAGE = 512  # most events in one page

_SEQUENCE = attrgetter("sequence")


class EventSource(Protocol):
    """What subscriptions read: an event bus."""

    async def _page(self, run_id: str, since: int, limit: int) -> EventPage:
        """Return the next events from `since` on: at most `limit`, and the bytes of a page."""

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        """Return the sequence that the next event of each run will get."""

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after commits that added events, until the returned function is called."""


class End:
    """The end of a subscription, once a future is done. It wakes the subscriber."""

    __slots__ = ("after", "future", "waiter")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future: asyncio.Future[Any] = future
        #: The subscription ends after a read of the log with a greater number than this; None before that is known.
        self.after: int | None = None
        self.waiter: asyncio.Future[None] | None = None
        future.add_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        if self.waiter is not None:
            _call(self.waiter)

    def forget(self) -> None:
        """No longer wait for the future."""
        self.future.remove_done_callback(self._wake)


class RunFeed:
    """The events of one run for the subscribers of one event loop.

    The window contains each event from `floor` to `tail`, which is the sequence to read next. There is no reader task:
    one subscriber that is at the tail reads for all. If it is cancelled, another subscriber reads. The others wait
    until
    there are events.
    """

    def __init__(self, bus: EventSource, run_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.run_id = run_id
        self.followers = 0
        self.floor: int = -1
        self.tail: int = -1
        self.window: list[EventPage] = []
        self._last_at = -1  # the cursor of subscribers that have not read the last page of the window
        self._ends: list[int] = []  # the sequence after each page of the window
        self._count = self._weight = 0  # events and bytes in the window
        self.closed: bool = False
        self._bus = bus
        self._loop = loop
        self._unread = False
        self._reading = False
        self._reads = self._reads_done = 0  # numbers of the last read that began, and of the last that succeeded
        self._more = False  # whether the last read left events in the log
        self._is_ending = False  # whether subscribers end after the next read
        self._waiting: list[asyncio.Future[None]] = []
        # Pages of subscribers behind the last page, by their cursors, while any of them holds the page.
        self._shared: WeakValueDictionary[int, EventPage] = WeakValueDictionary()
        self._lock = asyncio.Lock()  # subscribers behind the window read one after another, so that they share pages

    def start(self, cursor: int, head: int) -> None:
        """Add a subscriber that begins at `cursor`; `head` is the sequence of the run's next event."""
        if self.tail < 0:
            self.floor = self.tail = min(cursor, head)
        self._unread = self._unread or self.tail < head

    def has_other_events(self, stored: list[Event]) -> bool:
        """Return whether the window contains other events of these sequences: the run was deleted and started again."""
        for event in stored:
            for known in self._pages_after(event.sequence)[:1]:
                at = bisect_left(known, event.sequence, key=_SEQUENCE)
                return known[at].sequence == event.sequence and _identity(known[at]) != _identity(event)
        return False

    def reset(self, cursor: int) -> None:
        """Discard the window, because the run was deleted and started again."""
        self.window, self._ends, self._shared = [], [], WeakValueDictionary()
        self._count = self._weight = 0
        self._last_at = -1
        self.floor = self.tail = cursor
        self._unread = True

    def mark_unread(self) -> None:
        """Let a subscriber read, because there may be new events."""
        self._unread = True
        self._call_reader()

    def close(self) -> None:
        """End all subscriptions of the run."""
        self.closed = True
        self._call_all()

    async def next_after(self, cursor: int, end: End | None = None) -> EventPage | None:
        """Return the next events from `cursor` on, in a page that other subscribers share; None at the end."""
        while True:
            if self.closed:
                raise StorageClosed(
                    "the event bus was closed during this subscription. Open another event bus, and subscribe again"
                )
            if cursor == self._last_at:  # most calls
                return self.window[-1]
            if cursor < self.floor:
                if page := await self._read_behind(cursor):
                    return page
                cursor = self.floor
            elif cursor < self.tail:
                return self._kept(cursor)
            elif end is not None and end.future.done() and self._is_over(end):
                self._call_reader()
                return None
            elif self._unread and not self._reading:
                await self._read()
            else:
                waiter = self._loop.create_future()
                self._waiting.append(waiter)
                if end is not None:
                    end.waiter = waiter
                try:
                    await waiter
                except asyncio.CancelledError:
                    with contextlib.suppress(ValueError):
                        self._waiting.remove(waiter)
                    # This waiter may have been called to read: then another waiter must read instead.
                    self._call_reader()
                    raise

    def _is_over(self, end: End) -> bool:
        """Return whether a subscriber at the tail received all events that were stored when the future was done."""
        try:
            end.future.result()
        except BaseException:
            self._call_reader()  # this subscriber may have been called to read
            raise
        if end.after is None:
            end.after = self._reads
            self._unread = True
        is_over = self._reads_done > end.after and not self._more
        self._is_ending = self._is_ending or not is_over
        return is_over

    def _call_reader(self) -> None:
        while self._unread and not self._reading and self._waiting:
            waiter = self._waiting.pop(0)
            if _call(waiter):
                return

    def _call_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            _call(waiter)

    async def _read(self) -> None:
        self._reading = True
        try:
            # All subscribers read the window before it moves, and notifications of one loop iteration cause one read.
            await asyncio.sleep(0)
            self._unread = False
            self._reads += 1
            at, number = self.tail, self._reads
            page = await self._bus._page(self.run_id, at, PAGE)
        except BaseException:
            self._unread = True
            self._reading = False
            self._call_reader()
            raise
        self._reading = False
        if self.tail != at:
            self._unread = True  # the window was reset during the read
            return
        self._reads_done, self._more = number, page.more
        if page:
            self._add(page)
        if page or self._is_ending:
            self._is_ending = False
            self._call_all()

    def _add(self, page: EventPage) -> None:
        self._last_at, self.tail = self.tail, page[-1].sequence + 1
        self.window.append(page)
        self._ends.append(self.tail)
        self._unread = self._unread or page.more
        self._count += len(page)
        self._weight += page.size
        excess = 0
        while (self._count > WINDOW or self._weight > WINDOW_BYTES) and excess < len(self.window) - 1:
            self._count -= len(self.window[excess])
            self._weight -= self.window[excess].size
            excess += 1
        if excess:
            del self.window[:excess], self._ends[:excess]
            self.floor = self.window[0][0].sequence

    def _pages_after(self, sequence: int) -> list[EventPage]:
        """Return the pages of the window with events at or after `sequence`."""
        return self.window[bisect_right(self._ends, sequence) :]

    def _kept(self, cursor: int) -> EventPage:
        """Return events of the window: several successive pages joined, for subscribers that lag."""
        page, *later = self._pages_after(cursor)
        is_whole = cursor <= page[0].sequence
        if is_whole and not (later and _fits(page, later[0])):
            return page
        if (shared := self._shared.get(cursor)) is not None:
            return shared
        found = EventPage(page[bisect_left(page, cursor, key=_SEQUENCE) :], True, page.size)
        for each in later:
            if not _fits(found, each):
                break
            found += each
            found.size += each.size
        self._shared[cursor] = found
        return found

    async def _read_behind(self, cursor: int) -> EventPage:
        """Return events that are no longer in the window."""
        await asyncio.sleep(0)  # other tasks run between the pages
        async with self._lock:
            shared = self._shared
            page = shared.get(cursor)
            if page is None:
                page = await self._bus._page(self.run_id, cursor, PAGE)
                shared[cursor] = page
            return page


def _call(waiter: asyncio.Future[None]) -> bool:
    """Wake a waiting subscriber; return False if it was woken before."""
    if waiter.done():
        return False
    waiter.set_result(None)
    return True


def _fits(page: EventPage, other: EventPage) -> bool:
    return len(page) + len(other) <= PAGE and page.size + other.size <= PAGE_BYTES


def _identity(event: Event) -> tuple[object, ...]:
    return event.event_type, event.timestamp


class SubscriptionHub:
    """The subscriptions of one event loop to one bus. Many commits wake it once for each loop iteration."""

    def __init__(self, bus: EventSource, loop: asyncio.AbstractEventLoop, drop: Callable[[], object]) -> None:
        self.feeds: dict[str, RunFeed] = {}
        self._bus = bus
        self._loop = loop
        self._thread = threading.get_ident()
        self._drop = drop
        self._is_notified = False
        self._read_again = False
        self._reading: asyncio.Task[None] | None = None
        self.stop_listening: Callable[[], None] = bus.listen("events", self._wake)

    def join(self, run_id: str) -> RunFeed:
        """Return the feed of a run, for one more subscriber."""
        feed = self.feeds.get(run_id)
        if feed is None:
            feed = self.feeds[run_id] = RunFeed(self._bus, run_id, self._loop)
        feed.followers += 1
        return feed

    def leave(self, feed: RunFeed) -> None:
        """End the use of a feed. The last subscriber removes it."""
        feed.followers -= 1
        if feed.followers == 0:
            del self.feeds[feed.run_id]
            if not self.feeds:
                self._end()

    def close(self) -> None:
        """Let all subscribers raise StorageClosed. Thread-safe."""
        self._call(self._close_feeds)

    def _close_feeds(self) -> None:
        for feed in self.feeds.values():
            feed.close()

    def _end(self) -> None:
        self._drop()
        self.stop_listening()
        if self._reading is not None:
            self._reading.cancel()

    def _call(self, callback: Callable[[], None]) -> None:
        same_thread = threading.get_ident() == self._thread
        try:
            (self._loop.call_soon if same_thread else self._loop.call_soon_threadsafe)(callback)
        except RuntimeError:
            # The loop was closed without closing its generators, so there are no subscribers any more.
            self._drop()
            self.stop_listening()

    def _wake(self) -> None:
        if not self._is_notified:
            self._is_notified = True
            self._call(self._notified)

    def _notified(self) -> None:
        # Cleared before the read: otherwise a commit after the read would not wake this loop again.
        self._is_notified = False
        if len(self.feeds) == 1:
            next(iter(self.feeds.values())).mark_unread()
        elif self.feeds:
            self._read_again = True
            if self._reading is None:
                self._reading = start_helper(self._read_heads())

    async def _read_heads(self) -> None:
        """Find the runs with new events in one read."""
        try:
            while self._read_again:
                self._read_again = False
                feeds = list(self.feeds.values())
                try:
                    heads = await self._bus._heads([feed.run_id for feed in feeds])
                except Exception:  # noqa: BLE001 - each subscriber gets the error in its own read
                    heads = [feed.tail + 1 for feed in feeds]
                for feed, head in zip(feeds, heads, strict=True):
                    if head > feed.tail:
                        feed.mark_unread()
        finally:
            self._reading = None

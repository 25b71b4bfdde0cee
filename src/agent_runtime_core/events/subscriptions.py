"""Subscriptions of one event loop: they share one reader for each run, and a bounded window of events.

A subscriber that is slower than the window reads the log for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from .._core.context_vars import start_helper
from ..errors import StorageClosed

if TYPE_CHECKING:
    from .event import Event

WINDOW = 1024  # most events in the window of a run
WINDOW_BYTES = 262_144  # most bytes of payloads in the window, without the last page
PAGE = 512  # most events in one read

_SEQUENCE = attrgetter("sequence")


class EventSource(Protocol):
    """What subscriptions read: an event bus."""

    async def _page(self, run_id: str, since: int, limit: int) -> list[Event]:
        """Return at most `limit` events from `since` on; fewer only at the end of the log."""

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        """Return the sequence that the next event of each run will get."""

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after commits that added events, until the returned function is called."""


class RunFeed:
    """The events of one run for the subscribers of one event loop.

    The window contains each event from `floor` to `tail`, which is the sequence to read next. There is no reader task:
    one subscriber that has reached the tail reads for all. If it is cancelled, another one reads. The others wait until
    there are events.
    """

    def __init__(self, bus: EventSource, run_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.run_id = run_id
        self.followers = 0
        self.floor: int = -1
        self.tail: int = -1
        self.window: list[Event] = []
        #: Number of events and bytes of each page in the window.
        self._pages: deque[tuple[int, int]] = deque()
        self._weight = 0
        self.closed: bool = False
        self._bus = bus
        self._loop = loop
        self._unread = False
        self._reading = False
        self._waiting: list[asyncio.Future[None]] = []
        # The last page and its first sequence. All subscribers that have reached this sequence share the list.
        self._page: list[Event] = []
        self._page_at = -1

    def start(self, cursor: int, head: int) -> None:
        """Add a subscriber that begins at `cursor`; `head` is the sequence of the run's next event."""
        if self.tail < 0:
            self.floor = self.tail = min(cursor, head)
        self._unread = self._unread or self.tail < head

    def has_other_events(self, stored: list[Event]) -> bool:
        """Return whether the window has other events of these sequences: the run was deleted and started again."""
        for event in stored:
            at = bisect_left(self.window, event.sequence, key=_SEQUENCE)
            if at < len(self.window) and self.window[at].sequence == event.sequence:
                return _identity(self.window[at]) != _identity(event)
        return False

    def reset(self, cursor: int) -> None:
        """Discard the window, because the run was deleted and started again."""
        self.window, self._page, self._page_at = [], [], -1
        self._pages.clear()
        self._weight = 0
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

    async def next_after(self, cursor: int) -> list[Event]:
        """Return the next events from `cursor` on, at least one, in a list that other subscribers share."""
        while True:
            if self.closed:
                raise StorageClosed(
                    "the event bus was closed during this subscription. Open another one, and subscribe again"
                )
            if cursor == self._page_at:
                return self._page
            if cursor < self.floor:
                # The window has moved past this subscriber: it reads for itself. Other tasks run between its pages.
                await asyncio.sleep(0)
                if page := await self._bus._page(self.run_id, cursor, PAGE):
                    return page
                cursor = self.floor
            elif cursor < self.tail:
                return self.window[bisect_left(self.window, cursor, key=_SEQUENCE) :]
            elif self._unread and not self._reading:
                await self._read()
            else:
                waiter = self._loop.create_future()
                self._waiting.append(waiter)
                try:
                    await waiter
                except asyncio.CancelledError:
                    with contextlib.suppress(ValueError):
                        self._waiting.remove(waiter)
                    # This waiter may have been called to read: another one has to read instead.
                    self._call_reader()
                    raise

    def _call_reader(self) -> None:
        while self._unread and not self._reading and self._waiting:
            waiter = self._waiting.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                return

    def _call_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _read(self) -> None:
        self._reading = True
        try:
            # All subscribers read the window before it moves, and notifications of one loop iteration cause one read.
            await asyncio.sleep(0)
            self._unread = False
            at = self.tail
            page = await self._bus._page(self.run_id, at, PAGE)
        except BaseException:
            self._unread = True
            self._reading = False
            self._call_reader()
            raise
        self._reading = False
        if self.tail != at:
            self._unread = True  # the window was reset during the read
        elif page:
            self._add(page)
            self._call_all()

    def _add(self, page: list[Event]) -> None:
        self._page, self._page_at = page, self.tail
        self.window += page
        self.tail = page[-1].sequence + 1
        self._unread = self._unread or len(page) >= PAGE
        weight = sum(map(_size, page))
        self._weight += weight
        self._pages.append((len(page), weight))
        excess = 0
        while (len(self.window) - excess > WINDOW or self._weight > WINDOW_BYTES) and len(self._pages) > 1:
            count, weight = self._pages.popleft()
            excess += count
            self._weight -= weight
        if excess:
            del self.window[:excess]
            self.floor = self.window[0].sequence


def _identity(event: Event) -> tuple[object, ...]:
    return event.event_type, event.timestamp


def _size(event: Event) -> int:
    """Return about how many bytes an event keeps in memory. One that is derived from a record counts as 0."""
    row = getattr(event, "_row", None)
    return 0 if row is None else len(row[2])


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
            # The loop was closed without closing its generators, so it has no subscribers any more.
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

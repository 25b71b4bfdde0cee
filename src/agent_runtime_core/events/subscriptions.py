"""How the followers in one event loop share what is read: one reader a run, a bounded window, history for the slow."""

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

WINDOW = 1024  # events kept for the followers of a run
WINDOW_BYTES = 262_144  # of payloads, beyond the page that was read last
PAGE = 512  # events read at once

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
    """One run as one event loop follows it.

    The window holds every event from `floor` up to `tail`, the next to be read. There is no reader task:
    one follower that has reached the tail reads for all, and hands over when it is cancelled. The others sleep until
    there is something for them.
    """

    def __init__(self, bus: EventSource, run_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.run_id = run_id
        self.followers = 0
        self.floor: int = -1
        self.tail: int = -1
        self.window: list[Event] = []
        #: How many events each page in the window brought, and of what weight.
        self._pages: deque[tuple[int, int]] = deque()
        self._weight = 0
        self.closed: bool = False
        self._bus = bus
        self._loop = loop
        self._unread = False
        self._reading = False
        self._waiting: list[asyncio.Future[None]] = []
        # What was read last, and for whom it is just what comes next: they share the list.
        self._page: list[Event] = []
        self._page_at = -1

    def start(self, cursor: int, head: int) -> None:
        """A follower comes in at `cursor` while `head` is the next sequence to be given."""
        if self.tail < 0:
            self.floor = self.tail = min(cursor, head)
        self._unread = self._unread or self.tail < head

    def has_other_events(self, stored: list[Event]) -> bool:
        """Whether the window has other events in the place of these: the run was deleted, and begun anew."""
        for event in stored:
            at = bisect_left(self.window, event.sequence, key=_SEQUENCE)
            if at < len(self.window) and self.window[at].sequence == event.sequence:
                return _identity(self.window[at]) != _identity(event)
        return False

    def reset(self, cursor: int) -> None:
        """Forget what was read: another log has its place."""
        self.window, self._page, self._page_at = [], [], -1
        self._pages.clear()
        self._weight = 0
        self.floor = self.tail = cursor
        self._unread = True

    def mark_unread(self) -> None:
        """There may be something to read."""
        self._unread = True
        self._call_reader()

    def close(self) -> None:
        self.closed = True
        self._call_all()

    async def next_after(self, cursor: int) -> list[Event]:
        """The next events from `cursor` on, at least one of them, in a list that others may share."""
        while True:
            if self.closed:
                raise StorageClosed("the event bus was closed while this run was followed")
            if cursor == self._page_at:
                return self._page
            if cursor < self.floor:
                # Others had moved on: this one reads for itself, and lets them run between its pages.
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
                    # It may have been this one that was to read.
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
            # Everybody takes what is in the window before it moves; wakes of the same tick become one read.
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
            self._unread = True  # it began again meanwhile
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
        over = 0
        while (len(self.window) - over > WINDOW or self._weight > WINDOW_BYTES) and len(self._pages) > 1:
            count, weight = self._pages.popleft()
            over += count
            self._weight -= weight
        if over:
            del self.window[:over]
            self.floor = self.window[0].sequence


def _identity(event: Event) -> tuple[object, ...]:
    return event.event_type, event.timestamp


def _size(event: Event) -> int:
    """Bytes that an event keeps while it is in the window, about; one made of a record is small."""
    row = getattr(event, "_row", None)
    return 0 if row is None else len(row[2])


class SubscriptionHub:
    """All that one event loop follows on one bus, woken once per tick however many commits there are."""

    def __init__(self, bus: EventSource, loop: asyncio.AbstractEventLoop, drop: Callable[[], object]) -> None:
        self.feeds: dict[str, RunFeed] = {}
        self._bus = bus
        self._loop = loop
        self._thread = threading.get_ident()
        self._drop = drop
        self._ringing = False
        self._look_again = False
        self._reading: asyncio.Task[None] | None = None
        self.stop_listening: Callable[[], None] = bus.listen("events", self._wake)

    def join(self, run_id: str) -> RunFeed:
        feed = self.feeds.get(run_id)
        if feed is None:
            feed = self.feeds[run_id] = RunFeed(self._bus, run_id, self._loop)
        feed.followers += 1
        return feed

    def leave(self, feed: RunFeed) -> None:
        feed.followers -= 1
        if feed.followers == 0:
            del self.feeds[feed.run_id]
            if not self.feeds:
                self._end()

    def close(self) -> None:
        """Tell every follower, from any thread, that the bus is closed."""
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
            # The loop was closed without ending its generators: nothing follows there any more.
            self._drop()
            self.stop_listening()

    def _wake(self) -> None:
        if not self._ringing:
            self._ringing = True
            self._call(self._notified)

    def _notified(self) -> None:
        # Cleared before anything is read: a commit that saw it set is seen by that read.
        self._ringing = False
        if len(self.feeds) == 1:
            next(iter(self.feeds.values())).mark_unread()
        elif self.feeds:
            self._look_again = True
            if self._reading is None:
                self._reading = start_helper(self._read_heads())

    async def _read_heads(self) -> None:
        """Find out in one read which of many runs went on."""
        try:
            while self._look_again:
                self._look_again = False
                feeds = list(self.feeds.values())
                try:
                    heads = await self._bus._heads([feed.run_id for feed in feeds])
                except Exception:  # noqa: BLE001 - every follower meets the error in its own read
                    heads = [feed.tail + 1 for feed in feeds]
                for feed, head in zip(feeds, heads, strict=True):
                    if head > feed.tail:
                        feed.mark_unread()
        finally:
            self._reading = None

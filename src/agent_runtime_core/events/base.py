"""EventBus: publish, read and subscribe to the events of runs, on every backend."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import encode_as
from .._core.context_vars import start_helper
from .._core.ids import next_id, plain, run_uuid
from .._core.payload_codec import encrypted_without_codec
from .._core.per_loop import PerLoop
from .._core.validation import Shown, is_number, must, type_name
from .._engines.base import Backend, Guard, Op
from .._engines.payloads import PayloadFields, Payloads
from .._journal.record import Record, decode_record
from ..errors import StorageClosed
from .event import (
    PAGE_BYTES,
    Event,
    EventPage,
    EventRows,
    StoredEvent,
    derived,
    lazy_event,
    lazy_events,
    page_rows,
    sequence_after,
)
from .subscriptions import End, SubscriptionHub

if TYPE_CHECKING:
    import asyncio


def _encode_events(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    run_id, rows = args
    return run_id, tuple(
        (event_id, kind, payloads.encode("event of run", run_id, payload), t) for event_id, kind, payload, t in rows
    )


def decode_rows(payloads: Payloads, run_id: str, rows: EventRows) -> EventRows:
    """Return the rows of a page as their readers get them."""

    def decoded(row: StoredEvent | Record) -> StoredEvent | Record:
        if isinstance(row, Record):
            return decode_record(payloads, run_id, row)
        return row._replace(payload=payloads.decode("event of run", run_id, row.payload))

    return EventRows(map(decoded, rows), rows.more, rows.size)


FIELDS = PayloadFields({"events.publish": _encode_events})


PUBLISH = "events.publish"
DELETE = "events.delete"
TRIM = "events.trim"
REWRITE = "events.rewrite"
COPY = "events.copy"

_PAGE = 2048  # most rows in one read
_SAMPLE = 64  # most rows that are read of a custom backend before their size is known
_LONGEST_NAME = 255
_FURTHEST = 2**53  # greater than every sequence, and every store accepts it


class EventBus(Backend):
    """A log of events for each run, which can be read and subscribed to from any sequence without a gap.

    Guarantees of every backend:

    1. The sequences of a run are 0, 1, 2 … without a gap, in the order of the commits.
    2. An event id that already exists in the run is deduplicated: the event keeps its old sequence.
    3. `subscribe` yields each event once and in order, even while events are published.
    4. A publisher never waits for a subscriber.
    5. `claim` is checked in the commit that writes the event.

    A custom backend calls `super().__init__()` and implements three methods. Check it with `testing.contracts.events`.

    * `commit(guard, ops)` applies all of `ops` or none. If `guard.token` is not the fencing token stored for
      `guard.key`, it writes nothing. It then returns the old results if each op was applied before (for a publish: all
      its event ids are stored), and raises LeaseLost otherwise. The ops are: `events.publish` (run_id, ((event_id,
      type, payload, t), …)): append events, except for ids that already exist in the run; return the list of their
      sequences. `events.delete` (run_id,): delete the published events of a run; return None. `events.trim` (run_id,
      sequence): delete the published events before that sequence, and their ids, except for the last event, so that
      sequences continue; return their number. `fence.install` (key, token): return True; raise LeaseLost if the stored
      token is greater. `fence.forget` (key,): return None.
    * `_rows(run_id, since, limit)` returns the stored events at or after `since`, sorted, at most `limit`.
    * `_head(run_id)` returns the sequence of the next event; 0 for an unknown run.

    run_id, event_id, type and payload are strings, stored unchanged. A store that can notify overrides `listen`.
    Without that, subscribers poll.

    Args:
        clock: Source of times.
        poll_interval: Seconds between polls.

    Raises:
        InvalidArgument: `poll_interval` is not a number of seconds above 0.
    """

    payload_fields = FIELDS
    #: Whether `_rows` also returns the records of the journal; their events are then not published.
    derives: ClassVar[bool] = False
    #: Whether `report_reader` stores reports, so that a reader in another process can slow a run down.
    stores_readers: ClassVar[bool] = False
    #: Whether `_rows` returns EventRows, and reads not much more than a page of them.
    bounds_pages: ClassVar[bool] = False

    def __init__(self, *, clock: Clock = SYSTEM, poll_interval: float = 0.1) -> None:
        if not is_number(poll_interval) or not poll_interval > 0:
            raise must("poll_interval", "be a number of seconds above 0", poll_interval)
        self.clock = clock
        self.poll_interval = poll_interval
        self._hubs: PerLoop[SubscriptionHub] = PerLoop(
            lambda loop: SubscriptionHub(self, loop, lambda: self._hubs.pop(loop, None)),
            lambda hub: hub.stop_listening(),
        )
        self._closed = False

    # -- what a backend provides

    @abstractmethod
    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[StoredEvent | Record]:
        """Return at most `limit` rows that have events at or after `since`, in order, from one consistent view."""

    @abstractmethod
    async def _head(self, run_id: str) -> int:
        """Return the sequence of the run's next event."""

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        """Return `_head` of several runs. Override it if each call is a round trip to a server."""
        return [await self._head(run_id) for run_id in run_ids]

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake()`, from any thread, after commits that added events.

        Args:
            topic: The topic.
            wake: Called after each of these commits.

        Returns:
            A function that removes the listener.
        """

        async def poll() -> None:
            while True:
                await self.clock.sleep(self.poll_interval)
                wake()

        polling = start_helper(poll(), f"agent-runtime-poll-{topic}")

        def stop() -> None:
            polling.cancel()

        return stop

    async def report_reader(self, run_id: str, reader: str, sequence: int | None) -> None:
        """Store the last sequence number that a reader read. A report is valid for 2 seconds, and may be lost.

        Args:
            run_id: The run.
            reader: Identifies the reader: letters, digits, `.` and `-`.
            sequence: The sequence, -1 for none yet; None if it does not read any more.
        """

    async def readers(self, run_id: str) -> dict[str, int]:
        """Return the readers of a run that have reported within the last 2 seconds, and their sequences.

        Args:
            run_id: The id of the run.
        """
        return {}

    # -- what a caller uses

    async def publish(
        self,
        run_id: str | UUID,
        event_type: str,
        payload: dict[str, Any],
        *,
        claim: str | None = None,
        event_id: str | None = None,
    ) -> Event:
        """Append one event, and return it once it is durable.

        Args:
            run_id: The run.
            event_type: Type of the event, 1 to 255 printable characters.
            payload: A dict, which must be JSON-serializable.
            claim: Current claim id of the run; None to publish without a claim.
            event_id: If an event with this id already exists in the run, nothing is appended and the returned event
                keeps its sequence. None for a new id.

        Returns:
            The event, with its sequence.

        Raises:
            LeaseLost: if the claim is not current. Nothing is written.
            UnserialisableResult: if the payload is not JSON-serializable. Nothing is written.
        """
        self._ensure_open()
        run, text = _known(run_id)
        t = self.clock.wall()
        id_ = checked_event_name("event_id", event_id) if event_id else next_id(self.clock, t)
        row = (id_, checked_event_name("event_type", event_type), self._text(text, payload), t)
        guard = Guard(text, claim) if claim is not None else None
        # Faster than calling the class.
        op: Op = tuple.__new__(Op, (PUBLISH, (text, (row,))))
        [[sequence]] = await self.commits.commit(guard, [op])
        return lazy_event(run, sequence, row)

    def publishing(
        self, run_id: str | UUID, events: Iterable[tuple[str, str, dict[str, Any]]], *, redacted: bool = False
    ) -> Op:
        """Return the operation that publishes (event id, type, payload) triples, for a commit together with others.

        Args:
            run_id: The run.
            events: The triples.
            redacted: The caller already redacted the payloads, if `redact_stored` is set.
        """
        t, run = self.clock.wall(), _known(run_id)[1]
        text_of = _text if redacted else partial(self._text, run)
        rows = tuple(
            (checked_event_name("event_id", id_), checked_event_name("event_type", type_), text_of(payload), t)
            for id_, type_, payload in events
        )
        return Op(PUBLISH, (run, rows))

    def _text(self, run_id: str, payload: object) -> str:
        text = _text(payload)
        return text if self.redaction is None else self.redaction.stored_dict("event", text, f"run {run_id}")

    async def get_events(self, run_id: str | UUID, since_sequence: int = 0, limit: int | None = None) -> list[Event]:
        """Return the run's events from `since_sequence` on (inclusive), at most `limit`; None for all.

        Args:
            run_id: The id of the run.
            since_sequence: The sequence of the first event.
            limit: At most this many events. If None, all.
        """
        self._ensure_open()
        cursor = min(_count("since_sequence", since_sequence), _FURTHEST)
        left = None if limit is None else _count("limit", limit)
        text = _known(run_id)[1]
        found: list[Event] = []
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = await self._page(text, cursor, size)
            found += page
            if not page or not page.more:
                break
            cursor = page[-1].sequence + 1
            left = None if left is None else left - len(page)
        return found

    async def head(self, run_id: str | UUID) -> int:
        """Return the sequence of the run's next event.

        Args:
            run_id: The id of the run.
        """
        self._ensure_open()
        return await self._head(_known(run_id)[1])

    async def published(self, run_id: str | UUID) -> frozenset[str]:
        """Return the ids of the run's published events. Events that are derived from records have no id.

        Args:
            run_id: The id of the run.
        """
        self._ensure_open()
        text = _known(run_id)[1]
        found: set[str] = set()
        since = 0
        while rows := await self.stored_rows(text, since, _PAGE):
            found.update(row.event_id for row in rows if isinstance(row, StoredEvent))
            if not rows.more:
                break
            since = sequence_after(rows[-1])
        return frozenset(found)

    def subscribe(self, run_id: str | UUID, since_sequence: int | None = None) -> AsyncGenerator[Event, None]:
        """Subscribe to the events of a run: `async for event in bus.subscribe(run_id)`, without an await.

        The iterator never ends by itself: leave the loop, or call its `aclose()`. A storage error ends it; then
        subscribe again from the last sequence + 1.

        Args:
            run_id: The run.
            since_sequence: Replay the events from this sequence (inclusive) first. None yields only events that are
                published after the start of the iteration.

        Returns:
            An async iterator of the events.

        Raises:
            StorageClosed: if the bus is closed.

        Examples:
            >>> import asyncio
            >>> from uuid import UUID
            >>> from agent_runtime_core.events import InMemoryEventBus
            >>> async def main():
            ...     bus = InMemoryEventBus()
            ...     await bus.publish(UUID(int=1), "page.read", {"page": 1})
            ...     async for event in bus.subscribe(UUID(int=1), since_sequence=0):
            ...         return event.event_type
            >>> asyncio.run(main())
            'page.read'
        """
        return _events_of(self._follow(_known(run_id)[1], _first(since_sequence)))

    def pages(
        self, run_id: str | UUID, since_sequence: int | None = 0, *, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Sequence[Event], None]:
        """Subscribe to the events of a run in pages, as `subscribe` does event by event.

        A page contains at least one event, and at most 512 with 256 KiB of payloads, unless its first event or the
        record that it is derived from is larger. Do not modify a page: readers in one event loop that are at the same
        sequence get the same object.

        Args:
            run_id: The run.
            since_sequence: The sequence of the first event. None yields only events that are published after the start
                of the iteration.
            until: A future of the running event loop. Once it is done, the iterator ends after the events that are
                stored by then. If the future failed, the iterator raises its exception. None for an iterator without an
                end.

        Returns:
            An async iterator of the pages.

        Raises:
            StorageClosed: if the bus is closed.
        """
        return self._follow(_known(run_id)[1], _first(since_sequence), until)

    async def close(self) -> None:
        """Close this bus, and its engine if no other backend uses it. Subscribers raise StorageClosed."""
        self._closed = True
        for hub in tuple(self._hubs.values()):
            hub.close()
        await super().close()

    # -- below

    def _ensure_open(self) -> None:
        if self._closed:
            raise StorageClosed("this event bus was closed. Open another event bus")

    async def _page(self, run_id: str, since: int, limit: int) -> EventPage:
        """Return the next events from `since` on: at most `limit`, and the bytes of a page."""
        run = UUID(run_id)
        rows = await self.stored_rows(run_id, since, limit)
        if self.payloads is not None:
            rows = decode_rows(self.payloads, run_id, rows)
        elif rows and (encrypted := encrypted_without_codec(f"events of run {run_id}", _content(rows[-1]))) is not None:
            raise encrypted
        if not self.derives or Record not in set(map(type, rows)):
            return EventPage(lazy_events(run, cast(Sequence[StoredEvent], rows)), rows.more, rows.size)
        events: list[Event] = []
        for row in rows:
            events += derived(run, row, since) if isinstance(row, Record) else lazy_events(run, (row,))
        return EventPage(events[:limit], rows.more or len(events) > limit, rows.size)

    async def stored_rows(self, run_id: str, since: int, limit: int) -> EventRows:
        """Return the rows of the next page, as they are stored."""
        if self.bounds_pages:
            return _as_page(await self._rows(run_id, since, limit), limit)
        # The first rows show how many of their size make a page: their backend would read `limit` rows of any size.
        asked = min(limit, _SAMPLE)
        page = _as_page(await self._rows(run_id, since, asked), asked)
        if page.more and asked == len(page) < limit:
            fitting = min(limit - asked, (PAGE_BYTES - page.size) * asked // max(page.size, 1))
            if fitting > 0:
                rest = await self._rows(run_id, sequence_after(page[-1]), fitting)
                page = page_rows([*page, *rest], limit, _as_page(rest, fitting).more)
        return page

    async def _follow(
        self, run_id: str, since: int | None, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[EventPage, None]:
        self._ensure_open()
        end = None if until is None else End(until)
        hub = self._hubs.here()
        # The listener is added before the head is read. Otherwise an event between the two would be missed.
        feed = hub.join(run_id)
        try:
            known = feed.tail
            head = await self._head(run_id)
            cursor = head if since is None else since
            # Sequences only grow and events do not change. After a difference, the run was deleted and started again.
            if head < known or (cursor < known and feed.has_other_events(await self._page(run_id, cursor, 1))):
                feed.reset(min(cursor, head))
            feed.start(cursor, head)
            while page := await feed.next_after(cursor, end):
                yield page
                cursor = page[-1].sequence + 1
        finally:
            hub.leave(feed)
            if end is not None:
                end.forget()


async def _events_of(pages: AsyncGenerator[EventPage, None]) -> AsyncGenerator[Event, None]:
    async with contextlib.aclosing(pages):
        async for page in pages:
            for event in page:
                yield event


def _as_page(rows: Sequence[StoredEvent | Record], asked: int) -> EventRows:
    return rows if isinstance(rows, EventRows) else page_rows(rows, asked, len(rows) >= asked)


def _content(row: StoredEvent | Record) -> str | None:
    return (row.info or row.result) if isinstance(row, Record) else row.payload


def _known(run_id: str | UUID) -> tuple[UUID, str]:
    if isinstance(run_id, (str, UUID)):
        return _read_id(run_id)
    raise must("run_id", "be a UUID or a string", run_id, "Pass str(run_id)")


@lru_cache(maxsize=1024)
def _read_id(run_id: str | UUID) -> tuple[UUID, str]:
    run = run_uuid(run_id, SYSTEM)[0]
    return run, str(run)


def checked_event_name(what: str, value: object) -> str:
    """Return an event's type or id as a plain `str`.

    Raises:
        InvalidArgument: if it is not valid; the message names the argument `what`.
    """
    if type(value) is str and 0 < len(value) <= _LONGEST_NAME and value.isprintable():
        return value
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or not value.isprintable():
        raise must(what, f"be a string of 1 to {_LONGEST_NAME} printable characters", value)
    return plain(value)


def _text(payload: object) -> str:
    if not isinstance(payload, dict):
        raise must("payload", "be a dict", Shown(type_name(type(payload))))
    return encode_as("payload", payload)


def _count(what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise must(what, "be an integer of at least 0", value)
    return value


def _first(since_sequence: int | None) -> int | None:
    return None if since_sequence is None else min(_count("since_sequence", since_sequence), _FURTHEST)

"""The event log of each run: what is decided, encoded and followed above every backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, cast
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import encode
from .._core.context_vars import start_helper
from .._core.ids import next_id, plain, run_uuid
from .._core.per_loop import PerLoop
from .._core.validation import is_number
from .._engines.base import Backend, Guard, Op
from .._journal.record import Record
from ..errors import InvalidArgument, StorageClosed, brief
from .event import Event, StoredEvent, derived, lazy_event, lazy_events
from .subscriptions import SubscriptionHub

PUBLISH = "events.publish"
DELETE = "events.delete"
TRIM = "events.trim"

_PAGE = 2048  # rows read at once where the caller wants all
_LONGEST_NAME = 255
_FURTHEST = 2**53  # no run gets there, and every store can be asked for it


class EventBus(Backend):
    """A log of events per run that can be read, and followed from any point without a gap.

    Guarantees: (1) sequence numbers of a run are 0, 1, 2 … with none left out, in the order of the commits;
    (2) an event id that the run already has is absorbed and keeps its old sequence; (3) `subscribe` yields
    each event once and in order, whatever is published meanwhile; (4) a publisher never waits for a
    follower; (5) `claim` is checked in the same commit as the write.

    A backend of your own calls `super().__init__()` and provides three primitives. `testing.contracts.events`
    proves it.

    * `commit(guard, ops)`: the only write, all of `ops` or none. With a guard whose `token` is not the fence
      stored for its `key`, nothing is written: LeaseLost, unless each op finds that it was applied before
      (for a publish: all its event ids are there), which returns the old results. The ops are
      `events.publish` (run_id, ((event_id, type, payload, t), …)) -> list of sequences, in one go the next
      ones of the run except for ids it already has; `events.delete` (run_id,) -> None; `events.trim`
      (run_id, sequence) -> how many published events before that sequence are deleted, with their ids: the last
      one there is stays, and sequences go on;
      `fence.install` (key, token) -> True, refused with LeaseLost when the stored token is greater;
      `fence.forget` (key,) -> None.
    * `_rows(run_id, since, limit)`: stored events at or after `since`, sorted, at most `limit`.
    * `_head(run_id)`: the sequence the next event will get; 0 for an unknown run.

    run_id, event_id, type and payload are texts to keep as they are. A store that can tell when something
    was committed overrides `listen`; otherwise followers look every `poll_interval` seconds.
    """

    #: Whether `_rows` also answers with the journal's records, whose events are then not published.
    derives: ClassVar[bool] = False

    def __init__(self, *, clock: Clock = SYSTEM, poll_interval: float = 0.1) -> None:
        if not is_number(poll_interval) or not poll_interval > 0:
            raise InvalidArgument(f"poll_interval={brief(poll_interval)} must be seconds above 0")
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
        """At most `limit` rows whose range of sequences ends after `since`, in order; one consistent view."""

    @abstractmethod
    async def _head(self, run_id: str) -> int:
        """The sequence the run's next event will get."""

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        """`_head` of several runs; worth overriding where each is a round trip."""
        return [await self._head(run_id) for run_id in run_ids]

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake()`, from any thread, after commits that added events; returns the way to stop."""

        async def poll() -> None:
            while True:
                await self.clock.sleep(self.poll_interval)
                wake()

        polling = start_helper(poll(), f"agent-runtime-poll-{topic}")

        def stop() -> None:
            polling.cancel()

        return stop

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
        """Append one event, durably.

        `claim` is the claim id that holds the run; without one this is an administrator's write. An
        `event_id` the run already has is absorbed: the answer carries the sequence it has.
        LeaseLost: the claim was superseded. UnserialisableResult: the payload has no JSON form. Nothing
        is written then.
        """
        self._ensure_open()
        run, text = _known(run_id)
        t = self.clock.wall()
        id_ = checked_event_name("event_id", event_id) if event_id else next_id(self.clock, t)
        row = (id_, checked_event_name("event_type", event_type), _text(payload), t)
        guard = Guard(text, claim) if claim is not None else None
        # As a NamedTuple itself makes one, only faster.
        op: Op = tuple.__new__(Op, (PUBLISH, (text, (row,))))
        [[sequence]] = await self.commit(guard, [op])
        return lazy_event(run, sequence, row)

    def publishing(self, run_id: str | UUID, events: Iterable[tuple[str, str, dict[str, Any]]]) -> Op:
        """The write of (event id, type, payload) triples as a value, for a commit together with others."""
        t = self.clock.wall()
        rows = tuple(
            (checked_event_name("event_id", id_), checked_event_name("event_type", type_), _text(payload), t)
            for id_, type_, payload in events
        )
        return Op(PUBLISH, (_known(run_id)[1], rows))

    async def get_events(self, run_id: str | UUID, since_sequence: int = 0, limit: int | None = None) -> list[Event]:
        """The run's events from `since_sequence` on (inclusive), at most `limit` of them."""
        self._ensure_open()
        cursor = min(_count("since_sequence", since_sequence), _FURTHEST)
        left = None if limit is None else _count("limit", limit)
        text = _known(run_id)[1]
        found: list[Event] = []
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = await self._page(text, cursor, size)
            found += page
            if len(page) < size:
                break
            cursor = page[-1].sequence + 1
            left = None if left is None else left - size
        return found

    async def head(self, run_id: str | UUID) -> int:
        """The sequence number the run's next event will get."""
        self._ensure_open()
        return await self._head(_known(run_id)[1])

    async def published(self, run_id: str | UUID) -> frozenset[str]:
        """The ids of the events that were published for the run; derived ones have none."""
        self._ensure_open()
        text = _known(run_id)[1]
        found: set[str] = set()
        since = 0
        while rows := await self._rows(text, since, _PAGE):
            found.update(row.event_id for row in rows if isinstance(row, StoredEvent))
            last = rows[-1]
            since = last.ev + last.nev if isinstance(last, Record) else last.sequence + 1
        return frozenset(found)

    def subscribe(self, run_id: str | UUID, since_sequence: int | None = None) -> AsyncGenerator[Event, None]:
        """Follow a run: `async for event in bus.subscribe(run_id)`, with no await before it.

        None yields what is published from the first step of the iteration on; a number replays from that
        sequence (inclusive) and then follows. It never ends by itself: break out, or aclose() it. A
        storage error ends it; subscribe again from the last sequence + 1. StorageClosed: the bus was closed.
        """
        since = None if since_sequence is None else min(_count("since_sequence", since_sequence), _FURTHEST)
        return self._follow(_known(run_id)[1], since)

    async def close(self) -> None:
        """Close this bus, and its engine if no other backend uses it; subscribers get StorageClosed."""
        self._closed = True
        for hub in tuple(self._hubs.values()):
            hub.close()

    # -- below

    def _ensure_open(self) -> None:
        if self._closed:
            raise StorageClosed("this event bus was closed")

    async def _page(self, run_id: str, since: int, limit: int) -> list[Event]:
        """At most `limit` events from `since` on; fewer only where the log ends."""
        run = UUID(run_id)
        rows = await self._rows(run_id, since, limit)
        if not self.derives or Record not in set(map(type, rows)):
            return lazy_events(run, cast(Sequence[StoredEvent], rows))
        events: list[Event] = []
        for row in rows:
            events += derived(run, row, since) if isinstance(row, Record) else lazy_events(run, (row,))
        return events[:limit]

    async def _follow(self, run_id: str, since: int | None) -> AsyncGenerator[Event, None]:
        self._ensure_open()
        hub = self._hubs.here()
        # Listening starts before the head is read: nothing can fall between the two.
        feed = hub.join(run_id)
        try:
            known = feed.tail
            head = await self._head(run_id)
            cursor = head if since is None else since
            # Numbers only grow, and what was told stays as it is: else the run was deleted, and begun anew.
            if head < known or (cursor < known and feed.has_other_events(await self._page(run_id, cursor, 1))):
                feed.reset(min(cursor, head))
            feed.start(cursor, head)
            while True:
                for event in await feed.next_after(cursor):
                    yield event
                cursor = event.sequence + 1
        finally:
            hub.leave(feed)


def _known(run_id: str | UUID) -> tuple[UUID, str]:
    if isinstance(run_id, (str, UUID)):
        return _read_id(run_id)
    raise InvalidArgument(f"a run id is a UUID or a text, not {brief(run_id)}")


@lru_cache(maxsize=1024)
def _read_id(run_id: str | UUID) -> tuple[UUID, str]:
    run = run_uuid(run_id, SYSTEM)[0]
    return run, str(run)


def checked_event_name(what: str, value: object) -> str:
    """The plain text of an event's type or id, or InvalidArgument, which says that of `what`."""
    if type(value) is str and 0 < len(value) <= _LONGEST_NAME and value.isprintable():
        return value
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or not value.isprintable():
        raise InvalidArgument(f"{what}={brief(value)} must be a text of 1 to {_LONGEST_NAME} printable characters")
    return plain(value)


def agent_event_type(value: object) -> str:
    """Return the plain text of a type that the code of a run emits.

    Raises:
        InvalidArgument: It is no type, or one of the runner's own, which say how the run started and finished.
    """
    kind = checked_event_name("event_type", value)
    if kind.startswith("run."):
        raise InvalidArgument(
            f"event_type must not begin with 'run.', got {brief(kind)}. The runner publishes these events: use another "
            "name, such as 'myapp.started'"
        )
    return kind


def _text(payload: object) -> str:
    if not isinstance(payload, dict):
        raise InvalidArgument(f"an event's payload is a dict, not {type(payload).__name__}")
    return encode(payload)


def _count(what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"{what}={brief(value)} must be a whole number of 0 or more")
    return value

"""Events as clients receive them, and pages of events. A process encodes an event once for all of its readers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as _dt
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Final

from .._core.codec.json import MAX_WHOLE, encode
from .._core.event_types import EventType
from ..errors import StorageCorrupt, UnserialisableResult
from ..events.base import EventBus
from ..events.event import Event, EventPage, payload_of, shown_type
from .plain import plain_json
from .problems import Problem

FURTHEST: Final = 2**53  # JavaScript represents integers exactly up to here
PAGE_BYTES: Final = (1 << 20) - 100  # of a page, unless its first event is larger
FIRST_BYTES: Final = 1 << 16  # of the page at the beginning of a log, which a reader sees sooner than a large page
MOST_TYPES: Final = 20  # patterns of event types
MOST_READ: Final = 8192  # events that one page reads, if the patterns of types remove most of them

Chosen = Callable[[Event], bool]


def sequence_of(name: str, text: str | None) -> int | None:
    """Return the sequence number in a parameter or header; None for None.

    Raises:
        Problem: It is none.
    """
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= FURTHEST:
        return int(text)
    message = f"{name} must be an integer from 0 to 2^53."
    raise Problem.of(400, message, errors=[{"field": name, "message": message}])


def type_filter(types: Sequence[str] | None) -> Chosen | None:
    """Return a function that selects the events whose type fits one of the patterns; None without patterns.

    Raises:
        Problem: There are too many.
    """
    if not types:
        return None
    if len(types) > MOST_TYPES:  # each event is compared with all of them
        message = f"There must be at most {MOST_TYPES} of them."
        raise Problem.of(422, f"types: {message}", type="urn:agent-runtime:invalid-argument",
                         errors=[{"field": "types", "message": message}])  # fmt: skip
    fits = re.compile("|".join(map(fnmatch.translate, dict.fromkeys(types)))).match
    return lambda event: fits(event.event_type) is not None


async def events_page(
    bus: EventBus, run_id: str, start: int, chosen: Chosen | None = None, *, stacks: bool = True
) -> bytes:
    """Return {"items", "next"} with the events from `start` on, as JSON.

    `next` is the value of `after` for the next page, null at the end of the log. Without `stacks`, failures have none.
    """
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stored.set_result(None)
    items: list[bytes] = []
    size, read, position = 0, 0, start
    most = PAGE_BYTES if start else FIRST_BYTES
    async with contextlib.aclosing(bus.pages(run_id, start, until=stored)) as pages:
        async for page in pages:
            if read >= MOST_READ:
                return _page_of(items, position - 1)
            for event in page if stacks else without_stacks(page):
                if chosen is None or chosen(event):
                    encoded = event_json(event)
                    if items and size + len(encoded) > most:
                        return _page_of(items, position - 1)
                    items.append(encoded)
                    size += len(encoded) + 1
                position = event.sequence + 1
            read += len(page)
    return _page_of(items, None)


def _page_of(items: Sequence[bytes], position: int | None) -> bytes:
    after = b"null" if position is None else b"%d" % position
    return b'{"items":[%b],"next":%b}' % (b",".join(items), after)


def event_json(event: Event) -> bytes:
    """Return an event as a JSON object with `sequence`, `type`, `time` and `payload`, in one line of ASCII.

    An event of `Event.from_agent` contains `"from_agent":true` too.
    The bytes are made once and stored in the event. A payload without tags of types is the stored text;
    `plain_json` describes other payloads.

    Raises:
        StorageCorrupt: The stored payload or time was changed.
    """
    try:
        return event._json
    except AttributeError:
        pass  # the first reader
    payload = _payload(event)
    time = event.timestamp
    if time.tzinfo is not _dt.UTC:
        time = time.astimezone(_dt.UTC)
    mark = ',"from_agent":true' if event.from_agent else ""
    text = (
        f'{{"sequence":{event.sequence},"type":{quote(event.event_type)},"time":"{time.isoformat()}"{mark}'
        f',"payload":{payload}}}'
    )
    event._json = text.encode("ascii")
    return event._json


def without_stacks(page: Sequence[Event]) -> Sequence[Event]:
    """Return events for a reader who may not see the code of the agent: the failure of the run without its stack.

    A page without such an event is returned as it is, because its bytes are made once.
    """
    if all(event.event_type != EventType.RUN_FAILED or event.from_agent for event in page):
        return page
    return [_without_stack(event) for event in page]


def _without_stack(event: Event) -> Event:
    if event.event_type != EventType.RUN_FAILED or event.from_agent:
        return event
    payload = {name: value for name, value in payload_of(event).items() if name != "stack"}
    return Event(event.run_id, event.event_type, payload, event.timestamp, event.sequence)


def _payload(event: Event) -> str:
    row = getattr(event, "_row", None)
    if row is None:  # derived from a record of the journal
        return plain_json(encode(event.payload, max_bytes=MAX_WHOLE))
    text: str = row[2]
    try:
        plain = plain_json(text)
        if plain[:1] != "{" or plain[-1:] != "}":
            raise UnserialisableResult("$", "not a dict")
    except UnserialisableResult as error:
        raise StorageCorrupt(
            f"run {event.run_id}: payload of event {event.sequence} is not what was written ({error}). Restore a backup"
        ) from error
    return plain


def sse_frames(page: Sequence[Event], *, named: bool = False) -> bytes:
    """Return events as server-sent events: the lines `id:` and `data:` of each, and an empty line.

    The bytes of a page from `EventBus.pages` or `RunClient.event_pages` are made once and stored in the page.

    Args:
        page: The events.
        named: Whether each gets a line `event:` with its type, too.
    """
    if not isinstance(page, EventPage):
        return _frames(page, named)
    frames = page.frames.get(named)
    if frames is None:
        frames = page.frames[named] = _frames(page, named)
    return frames


def _frames(events: Iterable[Event], named: bool) -> bytes:
    if named:
        return b"".join(
            b"event: %b\nid: %d\ndata: %b\n\n" % (_name(shown_type(event)), event.sequence, event_json(event))
            for event in events
        )
    return b"".join([b"id: %d\ndata: %b\n\n" % (event.sequence, event_json(event)) for event in events])


def _name(event_type: str) -> bytes:
    """Return a type for the line `event:`. A type with a line break, which no method accepts, is escaped as in JSON."""
    return (event_type if event_type.isprintable() else quote(event_type)[1:-1]).encode()

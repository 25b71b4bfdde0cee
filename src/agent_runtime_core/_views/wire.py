"""Events as clients receive them. A process encodes an event once, and all of its readers share the bytes."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii as quote

from .._core.codec.json import MAX_WHOLE, encode
from .._core.codec.plain import plain_json
from .._core.event_types import EventType
from ..errors import StorageCorrupt, UnserialisableResult
from ..events.event import Event, EventPage, payload_of, shown_type

__all__ = ["event_json", "plain_json", "sse_frames", "without_stacks"]


def event_json(event: Event) -> bytes:
    """Return an event as a JSON object with `sequence`, `type`, `time` and `payload`, in one line of ASCII.

    An event of `Event.from_agent` has `"from_agent":true` too.
    The bytes are made once and stored in the event. A payload without tags of types is the stored text;
    `plain_json` describes other ones.

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
        named: Whether each has a line `event:` with its type, too.
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
    """Return a type for the line `event:`. One with a line break, which no method accepts, is escaped as in JSON."""
    return (event_type if event_type.isprintable() else quote(event_type)[1:-1]).encode()

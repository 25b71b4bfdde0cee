"""The frames of event streams: server-sent events, and JSON frames of the WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from .._views.wire import event_json
from ..events.event import Event, payload_of

RETRY_MS: Final = 1000  # how long a client waits before it reconnects
#: The same after `bye`. A response with 503 ends an EventSource, so it has to wait until the next server is ready.
BYE_RETRY_MS: Final = 5000
SLICE: Final = 32_768  # bytes; half of the high-water mark of a transport
START: Final = b"retry: %d\n\n" % RETRY_MS
COMMENT: Final = b":\n\n"
_DELTA: Final = "assistant.delta"


def end_frame(state: str) -> bytes:
    """Return the last server-sent event of a finished run. It has no id, so a client keeps its position."""
    return b"data: %b\n\n" % _json({"type": "end", "state": state})


def error_frame(problem: dict[str, Any], *, restart: bool = False) -> bytes:
    """Return the server-sent event for an error after which the client reconnects.

    It has no `event:` field, because a browser reports its own connection errors as events of the type "error".

    Args:
        problem: Status, title and detail.
        restart: Whether the client's position is void. An empty id makes an EventSource read from the start.
    """
    position = b"id\n" if restart else b""
    return b"%bretry: %d\ndata: %b\n\n" % (position, RETRY_MS, _json({"type": "error", **problem}))


def bye_frame() -> bytes:
    """Return the server-sent event of a server that is shutting down. Clients reconnect after `retry`."""
    return b'event: bye\nretry: %d\ndata: {"type":"bye"}\n\n' % BYE_RETRY_MS


def position_frame(sequence: int) -> bytes:
    """Return a frame that moves the client's position without an event, because a filter removed the events."""
    return b"id: %d\n\n" % sequence


def slices(frames: bytes) -> Iterator[bytes]:
    """Cut frames into pieces of at most 32 KiB that end with a frame. A larger frame is a piece of its own.

    The transport then never buffers more than its high-water mark and one piece, and a comment fits between two.
    """
    start, length = 0, len(frames)
    while length - start > SLICE:
        end = frames.rfind(b"\n\n", start, start + SLICE)
        if end < 0:
            end = frames.find(b"\n\n", start + SLICE - 1)
        yield frames[start : end + 2]
        start = end + 2
    if start < length:
        yield frames[start:] if start else frames


def socket_frame(kind: str, **fields: Any) -> str:
    """Return a frame of the WebSocket; fields that are None are left out."""
    return _json({"type": kind, **{name: value for name, value in fields.items() if value is not None}}).decode()


def event_text(run_id: str, event: Event) -> str:
    """Return the frame of the WebSocket for an event: `delta` for a piece of an answer, else `event`."""
    if event.event_type == _DELTA:
        payload = payload_of(event)
        if isinstance(payload.get("delta"), str):
            return socket_frame(
                "delta", run_id=run_id, sequence=event.sequence, delta=payload["delta"], step_id=payload.get("step_id")
            )
    start = f'{{"type":"event","run_id":"{run_id}","sequence":{event.sequence},"event":'
    return f"{start}{event_json(event).decode()}}}"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).encode("utf-8", "replace")

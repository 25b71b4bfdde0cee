"""Streams that a client of MCP resumes: after a lost connection it gets what the server sent in the meantime."""

from __future__ import annotations

from collections import deque
from typing import Any, Final
from urllib.parse import quote, unquote

from mcp.server import Server
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import JSONRPCMessage
from starlette.applications import Starlette

_KEPT: Final = 100  # messages of a session; clients come back within seconds


class ResumableServer(Server[Any]):
    """A server of the SDK whose app sends priming events and a retry field, unless it gets another event store."""

    retry_ms = 1000

    def streamable_http_app(self, **options: Any) -> Starlette:
        """Return the ASGI app. The options are the options of the SDK."""
        mine = options.get("event_store") is None
        if mine:
            options = {"retry_interval": self.retry_ms, **options, "event_store": SessionEvents()}
        app = super().streamable_http_app(**options)
        if mine:
            self.session_manager.__class__ = _Sessions
        return app


class _Sessions(StreamableHTTPSessionManager):
    """A manager with an event store for each session.

    The SDK shares its event store. Its streams are named by the ids of requests, which are the same in many sessions,
    so a client could read what another client got.
    """

    @property
    def event_store(self) -> EventStore:  # type: ignore[override]
        """A new store: the manager reads this for each session that it opens."""
        return SessionEvents()


class SessionEvents(EventStore):
    """The last messages of a session, in memory, as the session itself is."""

    def __init__(self) -> None:
        self._number = 0
        self._events: deque[tuple[int, str, JSONRPCMessage]] = deque(maxlen=_KEPT)

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Store a message, or nothing for a priming event, and return the id of the event."""
        self._number += 1
        if message is not None:
            self._events.append((self._number, stream_id, message))
        return _id(self._number, stream_id)

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send the messages of a stream after an event."""
        number, _, stream = last_event_id.partition("-")
        if not number.isdecimal():
            return None
        stream_id = unquote(stream)
        for each, of, message in [*self._events]:
            if each > int(number) and of == stream_id:
                await send_callback(EventMessage(message, _id(each, of)))
        return stream_id


def _id(number: int, stream_id: str) -> str:
    return f"{number}-{quote(stream_id)}"

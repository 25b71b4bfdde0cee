"""Connections of uvicorn with limits: their number, the size of the headers, and the time to send them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .._core.clock import Clock
from .._core.ids import new_ulid
from .errors import MEDIA_TYPE, Problem
from .limits import IS_SPARE, too_many_connections
from .state import ServerState

#: Bytes of a request line and headers besides the names and values that the settings limit.
_REST: Final = 1024
#: Connections beyond the limit, for requests to `/health`.
SPARE: Final = 16
_LOOK_SECONDS: Final = 1.0  # between two looks at the answers that clients do not read


class Connections:
    """The HTTP connections of one server.

    A connection without a request in progress makes way for a new connection. A client that reads nothing of its answer
    is disconnected, even if the server has closed the connection.
    """

    def __init__(self, state: ServerState) -> None:
        self._limits = state.limits
        self.clock: Clock = state.runner.queue.clock
        self.most: int = state.settings.max_connections
        self.seconds: float = state.settings.request_seconds
        self.head_bytes: int = state.settings.max_header_bytes + state.settings.max_url_bytes + _REST
        self._open: set[GuardedProtocol] = set()
        self._idle: dict[GuardedProtocol, None] = {}  # in the order in which they became idle
        #: A little later than the check of event streams, which counts the streams that it cuts.
        self._stalled_seconds = state.settings.stalled_seconds + 2 * _LOOK_SECONDS
        #: Of each open transport: unsent bytes at the last look, and for how many seconds they did not get fewer.
        self._transports: dict[asyncio.WriteTransport, tuple[int, float]] = {}
        self._looking: asyncio.TimerHandle | None = None

    def opened(self, connection: GuardedProtocol) -> None:
        """Count a new connection. If there are too many, close the connection that is idle for longest.

        If no other connection is idle, up to `SPARE` new connections stay open. Their requests get 503, except for
        `/health`.
        """
        self._open.add(connection)
        self._idle[connection] = None
        self._transports[connection.transport] = (0, 0.0)
        if self._looking is None:
            self._look_later()
        # Streams have limits of their own. A connection that became a socket is in `_open` no more.
        streams = self._limits.open_streams - self._limits.open_sockets
        over = len(self._open) - streams - self.most
        if over <= 0:
            return
        if over > SPARE or len(self._idle) > 1:
            oldest = next(iter(self._idle))
            oldest.reject(too_many_connections())
            if oldest.transport.get_write_buffer_size():  # its client reads nothing, and it would keep its descriptor
                oldest.transport.abort()
        else:
            connection.app_state = {**connection.app_state, IS_SPARE: True}

    def idle(self, connection: GuardedProtocol) -> None:
        """Note that no request of a connection is in progress."""
        if connection in self._open:
            self._idle.setdefault(connection)

    def busy(self, connection: GuardedProtocol) -> None:
        """Note that a request of a connection is in progress."""
        self._idle.pop(connection, None)

    def closed(self, connection: GuardedProtocol) -> None:
        """Forget a connection, which is closed or will be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def lost(self, transport: asyncio.WriteTransport) -> None:
        """Forget a transport that has ended, or that another protocol has taken over."""
        self._transports.pop(transport, None)

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look) if self._transports else None

    def _look(self) -> None:
        self.look(_LOOK_SECONDS)
        self._look_later()

    def look(self, elapsed: float) -> None:
        """Drop the connections whose clients have accepted nothing for too long, `elapsed` after the last look."""
        for transport, (before, stalled) in tuple(self._transports.items()):
            size = transport.get_write_buffer_size()
            stalled = stalled + elapsed if size and size >= before else 0.0
            self._transports[transport] = (size, stalled)
            if stalled >= self._stalled_seconds:
                transport.abort()


class _Unlimited(int):
    """The expected length of a response that ends with its connection: 0 is left, and no part of it is too long."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _Unlimited:
        return self


class GuardedProtocol(asyncio.Protocol):
    """What is added to the HTTP protocol of uvicorn. Its `cycle` is the present request, or the last request."""

    app_state: Any
    connections: Any
    guard: Connections
    cycle: Any
    headers: Any
    scope: Any
    transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time for the first request."""
        super().connection_made(transport)
        self._head = 0
        self._timer: asyncio.TimerHandle | None = None
        self._upgraded = False
        self._await_request()
        self.guard.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        self.guard.lost(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reject headers that are too large or too slow, even if they follow a request in progress."""
        before = self.cycle
        is_body = before is not None and before.more_body
        super().data_received(data)
        if self._upgraded or self.transport.is_closing():
            return
        if is_body or self.cycle is not before:
            self._head = 0
        else:
            self._head += len(data)
            if self._head > self.guard.head_bytes:
                self.reject(Problem.of(431, "The headers are too large."))
                return
        if self._is_idle():
            self._await_request()
        else:
            self._stop_timer()
            self.guard.busy(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore the trailers of a chunked body, which httptools adds to the headers that were checked before."""
        if self.cycle is None or self.cycle.scope is not self.scope:
            cast("Any", super()).on_header(name, value)

    def on_headers_complete(self) -> None:
        """Send an HTTP/1.0 client no chunks, which httptools leaves to its caller and h11 does itself."""
        cast("Any", super()).on_headers_complete()
        cycle = self.cycle
        if self.scope["http_version"] < "1.1" and cycle is not None and cycle.scope is self.scope:
            cycle.chunked_encoding, cycle.expected_content_length = False, _Unlimited()

    def on_response_complete(self) -> None:
        """Note that no request of the connection is in progress."""
        cast("Any", super()).on_response_complete()
        if self._is_idle():
            self.guard.idle(self)

    def handle_websocket_upgrade(self, *args: Any) -> None:
        """Forget the connection, which another protocol serves from now on."""
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            # The other protocol would wait for the rest of such a handshake, without a limit.
            self.reject(Problem.of(400, "A WebSocket handshake must not have a body."))
            return
        self._forget()
        self.guard.lost(self.transport)
        self._upgraded = True
        cast("Any", super()).handle_websocket_upgrade(*args)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a problem. It may be the body of a request whose response has not begun."""
        cycle = self.cycle
        if not self._is_idle() and cycle.more_body and not (cycle.response_started or getattr(self, "pipeline", ())):
            cycle.disconnected = True  # what its route answers is not sent
            cycle.message_event.set()
        self.reject(Problem.of(400, "The request is not valid HTTP."))

    def reject(self, problem: Problem) -> None:
        """Send a problem, unless a response is on its way, and close the connection."""
        self._forget()
        if self._is_idle():
            request_id = new_ulid(self.guard.clock)
            body = json.dumps(problem.body(request_id)).encode()
            lines = [f"HTTP/1.1 {problem.status} {problem.title}", f"Content-Type: {MEDIA_TYPE}",
                     f"Content-Length: {len(body)}", "Connection: close", f"X-Request-Id: {request_id}",
                     *(f"{name}: {value}" for name, value in problem.headers.items())]  # fmt: skip
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete or self.cycle.disconnected)

    def _await_request(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.guard.seconds, self._too_slow)

    def _too_slow(self) -> None:
        if not self.transport.is_closing() and self._is_idle():
            self.reject(Problem.of(408, f"The request must be sent within {self.guard.seconds:g} s."))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        self._stop_timer()
        self.guard.closed(self)


def guarded_protocol(state: ServerState) -> type[asyncio.Protocol]:
    """Return the HTTP protocol of uvicorn with the limits of a server."""
    return type("HTTPProtocol", (GuardedProtocol, AutoHTTPProtocol), {"guard": Connections(state)})

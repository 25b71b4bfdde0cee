"""The open streams and sockets of a process: comments while they are idle, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, cast

from starlette.requests import HTTPConnection

from .._core.context_vars import start_helper
from .._views.events import event_json
from ..events.event import Event, payload_of
from ..queue.base import RunQueue
from ..queue.records import LIVE, RunRow
from .errors import Problem
from .limits import Limits
from .settings import ServerSettings
from .state import state_of

TICK: Final = 1.0  # seconds between two looks at the open streams
CHECK_SECONDS: Final = 1.0  # how old a check of a run's row may be
RETRY_MS: Final = 1000  # how long a client waits before it reconnects
#: The same after `bye`. A response with 503 ends an EventSource, so it has to wait until the next server is ready.
BYE_RETRY_MS: Final = 5000
SLICE: Final = 32_768  # bytes; half of the high-water mark of a transport
START: Final = b"retry: %d\n\n" % RETRY_MS
COMMENT: Final = b":\n\n"
_DELTA: Final = "assistant.delta"
DRAINING: Final = "draining"
STALLED: Final = "stalled"
#: Bytes that the kernel accepts of a socket before they are sent. A system without the option accepts some megabytes.
UNSENT_IN_KERNEL: Final = 65536
_NOTSENT_LOWAT: Final[int | None] = getattr(socket, "TCP_NOTSENT_LOWAT", None)
REPLACED: Final = "The run was deleted and submitted again"
Pages = Callable[[int], AsyncGenerator[Sequence[Event], None]]
Send = Callable[[Sequence[Event]], Awaitable[None]]


class Reader:
    """One open stream or socket.

    It needs no timer: `OpenStreams` looks at all readers once per second.

    Attributes:
        stopped: Resolved with DRAINING or STALLED when the stream must end.
    """

    def __init__(self) -> None:
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sending = 0  # sends that are not complete
        self._sends = 0  # complete ones
        self._seen = -1
        self._idle = self._stalled = 0.0  # seconds without a send, and in the same send

    @property
    def sending(self) -> bool:
        """Whether a send waits for the transport."""
        return self._sending > 0

    def look(self, elapsed: float, comment_after: float, stalled_after: float) -> bool:
        """Stop a reader that has accepted nothing for too long. Return whether an idle reader needs a comment."""
        if self._sends != self._seen:
            self._seen, self._idle, self._stalled = self._sends, 0.0, 0.0
        elif self._sending:
            self._stalled += elapsed
            if self._stalled >= stalled_after:
                self.stop(STALLED)
        else:
            self._stalled = 0.0
            self._idle += elapsed
            if self._idle >= comment_after:
                self._idle = 0.0
                return True
        return False

    def stop(self, reason: str) -> None:
        """End the stream."""
        if not self.stopped.done():
            self.stopped.set_result(reason)

    async def comment(self) -> None:
        """Send something that clients ignore, so that proxies keep the connection."""


class Replaced(Exception):
    """The run was deleted, and another run was submitted with its id."""


class FollowedRun:
    """Notices for all streams of a run that it was deleted, or deleted and submitted again.

    The positions of their clients are then void. Events of the new run must not follow events of the old run.

    Args:
        queue: Stores the row of the run.
        row: The row when the first stream began.
    """

    def __init__(self, queue: RunQueue, row: RunRow) -> None:
        self.streams: int = 0
        self._queue = queue
        self._row = row
        self._time = asyncio.get_running_loop().time
        self._checked = self._time()
        self._checking: asyncio.Task[RunRow] | None = None

    def is_due(self, now: float) -> bool:
        """Return whether the last check is too old at this time of the loop.

        The next check starts before that, so that the streams of a run with many events do not all wait for it.
        """
        age = now - self._checked
        if age > CHECK_SECONDS / 2 and self._checking is None:
            _ = self._start()
        return age > CHECK_SECONDS

    async def check(self) -> RunRow:
        """Read the row again, once for all streams that ask for it, and return it.

        Raises:
            Replaced: It is the row of another run.
            UnknownRun: The run was deleted.
        """
        return await asyncio.shield(self._checking or self._start())

    async def follow(self, read: Pages, since: int, generation: int, send: Send) -> RunRow:
        """Send the run's events from `since` on until it has finished; return its row.

        A run may be resumed just as it ends. Its stream continues then: the returned row shows a final status, and the
        events of all its generations were sent.

        Args:
            read: Returns the pages from a sequence number on, as `RunClient.event_pages` does.
            since: The sequence number of the first event.
            generation: Of the run when the stream began.
            send: Sends a page.

        Raises:
            Replaced: The run was deleted, and submitted again.
            UnknownRun: The run was deleted.
        """
        while True:
            async with contextlib.aclosing(read(since)) as pages:
                async for page in pages:
                    if self.is_due(self._time()):
                        await self.check()
                    await send(page)
                    since = page[-1].sequence + 1
            row = await self.check()
            if row.status not in LIVE and row.generation == generation:
                return row
            # A generation may have ended after the last page was read. Its events are read now.
            generation = row.generation

    def _start(self) -> asyncio.Task[RunRow]:
        self._checking = start_helper(self._check())
        self._checking.add_done_callback(self._done)
        return self._checking

    def _done(self, task: asyncio.Task[RunRow]) -> None:
        self._checking = None
        if not task.cancelled():
            task.exception()  # each stream raises it, or checks again when it is due

    async def _check(self) -> RunRow:
        began = self._time()
        row = await self._queue.require(self._row.run_id)
        if row.arrival != self._row.arrival:
            raise Replaced
        self._checked = began
        return row


class OpenStreams:
    """The streams and sockets of one server.

    Args:
        settings: `keep_alive_seconds` and `stalled_seconds` apply.
        draining: Ends all streams when it is set.
        limits: Counts the streams that are stopped because their client accepts nothing.
    """

    def __init__(self, settings: ServerSettings, draining: asyncio.Event, limits: Limits) -> None:
        self._settings = settings
        self._limits = limits
        self._draining = draining
        self._readers: set[Reader] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._comments: set[asyncio.Task[None]] = set()
        self._runs: dict[tuple[str, int], FollowedRun] = {}

    @contextlib.contextmanager
    def following(self, queue: RunQueue, row: RunRow) -> Iterator[FollowedRun]:
        """Share the checks of a run with its other streams inside the block."""
        key = (row.run_id, row.arrival)
        run = self._runs.setdefault(key, FollowedRun(queue, row))
        run.streams += 1
        try:
            yield run
        finally:
            run.streams -= 1
            if not run.streams:
                del self._runs[key]

    @contextlib.contextmanager
    def opened(self, reader: Reader) -> Iterator[None]:
        """Look after a reader inside the block.

        Raises:
            Problem: 503, because the server shuts down.
        """
        if self._draining.is_set():
            raise Problem.of(503, "The server is shutting down. Repeat the request.", headers={"Retry-After": "1"})
        self._readers.add(reader)
        if self._ticking is None or self._ticking.done():
            self._ticking = start_helper(self._tick(), "agent-runtime-streams")
        try:
            yield
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._ticking.cancel()
                self._ticking = None

    def look(self, elapsed: float) -> None:
        """Look at all readers, `elapsed` seconds after the last time."""
        settings = self._settings
        for reader in tuple(self._readers):
            stopped = reader.stopped.done()
            if reader.look(elapsed, settings.keep_alive_seconds, settings.stalled_seconds):
                task = start_helper(reader.comment())
                self._comments.add(task)
                task.add_done_callback(self._comments.discard)
            self._limits.streams_cut += reader.stopped.done() and not stopped

    async def _tick(self) -> None:
        time = asyncio.get_running_loop().time
        while not self._draining.is_set():
            began = time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._draining.wait()
            self.look(time() - began)
        for reader in tuple(self._readers):
            reader.stop(DRAINING)


def open_streams_of(connection: HTTPConnection) -> OpenStreams:
    """Return the open streams of the application that handles this request or socket."""
    found = getattr(connection.app.state, "open_streams", None)
    if found is None:
        state = state_of(connection)
        found = connection.app.state.open_streams = OpenStreams(state.settings, state.draining, state.limits)
    return cast("OpenStreams", found)


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Return when one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def abort(channel: Any) -> None:
    """Drop a connection whose peer accepts nothing, so that its buffer is freed.

    ASGI defines no message for it. A normal close first waits until the peer has accepted the buffer, perhaps forever.
    In uvicorn, `receive` is a method of an object that holds the transport.
    """
    transport = _transport_of(channel)
    if transport is not None and hasattr(transport, "abort"):
        transport.abort()


def limit_unsent(channel: Any) -> None:
    """Make the kernel accept at most `UNSENT_IN_KERNEL` bytes of a connection that were not sent yet.

    Its send buffer grows to megabytes otherwise, in which a client that reads nothing does not show.
    """
    transport = _transport_of(channel)
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is not None and _NOTSENT_LOWAT is not None:
        with contextlib.suppress(OSError):  # it is no TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_IN_KERNEL)


def _transport_of(channel: Any) -> Any:
    return getattr(getattr(channel, "__self__", None), "transport", None)


def end_frame(state: str) -> bytes:
    """Return the last server-sent event of a finished run. It contains no id, so a client keeps its position."""
    return b"data: %b\n\n" % _json({"type": "end", "state": state})


def error_frame(problem: dict[str, Any], *, restart: bool = False) -> bytes:
    """Return the server-sent event for an error after which the client reconnects.

    It contains no `event:` field, because a browser reports its own connection errors as events of the type "error".

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
    """Cut frames into pieces of at most 32 KiB that end with a frame. A larger frame is a separate piece.

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

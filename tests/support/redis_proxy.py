"""A TCP proxy on loopback between a client and a Redis that cuts, delays and counts; it ends with its block.

It runs a loop of its own in a thread of its own, so that a test may block, or have a loop, or neither.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from tests.support.redis_protocol import PUSH, Unfinished, read
from tests.support.redis_servers import HOST

T = TypeVar("T")
When = Literal["before", "middle", "after", "stall"]
PATIENCE = 5.0  # seconds for replies that a cut waits for


class Cut:
    """A proxy to `port` of loopback; `delay` is the seconds by which replies are late, and may be changed.

    Counted are requests and connections of all clients together. It knows which reply is whose as long as each request
    has one, which those of MONITOR and CLIENT REPLY OFF have not; what comes of a subscription is passed on. With `tls`
    clients speak TLS to it.
    """

    def __init__(self, port: int, *, delay: float = 0.0, tls: ssl.SSLContext | None = None) -> None:
        self.target = port
        self.tls = tls
        self.port = 0
        self.delay = delay
        self.connections = 0
        #: How often a connection was cut, or fell silent, by `cut`.
        self.cuts = 0
        #: The first word of each request so far, in capitals.
        self.asked: list[str] = []
        self._plan: dict[int, When] = {}
        self._failures: list[BaseException] = []
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cut", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening = self._call(asyncio.start_server(self._serve, HOST, 0, ssl=self.tls))
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._failures:
            raise AssertionError("what went through the proxy could not be followed") from self._failures[0]

    @property
    def url(self) -> str:
        return f"redis{'' if self.tls is None else 's'}://{HOST}:{self.port}/0"

    @property
    def requests(self) -> int:
        return len(self.asked)

    def cut(self, when: When, n: int = 1) -> None:
        """Cut the connection of the n-th request from now (n = 1 is the next one).

        "before": it does not reach the server, all earlier ones of its connection are answered.
        "middle": the server carries it out, and half of its reply arrives.
        "after": the server carries it out, and nobody reads its reply.
        "stall": the same, but the connection stays open and nothing comes any more.
        What the same connection sends after that request does not reach the server.
        """

        async def plan() -> None:
            self._plan[self.requests + n] = when

        self._call(plan())

    def drop(self) -> int:
        """Cut every connection there is, at once; how many there were."""
        return self._call(self._drop())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(30)

    async def _end(self) -> None:
        self._listening.close()
        await self._drop()

    async def _drop(self) -> int:
        tasks = tuple(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        # A server that is down, and a client or a server that is gone, end the connection and nothing else.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                upstream = await asyncio.open_connection(HOST, self.target)
                self._failures += await _Passage(self, (reader, writer), upstream).run()
            except asyncio.CancelledError:
                writer.transport.abort()
                raise
            finally:
                self._open.discard(task)
                writer.close()

    def _arrived(self, request: Any) -> When | None:
        """Note a request; what is to become of its connection."""
        words = request if isinstance(request, list) else [b"?"]
        self.asked.append(words[0].decode("ascii", "replace").upper())
        return self._plan.pop(self.requests, None)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Passage:
    """One connection through the proxy."""

    def __init__(self, proxy: Cut, client: Ends, server: Ends) -> None:
        self._proxy = proxy
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        # What is to become of each reply that is owed, in order, and of the next that nobody is owed.
        self._owed: deque[When | None] = deque()
        self._unowed: When | None = None
        self._paid = asyncio.Event()

    async def run(self) -> list[BaseException]:
        """Until either side ends it, or a cut does; what else ended it."""
        ways = [asyncio.ensure_future(way) for way in (self._requests(), self._replies())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First of all: what is awaited here may be cancelled.
            self._to_server.close()
            for way in ways:
                way.cancel()
            ends = await asyncio.gather(*ways, return_exceptions=True)
        return [end for end in ends if end is not None and not isinstance(end, OSError | asyncio.CancelledError)]

    async def _requests(self) -> None:
        async for request, raw in _messages(self._from_client):
            when = self._proxy._arrived(request)
            if when == "before":
                await self._all_answered()
                self._proxy.cuts += 1
                return
            if self._proxy.asked[-1].endswith("SUBSCRIBE"):
                self._unowed = when
            else:
                self._owed.append(when)
            self._to_server.write(raw)
            await self._to_server.drain()
            if when is not None:
                await asyncio.Event().wait()  # until the reply has been dealt with

    async def _all_answered(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self._owed:
                    self._paid.clear()
                    await self._paid.wait()

    async def _replies(self) -> None:
        async for _, raw in _messages(self._from_server, self._proxy):
            owed = raw[0] != PUSH and bool(self._owed)
            when = self._owed[0] if owed else self._unowed
            if when is not None:
                self._proxy.cuts += 1
                if when == "stall":
                    await asyncio.Event().wait()
                raw = raw[: len(raw) // 2] if when == "middle" else b""
            self._to_client.write(raw)
            await self._to_client.drain()
            if when is not None:
                return
            if owed:
                self._owed.popleft()
                self._paid.set()


async def _messages(reader: asyncio.StreamReader, late: Cut | None = None) -> AsyncIterator[tuple[Any, bytes]]:
    """Each whole message, decoded and as it came; after the delay of `late`."""
    unread = bytearray()
    while more := await reader.read(65536):
        if late is not None and late.delay:
            await asyncio.sleep(late.delay)
        unread += more
        with contextlib.suppress(Unfinished):
            while unread:
                value, end = read(unread)
                yield value, bytes(unread[:end])
                del unread[:end]

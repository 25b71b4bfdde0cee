"""A TCP proxy on loopback that cuts connections, whatever they speak. It has a loop and a thread, and ends with its
block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

from tests.support.redis_servers import HOST


class TcpProxy:
    """A proxy to `port` of loopback."""

    def __init__(self, port: int) -> None:
        self.target, self.port = port, 0
        self.connections = self.cuts = 0
        self._swallow: list[bytes] = []
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, HOST, 0), self._loop)
        self._listening = listening.result(10)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._listening.close)
        self.drop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def drop(self) -> int:
        """Cut every connection, and return how many there were."""
        return asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(10)

    def swallow(self, text: bytes) -> None:
        """Pass on what contains `text`, the next time that a client sends it, and cut the connection at the reply."""
        self._swallow.append(text)

    async def _drop(self) -> int:
        tasks = tuple(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.cuts += len(tasks)
        return len(tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            upstream: asyncio.StreamWriter | None = None
            try:
                replies, upstream = await asyncio.open_connection(HOST, self.target)
                cut = asyncio.Event()
                ways = [
                    asyncio.ensure_future(self._pass(reader, upstream, cut, sent=True)),
                    asyncio.ensure_future(self._pass(replies, writer, cut, sent=False)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                self._open.discard(task)
                for each in (writer, upstream):
                    if each is not None:
                        each.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: asyncio.Event, *, sent: bool
    ) -> None:
        while data := await reader.read(65536):
            if sent and any(text in data for text in self._swallow):
                self._swallow = [text for text in self._swallow if text not in data]
                cut.set()
            if not sent and cut.is_set():
                self.cuts += 1
                return
            writer.write(data)
            await writer.drain()

"""Clients of event streams and sockets: servers in the loop of the test, parsed frames, readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self

import httpx
import pytest
from starlette.requests import HTTPConnection

from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.open_streams import FollowedRun, OpenStreams, open_streams_of
from agent_runtime_core.server.serving import Server
from tests.server.conftest import TOKEN

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SMALL = 4096  # bytes that the kernel keeps for a connection, at least
SLOW = {"sndbuf": SMALL}


@contextlib.asynccontextmanager
async def serving(app: Any, *, sndbuf: int | None = None) -> AsyncIterator[int]:
    """The port of a server that runs in this loop, so that one process has the server and the run."""
    listening = socket.create_server(("127.0.0.1", 0))
    if sndbuf is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    server = Server(app)
    app.state.connections = server.config.http.guard  # type: ignore[union-attr]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await server.ready.wait()
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        await task
        listening.close()


def client_at(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", headers=HEADERS, timeout=60)


def streams_of(app: Any) -> OpenStreams:
    """The streams of this application, also before the first of its requests that reads one."""
    return open_streams_of(HTTPConnection({"type": "http", "app": app}))


class Frame(dict[str, Any]):
    """A server-sent event: its data, with `id`, `event` and `retry` as attributes."""

    id: str | None = None
    event: str | None = None
    retry: str | None = None
    is_comment: bool = False

    @classmethod
    def of(cls, text: str) -> Frame:
        frame = cls()
        for line in text.split("\n"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                frame.update(json.loads(value))
            elif name in ("id", "event", "retry"):
                setattr(frame, name, value)
            else:
                assert not name, f"unknown field {line!r}"
                frame.is_comment = True
        return frame


def frames_in(text: str) -> list[Frame]:
    """All frames of a complete stream."""
    assert text.endswith("\n\n")
    return [Frame.of(each) for each in text[:-2].split("\n\n")]


async def frames_of(response: httpx.Response) -> AsyncGenerator[Frame, None]:
    rest = ""
    async for part in response.aiter_text():
        *texts, rest = (rest + part).split("\n\n")
        for each in texts:
            yield Frame.of(each)
    assert rest == ""


@contextlib.asynccontextmanager
async def following(
    client: httpx.AsyncClient, run_id: str, **options: Any
) -> AsyncIterator[AsyncGenerator[Frame, None]]:
    """The frames of a stream, as they arrive; closing it disconnects."""
    async with client.stream("GET", f"/runs/{run_id}/events", **options) as response:
        assert response.status_code == 200, await response.aread()
        async with contextlib.aclosing(frames_of(response)) as frames:
            yield frames


class SilentReader:
    """A client that asks for a stream, and reads nothing until `read_all`."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        self._socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def address(self) -> Any:
        """Its address, as the server sees it."""
        return self._socket.getsockname()

    async def connect(self, port: int, path: str) -> None:
        request = f"GET /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        await self.send(port, request.encode())

    async def send(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", port))
        await loop.sock_sendall(self._socket, request)

    async def read(self, size: int) -> None:
        """Read at least so many bytes."""
        while size > 0:
            size -= len(await asyncio.get_running_loop().sock_recv(self._socket, 65536))

    async def read_all(self) -> bytes:
        """All that comes until the server ends the connection, or the stream."""
        loop, parts = asyncio.get_running_loop(), []
        with contextlib.suppress(ConnectionResetError):
            while part := await loop.sock_recv(self._socket, 65536):
                parts.append(part)
                if part.endswith(b"0\r\n\r\n"):
                    break
        return b"".join(parts)


def unchunked(response: bytes) -> str:
    """The body of a complete response."""
    _, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


def resume_as_it_ends(patch: pytest.MonkeyPatch, runner: AgentRunner, *, execute: bool) -> None:
    """Resume a cancelled run after its stream has read all events, and before the stream asks for its state.

    With `execute`, the run has finished again when the stream asks; else it is pending then, and executed afterwards.
    """
    check = FollowedRun._check
    tasks = []

    async def resumed(self: FollowedRun) -> RunRow:
        row = await runner.queue.require(self._row.run_id)
        if row.status == "cancelled":
            await runner.resume(row.run_id)
            if execute:
                await runner.run_once()
        found = await check(self)
        if found.status == "pending":
            tasks.append(asyncio.ensure_future(runner.run_once()))
        return found

    patch.setattr(FollowedRun, "_check", resumed)
